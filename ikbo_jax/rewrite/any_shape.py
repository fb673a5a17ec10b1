"""Elementwise programs, which run on arrays of any shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite import curves
from ikbo_jax.rewrite.jaxprs import interpret
from ikbo_jax.rewrite.rules import ELEMENTWISE

#: Derivatives of a custom_jvp function that are proven to be elementwise. Its JVP rule may call the
#: function again, so that there is no last derivative.
_PROVEN_DERIVATIVES = 2


def is_elementwise_jvp(eqn: Any, derivatives: int = _PROVEN_DERIVATIVES) -> bool:
    """Whether a custom_jvp function and its first derivatives are elementwise."""
    programs = [eqn.params["call_jaxpr"]]
    programs += [curves.jvp_rule(eqn)[0]] if derivatives else []
    return all(_only_elementwise(program, max(0, derivatives - 1)) for program in programs)


def _only_elementwise(program: Any, derivatives: int) -> bool:
    """Whether all equations of a program are elementwise, with numbers as further operands."""

    def is_elementwise(eqn: Any) -> bool:
        name = eqn.primitive.name
        if name == "jit":
            return _only_elementwise(eqn.params["jaxpr"], derivatives)
        if name == "custom_jvp_call":
            return is_elementwise_jvp(eqn, derivatives)
        if name == "broadcast_in_dim":
            return eqn.invars[0].aval.ndim == 0
        return name in (*ELEMENTWISE, "select_n", "clamp")

    return not program.constvars and all(map(is_elementwise, program.eqns))


def _evaluated(program: Any, consts: Any, arrays: Any) -> list[Any]:
    """The results of a program of elementwise equations, on arrays of any shape."""

    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "jit":
            inner = eqn.params["jaxpr"]
            return _evaluated(inner, inner.consts, operands)
        if name == "custom_jvp_call":
            return [run_custom_jvp(eqn, operands)]
        if name == "broadcast_in_dim":
            # Of a number, which the next equation broadcasts.
            return operands
        if name in ("select_n", "clamp"):
            shape = np.broadcast_shapes(*map(np.shape, operands))
            which = operands[0] if name == "select_n" and np.ndim(operands[0]) == 0 else None
            operands = [jnp.broadcast_to(x, shape) for x in operands]
            operands = operands if which is None else [which, *operands[1:]]
        primitive = eqn.primitive
        return [primitive.bind(*operands, **primitive.get_bind_params(eqn.params))]

    return interpret(program, consts, arrays, run)


def run_custom_jvp(eqn: Any, arrays: list[jax.Array]) -> jax.Array:
    """A custom_jvp function of one result, at the shape of these arrays."""
    call = eqn.params["call_jaxpr"]
    function = jax.custom_jvp(lambda *xs: _evaluated(call, (), xs)[0])

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        program, consts, zeros = curves.jvp_rule(eqn)
        out = _evaluated(program, consts, [*primals, *tangents])
        return out[0], jnp.zeros_like(out[0]) if zeros[0] else out[1]

    result: jax.Array = function(*arrays)
    return result
