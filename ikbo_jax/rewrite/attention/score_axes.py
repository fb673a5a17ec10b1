"""Operations on the dimensions of attention's scores: sums and maxima over keys, and layouts."""

from typing import Any

from ikbo_jax.rewrite.attention.scores import KEY, ONE, Label
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.registry import NotCovered


def reduced(ctx: Context, eqn: Any, x: Any) -> Any:
    """Takes the maximum of logits, or sums exponentials or probabilities, over all keys."""
    axes = [int(a) for a in eqn.params["axes"]]
    of_probabilities = x.stage == "weighted" and x.weights.of.stage == "probabilities"
    stages = {("reduce_max", "logits"): "max", ("reduce_sum", "exp"): "sum"}
    stages |= {("reduce_sum", "weighted"): "total"} if of_probabilities else {}
    stage = stages.get((eqn.primitive.name, x.stage))
    kinds = [x.labels[a][0] for a in axes]
    if stage is None or kinds.count(KEY) != 1 or any(kind not in (KEY, ONE) for kind in kinds):
        raise NotCovered(f"attention is not recognised: {eqn.primitive.name} of its {x.stage}")
    labels = tuple(label for d, label in enumerate(x.labels) if d not in axes)
    return x.then(eqn, [x], stage=stage, labels=labels)


def transpose(ctx: Context, eqn: Any, x: Any) -> Any:
    """Transposes the labels."""
    return x.then(eqn, [x], labels=tuple(x.labels[d] for d in eqn.params["permutation"]))


def broadcast(ctx: Context, eqn: Any, x: Any, *dynamic: Any) -> Any:
    """Adds dimensions of size 1, or the dimension of keys to a maximum or sum."""
    shape, dims = eqn.params["shape"], [int(d) for d in eqn.params["broadcast_dimensions"]]
    if any(shape[t] != x.shape[d] for d, t in enumerate(dims)):
        raise NotCovered("attention is not recognised: its scores are broadcast")
    labels: list[Label] = [(ONE, 0)] * len(shape)
    for d, target in enumerate(dims):
        labels[target] = x.labels[d]
    added = [t for t in range(len(shape)) if t not in dims and shape[t] != 1]
    keys = x.root.key.shape[1]
    if x.stage not in ("max", "sum") and added or any(shape[t] != keys for t in added):
        raise NotCovered("attention is not recognised: its scores are broadcast")
    return x.then(eqn, [x], labels=tuple(labels))


def reshape(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reshapes by adding or removing dimensions of size 1."""
    shape = tuple(eqn.outvars[0].aval.shape)
    kept = [label for label, n in zip(x.labels, x.shape, strict=True) if n != 1]
    if [n for n in x.shape if n != 1] != [n for n in shape if n != 1]:
        raise NotCovered("attention is not recognised: its scores are reshaped")
    ones = iter([label for label, n in zip(x.labels, x.shape, strict=True) if n == 1])
    rest = iter(kept)
    labels = tuple(next(rest) if n != 1 else next(ones, (ONE, 0)) for n in shape)
    return x.then(eqn, [x], labels=labels)
