"""Products of all pairs of fields, of which a model keeps some: the interaction of DLRM.

`einsum("bfd,bgd->bfg", fields, fields)` of fields of users and candidates is represented by
`Scores` of `Blocks`. If the program looks up constant positions of it, each pair of two users'
fields is computed at user batch, and the others at candidate batch.
"""

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
from ikbo_jax.rewrite.rules.placing import constant_positions
from ikbo_jax.rewrite.rules.reshaped_axes import to_shape
from ikbo_jax.rewrite.rules.taken import Sorted, in_order, moved, sorted_by_lookup, taken
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Lazy,
    base_of,
    has_lineage,
    is_plain,
    lazy,
    of_bases,
)
from ikbo_jax.rewrite.values.registry import NotCovered

#: With more lookups, every field by its own index, the blocks are single products.
_MOST_BLOCKS = 16


def reshape(ctx: Context, eqn: Any, x: Scores) -> Any:
    """Flattens the pairs, or adds or removes dimensions of size 1."""
    (batch, *rest) = x.shape
    shape = tuple(eqn.outvars[0].aval.shape)
    flattens = len(rest) == 2 and 1 not in rest and shape == (batch, rest[0] * rest[1])
    if (found := _masked_product(ctx, x) if flattens else None) is not None:
        every = np.stack(np.divmod(np.arange(shape[1]), rest[1]), axis=1)
        return _chosen(ctx, found[0], every, np.broadcast_to(found[1], (1, *rest)).reshape(-1))
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


def _is_product(x: Scores, *, scaled: bool = True, in_order: bool = True) -> bool:
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
        and set(x.labels) == {(BATCH, 0), (QUERY, 0), (KEY, 0)}
        and (x.labels[0] == (BATCH, 0) or not in_order)
    )


def _has_users(x: Any) -> bool:
    return any(map(has_lineage, x.parts if isinstance(x, Concat) else (x,)))


def gather(ctx: Context, eqn: Any, x: Any, indices: Any) -> Any:
    """Looks constant pairs up."""
    if not isinstance(x, Scores) or not _is_product(x, in_order=False):
        raise NotCovered("attention is not recognised: gather of its scores")
    batch = x.labels.index((BATCH, 0))
    axes = tuple([d for d in range(3) if d != batch])
    pairs, order = constant_positions(ctx, eqn, x, indices, axes)
    found = _chosen(ctx, x, pairs)
    return moved(found, (0, 1) if order[0] == batch else (1, 0))


def slice_(ctx: Context, eqn: Any, x: Scores) -> Any:
    """Slices pairs of the same fields in all rows of the batch."""
    batch, *cuts = known.cuts(eqn.params)
    if not _is_product(x) or batch != slice(0, x.shape[0], 1):
        raise NotCovered(f"attention is not recognised: slice of its {x.stage}")
    fields = [np.arange(n)[cut] for n, cut in zip(x.shape[1:], cuts, strict=True)]
    pairs = np.stack(np.meshgrid(*fields, indexing="ij"), axis=-1).reshape(-1, 2)
    return to_shape(ctx, eqn, _chosen(ctx, x, pairs), eqn.outvars[0].aval.shape)


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
    """Sums pairs, times weights that are the same for all rows or a fixed mask; exponentials."""
    found = _masked_product(ctx, x) if eqn.params["axes"] == (1, 2) else None
    if found is not None and _is_product(found[0], scaled=False):
        kept = np.broadcast_to(found[1], (1, *x.shape[1:]))[0]
        return _weighted(ctx, eqn, found[0], jnp.asarray(kept, found[0].root.key.dtype))
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
    sides = (rows, *_), (columns, *_) = _sides(ctx, x)
    if len(rows) * len(columns) > _MOST_BLOCKS or weights.dtype != x.root.key.dtype:
        raise NotCovered("weighted products of fields of many lookups")
    at = [[np.flatnonzero(group == n) for n in range(len(values))] for values, group, _ in sides]
    is_gram, terms = x.root.query is x.root.key, []
    for (m, row), (n, column) in itertools.product(enumerate(rows), enumerate(columns)):
        if is_gram and m > n:
            continue
        own = staged.take(staged.take(weights, at[0][m], 0), at[1][n], 1)
        if is_gram and m < n:
            # The product of two fields is that of the same fields in the other order.
            own = own + staged.take(staged.take(weights, at[0][n], 0), at[1][m], 1).T
        # [other fields, batch, width]
        first, own, other = (row, own.T, column) if has_lineage(row) else (column, own, row)
        mixed = _product(ctx, x, own, first, (((1,), (1,)), ((), ())))
        numbers = ((0, 2), (1, 2)), ((1,), (0,))
        terms.append(ctx.build(_product(ctx, x, mixed, other, numbers, np.dtype(np.float32))))
    return staged.cast(functools.reduce(jax.lax.add, terms), eqn.outvars[0].aval.dtype)


def _product(
    ctx: Context, x: Scores, lhs: Any, rhs: Any, numbers: Any, preferred: Any = None
) -> Any:
    """Multiplies, as the product of the scores does, with other dimension numbers."""
    eqn = x.equation.replace(params={**x.equation.params, "dimension_numbers": numbers})
    return contraction.product(ctx, eqn, lhs, rhs, preferred)


def _sides(ctx: Context, scores: Scores) -> list[Sorted]:
    """Returns the fields of rows and columns, one value for each lookup."""
    sides = [sorted_by_lookup(ctx, x, 1) for x in (scores.root.query, scores.root.key)]
    # In the order of the scores.
    is_first = scores.labels.index((KEY, 0)) < scores.labels.index((QUERY, 0))
    return sides[:: -1 if is_first else 1]


def _chosen(ctx: Context, scores: Scores, pairs: np.ndarray, kept: np.ndarray | None = None) -> Any:
    """Computes the products of these pairs [count, 2]: [batch, count].

    Products that are not `kept` [count] are 0.
    """
    kept = np.ones(len(pairs), bool) if kept is None else kept
    rows, columns = ctx.scope.once(("sides",), [scores], lambda: _sides(ctx, scores))
    of_rows, of_columns = rows.group[pairs[:, 0]], columns.group[pairs[:, 1]]
    parts, places = [], []
    for m, n in itertools.product(range(len(rows.values)), range(len(columns.values))):
        at = np.flatnonzero((of_rows == m) & (of_columns == n) & kept)
        if at.size:
            of_fields = functools.partial(_block, ctx, scores, rows.values[m], columns.values[n])
            block = ctx.scope.once(("block", m, n), [scores], of_fields)
            width = columns.values[n].shape[1]
            first, second = rows.offset[pairs[at, 0]], columns.offset[pairs[at, 1]]
            parts.append(taken(block, first * width + second, 1))
            places.append(at)
    if len(parts) > _MOST_BLOCKS:
        raise NotCovered("products of fields of many lookups")
    if not kept.all():
        places.append(np.flatnonzero(~kept))
        zeros = jnp.asarray(np.zeros((1, len(places[-1])), scores.dtype))
        parts.append(lazy(zeros, (scores.shape[0], len(places[-1])), None, -1, frozenset()))
    return in_order(parts, places, 1)


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
