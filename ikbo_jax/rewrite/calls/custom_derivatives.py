"""Rules of functions with derivatives of their own, `jax.custom_jvp` and `jax.custom_vjp`.

Functions and derivatives run at the smaller batch. A backward pass takes the gradient of every
candidate; there, it takes the sum of the gradients of a user's candidates. That is the same only if
the backward pass is linear in the gradient, and works row by row. Both are proven from its
equations. A clipped gradient, for example, is not linear.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ikbo_jax.rewrite.attention import cudnn
from ikbo_jax.rewrite.facts import curves
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.values import lineage, linear
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.forms import form, in_form_of, unpack, unpack_all, with_all_inside
from ikbo_jax.rewrite.values.jaxprs import evaluate, trace
from ikbo_jax.rewrite.values.lineage import Concat, Lazy
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Reshaped, Taken, reshaped


def custom_jvp(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs the function and its JVP rule, both at the smaller batch."""
    params = eqn.params
    if params.get("jvp_jaxpr_fun") is None or params["num_consts"]:
        raise NotCovered("custom_jvp with closed-over values")
    if params["call_jaxpr"].effects:
        # The function is interpreted twice, which would repeat them.
        raise NotCovered("custom_jvp with effects")
    is_simple = len(operands) == len(eqn.outvars) == 1 and not params["symbolic_zeros"]
    is_elementwise = functools.partial(any_shape.is_elementwise_jvp, eqn)
    if is_simple and type(operands[0]) is Reshaped and operands[0].inner.rule is not None:
        if not _once(ctx, eqn, (eqn.invars[0].aval,), is_elementwise):
            raise NotCovered("custom_jvp of scores that is not elementwise")
        inner, layout = operands[0].inner, operands[0].layout
        (result,) = ctx.run_equation(any_shape.at_shape_of(eqn, inner), [inner])
        return [reshaped(result, *layout)]
    arrays, pack = unpack_all(operands)
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
        raise NotCovered("custom_jvp with operands that are not floating-point numbers")
    if is_simple and _once(ctx, eqn, (eqn.invars[0].aval,), is_elementwise):
        for x in filter(lineage.has_lineage, with_all_inside(operands)):
            ctx.recorder.saved(eqn, x.origins, "work at the smaller batch", False)
        return pack([any_shape.run_custom_jvp(eqn, [x]) for x in arrays])
    with ctx.muted():
        results = ctx.inner().run_closed(params["call_jaxpr"], operands, eqn)
    if not all(isinstance(value, (Lazy, Concat, Reshaped, Taken)) for value in results):
        raise NotCovered("custom_jvp of a function that mixes rows")
    must_be_proven, rule = ctx.derivatives < any_shape.PROVEN_DERIVATIVES, None
    if must_be_proven:
        # Calls of one function on values of the same forms share the rule.
        forms, avals = (*map(form, operands), *map(form, results)), [v.aval for v in eqn.invars]
        key = (*forms, ctx.derivatives, *avals, *(v.aval for v in eqn.outvars))
        prove = functools.partial(_jvp_rule, ctx, eqn, operands, results)
        rule = _once(ctx, eqn, key, prove)
    if must_be_proven and rule is None:
        if ctx.differentiated:
            raise NotCovered("custom_jvp whose derivative does not work row by row")
        ctx.gradient_differs()
        return ctx.run_closed(params["call_jaxpr"], operands, eqn)
    _, pack_results = unpack_all(results)
    whole = at_users(ctx, eqn, pack, results, arrays)

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        return evaluate(whole, arrays)

    @function.defjvp
    def derivative_of(primals: Any, tangents: Any) -> Any:
        if rule is None:
            raise NotImplementedError(any_shape.THIRD)
        both = evaluate(rule, [*primals, *tangents])
        return both[: len(both) // 2], both[len(both) // 2 :]

    return pack_results(function(*arrays))


def _once(ctx: Context, eqn: Any, key: Any, prove: Callable[[], Any]) -> Any:
    """Returns what `prove` returns, once for all calls with the same JVP rule and this key."""
    rule = any_shape.rule_identity(eqn.params["jvp_jaxpr_fun"])
    return prove() if rule is None else ctx.programs.once((rule, *key), prove)


def _jvp_rule(
    ctx: Context, eqn: Any, operands: Sequence[Any], results: Sequence[Any]
) -> core.Jaxpr | None:
    """Traces the JVP rule of a custom_jvp function on arrays at the smaller batch.

    The program takes the operands' arrays and tangents, and returns the results' arrays and
    tangents. None if the rule cannot be proven to work row by row: if a result is no lookup of the
    same rows (see `proven`).
    """
    jaxpr, consts, zeros = curves.jvp_rule(eqn)
    like = [*results, *(x for x, zero in zip(results, zeros, strict=True) if not zero)]
    arrays, pack = unpack_all(operands)

    def run(*both: Any) -> list[Any]:
        primals, tangents = both[: len(arrays)], both[len(arrays) :]
        with ctx.muted():
            values = ctx.afterwards().run(jaxpr, consts, [*pack(primals), *pack(tangents)])
        found = [unpack(x)[0] for x in in_form_of(values, like)]
        out, slopes = found[: len(results)], iter(found[len(results) :])
        for x, zero in zip(list(out), zeros, strict=True):
            out.append(list(map(jnp.zeros_like, x)) if zero else next(slopes))
        return list(itertools.chain(*out))

    return proven(run, [*arrays, *arrays])


def at_users(
    ctx: Context, eqn: Any, pack: Callable[..., Any], results: Sequence[Any], arrays: Sequence[Any]
) -> core.Jaxpr:
    """Traces a function from the arrays of operands, at the smaller batch, to those of results."""

    def run(*arrays: Any) -> Any:
        values = ctx.inner().run_closed(eqn.params["call_jaxpr"], pack(arrays), eqn)
        return unpack_all(in_form_of(values, results))[0]

    program = without_dead_code(trace(run, arrays))
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        kind = eqn.primitive.name.removesuffix("_call")
        raise NotCovered(f"{kind} of a function that looks rows up itself")
    return program


def proven(rule: Callable[..., Any], like: Sequence[Any]) -> core.Jaxpr | None:
    """Traces a rule for derivatives, which raises if it does not work row by row; None then.

    And None if it needs an array of the trace around the call, which has ended when JAX takes the
    derivative.
    """
    try:
        program = without_dead_code(trace(rule, like))
    except ImportError:
        raise
    except Exception:
        # Whatever it is, the rule does not work row by row.
        return None
    used = {v for eqn in program.eqns for v in eqn.invars if isinstance(v, core.Var)}
    needed = [x for v, x in zip(program.constvars, program.consts, strict=True) if v in used]
    return None if any(isinstance(x, jax.core.Tracer) for x in needed) else program


def custom_vjp(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs the function, and its backward pass, at the smaller batch."""
    jaxpr = eqn.params["call_jaxpr"]
    if cudnn.is_attention(eqn):
        return cudnn.call(ctx, eqn, operands)
    # Along a broadcast axis, gradients are summed, too; the proof does not cover such sums.
    operands = tuple(_spread(x) for x in operands)
    deferred = [x for x in operands if not lineage.is_plain(x)]
    fixed = [x for x in operands if lineage.is_plain(x)]
    if not all(lineage.has_lineage(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in deferred):
        raise NotCovered("custom_vjp of operands that are no lookups of floating-point numbers")
    if jaxpr.effects:
        # The function is interpreted twice, which would repeat them.
        raise NotCovered("custom_vjp with effects")
    if any(isinstance(x, jax.core.Tracer) for x in fixed):
        # Its gradient is a sum over the candidates, not over the users.
        raise NotCovered("custom_vjp with operands that are not looked up, such as weights")
    with ctx.muted():
        results = [_spread(x) for x in ctx.inner().run_closed(jaxpr, operands, eqn)]
    if not all(lineage.has_lineage(x) and x.lineage is deferred[0].lineage for x in results):
        raise NotCovered("custom_vjp of a function that mixes rows")
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in results):
        raise NotCovered("custom_vjp whose results are not floating-point numbers")
    # A forward pass may call its own function, so that there is no last derivative.
    must_be_proven = ctx.derivatives < any_shape.PROVEN_DERIVATIVES
    known = _passes(ctx, eqn, operands, results) if must_be_proven else None
    if must_be_proven and known is None:
        raise NotCovered("custom_vjp whose backward pass is not linear, or mixes rows")
    _, pack = unpack_all(operands)
    arrays, _ = unpack_all(deferred)
    _, pack_results = unpack_all(results)

    def with_fixed(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return pack([x if lineage.is_plain(x) else next(rest) for x in operands])

    program = at_users(ctx, eqn, with_fixed, results, arrays)

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return evaluate(program, arrays)

    def pass_of(number: int, arrays: Sequence[Any]) -> list[Any]:
        if known is None:
            raise NotImplementedError(any_shape.THIRD)
        return evaluate(known[number], arrays)

    function.defvjp(
        lambda *arrays: (pass_of(0, arrays), arrays),
        lambda arrays, gradients: tuple(pass_of(1, [*arrays, *gradients])),
    )
    return pack_results(function(*arrays))


def _spread(x: Any) -> Any:
    return lineage.spread_axes(x, range(len(x.shape))) if isinstance(x, Lazy) else x


def _passes(
    ctx: Context, eqn: Any, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[core.Jaxpr, core.Jaxpr] | None:
    """Traces both passes of a custom_vjp function on arrays at the smaller batch.

    The first program maps the arrays of the lookups to the arrays of the results; the second maps
    both, and the results' gradients, to the lookups' gradients. None if the backward pass cannot be
    proven to be linear and to work row by row, or needs an array of the trace around the call.
    """
    deferred = [x for x in operands if not lineage.is_plain(x)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*deferred, *results)]
    count = len(deferred)

    def passes(*values: Any) -> list[Any]:
        def original(*values: Any) -> Any:
            rest = iter(values)
            return ctx.bind(eqn, *(x if lineage.is_plain(x) else next(rest) for x in operands))

        out, backward = jax.vjp(original, *values[:count])
        return [*out, *backward(list(values[count:]))]

    whole = without_dead_code(trace(passes, like))
    gradients = without_dead_code(whole.replace(outvars=whole.outvars[len(results) :]))
    axes = [None] * count + [x.axis for x in results]
    if not linear.is_linear_by_row(gradients, axes, [x.axis for x in deferred]):
        return None
    if any(isinstance(x, jax.core.Tracer) for x in whole.consts):
        return None
    arrays, pack = unpack_all(deferred)
    out_arrays, pack_results = unpack_all(results)

    def one_pass(wanted: slice, like: Sequence[Any]) -> Any:
        def run(*both: Any) -> list[Any]:
            primals = pack(both[: len(arrays)])
            # The forward pass reads no gradient.
            slopes = pack_results(both[len(arrays) :] or list(map(jnp.zeros_like, out_arrays)))
            with ctx.muted():
                values = ctx.afterwards().run(whole, whole.consts, [*primals, *slopes])[wanted]
            return unpack_all(in_form_of(values, like))[0]

        return run

    backward = proven(one_pass(slice(len(results), None), deferred), [*arrays, *out_arrays])
    forward = proven(one_pass(slice(len(results)), results), arrays)
    return None if forward is None or backward is None else (forward, backward)
