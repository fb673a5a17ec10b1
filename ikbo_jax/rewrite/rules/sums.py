"""Sums and differences of user and candidate in a product: each term is multiplied by itself.

The activation unit of DIN multiplies `[q, h, q - h, q * h]` by weights. The product with `q - h` is
the product with q less the product with h, each at its own batch.
"""

import math
from typing import Any

from jax import lax

from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules.elementwise import slice_along
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, base_of, is_at_least, is_plain

#: How deep sums of sums are followed.
_DEPTH = 3


def by_terms(ctx: Context, whole: Concat, weights: Any, axis: int) -> tuple[Concat, Any]:
    """Replaces sums in a concatenation by their terms, and repeats the weights accordingly.

    `[q, h, q - h]` and `[W0, W1, W2]` become `[q, h, q, h]` and `[W0, W1, W2, -W2]`. The
    concatenated axis is summed in the product, with the axis `axis` of the weights.
    """
    if not is_plain(weights):
        return whole, weights
    terms = [_terms(ctx, part) for part in whole.parts]
    if all(len(found) == 1 for found in terms):
        return whole, weights
    parts, slices = [], []
    for found, (_, start, stop) in zip(terms, whole.pieces(), strict=True):
        piece = slice_along(weights, start, stop, axis)
        for value, sign in found:
            parts.append(value)
            slices.append(piece if sign > 0 else lax.neg(piece))
    return Concat(tuple(parts), whole.axis), staged.concatenate(slices, axis)


def _terms(ctx: Context, part: Any) -> list[tuple[Any, int]]:
    """Returns the terms of a part with their signs; the part itself if it is no sum, or cheap."""
    if not is_plain(part):
        return [(part, 1)]
    terms = _expanded(ctx, part, part.shape, 1, _DEPTH)
    rows = sum(math.prod(base_of(value).shape) for value, _ in terms)
    return terms if is_at_least(math.prod(part.shape), rows + 1) else [(part, 1)]


def _expanded(
    ctx: Context, value: Any, shape: tuple[int, ...], sign: int, depth: int
) -> list[tuple[Any, int]]:
    if tuple(shape_of(value)) != tuple(shape):
        # Dimensions of size 1 are broadcast by the sum.
        value = Lazy(value, tuple(shape)) if is_plain(value) else value
    produced = None
    if is_plain(value) and depth:
        produced = ctx.scope.producer(value, ("add", "sub"))
    if produced is None:
        return [(value, sign)]
    operands = produced[1]
    if any(
        len(shape_of(x)) != len(shape)
        or x.dtype != value.dtype
        or not is_plain(x)
        and (not isinstance(x, Lazy) or tuple(x.shape) != tuple(shape))
        for x in operands
    ):
        return [(value, sign)]
    second = -sign if produced[0].primitive.name == "sub" else sign
    left = _expanded(ctx, operands[0], shape, sign, depth - 1)
    return left + _expanded(ctx, operands[1], shape, second, depth - 1)
