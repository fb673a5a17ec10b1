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
from ikbo_jax.rewrite.calls.custom_jvp import at_users, proven
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules.any_shape import PROVEN_DERIVATIVES, THIRD
from ikbo_jax.rewrite.values import linear
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.forms import in_form_of, unpack_all
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
    known = _passes(ctx, eqn, operands, results) if must_be_proven else None
    if must_be_proven and known is None:
        raise NotCovered("custom_vjp whose backward pass is not linear, or mixes rows")
    _, pack = unpack_all(operands)
    arrays, _ = unpack_all(deferred)
    _, pack_results = unpack_all(results)

    def with_fixed(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return pack([x if is_plain(x) else next(rest) for x in operands])

    program = at_users(ctx, eqn, with_fixed, results, arrays)

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return evaluate(program, arrays)

    def pass_of(number: int, arrays: Sequence[Any]) -> list[Any]:
        if known is None:
            raise NotImplementedError(THIRD)
        return evaluate(known[number], arrays)

    function.defvjp(
        lambda *arrays: (pass_of(0, arrays), arrays),
        lambda arrays, gradients: tuple(pass_of(1, [*arrays, *gradients])),
    )
    return pack_results(function(*arrays))


def _spread(x: Any) -> Any:
    return spread_axes(x, range(len(x.shape))) if isinstance(x, Lazy) else x


def _passes(
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
