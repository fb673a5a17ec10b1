"""The rule of custom_jvp: the function and its JVP rule, both at the smaller batch."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.facts import curves
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.values import jvp_rules, lineage
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.forms import (
    detached,
    form,
    unpack,
    unpack_all,
    with_all_inside,
    with_inside,
)
from ikbo_jax.rewrite.values.jaxprs import evaluate, trace
from ikbo_jax.rewrite.values.lineage import Concat, Lazy
from ikbo_jax.rewrite.values.merged import Reshaped
from ikbo_jax.rewrite.values.registry import NotCovered


def custom_jvp(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs the function and its JVP rule, both at the smaller batch."""
    params = eqn.params
    if params.get("jvp_jaxpr_fun") is None or params["num_consts"]:
        raise NotCovered("custom_jvp with closed-over values")
    if params["call_jaxpr"].effects:
        # The function is interpreted twice, which would repeat them.
        raise NotCovered("custom_jvp with effects")
    arrays, pack = unpack_all(operands)
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
        raise NotCovered("custom_jvp with operands that are not floating-point numbers")
    if len(operands) == 1 and _is_elementwise(ctx, eqn):
        for x in filter(lineage.has_lineage, with_all_inside(operands)):
            ctx.recorder.saved(eqn, x.origins, "work at the smaller batch", False)
        return pack([any_shape.run_custom_jvp(eqn, [x]) for x in arrays])
    with ctx.muted():
        results = ctx.inner().run_closed(params["call_jaxpr"], operands, eqn)
    if not all(isinstance(value, (Lazy, Concat, Reshaped)) for value in results):
        raise NotCovered("custom_jvp of a function that mixes rows")
    count = len(operands)
    must_be_proven = ctx.derivatives < any_shape.PROVEN_DERIVATIVES
    rule = _proven_rule(ctx, eqn, operands, results) if must_be_proven else None
    if must_be_proven and rule is None:
        reason = "custom_jvp whose derivative does not work row by row"
        if ctx.differentiated:
            raise NotCovered(reason)
        ctx.gradient_differs()
        return ctx.run_closed(params["call_jaxpr"], operands, eqn)
    _, pack_results = unpack_all(results)

    def at_users(*arrays: Any) -> Any:
        values = ctx.inner().run_closed(params["call_jaxpr"], pack(arrays), eqn)
        return unpack_all(in_form_of(values, results))[0]

    whole = without_dead_code(trace(at_users, arrays))
    if any(isinstance(x, jax.core.Tracer) for x in whole.consts):
        raise NotCovered("custom_jvp of a function that looks rows up itself")
    # The traced program holds these functions, so they must not hold arrays of the trace.
    later, like = ctx.detached(), detached([*operands, *results])

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        return evaluate(whole, arrays)

    @function.defjvp
    def derivative_of(primals: Any, tangents: Any) -> Any:
        program = rule
        if program is None:
            program = _jvp_rule(later, eqn, like[:count], like[count:])
        if program is None:
            raise NotImplementedError("ikbo_jax.rewrite: a third derivative that mixes rows")
        both = evaluate(program, [*primals, *tangents])
        return both[: len(both) // 2], both[len(both) // 2 :]

    return pack_results(function(*arrays))


def _is_elementwise(ctx: Context, eqn: Any) -> bool:
    """Whether a function has one result, and it and its derivatives are elementwise."""
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
    """Returns `_jvp_rule` of a call; calls of one function on values of the same forms share it."""
    rule = jvp_rules.identity(eqn.params["jvp_jaxpr_fun"])
    if rule is None:
        return _jvp_rule(ctx, eqn, operands, results)
    forms = tuple(map(form, operands)), tuple(map(form, results))
    key = (rule, *forms, ctx.derivatives, tuple(v.aval for v in (*eqn.invars, *eqn.outvars)))
    proven = ctx.programs.jvp_rules
    if key not in proven:
        proven[key] = _jvp_rule(ctx, eqn, operands, results)
    return proven[key]


def _jvp_rule(
    ctx: Context, eqn: Any, operands: Sequence[Any], results: Sequence[Any]
) -> core.Jaxpr | None:
    """Traces the JVP rule of a custom_jvp function on arrays at the smaller batch.

    The program takes the operands' arrays and tangents, and returns the results' arrays and
    tangents. None if the rule cannot be proven to work row by row: if a result is no lookup of the
    same rows, or if the rule needs an array of the trace around the call, which has ended when JAX
    takes the derivative.
    """
    jaxpr, consts, zeros = curves.jvp_rule(eqn)
    nonzero = [x for x, zero in zip(results, zeros, strict=True) if not zero]
    like = [*results, *nonzero]
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

    try:
        program = without_dead_code(trace(run, [*arrays, *arrays]))
    except ImportError:
        raise
    except Exception:
        # Also if the lookup of a detached lineage is needed, which has no index.
        return None
    used = {v for eqn in program.eqns for v in eqn.invars if isinstance(v, core.Var)}
    needed = [x for v, x in zip(program.constvars, program.consts, strict=True) if v in used]
    return None if any(isinstance(x, jax.core.Tracer) for x in needed) else program


def matches(value: Any, like: Any) -> bool:
    """Whether two values have the same form, once dimensions of size 1 of `value` are broadcast."""
    if lineage.is_plain(like) or lineage.is_plain(value):
        return lineage.is_plain(like) and lineage.is_plain(value)
    if _is_uniform(value):
        return True
    if isinstance(like, Reshaped):
        same = type(value) is type(like) and value.layout == like.layout
        return same and matches(value.inner, like.inner)
    if isinstance(like, Concat):
        same = isinstance(value, Concat) and (value.axis, value.sizes) == (like.axis, like.sizes)
        return same and all(map(matches, value.parts, like.parts))
    return (
        isinstance(value, Lazy)
        and (value.lineage, value.axis) == (like.lineage, like.axis)
        and all(n in (1, m) for n, m in zip(value.base.shape, like.base.shape, strict=True))
    )


def in_form_of(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Broadcasts the values' arrays to the shapes of `like`'s arrays; NotCovered in other forms."""
    if not all(map(matches, values, like)):
        raise NotCovered("a function that mixes rows")
    return list(map(_widened, values, like))


def _widened(value: Any, like: Any) -> Any:
    if isinstance(like, Reshaped):
        inner = value if _is_uniform(value) else value.inner
        return with_inside(like, [_widened(inner, like.inner)])
    if isinstance(like, Concat):
        parts = [value] * len(like.parts) if _is_uniform(value) else value.parts
        return Concat(tuple(map(_widened, parts, like.parts)), like.axis)
    if isinstance(like, Lazy):
        if _is_uniform(value):
            return dataclasses.replace(like, base=lax.full_like(like.base, value.base.reshape(())))
        return dataclasses.replace(like, base=lineage.spread(value.base, like.base.shape))
    return value


def _is_uniform(value: Any) -> bool:
    return lineage.is_only_broadcast(value) and value.base.size == 1
