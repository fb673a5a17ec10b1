"""Rules of primitives that work on every row by itself, if they take the looked-up axis whole."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ikbo_jax.rewrite import lineage
from ikbo_jax.rewrite.calls import exported
from ikbo_jax.rewrite.forms import form, unpack_all
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.known import known
from ikbo_jax.rewrite.lineage import (
    Concat,
    Lazy,
    carries,
    has_lineage,
    is_plain,
    lazy,
    origins_of,
    spread,
    spread_axes,
)
from ikbo_jax.rewrite.merged import RULES
from ikbo_jax.rewrite.registry import NotCovered, register_rule, rule_of
from ikbo_jax.rewrite.rules import at_user_batch, common_lineage


@register_rule("sharding_constraint")
def _sharding_constraint(ctx: Context, eqn: Any, x: Any) -> Any:
    """A constraint changes no value; the array that it places does not exist."""
    return x


RULES["sharding_constraint"] = _sharding_constraint


@register_rule("top_k")
def _top_k(ctx: Context, eqn: Any, x: Any) -> Any:
    axis = eqn.params.get("axis", len(x.shape) - 1)
    if not isinstance(x, Lazy) or x.axis == axis:
        raise NotCovered("top_k of a concatenation, or along the looked-up axis")
    x = spread_axes(x, [axis])
    shape = tuple(eqn.outvars[0].aval.shape)
    bases = ctx.bind(eqn, x.base)
    return [at_user_batch(ctx, eqn, b, shape, x.lineage, x.axis, x.origins) for b in bases]


@register_rule("conv_general_dilated")
def _convolution(ctx: Context, eqn: Any, x: Any, kernel: Any) -> Any:
    """A convolution of looked-up rows, such as of a history, with weights."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if not isinstance(x, Lazy) or not is_plain(kernel) or params["batch_group_count"] != 1:
        raise NotCovered("convolution of a concatenation, or by a looked-up kernel")
    batch = numbers.lhs_spec[0]
    if has_lineage(x) and x.axis != batch:
        raise NotCovered("convolution along the looked-up axis")
    x = spread_axes(x, [d for d in range(len(x.shape)) if d != batch])
    base = ctx.bind(eqn, x.base, kernel)
    shape, out_batch = tuple(eqn.outvars[0].aval.shape), numbers.out_spec[0]
    saved = 2 * (shape[out_batch] - base.shape[out_batch]) * (base.size // base.shape[out_batch])
    saved *= kernel.size // max(1, kernel.shape[numbers.rhs_spec[0]])
    ctx.recorder.saved(eqn, x.origins, "product at the smaller batch", saved, True)
    return lazy(base, shape, x.lineage, out_batch if has_lineage(x) else -1, x.origins)


@register_rule("dynamic_slice")
def _dynamic_slice(ctx: Context, eqn: Any, x: Any, *starts: Any) -> Any:
    """A slice that takes the looked-up axis whole, at any positions along the other axes."""
    sizes = list(eqn.params["slice_sizes"])
    if not all(map(is_plain, starts)) or is_plain(x):
        raise NotCovered("dynamic_slice at positions that are looked up")
    if isinstance(x, Concat):
        return _slice_at_constants(ctx, eqn, x, sizes, starts)
    if has_lineage(x) and sizes[x.axis] != x.shape[x.axis]:
        raise NotCovered("dynamic_slice of the looked-up axis")
    sizes = [min(n, m) for n, m in zip(sizes, x.base.shape, strict=True)]
    if has_lineage(x):
        sizes[x.axis] = x.base.shape[x.axis]
    # A start along an axis that is taken whole is clamped to 0.
    base = ctx.bind(eqn, x.base, *starts, slice_sizes=tuple(sizes))
    shape = tuple(eqn.outvars[0].aval.shape)
    return lazy(base, shape, x.lineage, x.axis, x.origins)


def _slice_at_constants(
    ctx: Context, eqn: Any, x: Concat, sizes: list[int], starts: tuple[Any, ...]
) -> Any:
    begins = []
    for start, size, full in zip(starts, sizes, x.shape, strict=True):
        number = known(ctx, start) if size != full else 0
        if number is None:
            raise NotCovered("dynamic_slice of a concatenation at positions that are not constant")
        begins.append(min(max(int(number), 0), full - size))
    params = {
        "start_indices": tuple(begins),
        "limit_indices": tuple(b + n for b, n in zip(begins, sizes, strict=True)),
        "strides": None,
    }
    rule = rule_of("slice")
    assert rule is not None
    return rule(ctx, eqn.replace(params=params), x)


@register_rule("dynamic_update_slice")
def _dynamic_update_slice(ctx: Context, eqn: Any, x: Any, update: Any, *starts: Any) -> Any:
    if not all(map(is_plain, starts)) or any(isinstance(y, Concat) for y in (x, update)):
        raise NotCovered("dynamic_update_slice of a concatenation")
    x, update = lineage.aligned([x, update])
    users, axis, differ = common_lineage([x, update])
    if users is None or differ or carries(x, axis) or carries(update, axis):
        raise NotCovered("dynamic_update_slice with a value at candidate batch")
    if shape_of(update)[axis] != shape_of(x)[axis]:
        raise NotCovered("dynamic_update_slice of the looked-up axis")
    bases = [_rows(y, axis, users.users) for y in (x, update)]
    base = ctx.bind(eqn, *bases, *starts)
    shape = tuple(eqn.outvars[0].aval.shape)
    return at_user_batch(ctx, eqn, base, shape, users, axis, origins_of(x, update))


def _rows(x: Any, axis: int, users: int) -> jax.Array:
    """The array of a value with `users` rows along `axis`, which are looked up or all equal."""
    base, shape = (x.base, list(x.shape)) if isinstance(x, Lazy) else (x, list(x.shape))
    shape[axis] = users
    return spread(base, tuple(shape))


def _scatter(ctx: Context, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    """`x.at[:, 0].set(y)`: an update at the same positions of every row."""
    numbers = eqn.params["dimension_numbers"]
    if not is_plain(indices) or any(isinstance(y, Concat) for y in (x, updates)):
        raise NotCovered(f"{eqn.primitive.name} of a concatenation, or at looked-up positions")
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape_of(x))) if d not in removed]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    x, updates = lineage.aligned([x, updates])
    users, axis = (x.lineage, x.axis) if has_lineage(x) else (None, -1)
    if has_lineage(updates):
        found = next((d for d, u in window.items() if u == updates.axis), -1)
        if users is not None and (updates.lineage, found) != (users, axis):
            raise NotCovered(f"{eqn.primitive.name} with another lookup")
        users, axis = updates.lineage, found
    if users is None or axis not in window or axis in numbers.scatter_dims_to_operand_dims:
        raise NotCovered(f"{eqn.primitive.name} along the looked-up axis")
    update_axis = window[axis]
    if shape_of(updates)[update_axis] != shape_of(x)[axis]:
        raise NotCovered(f"{eqn.primitive.name} of a part of the looked-up axis")
    if carries(x, axis) or carries(updates, update_axis):
        raise NotCovered(f"{eqn.primitive.name} with a value at candidate batch")
    bases = _rows(x, axis, users.users), _rows(updates, update_axis, users.users)
    base = ctx.bind(eqn, bases[0], indices, bases[1])
    shape = tuple(eqn.outvars[0].aval.shape)
    return at_user_batch(ctx, eqn, base, shape, users, axis, origins_of(x, updates))


for _name in ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"):
    register_rule(_name, _scatter)


@register_rule("while")
def _while(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """A loop whose carries keep their form, and which ends by a value that is no lookup."""
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body = operands[:first], operands[first:second]
    carry = list(operands[second:])
    if condition.effects or body.effects:
        raise NotCovered("a while loop with effects")

    def step(carry: list[Any]) -> tuple[Context, list[Any]]:
        inner = ctx.inner()
        return inner, exported(inner, inner.run_closed(body, [*of_body, *carry], eqn), ctx)

    while True:
        arrays, pack = unpack_all(carry)
        unstable: list[int] = []

        def once(*arrays: Any, pack: Any = pack, unstable: list[int] = unstable) -> Any:
            _, results = step(pack(arrays))
            for position, (before, after) in enumerate(zip(carry, results, strict=True)):
                if form(before) not in ("plain", form(after)):
                    unstable.append(position)
            return ()

        with ctx.muted():
            jax.eval_shape(once, *arrays)
        if not unstable:
            break
        for position in unstable:
            reason = "carried through a while loop whose body returns it in another form"
            carry[position] = ctx.materialise(eqn, carry[position], reason)
    if all(map(is_plain, carry)):
        raise NotCovered("a while loop whose carries are no lookups")

    def proceeds(arrays: Any) -> Any:
        inner = ctx.inner()
        (result,) = inner.run_closed(condition, [*of_condition, *pack(arrays)], eqn)
        return inner.build(result)

    def run(arrays: Any) -> Any:
        inner, results = step(pack(arrays))
        new = [inner.build(y) if is_plain(x) else y for x, y in zip(carry, results, strict=True)]
        return unpack_all(new)[0]

    out = lax.while_loop(proceeds, run, arrays)
    return pack(out)
