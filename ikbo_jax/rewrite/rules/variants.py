"""The primitive of a program with two variants: one for values, and one for derivatives.

`jax.custom_jvp` would not do. Of a call that is batched and then differentiated, JAX batches the
derivative in forward mode, for which the ops have no rule. And the function that is called cannot
know that it will be batched: `jax.vmap` may be applied to a `jit`, a checkpoint or a branch around
it. This primitive batches both variants, and differentiates the batched one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.jaxprs import Checked, CheckedPrimitive, call, evaluate, trace

#: Its parameters are the variant for values, `program`; `exact`; and the original, `call_jaxpr`.
rewritten_p = CheckedPrimitive("ikbo_rewritten")
# JAX 0.12 would ask for a rule where a program has what it lowers in two steps. The lowering traces
# `program` again, and takes both.
rewritten_p.is_high = lambda *_, **__: False  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Exact:
    """Holds the variant for derivatives and the original, each traced at its first use.

    It is a parameter of equations, which JAX compares by identity. It holds no tracers.
    """

    trace_differentiated: Callable[[], core.Jaxpr]
    trace_original: Callable[[], core.Jaxpr]

    @functools.cached_property
    def jaxpr(self) -> core.Jaxpr:
        """Variant for derivatives. JAX differentiates a loop's body several times."""
        return self.trace_differentiated()

    @functools.cached_property
    def original(self) -> core.Jaxpr:
        """Original program."""
        return self.trace_original()

    def batched(self, batch: Callable[[core.Jaxpr], core.Jaxpr]) -> Exact:
        """Batches both programs."""
        return Exact(lambda: batch(self.jaxpr), lambda: batch(self.original))

    def __repr__(self) -> str:
        return "..."


def bind(program: core.Jaxpr, exact: Exact, inputs: Sequence[Any]) -> list[Any]:
    """Binds `program`, the variant for values, with the derivative of `exact`."""

    def original() -> core.Jaxpr:
        # Traced as a call, the program has no constants, as `Checked` needs.
        of = exact.original
        return trace(lambda *inputs: call(of, inputs, "original"), of.in_avals, of)

    params = {"program": program, "exact": exact, "call_jaxpr": Checked(original)}
    results: list[Any] = rewritten_p.bind(*inputs, **params)
    return results


def with_checks_of(
    checked: Callable[..., jax.Array], run: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
    """Computes integers by `run(*arrays)`; `checkify` checks `checked(*arrays)` instead."""
    program = trace(lambda *arrays: [run(*arrays)], arrays)
    like = [jax.typeof(x) for x in arrays]
    original = functools.partial(trace, lambda *arrays: [checked(*arrays)], like)
    return bind(program, Exact(lambda: program, original), arrays)[0]


def _values(*inputs: Any, program: core.Jaxpr, exact: Exact, call_jaxpr: Any) -> list[Any]:
    del exact, call_jaxpr
    return call(program, inputs, "rewritten")


rewritten_p.def_impl(_values)
rewritten_p.def_abstract_eval(lambda *_, program, **__: program.out_avals)
mlir.register_lowering(rewritten_p, mlir.lower_fun(_values))


def _of_some(
    program: core.Jaxpr, operands: Sequence[Any], positions: Sequence[int]
) -> Callable[..., list[Any]]:
    def fn(*values: Any) -> list[Any]:
        merged = dict(enumerate(operands)) | dict(zip(positions, values, strict=True))
        return evaluate(program, list(merged.values()))

    return fn


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, exact: Exact, **_: Any
) -> tuple[list[Any], list[Any]]:
    # The other arguments have no tangent; integers and PRNG keys never have one.
    active = [n for n, x in enumerate(tangents) if not isinstance(x, ad.Zero)]
    fn = _of_some(exact.jaxpr, primals, active)
    return jax.jvp(fn, [primals[n] for n in active], [tangents[n] for n in active])


ad.primitive_jvps[rewritten_p] = _jvp


def _transpose(cotangents: Sequence[Any], *operands: Any, exact: Exact, **_: Any) -> list[Any]:
    """Transposes the original for `jax.linear_transpose`; derivatives never come here."""
    linear = [n for n, x in enumerate(operands) if ad.is_undefined_primal(x)]
    fn = _of_some(exact.original, operands, linear)
    like = [jax.ShapeDtypeStruct(operands[n].aval.shape, operands[n].aval.dtype) for n in linear]
    full = [ad.instantiate_zeros(x) for x in cotangents]
    found = iter(jax.linear_transpose(fn, *like)(full))
    return [next(found) if ad.is_undefined_primal(x) else None for x in operands]


ad.primitive_transposes[rewritten_p] = _transpose


def _batch(
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    program: core.Jaxpr,
    exact: Exact,
    call_jaxpr: Any,
) -> tuple[list[Any], Sequence[Any]]:
    del call_jaxpr
    if all(dim is None for dim in dims):
        return bind(program, exact, operands), [None] * len(program.outvars)

    def batched(program: core.Jaxpr) -> core.Jaxpr:
        # All programs batch all results, since only one of them might find a result that is the
        # same for the whole batch.
        found, _ = batching.batch_jaxpr_axes(program, axis, dims, [0] * len(program.outvars))
        return found

    results = bind(batched(program), exact.batched(batched), operands)
    return results, [0] * len(results)


batching.fancy_primitive_batchers[rewritten_p] = _batch


def rewritten(ctx: Context, eqn: Any, *operands: Any) -> list[Any]:
    """Interprets the original of a rewritten function that is called in a rewritten function."""
    return ctx.run_closed(eqn.params["exact"].original, operands, eqn)


def rows(ctx: Context, eqn: Any, *operands: Any) -> list[Any]:
    """Interprets a lookup of a rewritten function that is called in a rewritten function."""
    return ctx.run_closed(eqn.params["call_jaxpr"], operands, eqn)
