"""What `checkify` checks: the original's equations, in place of the equations that run.

`checkify` goes through the equations of a traced function. It takes an equation with a parameter
`call_jaxpr` for a call, adds checks to this program, and binds the primitive with the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import batching, mlir

from ikbo_jax.rewrite.jaxprs import call, evaluate, trace


class Program:
    """A program for `checkify`, which reads these attributes.

    It is no jaxpr: whatever searches equations for programs passes it over. It is traced at its
    first use.
    """

    def __init__(self, make: Callable[[], core.Jaxpr]) -> None:
        self._make = make

    @functools.cached_property
    def traced(self) -> core.Jaxpr:
        """The program. `checkify` expects that it has no constants, so that it is a call."""
        program = self._make()
        return trace(lambda *inputs: call(program, inputs, "original"), program.in_avals, program)

    constvars = property(lambda self: self.traced.constvars)
    debug_info = property(lambda self: self.traced.debug_info)
    eqns = property(lambda self: self.traced.eqns)
    invars = property(lambda self: self.traced.invars)
    outvars = property(lambda self: self.traced.outvars)

    def __repr__(self) -> str:
        return "..."


class Primitive(core.Primitive):
    """A primitive with several results and a parameter `call_jaxpr`, a `Program`."""

    multiple_results = True

    def bind(self, *inputs: Any, **params: Any) -> Any:
        """The results. `checkify` calls it with a function that checks the program."""
        if "subfuns" in params:
            return params["subfuns"][0].call_wrapped(*inputs)
        return super().bind(*inputs, **params)


#: Returns its first operand.
_looked_up_p = Primitive("ikbo_looked_up")
_looked_up_p.is_high = lambda *_, **__: False  # type: ignore[method-assign]
_looked_up_p.def_impl(lambda index, *_, **__: [index])
_looked_up_p.def_abstract_eval(lambda index, *_, **__: [index])
mlir.register_lowering(_looked_up_p, lambda _, index, *__, **___: [index])


def looked_up(eqn: Any, index: Any, indices: Any, shape: Sequence[int]) -> Any:
    """`index`, of which `checkify` reports what it reports of a gather.

    Args:
      eqn: the gather. It is not part of the program that runs.
      index: an array that is computed from `indices`.
      indices: the gather's indices.
      shape: the shape of its operand. Its values have no effect on the report.
    """
    like = [jax.typeof(x) for x in (index, indices)]

    def original(index: Any, indices: Any) -> list[Any]:
        table = lax.full(shape, np.zeros((), bool))
        eqn.primitive.bind(table, indices, **{**eqn.params, "fill_value": None})
        return [index]

    program = Program(lambda: trace(original, like))
    (found,) = _looked_up_p.bind(index, indices, call_jaxpr=program)
    return found


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, call_jaxpr: Program
) -> tuple[list[Any], list[Any]]:
    if dims[0] is None:
        # The other columns differ over the batch. They are not checked.
        return [operands[0]], [None]
    index = batching.bdim_at_front(operands[0], dims[0], operands[0].shape[dims[0]])
    dims = [0, dims[1]]
    program = Program(lambda: batching.batch_jaxpr_axes(call_jaxpr.traced, axis, dims, [0])[0])
    return _looked_up_p.bind(index, operands[1], call_jaxpr=program), [0]


batching.fancy_primitive_batchers[_looked_up_p] = _batch


#: Runs `program`. Without a parameter `call_jaxpr`, `checkify` passes it over.
_unchecked_p = core.Primitive("ikbo_unchecked")
_unchecked_p.multiple_results = True
_unchecked_p.is_high = lambda *_, **__: False  # type: ignore[method-assign]


def unchecked(fn: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    """`fn(x)` of integers, with equations that the original has not and `checkify` does not see.

    `checkify` raises IndexError at a scatter under `vmap`.
    """
    found: list[jax.Array] = _unchecked_p.bind(x, program=trace(lambda x: [fn(x)], [x]))
    return found[0]


def _run(*operands: Any, program: core.Jaxpr) -> list[Any]:
    return evaluate(program, operands)


def _batch_unchecked(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, program: core.Jaxpr
) -> tuple[list[Any], list[Any]]:
    if all(dim is None for dim in dims):
        return _unchecked_p.bind(*operands, program=program), [None]
    batched, _ = batching.batch_jaxpr_axes(program, axis, dims, [0])
    return _unchecked_p.bind(*operands, program=batched), [0]


_unchecked_p.def_impl(_run)
_unchecked_p.def_abstract_eval(lambda _, *, program: program.out_avals)
mlir.register_lowering(_unchecked_p, mlir.lower_fun(_run))
batching.fancy_primitive_batchers[_unchecked_p] = _batch_unchecked
