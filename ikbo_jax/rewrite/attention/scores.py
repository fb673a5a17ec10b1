"""Attention's scores, from logits to probabilities: recognised, but not computed.

Every primitive that occurs in a softmax has a rule here, which maps `Scores` to `Scores`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.ops import arguments
from ikbo_jax.rewrite.facts import curves, proofs
from ikbo_jax.rewrite.facts.curves import Curve
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import any_shape, reselect
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Deferred, transposed
from ikbo_jax.rewrite.values.registry import NotCovered, rule_of

# Kinds of dimensions of the scores. Queries and keys share the heads; all remaining dimensions of
# the queries are of the kind QUERY.
BATCH, HEAD, QUERY, KEY, ONE = "batch", "head", "query", "key", "one"
#: A dimension: its kind, and its number among the dimensions of this kind.
Label = tuple[str, int]
#: The dimension that attention weights do not have and values have.
WIDTH: Label = ("width", 0)
#: Dtypes of scores and values. Comparisons with types, not names, cost no Python call.
DTYPES = tuple(map(jnp.dtype, arguments.DTYPES))


@dataclasses.dataclass(frozen=True, eq=False)
class Fill:
    """Holds a mask of logits, and its number; or a mask of weights, whose number is 0.

    Attributes:
      value: the number that replaces masked logits, or is added to them, as the softmax sees it.
      added: the dtype of the addition; None if `where` put the number in.
      after: the factor by which the sum was multiplied after the addition.
      kept: False where a logit is masked. Of `Logits`, [users, keys], or None if only `seen` masks
        logits; of `Blocks`, [batch, *queries, *heads, keys], where sizes may be 1; of `Weights`,
        [users, keys, *heads], where heads may be 1.
      state: `known_mask` of the whole mask: of `Blocks`, of the dimensions of `kept`; of `Logits`,
        with `seen`, [batch or 1, queries or 1, keys].
      lengths: [users] int32 if `kept` is proven to be the first `lengths` keys; else None.
      source: see `proofs.source_of_mask`; None if the mask hides what is True.
      seen: None; or if a mask of `Logits` differs by candidate or query, the factor of it that
        does: [batch or 1, queries or 1, keys] bool, an interval of keys in each row.
      labels: of a mask of `Blocks`, the labels of its own dimensions.
      factors: of a mask of `Blocks`, computes its factors in a region of `masks.factors`: `kept`
        and `state` of each, whether it keeps an interval of keys in each row, and an identity:
        factors of one identity agree where the query is the key.
    """

    value: float
    added: Any = None
    after: float = 1.0
    kept: Any = None
    state: Any = None
    lengths: jax.Array | None = None
    source: Any = None
    seen: Any = None
    labels: tuple[Label, ...] = ()
    factors: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """Holds scale · query · key, masked: the root of the `Scores` made of it.

    Attributes:
      query: [batch, *queries, *heads, width].
      key: [batch, keys, *heads, width], looked up.
      queries: sizes of the queries' dimensions.
      heads: sizes of the heads' dimensions.
      scale: factor of the product.
      fills: the masks in program order; where two of them mask, the later one prevails.
      mask_origins: the broadcasts that the masks stem from.
      cap: None, or the factor of the hyperbolic tangent of the product.
      biases: what is added to the scaled and capped product, before the masks: of `Logits`, at most
        one array [users or 1, heads or 1, queries or 1, keys]; of `Blocks`, values [batch,
        *queries, *heads, keys], where sizes may be 1.
      unscaled: None; or the root whose query was multiplied by a factor of the logits.
    """

    query: Any
    key: Any
    queries: tuple[int, ...]
    heads: tuple[int, ...]
    scale: float = 1.0
    fills: tuple[Fill, ...] = ()
    mask_origins: frozenset = frozenset()
    cap: float | None = None
    biases: tuple[Any, ...] = ()
    unscaled: Any = None

    @property
    def labels(self) -> list[Label]:
        """Labels of the dimensions [batch, *queries, *heads, keys]."""
        between: list[Label] = [(QUERY, n) for n in range(len(self.queries))]
        between += [(HEAD, n) for n in range(len(self.heads))]
        return [(BATCH, 0), *between, (KEY, 0)]

    @property
    def is_only_scaled(self) -> bool:
        """Whether the root is a scaled product alone."""
        return not self.fills and self.cap is None and not self.biases

    @property
    def scale_and_cap(self) -> tuple[float, float | None]:
        """The scale and the cap as `ikbo_jax.attention` takes them."""
        # c * tanh(s * x) is |c| * tanh((s * c) * x / |c|).
        return (self.scale, None) if self.cap is None else (self.scale * self.cap, abs(self.cap))


class Logits(Root):
    """Holds the logits of keys that are looked up along their dimension 0.

    The base of the keys is [users, keys, *heads, width]; the query is an array.
    """

    @property
    def lineage(self) -> Any:
        return self.key.lineage


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(Deferred):
    """Stands for a value between logits and probabilities, which is not computed.

    Attributes:
      root: the logits that it is computed from.
      stage: "logits", "max", "shifted", "exp", "sum", "probabilities"; or "curve", not part of a
        softmax, but possibly an activation; or, if the root is `Blocks`, "elementwise"; or a stage
        of `weights`.
      labels: the label of every dimension.
      run: computes the value as the program is written.
      curve: the value as an elementwise function of query · key; None if unknown.
      shifted: whether the maximum was subtracted before the exponential.
      equation: the product of the logits.
      made: the producing equation and its operands; None for a product.
      weights: how probabilities or a curve were changed, as `products.Weights`; None if they were
        not.
      floor: ("add", e) for a sum plus e; ("max", e) for the larger of a sum and e.
      sum_of_one: whether the exponentials of every row with kept keys have a sum of at least 1.
      emptied: "select" or "product", by what exponentials of rows without kept keys become 0
        instead of NaN; "" if nothing does it.
      reason: of a curve or an elementwise function, why it is no part of a softmax.
    """

    root: Any
    stage: str
    labels: tuple[Label, ...]
    shape: tuple[int, ...]
    dtype: Any
    run: Callable[[Context], jax.Array]
    curve: Curve | None = None
    shifted: bool = False
    equation: Any = None
    made: Any = None
    weights: Any = None
    floor: tuple[str, float] | None = None
    sum_of_one: bool = False
    emptied: str = ""
    reason: str = ""

    is_computed = True

    @property
    def origins(self) -> frozenset:
        return self.root.key.origins

    def build(self, ctx: Context) -> jax.Array:
        return self.run(ctx)

    def aligned(self, ctx: Context, *values: Any) -> tuple[Scores, list[Any]]:
        """Gives the keys and values that one index looks up one lineage; see `reselect.aligned`."""
        root, weights = self.root, self.weights
        key, *found = reselect.aligned(ctx, [root.key, *values])
        if key is root.key:
            return self, found

        lineages = root.key.lineage, key.lineage

        # What is by user gets the rows that the keys get, too.
        def rows(x: Any) -> Any:
            of_users = x is not None and x.shape[0] == root.key.base.shape[0]
            return reselect.at_rows_of(ctx, x, 0, *lineages) if of_users else x

        def masks(fills: Sequence[Fill]) -> tuple[Fill, ...]:
            kept = [dataclasses.replace(x, kept=rows(x.kept)) for x in fills]
            return tuple([dataclasses.replace(x, lengths=rows(x.lengths)) for x in kept])

        biases = tuple(map(rows, root.biases))
        new = dataclasses.replace(root, key=key, fills=masks(root.fills), biases=biases)
        if weights is not None:
            of, factors = dataclasses.replace(weights.of, root=new), map(rows, weights.factors)
            changes = {"of": of, "factors": tuple(factors), "masks": masks(weights.masks)}
            weights = dataclasses.replace(weights, **changes)
        return dataclasses.replace(self, root=new, weights=weights), found

    def rule(self, ctx: Context, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has scores among its operands."""
        name = eqn.primitive.name
        if name == "jit":
            return ctx.run_closed(eqn.params["jaxpr"], operands, eqn)
        curve = _curve_of(ctx, eqn, operands)
        try:
            rule = rule_of(name, "scores")
            if rule is None:
                raise NotCovered(f"attention is not recognised: {name} of its {self.stage}")
            result = rule(ctx, eqn, *operands)
        except NotCovered as error:
            found = (x.reason for x in operands if isinstance(x, Scores))
            reason = next(filter(None, found), str(error))
            if curve is not None:
                result = self.then(eqn, operands, stage="curve", curve=curve, reason=reason)
            elif _is_elementwise(eqn, operands):
                result = self.then(eqn, operands, stage="elementwise", reason=reason)
            else:
                raise NotCovered(reason) from None
            return [result] if eqn.primitive.multiple_results else result
        if not isinstance(result, Scores) or name in proofs.MOVES or result.curve is curve:
            return result
        return dataclasses.replace(result, curve=curve)

    def then(self, eqn: Any, operands: Any, **changes: Any) -> Scores:
        """Returns the result of an equation: these scores with some attributes changed."""
        (out,) = eqn.outvars

        def run(ctx: Context) -> jax.Array:
            arrays = [
                staged.placed_as(ctx.build(x), v.aval)
                for x, v in zip(operands, eqn.invars, strict=True)
            ]
            out = ctx.bind(eqn, *arrays)
            return out[0] if eqn.primitive.multiple_results else out

        # `dataclasses.replace` takes five times as long.
        found = object.__new__(Scores)
        made = {"shape": tuple(out.aval.shape), "dtype": out.aval.dtype, "run": run}
        vars(found).update(vars(self) | made | {"made": (eqn, tuple(operands))} | changes)
        return found


def _is_elementwise(eqn: Any, operands: Any) -> bool:
    """Whether an equation computes element by element with scores of concatenated tokens."""
    scores = [x for x in operands if isinstance(x, Scores)]
    if isinstance(scores[0].root, Logits) or len(eqn.outvars) != 1:
        return False
    if not _of_one_product(scores) or any(x.stage not in ("logits", "elementwise") for x in scores):
        return False
    # A custom_jvp function may do anything to the rows of its operand.
    if eqn.primitive.name == "custom_jvp_call":
        return len(operands) == 1 and any_shape.is_elementwise_jvp(eqn)
    return eqn.primitive.name in ELEMENTWISE


def _of_one_product(scores: Sequence[Scores]) -> bool:
    """Whether scores are computed from one product, with the same dimensions."""
    first = scores[0]
    return all(
        x.labels == first.labels
        and (x.root.unscaled or x.root).query is (first.root.unscaled or first.root).query
        and x.root.key is first.root.key
        for x in scores
    )


def _curve_of(ctx: Context, eqn: Any, operands: Any) -> Curve | None:
    """Returns the curve of an equation on scores of one product and numbers, or None."""
    if eqn.primitive.name not in curves.ELEMENTWISE or len(eqn.outvars) != 1:
        return None
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        return None
    scores = [x for x in operands if isinstance(x, Scores)]
    for x in scores:
        if x.curve is None or x.root.fills or x.root.biases:
            return None
    if not _of_one_product(scores):
        return None
    arguments: list[Any] = []
    for x in operands:
        arguments.append(x.curve if isinstance(x, Scores) else constant(ctx, x))
        if arguments[-1] is None:
            return None
    return curves.then(eqn, arguments)


# The rules. Each is called with the context, the equation and its operands, among them `Scores`.


def only(operands: Any) -> Scores:
    """Returns the only operand that is `Scores`; raises NotCovered if several are."""
    scores = [x for x in operands if isinstance(x, Scores)]
    if len(scores) != 1:
        raise NotCovered("attention is not recognised: its scores are combined with scores")
    return scores[0]


#: An operand of a product of queries with keys: its value, and its summed and batch dimensions.
Side = tuple[Any, Sequence[int], Sequence[int]]


def of_product(
    kind: type[Root],
    eqn: Any,
    query: Side,
    key: Side,
    user_dim: int,
    key_first: bool,
    run: Callable[[Context], jax.Array],
    curve: Curve | None = None,
) -> Scores:
    """Returns the scores of a product of queries with keys, with a root of this kind.

    `user_dim` is the number of the candidates' batch dimension; `key_first` says whether the keys
    are the first operand. `run` and `curve` are attributes of the scores.
    """

    def arranged(x: Any, contract: Sequence[int], batch: Sequence[int]) -> Any:
        free = [d for d in range(len(shape_of(x))) if d not in (*contract, *batch)]
        heads = [d for n, d in enumerate(batch) if n != user_dim]
        return transposed(x, [batch[user_dim], *free, *heads, *contract])

    rows, numbers = arranged(*query), itertools.count()
    batch: list[Label] = [
        (BATCH, 0) if n == user_dim else (HEAD, next(numbers)) for n in range(len(query[2]))
    ]
    sizes = shape_of(rows)[1:-1]
    count = len(sizes) - len(batch) + 1
    root = kind(rows, arranged(*key), sizes[:count], sizes[count:])
    free: list[Label] = [(QUERY, n) for n in range(count)]
    labels = (*batch, (KEY, 0), *free) if key_first else (*batch, *free, (KEY, 0))
    out: Any = eqn.outvars[0].aval
    return Scores(root, "logits", labels, tuple(out.shape), out.dtype, run, curve, equation=eqn)


def order_of_values(eqn: Any, scores: Scores, side: int, value: Any) -> list[int]:
    """Returns the dimensions of values, in the order [batch, keys, *heads, width].

    `side` is the position of the weights among the operands of their product with `value`. In place
    of a head that the values lack, as under a `vmap` of the keys alone, stands -1.
    """
    contract, batch = eqn.params["dimension_numbers"]
    pairs = dict(zip((scores.labels[d] for d in batch[side]), batch[1 - side], strict=True))
    wanted: list[Label] = [(BATCH, 0), *((HEAD, n) for n in range(len(scores.root.heads)))]
    summed, batched = contract[1 - side], batch[1 - side]
    free = [d for d in range(len(shape_of(value))) if d not in (*summed, *batched)]
    of_keys = [scores.labels[d] for d in contract[side]] == [(KEY, 0)]
    if not of_keys or (BATCH, 0) not in pairs or not pairs.keys() <= set(wanted) or len(free) != 1:
        raise NotCovered("attention is not recognised: another product with its values")
    axis, *heads = (int(pairs.get(label, -1)) for label in wanted)
    return [axis, *map(int, summed), *heads, *free]


def labels_of_product(eqn: Any, scores: Scores, side: int) -> list[Label]:
    """Labels a product of weights, which are the operand `side`, with their values."""
    (contract, batch) = eqn.params["dimension_numbers"]
    summed = (*contract[side], *batch[side])
    rest = [label for d, label in enumerate(scores.labels) if d not in summed]
    return [
        *(scores.labels[d] for d in batch[side]),
        *([*rest, WIDTH] if side == 0 else [WIDTH, *rest]),
    ]


#: Equations that keep scores of one stage alone: a sum is never negative, and the gradient of a
#: maximum cancels in the softmax.
_KEEP_ONE_STAGE = {"abs": "sum", "stop_gradient": "max"}


def kept(ctx: Context, eqn: Any, x: Any) -> Any:
    """Keeps the scores."""
    if x.stage != _KEEP_ONE_STAGE.get(eqn.primitive.name, x.stage):
        raise NotCovered(f"attention is not recognised: {eqn.primitive.name} of its {x.stage}")
    return x.then(eqn, [x])


def cast(ctx: Context, eqn: Any, x: Any) -> Any:
    """Casts the scores, and rounds the numbers of their masks."""
    dtype = eqn.outvars[0].aval.dtype
    if dtype not in DTYPES:
        raise NotCovered(f"attention is not recognised: its scores are cast to {dtype}")
    root = with_fills(x.root, dtype, 1.0) if x.stage == "logits" else x.root
    rounds = any(jnp.finfo(dtype).eps > jnp.finfo(bias.dtype).eps for bias in root.biases)
    if rounds and x.stage == "logits":
        raise NotCovered(f"attention is not recognised: a sum with a bias is cast to {dtype}")
    return x.then(eqn, [x], root=root)


def with_fills(root: Logits, dtype: Any, factor: float) -> Logits:
    """Multiplies the numbers of the masks of logits, and rounds them to `dtype`."""
    fills = []
    for fill in root.fills:
        with np.errstate(all="ignore"):
            value = float(np.asarray(fill.value * factor).astype(dtype).astype(np.float64))
        if value == math.inf:
            raise NotCovered(f"attention is not recognised: masked logits become {value}")
        fill = dataclasses.replace(fill, value=value, after=fill.after * factor)
        if fill.added is not None and jnp.finfo(dtype).eps > jnp.finfo(fill.added).eps:
            fill = dataclasses.replace(fill, added=dtype)
        fills.append(fill)
    return dataclasses.replace(root, fills=tuple(fills)) if fills else root


def belong(x: Scores, y: Scores) -> bool:
    """Whether y, reduced over the keys, has the root of x and broadcasts to its dimensions."""
    return _same_root(x.root, y.root) and all(
        a == b or a[0] == ONE or (a[0] == KEY and b[0] == ONE)
        for a, b in zip(x.labels, y.labels, strict=True)
    )


def _same_root(x: Any, y: Any) -> bool:
    """Whether two scores have one root, or one product with equal masks."""
    if x is y or type(x) is not type(y):
        return x is y
    same = x.query is y.query and x.key is y.key and (x.scale, x.cap) == (y.scale, y.cap)
    return (
        same
        and x.biases is y.biases
        and all(
            a is b
            or proofs.same_source(a.source, b.source)
            and (a.value, a.added, a.after) == (b.value, b.added, b.after)
            for a, b in itertools.zip_longest(x.fills, y.fills, fillvalue=Fill(0.0))
        )
    )
