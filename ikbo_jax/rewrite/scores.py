"""Attention's scores on their way from logits to probabilities, recognised but not computed.

Each primitive that models spell a softmax with has a step here, from one `Scores` to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite import curves
from ikbo_jax.rewrite.curves import IDENTITY, Curve
from ikbo_jax.rewrite.interpret import Context, NotCovered
from ikbo_jax.rewrite.lineage import (
    Deferred,
    Lazy,
    Lineage,
    base_of,
    has_lineage,
    is_plain,
    spread,
)

# What a dimension of the scores is. Heads are shared by queries and keys; everything else of the
# queries is one list of queries.
BATCH, HEAD, QUERY, KEY, ONE = "batch", "head", "query", "key", "one"
#: A dimension: what it is, and which of its kind.
Label = tuple[str, int]

#: Logits from here down count as masked: exp of them is 0 beside any other logit.
MASKED_BELOW = -1e4


@dataclasses.dataclass(frozen=True, eq=False)
class Logits:
    """scale · query · key of looked-up keys, masked; the common root of all `Scores` made of it.

    Attributes:
      query: [batch, *queries, *heads, width].
      key: looked up along its dimension 0: base [users, keys, *heads, width].
      queries: sizes of the queries' dimensions.
      heads: sizes of the heads' dimensions.
      scale: factor of the product.
      mask: base [users, keys] bool, False where the logit is `fill`; None if there is no mask.
      lengths: [users] int32 if the mask is known to be the first `lengths` keys.
      fill: what masked logits are, or what is added to them.
      added: whether it is added.
      mask_origins: the broadcasts that the mask stems from.
    """

    query: jax.Array
    key: Lazy
    queries: tuple[int, ...]
    heads: tuple[int, ...]
    scale: float = 1.0
    mask: jax.Array | None = None
    lengths: jax.Array | None = None
    fill: float = -math.inf
    added: bool = False
    mask_origins: frozenset = frozenset()

    @property
    def lineage(self) -> Lineage:
        assert self.key.lineage is not None
        return self.key.lineage


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(Deferred):
    """A value on the way from logits to probabilities, not computed.

    Attributes:
      root: the logits that it is made of.
      stage: "logits", "max", "shifted", "exp", "sum", "probabilities", or "curve": what is on no
        way to a softmax, but maybe an activation.
      labels: what each dimension is.
      shape: what the program sees.
      dtype: what the program sees.
      run: computes it as the program says.
      curve: what the value is of queries times keys, element by element; None if unknown.
    """

    root: Logits
    stage: str
    labels: tuple[Label, ...]
    shape: tuple[int, ...]
    dtype: Any
    run: Callable[[Context], jax.Array]
    curve: Curve | None = IDENTITY

    @property
    def origins(self) -> frozenset:
        return self.root.key.origins

    def build(self, ctx: Context) -> jax.Array:
        return self.run(ctx)

    def step(self, ctx: Context, eqn: Any, operands: Any) -> Any:
        """The result of an equation that has scores among its operands."""
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            return ctx.run_closed(eqn.params["jaxpr"], operands, eqn)
        curve = _curve_of(ctx, eqn, operands)
        rule = STEPS.get(name)
        try:
            if rule is None:
                raise NotCovered(f"attention is not recognised: {name} of its {self.stage}")
            result = rule(ctx, eqn, *operands)
        except NotCovered:
            if curve is None:
                raise
            result = self.then(eqn, operands, stage="curve", curve=curve)
            return [result] if eqn.primitive.multiple_results else result
        if not isinstance(result, Scores) or name in _MOVES:
            return result
        return dataclasses.replace(result, curve=curve)

    def then(self, eqn: Any, operands: Any, **changes: Any) -> Scores:
        """The next value: the result of an equation, with some of this one's attributes changed."""
        (out,) = eqn.outvars

        def run(ctx: Context) -> jax.Array:
            out = ctx.bind(eqn, *map(ctx.build, operands))
            return out[0] if eqn.primitive.multiple_results else out

        return dataclasses.replace(
            self, shape=tuple(out.aval.shape), dtype=out.aval.dtype, run=run, **changes
        )


def _curve_of(ctx: Context, eqn: Any, operands: Any) -> Curve | None:
    """The curve of an equation's result, if its operands are one product's scores and numbers."""
    if eqn.primitive.name not in curves.ELEMENTWISE or len(eqn.outvars) != 1:
        return None
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        return None
    scores = [x for x in operands if isinstance(x, Scores)]
    first = scores[0]
    for x in scores:
        same = x.root.query is first.root.query and x.root.key is first.root.key
        if not same or x.labels != first.labels or x.root.mask is not None or x.curve is None:
            return None
    found: list[Any] = []
    for x in operands:
        number = None if isinstance(x, Scores) else constant(ctx, x)
        if number is None and not isinstance(x, Scores):
            return None
        found.append(x.curve if isinstance(x, Scores) else number)
    return curves.then(eqn, found)


#: The step of every primitive that may happen to scores; `attention` adds the last one.
STEPS: dict[str, Callable[..., Any]] = {}

# Steps. Each takes the scope, the equation and its operands, at least one of which is a `Scores`.


def only(operands: Any) -> Scores:
    """The one of the operands that is `Scores`; raises NotCovered if several are."""
    scores = [x for x in operands if isinstance(x, Scores)]
    if len(scores) != 1:
        raise NotCovered("attention is not recognised: its scores meet scores")
    return scores[0]


def _same(ctx: Context, eqn: Any, x: Any) -> Any:
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        raise NotCovered("attention is not recognised: its scores are cast to no floating point")
    return x.then(eqn, [x])


def _scaled(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Scores times or over a number; exponentials over their sum."""
    divides = eqn.primitive.name == "div"
    if isinstance(x, Scores) and isinstance(y, Scores):
        if divides and (x.stage, y.stage) == ("exp", "sum") and _belong(x, y):
            return x.then(eqn, [x, y], stage="probabilities")
        raise NotCovered("attention is not recognised: its scores meet scores")
    scores, other = (x, y) if isinstance(x, Scores) else (y, x)
    factor = constant(ctx, other)
    if factor is None or scores.stage != "logits" or (divides and scores is y):
        raise NotCovered(f"attention is not recognised: {scores.stage} scaled by another value")
    factor = 1 / factor if divides else factor
    if scores.root.mask is not None and factor <= 0:
        raise NotCovered("attention is not recognised: masked logits with their sign changed")
    root = dataclasses.replace(
        scores.root, scale=scores.root.scale * factor, fill=scores.root.fill * factor
    )
    return scores.then(eqn, [x, y], root=root)


def _subtracted(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    both = isinstance(x, Scores) and isinstance(y, Scores)
    if both and _belong(x, y) and (x.stage, y.stage) == ("logits", "max"):
        return x.then(eqn, [x, y], stage="shifted")
    raise NotCovered("attention is not recognised: something is subtracted from its scores")


def _belong(x: Scores, y: Scores) -> bool:
    """Whether y, reduced over the keys, lines up with x."""
    return x.root is y.root and all(
        a == b or a[0] == ONE or (a[0] == KEY and b[0] == ONE)
        for a, b in zip(x.labels, y.labels, strict=True)
    )


def _exponential(ctx: Context, eqn: Any, x: Any) -> Any:
    if x.stage not in ("logits", "shifted"):
        raise NotCovered(f"attention is not recognised: exp of its {x.stage}")
    return x.then(eqn, [x], stage="exp")


def _maximum(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    scores = only((x, y))
    other = constant(ctx, y if scores is x else x)
    if scores.stage != "max" or other != -math.inf:
        raise NotCovered(f"attention is not recognised: max of its {scores.stage}")
    return scores.then(eqn, [x, y])


def _reduced(ctx: Context, eqn: Any, x: Any) -> Any:
    """Maximum of the logits, sum of the exponentials; both over all keys."""
    axes = [int(a) for a in eqn.params["axes"]]
    stages = {("reduce_max", "logits"): "max", ("reduce_sum", "exp"): "sum"}
    stage = stages.get((eqn.primitive.name, x.stage))
    kinds = [x.labels[a][0] for a in axes]
    if stage is None or kinds.count(KEY) != 1 or any(kind not in (KEY, ONE) for kind in kinds):
        raise NotCovered(f"attention is not recognised: {eqn.primitive.name} of its {x.stage}")
    labels = tuple(label for d, label in enumerate(x.labels) if d not in axes)
    return x.then(eqn, [x], stage=stage, labels=labels)


def _transpose(ctx: Context, eqn: Any, x: Any) -> Any:
    return x.then(eqn, [x], labels=tuple(x.labels[d] for d in eqn.params["permutation"]))


def _broadcast(ctx: Context, eqn: Any, x: Any, *dynamic: Any) -> Any:
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


def _reshape(ctx: Context, eqn: Any, x: Any) -> Any:
    """Dimensions of size 1 come and go; others stay."""
    shape = tuple(eqn.outvars[0].aval.shape)
    kept = [label for label, n in zip(x.labels, x.shape, strict=True) if n != 1]
    if [n for n in x.shape if n != 1] != [n for n in shape if n != 1]:
        raise NotCovered("attention is not recognised: its scores are reshaped")
    ones = iter([label for label, n in zip(x.labels, x.shape, strict=True) if n == 1])
    rest = iter(kept)
    labels = tuple(next(rest) if n != 1 else next(ones, (ONE, 0)) for n in shape)
    return x.then(eqn, [x], labels=labels)


def _selected(ctx: Context, eqn: Any, which: Any, if_false: Any, if_true: Any) -> Any:
    """`where(mask, logits, very negative)`, either way round."""
    if isinstance(which, Scores):
        raise NotCovered("attention is not recognised: its scores select")
    scores = only((if_false, if_true))
    keeps = scores is if_true
    fill = constant(ctx, if_false if keeps else if_true)
    if scores.stage != "logits" or fill is None or fill > MASKED_BELOW:
        raise NotCovered(f"attention is not recognised: its {scores.stage} are masked by a value")
    root = _masked(ctx, scores, which, keeps, fill)
    return scores.then(eqn, [which, if_false, if_true], root=root)


def _added(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Logits plus 0, or plus a very negative number where they are masked."""
    scores = only((x, y))
    bias = y if scores is x else x
    values = possible_values(ctx, bias)
    if scores.stage != "logits" or not values:
        raise NotCovered(f"attention is not recognised: something is added to its {scores.stage}")
    fills = [value for value in values if value != 0]
    if values == {0.0}:
        return scores.then(eqn, [x, y])
    if not isinstance(bias, Lazy) or max(fills) > MASKED_BELOW:
        raise NotCovered("attention is not recognised: a bias is added to its logits")
    kept = dataclasses.replace(bias, base=bias.base == 0)
    root = dataclasses.replace(_masked(ctx, scores, kept, True, max(fills)), added=True)
    return scores.then(eqn, [x, y], root=root)


def possible_values(ctx: Context, value: Any, depth: int = 12) -> set[float] | None:
    """The few numbers that a value can hold; None if they are many, or unknown."""
    number = constant(ctx, value)
    if number is not None:
        return {number}
    if getattr(value, "dtype", None) == jnp.bool_:
        return {0.0, 1.0}
    made = ctx.producer(value)
    if made is None or depth == 0:
        return None
    eqn, operands = made
    name = eqn.primitive.name
    if name in (*_MOVES, "convert_element_type", "copy", "gather"):
        return possible_values(ctx, operands[0], depth - 1)
    if name == "select_n":
        operands = operands[1:]
    elif name not in ("add", "sub", "mul"):
        return None
    of = [possible_values(ctx, x, depth - 1) for x in operands]
    if any(x is None for x in of):
        return None
    if name == "select_n":
        return set().union(*(x for x in of if x))
    pairs = itertools.product(*(x for x in of if x is not None))
    with np.errstate(all="ignore"):
        found = {float(_ARITHMETIC[name](eqn, *pair)) for pair in pairs}
    return found if len(found) <= 4 else None


#: Primitives that only move what they are given.
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def _masked(ctx: Context, scores: Scores, mask: Any, keeps: bool, fill: float) -> Logits:
    root = scores.root
    if not isinstance(mask, Lazy) or (
        has_lineage(mask)
        and (mask.lineage is not root.lineage or scores.labels[mask.axis][0] != BATCH)
    ):
        raise NotCovered("attention is not recognised: its mask is not by user")
    for d, n in enumerate(mask.base.shape):
        if n != 1 and scores.labels[d][0] not in (BATCH, KEY):
            raise NotCovered("attention is not recognised: its mask differs by query or head")
        if n != 1 and scores.labels[d][0] == BATCH and d != mask.axis:
            raise NotCovered("attention is not recognised: its mask differs by candidate")
    kinds = [label[0] for label in scores.labels]
    users, keys = root.key.base.shape[:2]
    order = [kinds.index(BATCH), kinds.index(KEY)]
    base = mask.base.reshape([mask.base.shape[d] for d in sorted(order)])
    base = spread(base if order == sorted(order) else base.T, (users, keys))
    lengths = _lengths(ctx, mask, users, keys) if keeps else None
    base = base if keeps else ~base
    if root.mask is not None:
        fill, base, lengths = max(fill, root.fill), base & root.mask, None
    origins = root.mask_origins | mask.origins
    return dataclasses.replace(root, mask=base, lengths=lengths, fill=fill, mask_origins=origins)


def _lengths(ctx: Context, mask: Any, users: int, keys: int) -> jax.Array | None:
    """The lengths, if a mask is `iota < lengths`."""
    made = ctx.producer(mask)
    while made is not None:
        eqn, operands = made
        name = eqn.primitive.name
        if name in ("lt", "gt"):
            position, length = operands if name == "lt" else reversed(operands)
            if _counts_up(ctx, position, keys) and np.size(base_of(length)) == users:
                return base_of(length).reshape(users).astype(jnp.int32)
            return None
        if name == "and":
            trues = [_is_true(ctx, x) for x in operands]
            if sum(trues) != 1:
                return None
            operands = [operands[trues.index(False)]]
        elif name not in ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy"):
            return None
        made = ctx.producer(operands[0])
    return None


def _counts_up(ctx: Context, value: Any, keys: int) -> bool:
    """Whether an array holds 0, 1, ..., keys - 1 along one dimension."""
    if np.size(base_of(value)) != keys:
        return False
    while is_plain(value) is False or isinstance(value, jax.core.Tracer):
        made = ctx.producer(value)
        if made is None:
            return False
        eqn, operands = made
        if eqn.primitive.name == "iota":
            return True
        if eqn.primitive.name not in ("broadcast_in_dim", "reshape", "squeeze", "copy"):
            return False
        value = operands[0]
    return np.array_equal(np.ravel(value), np.arange(keys))


def _is_true(ctx: Context, value: Any) -> bool:
    while not is_plain(value) or isinstance(value, jax.core.Tracer):
        made = ctx.producer(value)
        if made is None or made[0].primitive.name not in ("broadcast_in_dim", "reshape", "copy"):
            return False
        value = made[1][0]
    return bool(np.all(np.asarray(value)))


def constant(ctx: Context, value: Any) -> float | None:
    """The number that a value is everywhere; None if it is none, or unknown."""
    if isinstance(value, Lazy) and value.lineage is None and value.base.size == 1:
        made = ctx.producer(value)
        return constant(ctx, made[1][0]) if made else constant(ctx, value.base)
    if not is_plain(value) or np.size(value) != 1:
        return None
    if not isinstance(value, jax.core.Tracer):
        return float(np.asarray(value).reshape(()).astype(np.float64))
    made = ctx.producer(value)
    if made is None:
        return None
    eqn, operands = made
    of = [constant(ctx, x) for x in operands]
    if None in of or eqn.primitive.name not in _ARITHMETIC:
        return None
    with np.errstate(all="ignore"):
        return float(_ARITHMETIC[eqn.primitive.name](eqn, *of))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "convert_element_type": lambda _, x: x,
    "broadcast_in_dim": lambda _, x: x,
    "reshape": lambda _, x: x,
    "squeeze": lambda _, x: x,
    "sqrt": lambda _, x: np.sqrt(x),
    "rsqrt": lambda _, x: 1 / np.sqrt(x),
    "neg": lambda _, x: -x,
    "mul": lambda _, x, y: x * y,
    "div": lambda _, x, y: np.divide(x, y),
    "add": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "pow": lambda _, x, y: np.power(x, y),
    "integer_pow": lambda eqn, x: np.power(x, float(eqn.params["y"])),
}


STEPS |= {
    "add": _added,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _same,
    "copy": _same,
    "div": _scaled,
    "exp": _exponential,
    "max": _maximum,
    "mul": _scaled,
    "name": _same,
    "reduce_max": _reduced,
    "reduce_precision": _same,
    "reduce_sum": _reduced,
    "reshape": _reshape,
    "select_n": _selected,
    "squeeze": _reshape,
    "stop_gradient": _same,
    "sub": _subtracted,
    "transpose": _transpose,
}
