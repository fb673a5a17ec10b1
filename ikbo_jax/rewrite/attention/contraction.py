"""Rules of products: at the smaller batch, by parts of a concatenation, by linear compression."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.ops.linear_compression import Term, linear_compression, multilevel_linear_compression
from ikbo_jax.rewrite.attention import blocks, products
from ikbo_jax.rewrite.attention.scores import DTYPES
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.report import cost, kernels
from ikbo_jax.rewrite.rules import one_hot, reselect, sums
from ikbo_jax.rewrite.rules.batched import at_one_batch, batched_product, dims_of
from ikbo_jax.rewrite.rules.concatenation import without_padding
from ikbo_jax.rewrite.rules.elementwise import concat, of_one_user
from ikbo_jax.rewrite.rules.taken import in_groups, sorted_by_lookup, taken
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Deferred, Lazy, Lineage
from ikbo_jax.rewrite.values.registry import NotCovered

_HALF = (jnp.bfloat16, jnp.float16)


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Multiplies two values, of which at least one is deferred or may be one-hot."""
    rows = one_hot.lookup(ctx, eqn, lhs, rhs)
    if rows is not None:
        return rows
    if lineage.is_plain(lhs) and lineage.is_plain(rhs):
        return ctx.bind(eqn, lhs, rhs)
    _, batch = eqn.params["dimension_numbers"]
    if isinstance(lhs, Concat) or isinstance(rhs, Concat):
        if batch[0] and products.has_default_precision(eqn):
            found = blocks.start(ctx, eqn, lhs, rhs, functools.partial(_whole, eqn, lhs, rhs))
            if found is not None:
                return found
        both = all(isinstance(x, Concat) and _is_looked_up(x) for x in (lhs, rhs))
        return (_of_concats if both else _of_concat)(ctx, eqn, lhs, rhs)
    if not batch[0]:
        return product(ctx, eqn, lhs, rhs)
    lhs, rhs = _of_one_lookup(ctx, lhs, rhs, zip(*batch, strict=True))
    scores = products.start(
        ctx, eqn, lhs, rhs, lambda scope: scope.build(product(scope, eqn, lhs, rhs))
    )
    return product(ctx, eqn, lhs, rhs) if scores is None else scores


def _whole(eqn: Any, lhs: Any, rhs: Any, ctx: Context) -> Any:
    """Multiplies two values that are materialised."""
    reason = "product of two concatenations"
    return ctx.bind(eqn, *(ctx.materialise(eqn, x, reason) for x in (lhs, rhs)))


def _of_concats(ctx: Context, eqn: Any, lhs: Concat, rhs: Concat) -> Any:
    """Multiplies two concatenations part by part: along a batch axis, or a summed one."""
    contract, batch = (list(zip(*dims, strict=True)) for dims in dims_of(eqn))
    axes, pairs = (lhs.axis, rhs.axis), list(zip(lhs.parts, rhs.parts, strict=False))
    if lhs.sizes != rhs.sizes or axes not in (*contract, *batch):
        raise NotCovered("product of two concatenations")
    if axes in contract:
        return _sum_of_products(ctx, eqn, True, pairs)
    return concat([product(ctx, eqn, *pair) for pair in pairs], batch.index(axes))


def _is_looked_up(x: Concat) -> bool:
    """Whether a part of a concatenation is more than an array or a broadcast one."""
    return any(
        isinstance(part, Deferred) and not lineage.is_only_broadcast(part) for part in x.parts
    )


def _of_one_lookup(ctx: Context, lhs: Any, rhs: Any, pairs: Any) -> Sequence[Any]:
    """Gives two values one lineage, if they are looked up along a batch dimension and end alike."""
    differ = type(lhs) is type(rhs) is Lazy and lhs.lineage is not rhs.lineage
    if differ and (lhs.axis, rhs.axis) in pairs:
        return reselect.at_last_steps(ctx, (lhs, rhs))
    return lhs, rhs


def product(
    ctx: Context, eqn: Any, lhs: Any, rhs: Any, preferred: Any = None, became: str = ""
) -> Any:
    """Multiplies two values, arrays or `Lazy`, at the smallest batch that both of them allow.

    `preferred` is the result's dtype, None for the equation's; `became` is a text for the report.
    """
    dims = (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims_of(eqn)
    if lhs_batch:
        lhs, rhs = _of_one_lookup(ctx, lhs, rhs, zip(lhs_batch, rhs_batch, strict=True))
    lhs, rhs = lineage.spread_axes(lhs, lhs_contract), lineage.spread_axes(rhs, rhs_contract)
    reason = "product that sums over the looked-up axis"
    if lineage.has_lineage(lhs) and lhs.axis in lhs_contract:
        lhs = ctx.materialise(eqn, lhs, reason)
    if lineage.has_lineage(rhs) and rhs.axis in rhs_contract:
        rhs = ctx.materialise(eqn, rhs, reason)
    lhs, rhs = at_one_batch(ctx, eqn, lhs, rhs, lhs_batch, rhs_batch)
    out, shape, value_lineage, axis = batched_product(ctx, eqn, lhs, rhs, dims, preferred)
    origins = lineage.origins_of(lhs, rhs)
    if lineage.is_at_least(math.prod(shape) - math.prod(out.shape), 1):
        ctx.recorder.saved(eqn, origins, became or "product at the smaller batch", True)
    return lineage.lazy(out, shape, value_lineage, axis, origins)


def _of_concat(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Multiplies with a concatenation, part by part."""
    left = isinstance(lhs, Concat) and not (isinstance(rhs, Concat) and _is_looked_up(rhs))
    whole, other = (lhs, rhs) if left else (rhs, lhs)
    (contract, other_contract), (batch, other_batch) = (
        dims if left else dims[::-1] for dims in dims_of(eqn)
    )

    def multiplied(x: Any, y: Any) -> Any:
        return product(ctx, eqn, *((x, y) if left else (y, x)))

    if whole.axis in batch:
        # Each position has its own matrix, such as each token in RankMixer.
        number = batch.index(whole.axis)
        axes = [dims[number] for dims in dims_of(eqn)[1]]
        return in_groups(ctx, eqn, (lhs, rhs), axes, number)
    if not lineage.has_lineage(other) and whole.axis in contract:
        other_axis = other_contract[contract.index(whole.axis)]
        whole, other = without_padding(ctx, whole, other, other_axis)
        if not isinstance(whole, Concat):
            return multiplied(whole, other)
    elif isinstance(other, Concat):
        # Weights that are concatenated, from zeros for example.
        other = ctx.build(other)
    if whole.axis not in contract:
        parts = [multiplied(part, other) for part in whole.parts]
        free = [d for d in range(len(whole.shape)) if d not in contract and d not in batch]
        axis = len(batch) + free.index(whole.axis)
        if not left:
            axis += len(shape_of(other)) - len(contract) - len(batch)
        return concat(parts, axis)
    other_axis = other_contract[contract.index(whole.axis)]
    if lineage.has_lineage(other) and other.axis == other_axis:
        raise NotCovered("product that sums over the looked-up axis")
    split, weights = sums.by_terms(ctx, whole, other, other_axis)
    if split is not whole and _joined(ctx, eqn, split) is split:
        whole, other = split, weights
    groups = _groups(ctx, whole, other, other_axis)
    if len(groups) > 1:
        compressed = _compress(ctx, eqn, left, whole, other, groups)
        if compressed is not None:
            return compressed
        joined = _joined(ctx, eqn, whole)
        if joined is not whole:
            return multiplied(joined, other)
    return _sum_of_products(ctx, eqn, left, groups)


#: How often a lookup before a product moves each byte of the rows: the lookup and the concatenation
#: each read and write the rows, and the product reads them.
_MOVED = 5


def _joined(ctx: Context, eqn: Any, whole: Concat) -> Any:
    """Materialises a concatenation if products of its parts would move more bytes.

    A product by parts looks its result up at candidate batch, once for every index.
    """
    (out,) = eqn.outvars
    wide = 4 if out.aval.dtype in _HALF else out.aval.dtype.itemsize
    looked_up = wide * math.prod(out.aval.shape)
    if kernels.on_gpu() and not _pays(whole, out.aval, looked_up):
        return ctx.materialise(eqn, whole, "looked up for one product: its parts take more kernels")
    rows = [part for part in whole.parts if lineage.has_lineage(part)]
    rest = [part for part in whole.parts if lineage.is_plain(part)]
    moved = _MOVED * sum(lineage.bytes_of(part.shape, part.dtype) for part in rows)
    # If only one array remains, no concatenation copies it.
    spared = 2 * lineage.bytes_of(rest[0].shape, rest[0].dtype) if len(rest) == 1 else 0
    lookups = len({(part.lineage, part.axis) for part in rows})
    if lineage.is_at_least(moved + spared, lookups * looked_up):
        return whole
    reason = "looked up for one product: products by parts would move more bytes"
    return ctx.materialise(eqn, whole, reason)


def _pays(whole: Concat, out: Any, looked_up: int) -> bool:
    """Whether products by parts take less time on a GPU: a product and a sum are two kernels more.

    The sum reads what the product of the rest writes. No concatenation is written and read. A part
    of a product is multiplied at 500 TFLOP/s.
    """
    width = sum(x.shape[whole.axis] for x in whole.parts if lineage.has_lineage(x))
    whole_bytes = lineage.bytes_of(whole.shape, whole.dtype)
    flops = 2 * math.prod(out.shape) * width
    saved = cost.Cost(flops, 2 * whole_bytes - 2 * looked_up, -2, 2 * flops)
    return lineage.is_at_least(cost.femtoseconds(saved), 0)


def _groups(ctx: Context, whole: Concat, other: Any, other_axis: int) -> list[tuple[Any, Any]]:
    """Pairs the parts of each lineage, concatenated, with their slices of the other operand."""
    other = lineage.spread_axes(other, [other_axis])
    values, group, _ = sorted_by_lookup(ctx, whole, whole.axis, len(whole.parts) ** 2)
    at = ((group == n).nonzero()[0] for n in range(len(values)))
    return [(x, taken(other, own, other_axis)) for x, own in zip(values, at, strict=True)]


def _sum_of_products(ctx: Context, eqn: Any, left: bool, groups: Any) -> Any:
    """Adds the parts' products, each computed at its part's batch and looked up."""
    (out,) = eqn.outvars
    dtype = out.aval.dtype
    # The sum is rounded once, like the undivided product.
    wide = jnp.float32 if dtype in _HALF else None
    # Whether a summed dimension of the first operand stands before a free one.
    (contract, _), (batch, _) = dims_of(eqn)
    free = set(range(eqn.invars[0].aval.ndim)) - {*contract, *batch}
    sums_before = any(d < max(free) for d in contract) if free else False
    total: Any = None
    for part, weights in groups:
        if wide and not kernels.on_gpu() and lineage.is_plain(part):
            # XLA transposes looked-up columns inside the product, and then has no kernel for it.
            part = lax.optimization_barrier(part)
        operands = (part, weights) if left else (weights, part)
        if wide and not kernels.on_gpu() and sums_before:
            # XLA multiplies by 16-bit weights that are transposed, but not to float32.
            wider = functools.partial(staged.cast, dtype=jnp.float32)
            operands = tuple(lineage.of_bases(wider, x) for x in operands)
        term = product(ctx, eqn, *operands, preferred=wide, became="product by parts, then added")
        term = ctx.materialise(eqn, term, "sum with a value at candidate batch", copied=False)
        total = term if total is None else lax.add(total, term)
    return staged.cast(total, dtype)


def _compress(
    ctx: Context, eqn: Any, left: bool, whole: Concat, weight: Any, groups: list[tuple[Any, Any]]
) -> Any:
    """Computes [M, K] · concat([B, K_user, N], [B, K_cand, N]) by an op; None if it is another."""
    (contract, (weight_contract, *_)), (batch, _) = (
        dims if left else dims[::-1] for dims in dims_of(eqn)
    )
    if not lineage.is_plain(weight) or batch or contract != [1] or whole.axis != 1:
        return None
    dtype, dtypes = eqn.outvars[0].aval.dtype, {x.dtype for pair in groups for x in pair}
    if len(whole.shape) != 3 or np.ndim(weight) != 2 or dtypes != {dtype} or dtype not in DTYPES:
        return None
    if eqn.params["precision"] not in (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT)):
        return None
    levels = _levels(ctx, groups, transposed=weight_contract != 1)
    if levels is None:
        return None
    name = "linear_compression"
    if len(levels) == 2:
        (user, cand) = levels
        assert cand.parent is not None
        out = linear_compression(
            cand.weight, user.weight, cand.embedding, user.embedding, cand.parent
        )
    else:
        name, out = "multilevel_linear_compression", multilevel_linear_compression(levels)
    ctx.recorder.saved(eqn, lineage.origins_of(whole), name, True)
    # out is [B, M, N]. The equation returns [B, N, M] if the weight is its second operand, and
    # [M, B, N] if it is the first.
    return staged.transpose(out, (0, 2, 1) if left else (1, 0, 2))


def _levels(ctx: Context, groups: Any, *, transposed: bool) -> list[Term] | None:
    """Returns parts looked up along axis 0 as a chain of levels, coarsest first, or None.

    `groups` are the parts, each with its slice of the weight, which may be transposed.
    """
    lineages: dict[tuple[Lineage, ...], tuple[Any, Any]] = {}
    for part, piece in groups:
        if lineage.is_only_broadcast(part):
            part = of_one_user(ctx, part, 0)
            if not lineage.has_lineage(part):
                return None
        is_looked_up = lineage.has_lineage(part)
        steps = part.lineage.steps if is_looked_up else ()
        if steps in lineages or is_looked_up and part.axis != 0:
            return None
        lineages[steps] = (part, piece)
    ordered = sorted(lineages, key=len, reverse=True)
    pairs = itertools.pairwise(ordered)
    if ordered[-1] or not all(x[-len(y) :] == y or not y for x, y in pairs):
        return None
    levels: list[Term] = []
    coarser: Any = None
    for steps in ordered:
        part, piece = lineages[steps]
        parent = None
        if coarser is not None:
            # The index from a level's rows into the rows of the next coarser level.
            first, *rest = coarser[: len(coarser) - len(steps)]
            parent = functools.reduce(ctx.scope.compose, rest, first).index
        rows = lineage.base_of(lineage.spread_axes(part, range(3)))
        levels.append(Term(piece.T if transposed else piece, rows, parent))
        coarser = steps
    return levels
