"""Forward-mode differentiation of an op: refused with a message that names the op."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

#: For ops whose gradient can be differentiated again, and for ops whose gradient cannot.
TWICE = "second derivatives are jax.jacrev(jax.grad(f)) instead of jax.hessian"
ONCE = "it has no second derivatives"

# The identity on an operand and on its tangent. Reverse mode transposes the tangent's equation, and
# transposition drops it; forward mode evaluates or compiles the equation, which raises. JAX's own
# message for a `custom_vjp`, which stands later in the program, is not reached.
operand_p = Primitive("ikbo_reverse_only")
tangent_p = Primitive("ikbo_reverse_only_tangent")


def operands(op: str, second: str, arrays: Any) -> Any:
    """Returns `arrays`, a tree; forward mode by one that is floating raises NotImplementedError.

    Outside of JAX's transformations this does nothing. `second` is `TWICE` or `ONCE`.
    """

    def operand(x: Any) -> Any:
        # Outside of jit: jit would put off the evaluation until JAX's own message was raised.
        is_traced = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        return operand_p.bind(x, op=op, second=second) if is_traced else x

    return jax.tree.map(operand, arrays)


def _refuse(*_: Any, op: str, second: str) -> NoReturn:
    raise NotImplementedError(
        f"{op} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.hessian, jax.linearize); "
        f"reverse mode works (jax.grad, jax.vjp, jax.jacrev); {second}"
    )


def _jvp(primals: Any, tangents: Any, **params: str) -> tuple[Any, Any]:
    # Called only for a tangent that is not symbolically zero.
    return operand_p.bind(*primals, **params), tangent_p.bind(*tangents, **params)


operand_p.def_impl(lambda x, **_: x)
operand_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(operand_p, lambda ctx, x, **_: [x])
batching.defvectorized(operand_p)
ad.primitive_jvps[operand_p] = _jvp

tangent_p.def_impl(_refuse)
tangent_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(tangent_p, lambda ctx, x, **params: _refuse(**params))
# `jax.hessian` in jit batches tangents while it traces; JAX's own message would come from there.
batching.primitive_batchers[tangent_p] = _refuse
ad.deflinear2(tangent_p, lambda cotangent, _, **__: [cotangent])
