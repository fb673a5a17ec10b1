"""Elementwise programs, which run on arrays of any shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.facts import curves
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE, common_shape
from ikbo_jax.rewrite.values.jaxprs import interpret, wrapped

#: Derivatives of a custom_jvp function that are proven to work row by row while the program is
#: rewritten. A JVP rule may call its own function, so that there is no last derivative.
PROVEN_DERIVATIVES = 2
THIRD = "ikbo_jax.rewrite: a third derivative of a function with a derivative of its own"


def rule_identity(derivative: Any) -> Any:
    """Returns an object that is equal for calls with the same JVP rule, `jvp_jaxpr_fun`.

    A model calls one function, such as `jax.nn.relu`, in every layer, and JAX wraps its JVP rule
    anew for every call. The object is the rule's Python function and the tree of its arguments.
    None if JAX wraps rules in another way than expected here, or if the call has static arguments
    (`nondiff_argnums`).
    """
    thunk = _closed_over(getattr(derivative, "f", None)).get("fn")
    rule: Any = _closed_over(thunk).get("jvp")
    transforms: Any = getattr(rule, "transforms", None)
    if not transforms or len(transforms) != 1 or getattr(rule, "params", None) != ():
        return None
    function, parameters = transforms[0]
    if getattr(function, "__name__", "") != "_flatten_jvp" or len(parameters) != 4:
        return None
    return rule.f, parameters[2]


def _closed_over(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    try:
        return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    except ValueError:  # A cell is empty.
        return {}


def is_elementwise_jvp(
    eqn: Any, derivatives: int = PROVEN_DERIVATIVES, assumed: frozenset = frozenset()
) -> bool:
    """Whether a custom_jvp function and its first derivatives are elementwise.

    `assumed` are the JVP rules, with the types of their operands, that are being proven. The JVP
    rule of `jax.nn.relu` calls `jax.nn.relu`, so it would otherwise be traced once more for each
    derivative.
    """
    rule = rule_identity(eqn.params["jvp_jaxpr_fun"])
    key = rule, *(v.aval for v in eqn.invars)
    left, others = max(0, derivatives - 1), assumed | {key}
    if not _only_elementwise(eqn.params["call_jaxpr"], left, others):
        return False
    is_proven = not derivatives or rule is not None and key in assumed
    return is_proven or _only_elementwise(curves.jvp_rule(eqn)[0], left, others)


def _only_elementwise(program: Any, derivatives: int, assumed: frozenset = frozenset()) -> bool:
    """Whether all equations of a program are elementwise, with numbers as further operands."""
    broadcast = set()

    def is_elementwise(eqn: Any) -> bool:
        name = eqn.primitive.name
        if name == "jit":
            return _only_elementwise(eqn.params["jaxpr"], derivatives, assumed)
        if name == "custom_jvp_call":
            return is_elementwise_jvp(eqn, derivatives, assumed)
        if name == "broadcast_in_dim" and (
            eqn.invars[0].aval.ndim == 0 or id(eqn.invars[0]) in broadcast
        ):
            # `vmap` broadcasts a number twice.
            broadcast.add(id(eqn.outvars[0]))
            return True
        return name in ELEMENTWISE

    return not program.constvars and all(map(is_elementwise, program.eqns))


def _evaluated(program: Any, consts: Any, arrays: Any) -> list[Any]:
    """Runs a program of elementwise equations on arrays of any shape."""

    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "jit":
            inner = eqn.params["jaxpr"]
            return _evaluated(inner, inner.consts, operands)
        if name == "custom_jvp_call":
            return [run_custom_jvp(eqn, operands)]
        if name == "broadcast_in_dim":
            # The operand is a number, which the next equation broadcasts.
            return operands
        params = eqn.primitive.get_bind_params(eqn.params)
        return [eqn.primitive.bind(*common_shape(eqn, operands), **params)]

    return interpret(program, consts, arrays, run)


def at_shape_of(eqn: Any, x: Any) -> Any:
    """Returns the equation of a custom_jvp function for a value of another shape."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    program = jax.make_jaxpr(lambda x: run_custom_jvp(eqn, [x]))(like)
    return program.eqns[0].replace(source_info=eqn.source_info)


def run_custom_jvp(eqn: Any, arrays: list[jax.Array]) -> jax.Array:
    """Runs a custom_jvp function of one result at the shape of these arrays."""
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
            raise NotImplementedError(THIRD)
        out = _evaluated(program, consts, primals_and_tangents)
        value = whole(out[0], primals_and_tangents)
        return [value, jnp.zeros_like(value) if zeros[0] else whole(out[1], primals_and_tangents)]

    # `jax.custom_jvp` would bind the primitive, too, but also look up the arguments' names.
    functions = tuple(wrapped(fn, call) for fn in (function, derivative))
    results: list[jax.Array] = eqn.primitive.bind(*arrays, subfuns=functions, symbolic_zeros=False)
    return results[0]
