"""Rules of primitives that reduce axes."""

import functools
import math
from typing import Any

from jax import lax

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.report import kernels
from ikbo_jax.rewrite.rules.elementwise import at_user_batch, concat
from ikbo_jax.rewrite.values.lineage import Concat, is_at_least, is_plain, spread_axes
from ikbo_jax.rewrite.values.registry import NotCovered

_COMBINED = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}
#: Primitives that reduce some axes.
REDUCTIONS = (*_COMBINED, "reduce_xor", "argmax", "argmin")
#: Elements from which on a GPU reduces a part of a concatenation in a kernel of its own.
_MANY = 2**22


def reduction(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reduces axes other than the looked-up axis."""
    axes = tuple(int(a) for a in eqn.params["axes"])
    if isinstance(x, Concat):
        if x.axis in axes:
            return _reduce_concat(ctx, eqn, x)
        parts = [_reduced_part(ctx, eqn, part) for part in x.parts]
        return concat(parts, x.axis - sum(a < x.axis for a in axes))
    if is_plain(x):
        return ctx.bind(eqn, x)
    if x.axis in axes:
        raise NotCovered(f"{eqn.primitive.name} over the looked-up axis")
    base = ctx.bind(eqn, spread_axes(x, axes).base)
    shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    axis = x.axis - sum(a < x.axis for a in axes)
    return at_user_batch(ctx, eqn, base, x.lineage, axis, x.origins, shape)


def _reduce_concat(ctx: Context, eqn: Any, x: Concat) -> Any:
    """Reduces over the concatenated axis: every part at its batch, then the results."""
    combine = _COMBINED.get(eqn.primitive.name)
    if combine is None:
        raise NotCovered(f"{eqn.primitive.name} over a concatenation")
    parts = (reduction(ctx, eqn, part) for part in x.parts)
    arrays = (ctx.materialise(eqn, part, "sum of parts", copied=False) for part in parts)
    return functools.reduce(combine, arrays)


def _reduced_part(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reduces a part of a concatenation; on a GPU, many rows in a kernel of their own.

    XLA would reduce them in the kernel that concatenates: FiBiNET, which sums over 64 features of
    496 pairs of fields of 4,096 candidates, took 1.14 ms instead of 0.22 (H200, bfloat16).
    """
    out, is_of_rows = reduction(ctx, eqn, x), len(x.shape) - 1 in eqn.params["axes"]
    # Of columns, threads reduce neighbouring ones.
    is_long = is_plain(x) and is_of_rows and is_at_least(math.prod(x.shape), _MANY)
    return lax.optimization_barrier(out) if is_long and kernels.on_gpu() else out
