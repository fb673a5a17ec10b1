"""Attention weights that the program changes after the softmax or the activation.

A model may apply its mask again after the softmax, set weights that are NaN to 0, weigh keys by
their age, or divide masked weights by their sum. `Weights` holds such factors and masks by user and
key. The rules of this module add these stages to the stages of `Scores`:

- "weighted": probabilities or a curve, changed by `Weights`;
- "total": the sum of weighted probabilities over the keys;
- "is nan", "is infinite", "is finite": comparisons, as in `jnp.nan_to_num` and `logsumexp`;
- "log of sum", "lse", "log of probabilities": a softmax by its logarithm.

A row whose weights a select sets to 0 is 0, also if its softmax is NaN. A product with the cast of
a mask is such a select, since XLA compiles it to a select.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.attention import logit_masks, masked_keys, score_factors, scores
from ikbo_jax.rewrite.attention.blocks import Blocks, arranged_array
from ikbo_jax.rewrite.attention.products import Weights
from ikbo_jax.rewrite.attention.scores import BATCH, HEAD, KEY, ONE, Fill, Label, Logits, Scores
from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.values.lineage import Lazy, base_of, is_plain, origins_of
from ikbo_jax.rewrite.values.registry import NotCovered

#: A number up to this is lost in the rounding of a float32 sum of at least 1.
_NEGLIGIBLE = 2.0**-25
#: The log of a number of keys can be added to a masked logit that is rounded by at most this.
_LOST = 2.0**-7
#: The stage of a softmax by its logarithm, which may be masked with -inf.
_LOGARITHM = "log of probabilities"


def _weights_of(x: Scores) -> Weights:
    is_log = x.stage == _LOGARITHM
    if x.weights is not None and (is_log or x.stage == "weighted"):
        return x.weights
    is_curve = x.stage in ("curve", "logits") and x.curve is not None and not x.root.fills
    is_curve = is_curve and not x.root.biases
    if not isinstance(x.root, Logits) or not (is_log or is_curve or x.stage == "probabilities"):
        raise NotCovered(f"attention is not recognised: {x.stage} changed by another value")
    return Weights(x)


def _changed(x: Scores, eqn: Any, operands: Any, other: Any = None, **changes: Any) -> Scores:
    weights = _weights_of(x)
    if weights.divided is not None:
        raise NotCovered("attention is not recognised: weights are changed after their division")
    origins = weights.origins | origins_of(other)
    weights = dataclasses.replace(weights, origins=origins, **changes)
    stage = _LOGARITHM if x.stage == _LOGARITHM else "weighted"
    return x.then(eqn, operands, stage=stage, weights=weights)


def _by_user(ctx: Context, x: Scores, other: Any) -> jax.Array:
    """Returns a factor or mask of weights as [users, keys, *heads], with 1 in place of a size."""
    _, (other,) = x.aligned(ctx, other)
    base, root = base_of(other), x.root
    if not is_plain(base) or np.ndim(base) != len(x.labels):
        raise NotCovered(f"attention is not recognised: {x.stage} changed by another value")
    if reason := logit_masks.not_by_user(ctx, x, other, (KEY, HEAD)):
        how = "another lookup" if reason.startswith("is not looked up") else "candidate"
        raise NotCovered(f"attention is not recognised: its weights are changed by {how}")
    wanted = [(BATCH, 0), (KEY, 0), *((HEAD, n) for n in range(len(root.heads)))]
    return jnp.asarray(arranged_array(base, x.labels, wanted))


def _mask(ctx: Context, x: Scores, value: Any) -> Fill:
    base = _by_user(ctx, x, value)
    kept = base if base.dtype == np.bool_ else base != 0
    return Fill(0.0, kept=kept, source=proofs.source_of_mask(ctx, value, x.labels))


def product(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Multiplies weights by a number, a mask, or factors by user and key.

    Logits are multiplied by a number.
    """
    at, other = (x, y) if isinstance(x, Scores) else (y, x)
    mask = ctx.scope.cast_mask(other) if isinstance(at.root, Blocks) else None
    if mask is not None and at.stage == "probabilities":
        return _hidden_again(ctx, eqn, (x, y), at, mask)
    changes = at.stage in ("probabilities", "curve", "weighted", "exp", "logits")
    if isinstance(other, Scores) or not changes or not isinstance(at.root, Logits):
        return score_factors.scaled(ctx, eqn, x, y)
    number = constant(ctx, other)
    is_factor = number is not None or at.root.fills or at.root.biases
    if at.stage == "logits" and (is_factor or score_factors.takes_factor(at, other)):
        return score_factors.scaled(ctx, eqn, x, y)
    if number is not None:
        return _scaled(at, eqn, (x, y), number)
    whole = shape_of(other) == at.shape and ctx.scope.cast_mask(other) is not None
    is_mask = (proofs.possible_values(ctx, other) or {math.nan}) <= {0.0, 1.0}
    if at.stage == "exp":
        if not is_mask:
            raise NotCovered("attention is not recognised: exp scaled by another value")
        return _masked_exponential(ctx, at, eqn, (x, y), other, whole)
    at, _ = at.aligned(ctx, other)
    if whole:
        found = (*_weights_of(at).masks, _mask(ctx, at, other))
        return _changed(at, eqn, (x, y), other, masks=found)
    factor = _by_user(ctx, at, other) != 0 if is_mask else _by_user(ctx, at, other)
    return _changed(at, eqn, (x, y), other, factors=(*_weights_of(at).factors, factor))


def _hidden_again(ctx: Context, eqn: Any, operands: Any, x: Scores, mask: Any) -> Scores:
    """Hides weights of concatenated tokens that are 0, since the same mask hides their logits.

    Weights of a row without kept keys may be others.
    """
    source = proofs.source_of_mask(ctx, mask, x.labels)
    if not any(proofs.same_source(fill.source, source) for fill in x.root.fills):
        raise NotCovered(f"attention is not recognised: its {x.stage} are masked by another mask")
    return x.then(eqn, operands, emptied="select")


def _scaled(x: Scores, eqn: Any, operands: Any, number: float) -> Scores:
    """Multiplies probabilities or weights by a number; for a curve, the result is another curve."""
    if x.stage not in ("probabilities", "weighted") or not math.isfinite(number):
        raise NotCovered(f"attention is not recognised: {x.stage} scaled by {number:g}")
    return _changed(x, eqn, operands, scale=_weights_of(x).scale * number)


def select(ctx: Context, eqn: Any, which: Any, *cases: Any) -> Any:
    """Selects weights, exponentials or logits, or a number, by a mask."""
    if isinstance(which, Scores):
        return _select_by_comparison(ctx, eqn, which, *cases)
    x = scores.only(cases)
    keeps, operands = x is cases[-1], (which, *cases)
    of_blocks = isinstance(x.root, Blocks) and x.stage in ("exp", "probabilities")
    if of_blocks and keeps and constant(ctx, cases[0]) == 0:
        return _hidden_again(ctx, eqn, operands, x, which)
    stages = ("exp", "probabilities", "curve", "weighted", _LOGARITHM)
    if len(cases) != 2 or x.stage not in stages or not isinstance(x.root, Logits):
        return logit_masks.selected(ctx, eqn, which, *cases)
    hidden = -math.inf if x.stage == _LOGARITHM else 0
    if constant(ctx, cases[0] if keeps else cases[1]) != hidden:
        raise NotCovered(f"attention is not recognised: its {x.stage} are masked by a value")
    if x.stage == "exp":
        if not keeps:
            raise NotCovered("attention is not recognised: its exp are masked by a value")
        return _masked_exponential(ctx, x, eqn, operands, which, True)
    x, _ = x.aligned(ctx, which)
    mask = _mask(ctx, x, which)
    mask = mask if keeps else Fill(0.0, kept=~mask.kept)
    weights = _weights_of(x)
    # The select also hides NaN and infinity of the factors before it.
    factors = tuple(jnp.where(mask.kept, f, jnp.zeros((), f.dtype)) for f in weights.factors)
    found = (*weights.masks, mask)
    return _changed(x, eqn, operands, which, factors=factors, masks=found)


def _masked_exponential(
    ctx: Context, x: Scores, eqn: Any, operands: Any, mask: Any, selects: bool
) -> Scores:
    """Masks exponentials with 0, as if their logits were -inf.

    `selects` says whether also NaN becomes 0, which the exponentials of a row without kept keys are
    if the maximum -inf is subtracted.
    """
    root = x.root
    if root.biases:
        raise NotCovered("attention is not recognised: a bias, and masked exponentials")
    source = proofs.source_of_mask(ctx, mask, x.labels)
    same = [f for f in root.fills if proofs.same_source(f.source, source)]
    rest = tuple(f for f in root.fills if f not in same)
    if any(f.value == -math.inf for f in root.fills) and not (selects and same and not rest):
        raise NotCovered("attention is not recognised: its exp are masked by another mask")
    if any(f.added is not None for f in root.fills):
        raise NotCovered("attention is not recognised: one mask is added, another put in by where")
    largest = max((f.value for f in same), default=math.inf)
    if x.shifted and same and largest > -1e3:
        # Far above a row's logits, it makes their exponentials 0, and the sum 0, too.
        raise NotCovered(f"attention is not recognised: its maximum may be a fill of {largest:g}")
    if [f.value for f in root.fills] == [-math.inf]:
        return x.then(eqn, operands, emptied="select")
    if getattr(mask, "dtype", None) != np.bool_ and isinstance(mask, Lazy):
        mask = dataclasses.replace(mask, base=mask.base != 0)
    # The softmax sees the number that this mask fills in, not that of an earlier, equal mask.
    earlier = dataclasses.replace(x, root=dataclasses.replace(root, fills=rest))
    fill = Fill(-math.inf, source=source)
    root = logit_masks.masked(ctx, earlier, mask, True, fill)
    # Without the masked keys' largest exponential, 1, the sum may be below 1. No logit is below a
    # large number, so that a masked key's exponential is the largest only in rows without others.
    least = x.sum_of_one and largest <= masked_keys.LARGE and not rest
    emptied = "select" if selects else "product"
    return x.then(eqn, operands, root=root, emptied=emptied, sum_of_one=least)


def comparison(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Compares weights with themselves (True for NaN), or with infinity (never True)."""
    name = eqn.primitive.name
    at, other = (x, y) if isinstance(x, Scores) else (y, x)
    if at.stage in ("probabilities", "weighted") and _weights_of(at).of.stage == "probabilities":
        if name == "ne" and other is at:
            return at.then(eqn, (x, y), stage="is nan", weights=_weights_of(at))
        number = None if isinstance(other, Scores) else constant(ctx, other)
        if name == "eq" and number is not None and math.isinf(number):
            return at.then(eqn, (x, y), stage="is infinite", weights=_weights_of(at))
    raise NotCovered(f"attention is not recognised: {name} of its {at.stage}")


def is_finite(ctx: Context, eqn: Any, x: Any) -> Any:
    """Marks where the maximum of the logits is finite."""
    if x.stage != "max" or not isinstance(x.root, Logits) or x.root.biases:
        raise NotCovered(f"attention is not recognised: is_finite of its {x.stage}")
    return x.then(eqn, [x], stage="is finite")


def _select_by_comparison(ctx: Context, eqn: Any, which: Scores, *cases: Any) -> Any:
    """Replaces NaN among weights by 0, or a maximum that is not finite by 0."""
    error = NotCovered("attention is not recognised: its scores are the condition of a select")
    at = scores.only(cases)
    is_first, operands = at is cases[0], (which, *cases)
    number = constant(ctx, cases[1] if is_first else cases[0])
    if at.root is not which.root or at.labels != which.labels or number is None:
        raise error
    if which.stage == "is finite" and at.stage == "max" and number == 0 and not is_first:
        # Exponentials of a row without kept keys become 0 instead of NaN.
        return at.then(eqn, operands, emptied="select")
    if not is_first or at.stage not in ("probabilities", "weighted"):
        raise error
    weights = _weights_of(at)
    if weights.factors:
        # The weights are NaN or infinite, too, where their factors are.
        raise error
    if which.stage == "is nan" and number == 0 and _same_weights(which, at):
        return _changed(at, eqn, operands, nan_is_zero=True)
    if which.stage == "is infinite" and weights.nan_is_zero and _same_weights(which, at):
        return at.then(eqn, operands)
    raise error


def _same_weights(which: Scores, at: Scores) -> bool:
    assert which.weights is not None
    return which.weights is at.weights or which.weights.of is at


def _bounded(ctx: Context, eqn: Any, x: Any, y: Any, how: str) -> Any:
    """Adds a number to a sum of weights or exponentials, or bounds the sum below by the number."""
    at = scores.only((x, y))
    number = constant(ctx, y if at is x else x)
    known = isinstance(at.root, Logits) and at.floor is None
    if number is None or not 0 <= number <= 1 or not known:
        raise NotCovered(f"attention is not recognised: {how} of its {at.stage}")
    if at.stage == "sum" and at.shifted:
        lost = at.sum_of_one and (how == "max" or number <= _NEGLIGIBLE)
        if not lost:
            raise NotCovered("attention is not recognised: a number is added to its sum")
    return at.then(eqn, (x, y), floor=(how, number))


def sum_of_two(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Adds a number to a sum, the maximum to the logarithm of a sum, or a mask to the logits."""
    if isinstance(x, Scores) and isinstance(y, Scores):
        if (x.stage, y.stage) == ("log of sum", "max") and scores.belong(x, y):
            eps = float(jnp.finfo(x.dtype).eps)
            if any(eps * abs(f.value) > _LOST for f in x.root.fills if f.value > -math.inf):
                # Of a user without keys, all logits are the mask's number, and rounding loses the
                # log of the number of keys that is added to it.
                raise NotCovered("attention is not recognised: a log is added to masked logits")
            return x.then(eqn, (x, y), stage="lse")
        raise NotCovered("attention is not recognised: its scores are combined with scores")
    if scores.only((x, y)).stage in ("sum", "total"):
        return _bounded(ctx, eqn, x, y, "add")
    return logit_masks.added(ctx, eqn, x, y)


def maximum(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Bounds a sum below by a number; keeps the maximum of the logits, beside -inf."""
    at = scores.only((x, y))
    if at.stage in ("sum", "total"):
        return _bounded(ctx, eqn, x, y, "max")
    if at.stage != "max" or constant(ctx, y if at is x else x) != -math.inf:
        raise NotCovered(f"attention is not recognised: max of its {at.stage}")
    return at.then(eqn, (x, y))


def quotient(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Divides weights or exponentials by their sum, scores by a number, or weights by factors."""
    if isinstance(x, Scores) and isinstance(y, Scores):
        if (x.stage, y.stage) == ("weighted", "total"):
            if x.weights is not y.weights or not scores.belong(x, y):
                raise NotCovered("attention is not recognised: weights over another sum")
            return _over_their_sum(x, eqn, y)
        if (x.stage, y.stage) != ("exp", "sum") or not scores.belong(x, y):
            raise NotCovered("attention is not recognised: its scores are combined with scores")
        if "product" in (x.emptied, y.emptied) and not (y.floor and y.floor[1]):
            # 0 / 0 is NaN, and so is its gradient, which a select would stop.
            raise NotCovered("attention is not recognised: masked exponentials over their sum")
        if y.floor:
            return _over_bounded_sum(x, eqn, y)
        return x.then(eqn, (x, y), stage="probabilities")
    changes = isinstance(x, Scores) and x.stage in ("probabilities", "curve", "weighted")
    if not changes or not isinstance(x.root, Logits):
        return score_factors.scaled(ctx, eqn, x, y)
    number = constant(ctx, y)
    if number is not None:
        return _scaled(x, eqn, (x, y), math.nan if number == 0 else 1 / number)
    at, _ = x.aligned(ctx, y)
    factors = (*_weights_of(at).factors, 1 / _by_user(ctx, at, y))
    return _changed(at, eqn, (x, y), y, factors=factors)


def _over_their_sum(x: Scores, eqn: Any, y: Scores) -> Scores:
    """Divides weights by their sum, by their sum plus a number, or by at least a number.

    A factor of the weights is a factor of their sum, too: c·w / (c·sum + e) = w / (sum + e/c).
    """
    factor = _weights_of(x).scale
    how, number = y.floor or ("add", 0.0)
    if factor <= 0:
        raise NotCovered(f"attention is not recognised: weights scaled by {factor:g}, over a sum")
    return _changed(x, eqn, (x, y), scale=1.0, divided=(how, number / factor))


def _over_bounded_sum(x: Scores, eqn: Any, y: Scores) -> Scores:
    """Divides exponentials by their sum plus a number, or by at least a number."""
    probabilities = x.then(eqn, (x, y), stage="probabilities")
    assert y.floor is not None
    if y.floor[1] == 0 or x.shifted and not (x.emptied or y.emptied):
        # With the maximum subtracted, the sum is at least 1, so that the number changes nothing; a
        # row of -inf is NaN with and without the number.
        return probabilities
    fills = x.root.fills
    known = x.emptied == y.emptied and all(f.seen is None for f in fills) if fills else True
    if not known or any(f.value > -math.inf or f.added is not None for f in fills):
        raise NotCovered("attention is not recognised: a number is added to its sum")
    ones = (1,) * len(x.root.heads)
    kept = [Fill(0.0, kept=f.kept.reshape(*f.kept.shape, *ones), source=f.source) for f in fills]
    divided = None if x.shifted else y.floor
    weights = Weights(
        probabilities,
        masks=tuple(kept),
        divided=divided,
        unnormalised=divided is not None,
        origins=x.root.mask_origins,
    )
    return x.then(eqn, (x, y), stage="weighted", weights=weights)


def logarithm(ctx: Context, eqn: Any, x: Any) -> Any:
    """Takes the logarithm of the sum of shifted exponentials."""
    known = isinstance(x.root, Logits) and x.stage == "sum" and x.floor is None
    if not known or not x.shifted:
        raise NotCovered(f"attention is not recognised: log of its {x.stage}")
    return x.then(eqn, [x], stage="log of sum")


def difference(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Subtracts the maximum, the logarithm of the sum or a bias from the logits."""
    if isinstance(x, Scores) and isinstance(y, Scores) and scores.belong(x, y):
        if (x.stage, y.stage) in (("shifted", "log of sum"), ("logits", "lse")):
            return x.then(eqn, (x, y), stage=_LOGARITHM, shifted=True)
        if (x.stage, y.stage) == ("logits", "max"):
            masked = isinstance(x.root, Logits) and all(f.value == -math.inf for f in x.root.fills)
            changes = {"sum_of_one": True, "emptied": y.emptied if masked else ""}
            return x.then(eqn, (x, y), stage="shifted", shifted=True, **changes)
    elif not isinstance(y, Scores) and x.stage == "logits":
        return logit_masks.biased(ctx, eqn, (x, y), x, y, subtracts=True)
    raise NotCovered("attention is not recognised: something is subtracted from its scores")


def exponential(ctx: Context, eqn: Any, x: Any) -> Any:
    """Takes the exponential of the logits; returns to the probabilities from their logarithm."""
    if x.stage in ("logits", "shifted"):
        return x.then(eqn, [x], stage="exp")
    if x.stage != _LOGARITHM:
        raise NotCovered(f"attention is not recognised: exp of its {x.stage}")
    probabilities = x.then(eqn, [x], stage="probabilities", weights=None)
    if x.weights is None:
        return probabilities
    weights = dataclasses.replace(x.weights, of=probabilities)
    return x.then(eqn, [x], stage="weighted", weights=weights)


# Operations on the dimensions of scores: sums and maxima over keys, and layouts.


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
