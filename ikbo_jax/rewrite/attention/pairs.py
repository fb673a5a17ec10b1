"""Products of all pairs of fields, of which a model keeps some: the interaction of DLRM.

`einsum("bfd,bgd->bfg", fields, fields)` of fields of users and candidates is represented by
`Scores` of `Blocks`. If the program looks up constant positions of it, each pair of two users'
fields is computed at user batch, and the others at candidate batch.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.attention import changed_weights, contraction, products
from ikbo_jax.rewrite.attention.blocks import Blocks
from ikbo_jax.rewrite.attention.scores import BATCH, KEY, QUERY, Scores
from ikbo_jax.rewrite.facts import known, masks
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules.concatenation import of_one_lineage
from ikbo_jax.rewrite.rules.elementwise import concat
from ikbo_jax.rewrite.rules.placing import constant_positions
from ikbo_jax.rewrite.rules.reshape import reshape_to
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Deferred,
    Lazy,
    base_of,
    has_lineage,
    is_plain,
    lazy,
    of_bases,
)
from ikbo_jax.rewrite.values.registry import NotCovered, rule_of

#: More runs of neighbouring pairs than this become no parts of a concatenation.
_MOST_RUNS = 128
#: With more lookups, every field by its own index, the blocks are single products.
_MOST_BLOCKS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs(Deferred):
    """Holds the products of all pairs, flattened: [batch, fields · fields].

    Attributes:
      scores: the products, maybe set to 0 by masks that the program fixes.
      product: the products themselves.
      kept: [fields · fields], False where a mask sets a product to 0.
    """

    scores: Scores
    product: Scores
    kept: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        batch, rows, columns = self.scores.shape
        return (batch, rows * columns)

    @property
    def dtype(self) -> Any:
        return self.scores.dtype

    @property
    def origins(self) -> frozenset:
        return self.scores.origins

    is_computed = True

    def build(self, ctx: Context) -> jax.Array:
        return staged.reshape(ctx.build(self.scores), self.shape)

    def rule(self, ctx: Context, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has flattened pairs among its operands."""
        name = eqn.primitive.name
        if name == "jit":
            return ctx.run_closed(eqn.params["jaxpr"], operands, eqn)
        if name == "gather":
            return _gather_of_pairs(ctx, eqn, *operands)
        if name == "reshape" and tuple(eqn.outvars[0].aval.shape) == self.scores.shape:
            return self.scores
        primitive_rule = rule_of(name)
        if primitive_rule is None or any(isinstance(x, Scores) for x in operands):
            raise NotCovered(f"{name} of products of fields")
        _, rows, columns = self.scores.shape
        every = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
        # Several equations may read the pairs, as a norm does.
        chosen = ctx.scope.once(
            ("every pair",), [self], lambda: _chosen(ctx, self.product, every, self.kept)
        )
        values = [chosen if x is self else x for x in operands]
        return primitive_rule(ctx, eqn, *values)


def reshape(ctx: Context, eqn: Any, x: Scores) -> Any:
    """Flattens the pairs, or adds or removes dimensions of size 1."""
    (batch, *rest) = x.shape
    shape = tuple(eqn.outvars[0].aval.shape)
    flattens = len(rest) == 2 and 1 not in rest and shape == (batch, rest[0] * rest[1])
    if (found := _masked_product(ctx, x) if flattens else None) is not None:
        return Pairs(x, found[0], np.broadcast_to(found[1], (1, *rest)).reshape(-1))
    return changed_weights.reshape(ctx, eqn, x)


def _masked_product(ctx: Context, x: Scores) -> tuple[Scores, np.ndarray] | None:
    """Finds the product that fixed masks, the same for all rows, set to 0, and where they keep it.

    The masks are [1, fields, fields], as of `where(tril(...), products, 0)`.
    """
    if _is_product(x):
        return x, np.ones((1, 1, 1), bool)
    made: Any = x.made or (None, ())
    eqn, operands = made
    inner = [y for y in operands if isinstance(y, Scores)]
    if eqn is None or len(inner) != 1 or len(operands) - len(inner) != 1 + (len(operands) == 3):
        return None
    kept: Any = None
    if eqn.primitive.name == "select_n" and inner[0] is not operands[0]:
        which, *cases = operands
        state = masks.known_mask(ctx, which)
        other = known.known(ctx, cases[0] if inner[0] is cases[1] else cases[1])
        if masks.UNKNOWN not in state and other is not None and not other.any():
            kept = state == (inner[0] is cases[1])
    elif eqn.primitive.name == "mul":
        number = known.known(ctx, operands[0] if inner[0] is operands[1] else operands[1])
        kept = number == 1 if number is not None and np.isin(number, (0, 1)).all() else None
    if kept is None or kept.ndim != 3 or (kept != kept[:1]).any():
        return None
    before = _masked_product(ctx, inner[0])
    return before and (before[0], before[1] & kept[:1])


def _is_product(x: Scores, *, scaled: bool = True) -> bool:
    """Whether scores are a product of rows with rows, maybe times a number, and nothing else.

    Both have rows of users: otherwise no product runs at user batch.
    """
    root: Any = x.root
    return (
        isinstance(root, Blocks)
        and _has_users(root.query)
        and _has_users(root.key)
        and x.stage == "logits"
        and (scaled or root.scale == 1)
        and root.cap is None
        and not root.fills
        and x.labels in (((BATCH, 0), (QUERY, 0), (KEY, 0)), ((BATCH, 0), (KEY, 0), (QUERY, 0)))
    )


def _has_users(x: Any) -> bool:
    return any(map(has_lineage, x.parts if isinstance(x, Concat) else (x,)))


def gather(ctx: Context, eqn: Any, x: Any, indices: Any) -> Any:
    """Looks constant pairs up."""
    if not isinstance(x, Scores) or not _is_product(x):
        raise NotCovered("attention is not recognised: gather of its scores")
    return _chosen(ctx, x, constant_positions(ctx, eqn, x, indices, (1, 2)))


def slice_(ctx: Context, eqn: Any, x: Scores) -> Any:
    """Slices pairs of the same fields in all rows of the batch."""
    batch, *cuts = known.cuts(eqn.params)
    if not _is_product(x) or batch != slice(0, x.shape[0], 1):
        raise NotCovered(f"attention is not recognised: slice of its {x.stage}")
    fields = [np.arange(n)[cut] for n, cut in zip(x.shape[1:], cuts, strict=True)]
    pairs = np.stack(np.meshgrid(*fields, indexing="ij"), axis=-1).reshape(-1, 2)
    return reshape_to(ctx, eqn, _chosen(ctx, x, pairs), eqn.outvars[0].aval.shape)


def _gather_of_pairs(ctx: Context, eqn: Any, x: Any, indices: Any) -> Any:
    if not isinstance(x, Pairs):
        raise NotCovered("lookup by products of fields")
    positions = constant_positions(ctx, eqn, x, indices, (1,))[:, 0]
    columns = x.scores.shape[2]
    pairs = np.stack(np.divmod(positions, columns), axis=1)
    return _chosen(ctx, x.product, pairs, x.kept[positions])


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Sums pairs with weights, in one product with a matrix [fields, fields]; see `products`."""
    side = int(isinstance(rhs, Scores))
    x, weights = (rhs, lhs) if side else (lhs, rhs)
    contract, (batch, _) = eqn.params["dimension_numbers"]
    of_pairs = not batch and len(contract[0]) == 2 and is_plain(weights)
    of_pairs = of_pairs and _is_product(x, scaled=False)
    if not of_pairs or np.ndim(weights) != 2 or not products.has_default_precision(eqn):
        return products.dot_general(ctx, eqn, lhs, rhs)
    order = [d for _, d in sorted(zip(contract[side], contract[1 - side], strict=True))]
    return _weighted(ctx, eqn, x, staged.transpose(weights, order))


def reduce_sum(ctx: Context, eqn: Any, x: Scores) -> Any:
    """Sums pairs times weights that are the same for all rows, or exponentials."""
    made: Any = x.made or (None, ())
    made, operands = made
    pair = [y for y in operands if isinstance(y, Scores)]
    is_weighted = made is not None and made.primitive is jax.lax.mul_p
    is_weighted = is_weighted and eqn.params["axes"] == (1, 2) and len(pair) == 1
    if is_weighted and _is_product(pair[0], scaled=False):
        base = base_of(operands[0] if pair[0] is operands[1] else operands[1])
        if is_plain(base) and np.shape(base) == (1, *x.shape[1:]):
            return _weighted(ctx, eqn, pair[0], staged.reshape(base, x.shape[1:]))
    return changed_weights.reduced(ctx, eqn, x)


def _weighted(ctx: Context, eqn: Any, x: Scores, weights: jax.Array) -> Any:
    """Sums the products of all pairs, each times its weight [fields, fields]: [batch].

    So do field-weighted factorisation machines. Users' fields are multiplied with the weights at
    user batch, also for pairs of a user's and a candidate's field.
    """
    sides = (rows, _, _), (columns, _, _) = _sides(ctx, x)
    if len(rows) * len(columns) > _MOST_BLOCKS or weights.dtype != x.root.key.dtype:
        raise NotCovered("weighted products of fields of many lookups")
    at = [[np.flatnonzero(group == n) for n in range(len(values))] for values, group, _ in sides]
    is_gram, terms = x.root.query is x.root.key, []
    for (m, row), (n, column) in itertools.product(enumerate(rows), enumerate(columns)):
        if is_gram and m > n:
            continue
        own = _weights_of(weights, at[0][m], at[1][n])
        if is_gram and m < n:
            # The product of two fields is that of the same fields in the other order.
            own = own + _weights_of(weights, at[0][n], at[1][m]).T
        # [other fields, batch, width]
        first, own, other = (row, own.T, column) if has_lineage(row) else (column, own, row)
        mixed = _product(ctx, x, own, first, (((1,), (1,)), ((), ())))
        numbers = ((0, 2), (1, 2)), ((1,), (0,))
        terms.append(ctx.build(_product(ctx, x, mixed, other, numbers, np.dtype(np.float32))))
    return staged.cast(functools.reduce(jax.lax.add, terms), eqn.outvars[0].aval.dtype)


def _weights_of(weights: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """Selects the weights of some rows and columns."""
    for axis, at in enumerate((rows, columns)):
        weights = staged.gather_rows(weights, jnp.asarray(at, jnp.int32), axis)
    return weights


def _product(
    ctx: Context, x: Scores, lhs: Any, rhs: Any, numbers: Any, preferred: Any = None
) -> Any:
    """Multiplies, as the product of the scores does, with other dimension numbers."""
    eqn = x.equation.replace(params={**x.equation.params, "dimension_numbers": numbers})
    return contraction.product(ctx, eqn, lhs, rhs, preferred)


def _sides(ctx: Context, scores: Scores) -> list[tuple[list[Any], np.ndarray, np.ndarray]]:
    """Returns, for rows and columns, a value a lineage, and each field's value and position."""
    both, sides = (scores.root.query, scores.root.key), []
    pieces = [x.pieces() if isinstance(x, Concat) else [(x, 0, x.shape[1])] for x in both]
    fields: dict[Any, int] = {}
    for part, start, stop in (*pieces[0], *pieces[1]):
        if has_lineage(part):
            fields[part.lineage] = fields.get(part.lineage, 0) + stop - start
    # Of fields that are looked up each by its own index, only the users' stay lookups.
    most = max(fields, key=lambda x: fields[x], default=None)
    is_one = len(fields) ** 2 > _MOST_BLOCKS
    for x, of_side in zip(both, pieces, strict=True):
        groups: dict[Any, list[tuple[Any, int]]] = {}
        for part, start, _ in of_side:
            if is_one and has_lineage(part) and part.lineage is not most:
                part = ctx.materialise(None, part, "products of fields of many lookups")
            key = part.lineage if has_lineage(part) else is_plain(part)
            groups.setdefault(key, []).append((part, start))
        group, offset = (np.zeros(x.shape[1], np.int64) for _ in range(2))
        values = []
        for number, found in enumerate(groups.values()):
            at = 0
            for part, first in found:
                size = part.shape[1]
                group[first : first + size] = number
                offset[first : first + size] = np.arange(at, at + size)
                at += size
            same = [part for part, _ in found]
            values.append(same[0] if len(same) == 1 else of_one_lineage(same, 1))
        sides.append((values, group, offset))
    # In the order of the scores, so that neighbouring pairs are slices.
    return sides[:: -1 if scores.labels[1] == (KEY, 0) else 1]


def _chosen(ctx: Context, scores: Scores, pairs: np.ndarray, kept: np.ndarray | None = None) -> Any:
    """Computes the products of these pairs [count, 2]: [batch, count], in runs of one batch.

    Products that are not `kept` [count] are 0.
    """
    kept = np.ones(len(pairs), bool) if kept is None else kept
    sides = ctx.scope.once(("sides",), [scores], lambda: _sides(ctx, scores))
    (rows, row_group, row_at), (columns, column_group, column_at) = sides
    groups = list(
        zip(row_group[pairs[:, 0]].tolist(), column_group[pairs[:, 1]].tolist(), strict=True)
    )
    blocks: dict[tuple[int, int], Any] = {}
    different = dict.fromkeys(itertools.compress(groups, kept))
    if len(different) > _MOST_BLOCKS:
        raise NotCovered("products of fields of many lookups")
    for m, n in different:
        of_fields = functools.partial(_block, ctx, scores, rows[m], columns[n])
        blocks[m, n] = ctx.scope.once(("block", m, n), [scores], of_fields)
    whole, places = _joined(blocks, rows, columns)
    found = [places[x] if x in places else (0, columns[x[1]].shape[1]) for x in groups]
    starts, widths = np.array(found, np.int64).reshape(-1, 2).T
    flat = starts + row_at[pairs[:, 0]] * widths + column_at[pairs[:, 1]]
    kinds = ["plain" if key in places else key for key in groups]
    kinds = [x if key in different else "zero" for x, key in zip(kinds, groups, strict=True)]
    runs = [list(run) for _, run in itertools.groupby(range(len(kinds)), kinds.__getitem__)]
    if len(runs) > _MOST_RUNS:
        raise NotCovered("products of fields of user and candidate in turns")
    parts = []
    for run in runs:
        if kinds[run[0]] == "zero":
            zeros = jnp.asarray(np.zeros((1, len(run)), scores.dtype))
            parts.append(lazy(zeros, (scores.shape[0], len(run)), None, -1, frozenset()))
            continue
        block = whole if kinds[run[0]] == "plain" else blocks[groups[run[0]]]
        part = _columns(block, flat[run].tolist())
        if not kept[run].all():
            part = of_bases(functools.partial(_selected, kept[run][None]), part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else concat(parts, 1)


def _joined(
    blocks: dict[tuple[int, int], Any], rows: list[Any], columns: list[Any]
) -> tuple[Any, dict[tuple[int, int], tuple[int, int]]]:
    """Concatenates the blocks at candidate batch, row by row, so that few slices are taken of them.

    Returns:
      Them as [batch, count], and the place of the first product of each block and the number of
      products from row to row.
    """
    of_rows: dict[int, list[int]] = {}
    for (m, n), block in blocks.items():
        if is_plain(block):
            of_rows.setdefault(m, []).append(n)
    start, places, found = 0, {}, []
    for m, numbers in of_rows.items():
        batch, height, _ = rows[m].shape
        sizes = [columns[n].shape[1] for n in sorted(numbers)]
        width = sum(sizes)
        offsets = [start, *(start + x for x in itertools.accumulate(sizes))]
        places.update(
            {(m, n): (at, width) for n, at in zip(sorted(numbers), offsets, strict=False)}
        )
        parts = [blocks[m, n] for n in sorted(numbers)]
        if len(parts) > 1:
            apart = [
                staged.reshape(x, (batch, height, size))
                for x, size in zip(parts, sizes, strict=True)
            ]
            parts = [staged.reshape(staged.concatenate(apart, 2), (batch, height * width))]
        found += parts
        start += height * width
    return (staged.concatenate(found, 1) if len(found) > 1 else (found or [None])[0]), places


def _block(ctx: Context, scores: Scores, rows: Any, columns: Any) -> Any:
    """Multiplies some rows with some columns, flattened: [batch, rows · columns]."""
    (batch, m, _), n = rows.shape, columns.shape[1]
    numbers = (((2,), (2,)), ((0,), (0,)))
    dot = scores.equation
    aval = dot.outvars[0].aval.update(shape=(batch, m, n))
    dot = dot.replace(outvars=[core.Var(aval)], params={**dot.params, "dimension_numbers": numbers})
    product = contraction.product(ctx, dot, rows, columns)
    if (scale := scores.root.scale) != 1:
        product = of_bases(lambda x: x * np.asarray(scale, x.dtype), product)
    if not isinstance(product, Lazy) or product.axis != 0:
        return staged.reshape(ctx.build(product), (batch, m * n))
    base = staged.reshape(product.base, (product.base.shape[0], m * n))
    return lazy(base, (batch, m * n), product.lineage, 0, product.origins)


@jax.jit
def _selected(kept: jax.Array, x: jax.Array) -> jax.Array:
    """Sets the columns that are not `kept` to 0."""
    return jnp.where(kept, x, 0)


def _columns(x: Any, columns: list[int]) -> Any:
    base = x if is_plain(x) else x.base
    if columns == list(range(columns[0], columns[0] + len(columns))):
        base = staged.slice_in_dim(base, columns[0], columns[-1] + 1, axis=1)
    else:
        base = base[:, np.array(columns)]
    if is_plain(x):
        return base
    return lazy(base, (x.shape[0], len(columns)), x.lineage, x.axis, x.origins)
