"""Functions with their own backward pass (`jax.custom_vjp`), at the smaller batch.

The backward pass takes the gradient of every candidate. At the smaller batch it takes the sum of
the gradients of a user's candidates. That is the same only if the backward pass is linear in the
gradient, and works row by row. Both are proven from its equations. A clipped gradient, for example,
is not linear.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ikbo_jax.rewrite.attention import cudnn
from ikbo_jax.rewrite.calls.custom_jvp import in_form_of
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules.any_shape import PROVEN_DERIVATIVES
from ikbo_jax.rewrite.values import linear
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.forms import detached, unpack_all
from ikbo_jax.rewrite.values.jaxprs import evaluate, trace
from ikbo_jax.rewrite.values.lineage import Lazy, has_lineage, is_plain, spread_axes
from ikbo_jax.rewrite.values.registry import NotCovered


def custom_vjp(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs the function, and its backward pass, at the smaller batch."""
    jaxpr = eqn.params["call_jaxpr"]
    if cudnn.is_attention(eqn):
        return cudnn.call(ctx, eqn, operands)
    # Along a broadcast axis, gradients are summed, too; the proof does not cover such sums.
    operands = tuple(_spread(x) for x in operands)
    deferred = [x for x in operands if not is_plain(x)]
    fixed = [x for x in operands if is_plain(x)]
    if not all(has_lineage(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in deferred):
        raise NotCovered("custom_vjp of operands that are no lookups of floating-point numbers")
    if jaxpr.effects:
        # The function is interpreted twice, which would repeat them.
        raise NotCovered("custom_vjp with effects")
    if any(isinstance(x, jax.core.Tracer) for x in fixed):
        # Its gradient is a sum over the candidates, not over the users.
        raise NotCovered("custom_vjp with operands that are not looked up, such as weights")
    with ctx.muted():
        results = [_spread(x) for x in ctx.inner().run_closed(jaxpr, operands, eqn)]
    if not all(has_lineage(x) and x.lineage is deferred[0].lineage for x in results):
        raise NotCovered("custom_vjp of a function that mixes rows")
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in results):
        raise NotCovered("custom_vjp whose results are not floating-point numbers")
    # A forward pass may call its own function, so that there is no last derivative.
    must_be_proven = ctx.derivatives < PROVEN_DERIVATIVES
    proven = _proven(ctx, eqn, operands, results) if must_be_proven else None
    if must_be_proven and proven is None:
        raise NotCovered("custom_vjp whose backward pass is not linear, or mixes rows")
    _, pack = unpack_all(operands)
    arrays, _ = unpack_all(deferred)
    _, pack_results = unpack_all(results)

    def at_users(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        whole = [x if is_plain(x) else next(rest) for x in operands]
        values = ctx.inner().run_closed(jaxpr, pack(whole), eqn)
        return unpack_all(in_form_of(values, results))[0]

    program = without_dead_code(trace(at_users, arrays))
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise NotCovered("custom_vjp of a function that looks rows up itself")
    # The traced program holds these functions, so they must not hold arrays of the trace. Operands
    # that are no lookups are constants.
    later, count = ctx.detached(), len(operands)
    of_lookups = iter(detached([*deferred, *results]))
    like = [x if is_plain(x) else next(of_lookups) for x in operands] + list(of_lookups)

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return evaluate(program, arrays)

    def passes() -> tuple[core.Jaxpr, core.Jaxpr]:
        found = _proven(later, eqn, like[:count], like[count:]) if proven is None else proven
        if found is None:
            raise NotImplementedError("ikbo_jax.rewrite: a third derivative that mixes rows")
        return found

    def forward_of(*arrays: Any) -> Any:
        return evaluate(passes()[0], arrays), arrays

    def backward_of(arrays: Any, gradients: Any) -> Any:
        return tuple(evaluate(passes()[1], [*arrays, *gradients]))

    function.defvjp(forward_of, backward_of)
    return pack_results(function(*arrays))


def _spread(x: Any) -> Any:
    return spread_axes(x, range(len(x.shape))) if isinstance(x, Lazy) else x


def _proven(
    ctx: Context, eqn: Any, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[core.Jaxpr, core.Jaxpr] | None:
    """Traces both passes of a custom_vjp function on arrays at the smaller batch.

    The first program maps the arrays of the lookups to the arrays of the results; the second maps
    both, and the results' gradients, to the lookups' gradients. None if the backward pass cannot be
    proven to be linear and to work row by row, or needs an array of the trace around the call.
    """
    deferred = [x for x in operands if not is_plain(x)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*deferred, *results)]
    count = len(deferred)

    def passes(*values: Any) -> list[Any]:
        def original(*values: Any) -> Any:
            rest = iter(values)
            return ctx.bind(eqn, *(x if is_plain(x) else next(rest) for x in operands))

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

    def at_users(wanted: slice, like: Sequence[Any]) -> Any:
        def run(*both: Any) -> list[Any]:
            primals = pack(both[: len(arrays)])
            # The forward pass reads no gradient.
            slopes = pack_results(both[len(arrays) :] or list(map(jnp.zeros_like, out_arrays)))
            with ctx.muted():
                values = ctx.afterwards().run(whole, whole.consts, [*primals, *slopes])[wanted]
            return unpack_all(in_form_of(values, like))[0]

        return run

    try:
        backward = trace(at_users(slice(len(results), None), deferred), [*arrays, *out_arrays])
        forward = trace(at_users(slice(len(results)), results), arrays)
    except ImportError:
        raise
    except Exception:
        # Also if the lookup of a detached lineage is needed, which has no index.
        return None
    both = without_dead_code(forward), without_dead_code(backward)
    consts = [x for program in both for x in program.consts]
    return None if any(isinstance(x, jax.core.Tracer) for x in consts) else both
