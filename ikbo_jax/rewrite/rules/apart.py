"""Rules of values that have other dimensions between those that look rows up together.

`jnp.einsum("rsnh,rsknh->rnsk", q, k[index])` has heads between requests and slots. An equation on
such a value becomes the same equation on the value before the transpose, whose result is
transposed.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.rules.batched import dims_of, labels_of
from ikbo_jax.rewrite.rules.reshape import groups_of
from ikbo_jax.rewrite.rules.reshaped_axes import axes_of, equation, to_shape
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Apart, is_split


def gathered[T](items: Sequence[T], together: Sequence[T]) -> list[T]:
    """Moves those items that are in `together` to the first of them, in their order there."""
    own = [x for x in together if x in items]
    start = min([items.index(x) for x in own], default=0)
    before = [x for x in items[:start] if x not in own]
    return [*before, *own, *(x for x in items[start:] if x not in own)]


def transposed(ctx: Context, eqn: Any, x: Any, order: Sequence[int]) -> Any:
    """Transposes any value by an equation, once in every scope."""
    order, shape = tuple(order), shape_of(x)
    if order == tuple(range(len(order))):
        return x

    def run() -> Any:
        sizes = [shape[d] for d in order]
        moved = equation(eqn, lax.transpose_p, [x], sizes, {"permutation": order})
        return ctx.run_equation(moved, [x])[0]

    return ctx.scope.once(("transposed", *order), [x], run)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _inner(ctx: Context, eqn: Any, x: Any, order: Sequence[int]) -> Any:
    """Returns the value whose transpose by `order` is `x`; `x` itself if its rank is another."""
    if type(x) is Apart and x.order == order:
        return x.inner
    of_rank = len(shape_of(x)) == len(order)
    return transposed(ctx, eqn, x, _inverse(order)) if of_rank else x


def _order_of(operands: Sequence[Any]) -> tuple[int, ...]:
    return next(x.order for x in operands if type(x) is Apart)


def _run(ctx: Context, eqn: Any, operands: Sequence[Any], order: Any, **params: Any) -> Any:
    """Runs an equation before the transposes of its results, all by `order`."""
    back = _inverse(order)
    shapes = [[v.aval.shape[d] for d in back] for v in eqn.outvars]
    inner = at_shapes(eqn, operands, list(map(tuple, shapes)), **params)
    found = ctx.run_equation(inner, list(operands))
    results = [transposed(ctx, eqn, x, order) for x in found]
    return results if eqn.primitive.multiple_results else results[0]


#: Parameters that number one dimension, that number several, and that have an entry for each.
_ONE, _SEVERAL = ("axis", "dimension"), ("axes", "dimensions")
_ENTRIES = ("limit_indices", "padding_config", "slice_sizes", "start_indices", "strides")


def in_place(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Works element by element, or along some dimensions, and moves no dimension."""
    order = _order_of(operands)
    back, given = _inverse(order), eqn.params
    params: dict[str, Any] = {name: order[given[name]] for name in _ONE if name in given}
    params |= {x: tuple([order[d] for d in given[x]]) for x in _SEVERAL if x in given}
    entries = [x for x in _ENTRIES if given.get(x) is not None]
    params |= {x: tuple([given[x][d] for d in back]) for x in entries}
    if "slice_sizes" in given:
        operands = (operands[0], *[operands[1:][d] for d in back])
    flat = [_inner(ctx, eqn, x, order) for x in operands]
    kept = [d for d in range(len(order)) if d not in params.get("axes", ())]
    left = [kept.index(d) for d in order if d in kept]
    return _run(ctx, eqn, flat, left if "axes" in given else order, **params)


def custom_jvp(ctx: Context, eqn: Any, x: Apart) -> Any:
    """Runs an elementwise function before the transpose."""
    if len(eqn.outvars) != 1 or not any_shape.is_elementwise_jvp(eqn):
        raise NotCovered("custom_jvp that is not elementwise")
    found = ctx.run_equation(any_shape.at_shape_of(eqn, x.inner), [x.inner])
    return [transposed(ctx, eqn, found[0], x.order)]


def transpose(ctx: Context, eqn: Any, x: Apart) -> Any:
    """Transposes the value before the transpose."""
    return transposed(ctx, eqn, x.inner, [x.order[d] for d in eqn.params["permutation"]])


def broadcast(ctx: Context, eqn: Any, x: Any) -> Any:
    """Adds dimensions after those of the value before the transpose."""
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    order = x.order if type(x) is Apart else tuple(range(len(dims)))
    own = [int(dims[d]) for d in _inverse(order)]
    own += [d for d in range(len(shape)) if d not in own]
    params = {"shape": tuple([shape[d] for d in own])}
    params["broadcast_dimensions"] = tuple(range(len(dims)))
    return _run(ctx, eqn, [_inner(ctx, eqn, x, order)], _inverse(own), **params)


def reshape(ctx: Context, eqn: Any, x: Apart) -> Any:
    """Reshapes the value before the transpose, if the reshape merges nothing that is moved."""
    shape, place = eqn.outvars[0].aval.shape, 0
    blocks: list[tuple[int, list[int]]] = []
    for dims, targets in groups_of(x.shape, shape):
        moved = [x.order[d] for d in dims]
        place = next(iter(moved), place)
        if moved != list(range(place, place + len(moved))):
            raise NotCovered("dimensions that are moved apart are merged by a reshape")
        blocks.append((place, targets))
    own = [d for _, targets in sorted(blocks, key=lambda block: block[0]) for d in targets]
    inner = to_shape(ctx, eqn, x.inner, [shape[d] for d in own])
    return transposed(ctx, eqn, inner, _inverse(own))


def ones_of(x: Any) -> set[int]:
    """Finds dimensions of size 1 beside several others that look rows up together."""
    own = axes_of(x.groups).together if is_split(x) else ()
    ones = {d for d in own if x.shape[d] == 1}
    return ones if len(ones) < len(own) - 1 else set()


def dot_general(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Multiplies with nothing between the dimensions that look rows up together.

    None if there is nothing between them.
    """
    contract, batch = dims_of(eqn)
    names = list(map(labels_of, "lr", operands, contract, batch))
    numbered = [f"b{n}" for n in range(len(batch[0]))]
    wanted = numbered + [x for own in names for x in own if x[0] in "lr"]
    flat, own, ones = list(operands), list(names), set[str]()
    for side, x in enumerate(operands):
        if type(x) is Apart:
            flat[side], own[side] = x.inner, [names[side][d] for d in _inverse(x.order)]
        ones |= {own[side][d] for d in ones_of(flat[side])}
    if ones:
        sizes = [dict(zip(of, shape_of(x), strict=True)) for of, x in zip(own, flat, strict=True)]
        own = [[x for x in of if x not in ones] for of in own]
        narrow = [[of_side[x] for x in of] for of_side, of in zip(sizes, own, strict=True)]
        flat = [to_shape(ctx, eqn, x, shape) for x, shape in zip(flat, narrow, strict=True)]
    order = [x for x in numbered if x not in ones]
    for side, x in enumerate(flat):
        if is_split(x):
            together = [own[side][d] for d in axes_of(x.groups).together]
            order, other = gathered(order, together), gathered(own[1 - side], together)
            moved = [own[1 - side].index(y) for y in other]
            flat[1 - side], own[1 - side] = transposed(ctx, eqn, flat[1 - side], moved), other
    if own == names and order == numbered:
        return None
    result = _product(ctx, eqn, flat, own, order, [x for x in wanted if x not in ones])
    return to_shape(ctx, eqn, result, eqn.outvars[0].aval.shape)


def _product(
    ctx: Context, eqn: Any, operands: Sequence[Any], names: Any, batch: Any, wanted: Any
) -> Any:
    """Multiplies values whose dimensions have `names`; the result has the dimensions `wanted`.

    `batch` are the names of batch dimensions, in the order of the product.
    """
    sizes = dict(zip(names[0] + names[1], [n for x in operands for n in shape_of(x)], strict=True))
    summed = [x for x in names[0] if x[0] == "c"]
    out = [*batch, *(x for own in names for x in own if x[0] in "lr")]
    numbers = tuple(tuple(tuple(map(own.index, of)) for own in names) for of in (summed, batch))
    inner = at_shapes(eqn, operands, [tuple([sizes[x] for x in out])], dimension_numbers=numbers)
    (result,) = ctx.run_equation(inner, list(operands))
    return transposed(ctx, eqn, result, [out.index(x) for x in wanted])
