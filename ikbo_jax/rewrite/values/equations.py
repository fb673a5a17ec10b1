"""Properties of a single equation, found without the interpreter's state."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.ops import dispatch, explain
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs
from ikbo_jax.rewrite.values.lineage import is_at_least, is_plain


def described(error: Exception) -> str:
    """Describes an exception in one line: its type and the first line of its message."""
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def why_kept(eqn: core.JaxprEqn) -> str:
    """Says why a lookup of arrays ran as it is, instead of becoming a lazy value."""
    operand: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    if not isinstance(difference := result.size - operand.size, int):
        if not is_at_least(difference, 1):
            return f"its {result.shape} results are not proven to be more than its operand's rows"
    elif difference <= 0:
        return "its result has no more rows than its operand"
    if eqn.primitive.name == "tile":
        return "what it repeats depends on no input, or it repeats several dimensions"
    return "it does not look up whole rows by one index"


def on_integers(eqn: core.JaxprEqn) -> bool:
    """Whether all operands and results are integers or booleans, and there are no effects."""
    for v in itertools.chain(eqn.outvars, eqn.invars):
        aval: Any = v.aval
        try:
            if aval.dtype.kind not in "iub":
                return False
        except AttributeError:
            continue
    return not eqn.effects


def grows(eqn: core.JaxprEqn) -> bool:
    """Whether an operation of two arrays has a larger result than both, as a sum of [1, D], [B, 1].

    Only elementwise operations and products broadcast so, and products without a summed dimension.
    """
    if len(eqn.invars) != 2 or len(eqn.outvars) != 1:
        return False
    first, second = [v.aval for v in eqn.invars]
    shapes = getattr(first, "shape", ()), getattr(second, "shape", ())
    if not shapes[0] or not shapes[1] or shapes[0] == shapes[1] or len(shapes[0]) != len(shapes[1]):
        return False
    shape: Any = getattr(eqn.outvars[0].aval, "shape", ())
    return shape not in shapes and len(shape) == len(shapes[0])


def identity(operand: Any) -> Any:
    """Returns a key that equal operands share: the object's identity, or a literal's bits."""
    if isinstance(operand, jax.Array) or not is_plain(operand):
        return id(operand)
    array = constant_array(operand)
    # 0.0 and -0.0 are equal, but their bits differ.
    return (array.dtype, array.tobytes()) if array.ndim == 0 else id(operand)


def constant_array(value: Any) -> np.ndarray:
    """Returns a constant as an array of its own dtype.

    A literal may be a Python number with a dtype: 0.1 of float32 is another number than 0.1.
    """
    return np.asarray(value, getattr(value, "dtype", None))


def op_plan(eqn: core.JaxprEqn) -> dispatch.Plan | None:
    """Returns the plan of the op of this library that an equation calls; None for others.

    A model's function may have the name of an op's, and may call the op. The plan is then inside of
    another call of that name.
    """
    return _plan_in(inner_programs(eqn)) if eqn.params.get("name") in OPS else None


#: Primitives of lookups, repeated rows, and calls of `ikbo_jax.look_up`.
LOOKUPS = ("gather", "tile", "jit")


def is_lookup(eqn: core.JaxprEqn) -> bool:
    """Whether an equation looks rows up or repeats them, also as a call of `ikbo_jax.look_up`."""
    name = eqn.primitive.name
    if name == "jit":
        return (plan := op_plan(eqn)) is not None and plan.op == "look_up"
    return name in LOOKUPS


def _plan_in(programs: Sequence[core.Jaxpr]) -> dispatch.Plan | None:
    """Finds a plan in programs, outside of calls that have the name of an op's."""
    for program in programs:
        # From the end, since an op stores the plan with its result.
        for eqn in reversed(program.eqns):
            if eqn.primitive.name in explain.WITHOUT_PROGRAMS:
                continue
            if eqn.primitive is dispatch.plan_p:
                plan: dispatch.Plan = eqn.params["plan"]
                return plan
            found = None if eqn.params.get("name") in OPS else _plan_in(inner_programs(eqn))
            if found is not None:
                return found
    return None


#: Primitives that only move data, and calls of programs whose equations are looked at one by one.
_KEEP_RANGE = frozenset(
    """
    broadcast_in_dim concatenate copy dynamic_slice expand_dims gather name optimization_barrier pad
    pvary reshape reshard rev sharding_constraint slice split squeeze stack stop_gradient tile
    transpose unstack
    call_hi_primitive checkpoint cond ikbo_rewritten ikbo_rows jit remat2 scan shard_map while
    """.split()  # noqa: SIM905  A table of words reads better.
)


def may_overflow(eqn: core.JaxprEqn) -> bool:
    """Whether the sum of a result's gradients over candidates may be too large for its dtype.

    Each candidate's gradient is finite in float16 and float8; the sum of thousands may not be, and
    computed for a user, the equation's gradient would start from this sum. bfloat16 has the range
    of float32.
    """
    if eqn.primitive.name in _KEEP_RANGE:
        return False
    if eqn.primitive.name == "convert_element_type":
        return _has_small_range(eqn.params["new_dtype"])
    for v in (*eqn.invars, *eqn.outvars):
        # Nearly all values; `getattr` for each of them would be a hundredth of tracing a layer.
        known = type(v.aval) is jax.core.ShapedArray and v.aval.dtype in _WIDE
        if not known and _has_small_range(getattr(v.aval, "dtype", None)):
            return True
    return False


#: The usual dtypes whose numbers, or integers, have at least bfloat16's range, or no gradient.
_WIDE = frozenset(map(jnp.dtype, ("float32", "bfloat16", "float64", "int32", "bool")))


@functools.cache
def _has_small_range(dtype: Any) -> bool:
    """Whether a dtype is a floating-point type whose largest number is below bfloat16's."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return float(jnp.finfo(dtype).max) < float(jnp.finfo(jnp.bfloat16).max)


#: By an operand's dimension, the dimension of the result along which an equation keeps its rows.
Dims = dict[int, int]


def kept_dims(eqn: core.JaxprEqn, n: int, result: Any) -> Dims:
    """Finds the dimensions of operand `n` that stay whole in the variable `result`.

    Proofs follow the rows of users through a program by these dimensions.

    The equation is elementwise, or one of a primitive in `KEPT_DIMS`.
    """
    before: tuple[int, ...] = eqn.invars[n].aval.shape  # type: ignore[attr-defined]
    after: tuple[int, ...] = result.aval.shape
    found = KEPT_DIMS.get(eqn.primitive.name, _ALL)(eqn, before, after, n)
    return {d: k for d, k in found.items() if before[d] == after[k]}


def _but(name: str) -> Callable[..., Dims]:
    """Makes the rule of equations that keep the rows along all dimensions but a parameter's."""

    def rule(eqn: Any, before: Any, shape: Any, n: int) -> Dims:
        changed = eqn.params[name] if name else ()
        changed = changed if isinstance(changed, tuple) else (changed,)
        kept = [d for d in range(len(before)) if d not in changed]
        return dict(zip(kept, kept if len(shape) == len(before) else range(len(kept)), strict=True))

    return rule


def _of_reshape(eqn: Any, before: Any, shape: Any, n: int) -> Dims:
    if eqn.params["dimensions"] is not None:
        return {}
    sizes = [(math.prod(shape[:d]), size) for d, size in enumerate(shape)]
    found = ((d, (math.prod(before[:d]), size)) for d, size in enumerate(before))
    return {d: sizes.index(size) for d, size in found if size in sizes}


def _of_product(eqn: Any, before: Any, shape: Any, n: int) -> Dims:
    contract, batch = (x[n] for x in eqn.params["dimension_numbers"])
    free = [d for d in range(len(before)) if d not in (*contract, *batch)]
    first = len(batch) if n == 0 else len(shape) - len(free)
    return {d: k for k, d in enumerate(batch)} | {d: first + k for k, d in enumerate(free)}


_ALL = _but("")
#: A rule takes an equation, the shapes of an operand and of the result, and the operand's position.
KEPT_DIMS: dict[str, Callable[..., Dims]] = {
    **dict.fromkeys(("dynamic_slice", "slice"), _ALL),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_sum"), _but("axes")),
    "broadcast_in_dim": lambda eqn, *_: dict(enumerate(eqn.params["broadcast_dimensions"])),
    "concatenate": _but("dimension"),
    "dot_general": _of_product,
    "reshape": _of_reshape,
    "split": _but("axis"),
    "squeeze": _but("dimensions"),
    "transpose": lambda eqn, *_: {p: d for d, p in enumerate(eqn.params["permutation"])},
}
