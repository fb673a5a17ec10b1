"""What an equation of a traced program tells by itself, whatever the interpreter knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.ops import dispatch
from ikbo_jax.rewrite.jaxprs import inner_programs
from ikbo_jax.rewrite.lineage import Concat, Deferred, Lazy, is_plain


def described(error: Exception) -> str:
    """An exception in one line: its type, and the first line of its message."""
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def why_kept(eqn: core.JaxprEqn) -> str:
    """Why a lookup of arrays is none that could be worked on later."""
    operand: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    if result.size <= operand.size:
        return "it makes no more rows than there are"
    return "it is no lookup of whole rows by one index"


def on_integers(eqn: core.JaxprEqn) -> bool:
    """Whether an equation works on integers and truth values alone, and does nothing besides."""
    for v in eqn.outvars:
        if getattr(getattr(v.aval, "dtype", None), "kind", "i") not in "iub":
            return False
    for x in eqn.invars:
        if getattr(getattr(x.aval, "dtype", None), "kind", "i") not in "iub":
            return False
    return not eqn.effects


def is_number(eqn: core.JaxprEqn, operands: list[Any]) -> bool:
    """Whether an equation's only result is a number, or one number broadcast."""
    if not 0 < len(operands) <= 2:
        return False
    for x, v in zip(operands, eqn.invars, strict=True):
        # The program's own shapes are faster to ask for than a tracer's.
        if not isinstance(x, Deferred):
            if getattr(v.aval, "size", 0) != 1:
                return False
        elif not isinstance(x, Lazy) or x.lineage is not None or x.base.size != 1:
            return False
    return len(eqn.outvars) == 1 and not eqn.effects


def identity(operand: Any) -> Any:
    """What tells an operand from others: its identity, or a literal's dtype and value."""
    if isinstance(operand, jax.Array) or not is_plain(operand):
        return id(operand)
    # Literals: Python numbers and NumPy scalars, told apart by type as well.
    array = np.asarray(operand)
    return (array.dtype, array.item()) if array.ndim == 0 else id(operand)


#: Primitives of whose result every row is NaN throughout where an operand's is. Those that hold
#: programs count, since what is inside is checked by itself.
KEEP_NAN = frozenset(
    """
    abs acos acosh add asin asinh atan atan2 atanh broadcast_in_dim cbrt ceil concatenate
    convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum digamma div
    dot_general erf erf_inv erfc exp exp2 expm1 floor gather integer_pow lgamma log log1p logistic
    max min mul name neg optimization_barrier reduce_max reduce_min reduce_precision reduce_prod
    reduce_sum rem reshape rev round rsqrt sign sin sinh slice sort split sqrt square squeeze
    stop_gradient sub tan tanh transpose
    checkpoint cond custom_jvp_call jit pjit remat2 scan
    """.split()  # noqa: SIM905  A table of words reads better.
)


def drops_nan(eqn: core.JaxprEqn, operands: Sequence[Any]) -> str:
    """Why rows that were looked up out of bounds might not stay NaN; "" if they do."""
    for x in operands:
        if _is_masked(x):
            break
    else:
        return ""
    keeps = eqn.primitive.name in KEEP_NAN and all(
        jnp.issubdtype(v.aval.dtype, jnp.inexact) or _holds_programs(eqn)
        for v in eqn.outvars
        if hasattr(v.aval, "dtype")
    )
    if keeps:
        return ""
    return (
        f"{eqn.primitive.name} may not keep the NaN of rows looked up out of bounds; "
        "a lookup with mode='clip' has none"
    )


def _holds_programs(eqn: core.JaxprEqn) -> bool:
    return any(True for _ in inner_programs(eqn))


def _is_masked(value: Any) -> bool:
    if isinstance(value, Concat):
        return any(map(_is_masked, value.parts))
    return isinstance(value, Lazy) and value.lineage is not None and value.lineage.valid is not None


#: The ops' functions under jit, which hold kernels and are not gone into.
_OPS = ("_linear_compression", "_attention", "_gdpa")


def is_op(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a call that runs an op of this library."""

    def holds(jaxpr: Any) -> bool:
        eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
        return any(
            e.primitive is dispatch.plan_p or any(map(holds, inner_programs(e))) for e in eqns
        )

    return eqn.params.get("name") in _OPS and any(map(holds, inner_programs(eqn)))
