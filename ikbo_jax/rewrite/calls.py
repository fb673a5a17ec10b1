"""Rules of primitives that call jaxprs: custom derivatives, checkpoint, scan, cond."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite import any_shape, hoisting, jvp_rules, loops, shared
from ikbo_jax.rewrite.dead_code import without_dead_code
from ikbo_jax.rewrite.forms import form, skeleton, unpack, unpack_all, with_all_inside
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.jaxprs import call_params, evaluate, trace, with_constants_last
from ikbo_jax.rewrite.lineage import Concat, Lazy, has_lineage, is_plain, lazy, spread
from ikbo_jax.rewrite.log import Log
from ikbo_jax.rewrite.merged import Merged
from ikbo_jax.rewrite.registry import NotCovered, register_rule
from ikbo_jax.rewrite.rules import ELEMENTWISE


def exported(inner: Context, values: Sequence[Any], outer: Context) -> list[Any]:
    """The results of an inner program; values with lineages of its scope are materialised."""
    lineages = outer.scope.lineages()

    def can_leave(value: Any) -> Any:
        if isinstance(value, Concat):
            return all(map(can_leave, value.parts))
        if isinstance(value, Merged):
            return can_leave(value.inner)
        return is_plain(value) or value.lineage is None or id(value.lineage) in lineages

    return [
        value
        if is_plain(value) or isinstance(value, (Lazy, Concat, Merged)) and can_leave(value)
        else inner.materialise(None, value, "result of an inner function")
        for value in values
    ]


@register_rule("remat2", source=True)
def _checkpoint(ctx: Context, eqn: Any, *operands: Any) -> Any:
    jaxpr = eqn.params["jaxpr"]
    if all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        return ctx.bind(eqn, *operands)

    def inline() -> list[Any]:
        return _checkpointed(ctx, eqn, operands)

    if isinstance(eqn.params["prevent_cse"], tuple) and len(set(eqn.params["prevent_cse"])) > 1:
        return inline()
    indices = [shared.is_index(v.aval) for v in eqn.invars]
    fixed = list(map(shared.is_fixed, operands, indices))
    return shared.call(ctx, eqn, operands, fixed, inline)


def _checkpointed(ctx: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a checkpointed function that is interpreted at this call alone."""
    jaxpr = eqn.params["jaxpr"]
    # Facts about indices and masks depend on the objects, so the body closes over these.
    fixed = [is_plain(x) and _is_exact(x) for x in operands]
    varying = [x for x, f in zip(operands, fixed, strict=True) if not f]
    arrays, pack = unpack_all(varying)
    packs: list[Any] = []

    def body(*arrays: Any) -> Any:
        inner = ctx.inner()
        packed = iter(pack(arrays))
        values = [x if f else next(packed) for x, f in zip(operands, fixed, strict=True)]
        results = exported(inner, inner.run_closed(jaxpr, values, eqn), ctx)
        out, out_pack = unpack_all(results)
        packs.append(out_pack)
        return out

    program = trace(body, arrays, jaxpr)
    if program.effects:
        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        out = jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)(*arrays)
        return packs[-1](out)
    # `jax.checkpoint` does the same, and looks for the names of all arguments besides.
    params = call_params(eqn.params, with_constants_last(program), {})
    return packs[-1](eqn.primitive.bind(*arrays, *program.consts, **params))


register_rule("checkpoint", _checkpoint, source=True)


def _is_exact(x: Any) -> bool:
    """Whether an array holds integers or booleans."""
    return getattr(getattr(x, "dtype", None), "kind", "") in ("i", "u", "b")


#: Derivatives of a custom_jvp function that are proven to work row by row while the program is
#: rewritten. A JVP rule may call its own function, so that there is no last derivative.
PROVEN_DERIVATIVES = 2


@register_rule("custom_jvp_call")
def _custom_jvp(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs the function and its JVP rule, both at the smaller batch."""
    params = eqn.params
    derivative = params.get("jvp_jaxpr_fun")
    if derivative is None or params["num_consts"]:
        raise NotCovered("custom_jvp with closed-over values")
    if params["call_jaxpr"].effects:
        # The function is interpreted twice, which would repeat them.
        raise NotCovered("custom_jvp with effects")
    arrays, _ = unpack_all(operands)
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
        raise NotCovered("custom_jvp with operands that are not floating-point numbers")
    if len(operands) == 1 and _only_elementwise(ctx, params["call_jaxpr"]):
        if _has_elementwise_rule(ctx, eqn):
            for x in filter(has_lineage, with_all_inside(operands)):
                ctx.recorder.saved(eqn, x.origins, "work at the smaller batch", False)
            arrays, pack = unpack_all(operands)
            return pack([any_shape.run_custom_jvp(eqn, [x]) for x in arrays])
        results = [operands[0]] * len(eqn.outvars)
    else:
        with ctx.muted():
            results = ctx.inner().run_closed(params["call_jaxpr"], operands, eqn)
    if not all(isinstance(value, (Lazy, Concat, Merged)) for value in results):
        raise NotCovered("custom_jvp of a function that mixes rows")
    must_be_proven = ctx.derivatives < PROVEN_DERIVATIVES
    rule = _proven_rule(ctx, eqn, operands, results) if must_be_proven else None
    if must_be_proven and rule is None:
        reason = "custom_jvp whose derivative does not work row by row"
        if ctx.differentiated:
            raise NotCovered(reason)
        ctx.gradient_differs()
        return ctx.run_closed(params["call_jaxpr"], operands, eqn)
    _, pack = unpack_all(operands)
    _, pack_results = unpack_all(results)

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        inner = ctx.inner()
        values = inner.run_closed(params["call_jaxpr"], pack(arrays), eqn)
        assert all(map(matches, values, results))
        return unpack_all(values)[0]

    @function.defjvp
    def derivative_of(primals: Any, tangents: Any) -> Any:
        program = rule
        if program is None:
            program = _jvp_rule(ctx, derivative, operands, results)
        if program is None:
            raise NotImplementedError("ikbo_jax.rewrite: a third derivative that mixes rows")
        both = evaluate(program, [*primals, *tangents])
        return both[: len(both) // 2], both[len(both) // 2 :]

    return pack_results(function(*arrays))


def _has_elementwise_rule(ctx: Context, eqn: Any) -> bool:
    """Whether the derivatives of a function of one operand and one result are elementwise, too."""
    rule = jvp_rules.identity(eqn.params["jvp_jaxpr_fun"])
    if len(eqn.outvars) != 1 or eqn.params["symbolic_zeros"]:
        return False
    if rule is None:
        return any_shape.is_elementwise_jvp(eqn)
    proven, key = ctx.programs.jvp_rules, (rule, eqn.invars[0].aval)
    if key not in proven:
        proven[key] = any_shape.is_elementwise_jvp(eqn)
    return bool(proven[key])


def _proven_rule(
    ctx: Context, eqn: Any, operands: Sequence[Any], results: Sequence[Any]
) -> core.Jaxpr | None:
    """`_jvp_rule` of a call; calls of one function on values of the same forms share it."""
    derivative = eqn.params["jvp_jaxpr_fun"]
    rule = jvp_rules.identity(derivative)
    if rule is None:
        return _jvp_rule(ctx, derivative, operands, results)
    forms = tuple(map(form, operands)), tuple(map(form, results))
    key = (rule, *forms, ctx.derivatives, tuple(v.aval for v in (*eqn.invars, *eqn.outvars)))
    proven = ctx.programs.jvp_rules
    if key not in proven:
        proven[key] = _jvp_rule(ctx, derivative, operands, results)
    return proven[key]


def _jvp_rule(
    ctx: Context, derivative: Any, operands: Sequence[Any], results: Sequence[Any]
) -> core.Jaxpr | None:
    """The JVP rule of a custom_jvp function on arrays at the smaller batch.

    Args:
      ctx: the context of the call.
      derivative: the parameter `jvp_jaxpr_fun` of the call.
      operands: the call's operands.
      results: the function's results.

    Returns:
      A program from the arrays of the operands and those of their tangents to the arrays of the
      results and those of their tangents. None if the rule cannot be proven to work row by row: a
      result is no lookup of the same rows, or needs an array of the trace around the call, which
      has ended when JAX takes the derivative.
    """
    jaxpr, consts, zeros = derivative.call_wrapped(*[False] * len(operands))
    nonzero = [x for x, zero in zip(results, zeros, strict=True) if not zero]
    like = [*results, *nonzero]
    arrays, pack = unpack_all(operands)

    def run(*both: Any) -> list[Any]:
        primals, tangents = both[: len(arrays)], both[len(arrays) :]
        with ctx.muted():
            values = ctx.afterwards().run(jaxpr, consts, [*pack(primals), *pack(tangents)])
        if not all(map(matches, values, like)):
            raise NotCovered("the derivative mixes rows")
        found = [unpack(widened(x, y))[0] for x, y in zip(values, like, strict=True)]
        out, slopes = found[: len(results)], iter(found[len(results) :])
        for x, zero in zip(list(out), zeros, strict=True):
            out.append(list(map(jnp.zeros_like, x)) if zero else next(slopes))
        return list(itertools.chain(*out))

    try:
        program = without_dead_code(trace(run, [*arrays, *arrays]))
    except NotCovered:
        return None
    used = {v for eqn in program.eqns for v in eqn.invars if isinstance(v, core.Var)}
    needed = [x for v, x in zip(program.constvars, program.consts, strict=True) if v in used]
    return None if any(isinstance(x, jax.core.Tracer) for x in needed) else program


def _only_elementwise(ctx: Context, program: core.Jaxpr) -> bool:
    """Whether a program is elementwise, so that its results have the form of its operand."""

    def find_out(program: core.Jaxpr) -> bool:
        defined = set(program.invars)
        answer = not program.constvars
        for eqn in program.eqns:
            nested = eqn.params.get("jaxpr")
            if nested is not None:
                answer &= eqn.primitive.name == "jit" and _only_elementwise(ctx, nested)
            else:
                answer &= eqn.primitive.name in ELEMENTWISE
            numbers = [v for v in eqn.invars if isinstance(v, core.Literal)]
            answer &= len(numbers) < len(eqn.invars)
            answer &= all(np.ndim(v.val) == 0 for v in numbers)
            defined.update(eqn.outvars)
        return answer and all(
            not isinstance(v, core.Literal) and v in defined for v in program.outvars
        )

    return ctx.programs.answer("elementwise", program, find_out)


def matches(value: Any, like: Any) -> bool:
    """Whether two values have the same form, once dimensions of size 1 of `value` are broadcast."""
    if is_plain(like) or is_plain(value):
        return is_plain(like) and is_plain(value)
    if _is_uniform(value):
        return True
    if isinstance(like, Merged):
        same = isinstance(value, Merged) and value.groups == like.groups
        return same and matches(value.inner, like.inner)
    if isinstance(like, Concat):
        same = isinstance(value, Concat) and (value.axis, value.sizes) == (like.axis, like.sizes)
        return same and all(map(matches, value.parts, like.parts))
    return (
        isinstance(value, Lazy)
        and (value.lineage, value.axis) == (like.lineage, like.axis)
        and all(n in (1, m) for n, m in zip(value.base.shape, like.base.shape, strict=True))
    )


def widened(value: Any, like: Any) -> Any:
    """The value with its arrays broadcast to the shapes of the arrays of `like`."""
    if isinstance(like, Merged):
        inner = value if _is_uniform(value) else value.inner
        return dataclasses.replace(like, inner=widened(inner, like.inner))
    if isinstance(like, Concat):
        parts = [value] * len(like.parts) if _is_uniform(value) else value.parts
        return Concat(tuple(map(widened, parts, like.parts)), like.axis)
    if isinstance(like, Lazy):
        if _is_uniform(value):
            return dataclasses.replace(like, base=lax.full_like(like.base, value.base.reshape(())))
        return dataclasses.replace(like, base=spread(value.base, like.base.shape))
    return value


def _is_uniform(value: Any) -> bool:
    """Whether a value is one number, broadcast."""
    return isinstance(value, Lazy) and value.lineage is None and value.base.size == 1


@register_rule("scan", source=True)
def _scan(ctx: Context, eqn: Any, *operands: Any) -> Any:
    params = eqn.params
    jaxpr = params["jaxpr"]
    n_consts, n_carry = hoisting.scan_counts(params)
    hoisted = hoisting.split(jaxpr, n_consts, params["length"])
    plain = all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr) and hoisted is None
    consts, init, xs = _split(operands, n_consts, n_carry)
    if plain and not any(map(hoisting.is_index, xs)):
        return ctx.bind(eqn, *operands)
    if hoisted is not None:
        first, jaxpr = hoisted
        origins = frozenset({ctx.recorder.found(eqn, "values of every iteration", False)})
        ctx.recorder.saved(eqn, origins, "computed once, before the loop", True)
        with ctx.recorder.inside(eqn):
            for hoisted_eqn in first.eqns:
                ctx.recorder.computed(hoisted_eqn, origins)
        consts += ctx.run_closed(first, consts, eqn)
    of_rows = loops.rows_before(ctx, eqn, jaxpr, consts, xs, n_carry)
    if plain and of_rows is None:
        return ctx.bind(eqn, *operands)
    if of_rows is not None:
        jaxpr, rows = of_rows
        xs = [*xs, *rows]
    xs = [
        ctx.materialise(eqn, x, "scan over the looked-up axis") if not _scannable(x) else x
        for x in xs
    ]
    carry = list(map(loops.uniform, init))

    while True:
        try:
            return _scanned(ctx, eqn, jaxpr, consts, carry, xs)
        except loops.Retry as trial:
            if loops.reformed(ctx, eqn, carry, trial.returned, init, "scan"):
                continue
            for value in consts[:n_consts]:
                if id(value) in trial.built:
                    ctx.materialise(eqn, value, "needed in every iteration of a scan")


def _scanned(
    ctx: Context,
    eqn: Any,
    jaxpr: core.Jaxpr,
    consts: list[Any],
    carry: list[Any],
    xs: list[Any],
) -> list[Any]:
    """The results of a scan whose body is interpreted once; may raise `loops.Retry`."""
    length, (n_consts, count) = eqn.params["length"], hoisting.scan_counts(eqn.params)
    arrays, pack = unpack_all(carry)
    # What the last trace of the body recorded: JAX may trace it twice, with other weak types.
    last: list[tuple[Log, list[Any]]] = []

    def body(arrays: Any, slices: Any) -> Any:
        log = Log()
        inner, values = ctx.inner(log), [*consts, *pack(arrays), *_packed_slices(xs, slices)]
        results = exported(inner, inner.run_closed(jaxpr, values), ctx)
        built = inner.scope.built()
        if loops.unstable(carry, results) or any(id(x) in built for x in consts[:n_consts]):
            raise loops.Retry(list(map(skeleton, results[:count])), built)
        new = [
            inner.build(r) if is_plain(c) else r
            for c, r in zip(carry, results[:count], strict=True)
        ]
        stacked = [_stackable(inner, y) for y in results[count:]]
        last[:] = [(log, stacked)]
        return unpack_all(new)[0], unpack_all(stacked)[0]

    out, ys = loops.scan(eqn, body, arrays, unpack_all(xs)[0])
    ((log, stacked),) = last
    with ctx.recorder.inside(eqn):
        call = log.replay(ctx.recorder, eqn, {}, None)
    return [*pack(out), *_packed_stacks(stacked, ys, length, call.origins)]


def _split(values: Sequence[Any], *counts: int) -> list[list[Any]]:
    pieces, rest = [], list(values)
    for count in counts:
        pieces.append(rest[:count])
        rest = rest[count:]
    return [*pieces, rest]


def _scannable(x: Any) -> bool:
    if isinstance(x, Concat):
        return x.axis != 0 and all(map(_scannable, x.parts))
    return is_plain(x) or isinstance(x, Lazy) and (x.axis != 0 and x.base.shape[0] == x.shape[0])


def _packed_slices(xs: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
    """The scanned values of one iteration."""
    rest = iter(slices)

    def one(x: Any) -> Any:
        if isinstance(x, Concat):
            return Concat(tuple(map(one, x.parts)), x.axis - 1)
        array = next(rest)
        if is_plain(x):
            return array
        axis = x.axis - 1 if x.lineage else -1
        return lazy(array, x.shape[1:], x.lineage, axis, x.origins)

    return [one(x) for x in xs]


def _stackable(ctx: Context, y: Any) -> Any:
    return y if is_plain(y) or isinstance(y, Lazy) else ctx.build(y)


def _packed_stacks(
    values: Sequence[Any], stacks: Sequence[Any], length: int, origins: Any
) -> list[Any]:
    """The stacked results of all iterations; `origins` maps what they stem from in the body."""
    out = []
    for value, stack in zip(values, stacks, strict=True):
        if is_plain(value):
            out.append(stack)
        else:
            axis = value.axis + 1 if value.lineage else -1
            shape = (length, *value.shape)
            out.append(lazy(stack, shape, value.lineage, axis, origins(value.origins)))
    return out


@register_rule("cond", source=True)
def _cond(ctx: Context, eqn: Any, index: Any, *operands: Any) -> Any:
    branches = eqn.params["branches"]
    if all(map(is_plain, operands)) and all(map(ctx.programs.is_plain, branches)):
        return ctx.bind(eqn, index, *operands)
    index = ctx.materialise(eqn, index, "decides which branch runs")

    def results(branch: Any) -> tuple[Context, list[Any]]:
        inner = ctx.inner()
        return inner, exported(inner, inner.run_closed(branch, operands, eqn), ctx)

    forms: list[list[Any]] = []
    with ctx.muted():
        for branch in branches:
            jax.eval_shape(lambda b=branch: forms.append([form(v) for v in results(b)[1]]))
    agree = [all(form == column[0] for form in column) for column in zip(*forms, strict=True)]
    packs: list[Any] = []

    def run(branch: Any) -> Any:
        inner, values = results(branch)
        reason = "the branches of a cond return it in different forms"
        values = [
            v if same else inner.materialise(eqn, v, reason)
            for v, same in zip(values, agree, strict=True)
        ]
        arrays, pack = unpack_all(values)
        packs.append(pack)
        return arrays

    out = lax.switch(index, [lambda b=branch: run(b) for branch in branches])
    return packs[-1](out)
