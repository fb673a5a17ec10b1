"""Elementwise programs, which run on arrays of any shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.facts import curves
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE
from ikbo_jax.rewrite.values import jvp_rules
from ikbo_jax.rewrite.values.jaxprs import interpret, wrapped

#: Derivatives of a custom_jvp function that are proven to be elementwise. Its JVP rule may call the
#: function again, so that there is no last derivative.
_PROVEN_DERIVATIVES = 2


def is_elementwise_jvp(
    eqn: Any, derivatives: int = _PROVEN_DERIVATIVES, assumed: frozenset = frozenset()
) -> bool:
    """Whether a custom_jvp function and its first derivatives are elementwise.

    `assumed` are the JVP rules, with the types of their operands, that are being proven. The JVP
    rule of `jax.nn.relu` calls `jax.nn.relu`, so it would otherwise be traced once more for each
    derivative.
    """
    rule = jvp_rules.identity(eqn.params["jvp_jaxpr_fun"])
    key = rule, *(v.aval for v in eqn.invars)
    programs = [eqn.params["call_jaxpr"]]
    if derivatives and (rule is None or key not in assumed):
        programs.append(curves.jvp_rule(eqn)[0])
    left, assumed = max(0, derivatives - 1), assumed | {key}
    return all(_only_elementwise(program, left, assumed) for program in programs)


def _only_elementwise(program: Any, derivatives: int, assumed: frozenset = frozenset()) -> bool:
    """Whether all equations of a program are elementwise, with numbers as further operands."""

    def is_elementwise(eqn: Any) -> bool:
        name = eqn.primitive.name
        if name == "jit":
            return _only_elementwise(eqn.params["jaxpr"], derivatives, assumed)
        if name == "custom_jvp_call":
            return is_elementwise_jvp(eqn, derivatives, assumed)
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

    def whole(x: Any, arrays: Any) -> Any:
        # A result may be one number, whose broadcast `_evaluated` leaves out.
        shape = np.broadcast_shapes(*map(np.shape, arrays))
        return x if np.shape(x) == shape else jnp.broadcast_to(x, shape)

    def function(*arrays: Any) -> list[Any]:
        return [whole(_evaluated(call, (), arrays)[0], arrays)]

    def derivative(*primals_and_tangents: Any) -> list[Any]:
        program, consts, zeros = curves.jvp_rule(eqn)
        if not _only_elementwise(program, 0):
            raise NotImplementedError("ikbo_jax.rewrite: a third derivative that mixes rows")
        out = _evaluated(program, consts, primals_and_tangents)
        value = whole(out[0], primals_and_tangents)
        return [value, jnp.zeros_like(value) if zeros[0] else whole(out[1], primals_and_tangents)]

    # `jax.custom_jvp` does the same, and looks for the names of the arguments besides.
    functions = tuple(wrapped(fn, call) for fn in (function, derivative))
    results: list[jax.Array] = eqn.primitive.bind(*arrays, subfuns=functions, symbolic_zeros=False)
    return results[0]
