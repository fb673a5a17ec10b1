"""Rejects forward-mode differentiation of an op with a message that names the op."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def identity_primitive(name: str) -> Primitive:
    """Makes a primitive that returns its array, lowers to no instruction and carries parameters.

    Unlike a name, or a registry outside the jaxpr, an equation survives jit's caches,
    differentiation, vmap and control flow.
    """
    found = Primitive(name)
    found.def_impl(lambda x, **_: x)
    found.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(found, lambda ctx, x, **_: [x])
    batching.defvectorized(found)
    return found


# Two identities: on an operand, and on its tangent. Reverse mode transposes the tangent's equation,
# which removes it. Forward mode evaluates or compiles the equation, which raises, before JAX
# reaches the `custom_vjp` later in the jaxpr and raises its own error.
operand_p = identity_primitive("ikbo_reverse_only")
tangent_p = Primitive("ikbo_reverse_only_tangent")


def operands(op: str, arrays: Any) -> Any:
    """Returns the tree `arrays`, marked so that forward mode raises NotImplementedError.

    Does nothing outside JAX's transformations.
    """

    def operand(x: Any) -> Any:
        # The marker must stay outside jit: inside, JAX would raise its own error first.
        is_traced = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        return operand_p.bind(x, op=op) if is_traced else x

    return jax.tree.map(operand, arrays)


def _refuse(*_: Any, op: str) -> NoReturn:
    raise NotImplementedError(
        f"{op} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.hessian, jax.linearize); "
        "reverse mode works (jax.grad, jax.vjp, jax.jacrev); second derivatives are "
        "jax.jacrev(jax.grad(f)) instead of jax.hessian"
    )


def _jvp(primals: Any, tangents: Any, **params: str) -> tuple[Any, Any]:
    # JAX calls this rule only if the tangent is not symbolically zero.
    return operand_p.bind(*primals, **params), tangent_p.bind(*tangents, **params)


ad.primitive_jvps[operand_p] = _jvp

tangent_p.def_impl(_refuse)
tangent_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(tangent_p, lambda ctx, x, **params: _refuse(**params))
# `jax.hessian` inside jit batches tangents while tracing; without this rule JAX would raise its own
# error there.
batching.primitive_batchers[tangent_p] = _refuse
ad.deflinear2(tangent_p, lambda cotangent, _, **__: [cotangent])
