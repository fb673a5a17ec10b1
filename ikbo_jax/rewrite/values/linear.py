"""Proves that a program is linear in some arguments, and maps every row of them by itself.

Every value of the program is 0, or it does not depend on these arguments ("free"), or it is linear
in them and one of its axes is their rows' axis: row n of the value is linear in their rows n alone.
Rounding counts as linear; what overflows, `equations.may_overflow` finds.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.values.equations import kept_dims

_ZERO, _FREE = "zero", "free"
#: What is known of a value: the rows' axis of a linear value, or one of the above.
Kind = int | str

_SAME_AXIS = frozenset(["add", "add_any", "convert_element_type", "copy", "name", "neg", "sub"])
_MOVES = frozenset(["broadcast_in_dim", "reduce_sum", "reshape", "squeeze", "transpose"])
_CALLS = frozenset(["jit", "remat2", "checkpoint"])


class _NotLinear(Exception):
    """Is raised at an equation that may not be linear, or may mix rows."""


def is_linear_by_row(
    program: core.Jaxpr, axes: Sequence[int | None], result_axes: Sequence[int]
) -> bool:
    """Whether a program is linear in some arguments, row by row.

    Args:
      program: the program.
      axes: for every argument, the axis of its rows; None if the argument counts as a constant.
      result_axes: for every result, the axis that must hold the rows. A result may also be 0.
    """
    try:
        found = _kinds(program, [_FREE if axis is None else axis for axis in axes])
    except _NotLinear:
        return False
    return all(x in (_ZERO, axis) for x, axis in zip(found, result_axes, strict=True))


def _kinds(program: core.Jaxpr, arguments: Sequence[Kind]) -> list[Kind]:
    """Finds what is known of a program's results."""
    kinds: dict[Any, Kind] = dict.fromkeys(program.constvars, _FREE)
    kinds.update(zip(program.invars, arguments, strict=True))

    def kind(v: Any) -> Kind:
        if isinstance(v, core.Literal):
            return _ZERO if np.all(np.asarray(v.val) == 0) else _FREE
        return kinds[v]

    for eqn in program.eqns:
        results = _results(eqn, [kind(v) for v in eqn.invars])
        kinds.update(zip(eqn.outvars, results, strict=True))
    return [kind(v) for v in program.outvars]


def _results(eqn: core.JaxprEqn, operands: list[Kind]) -> list[Kind]:
    name = eqn.primitive.name
    if name in _CALLS:
        return _kinds(eqn.params["jaxpr"], operands)
    linear = [x for x in operands if isinstance(x, int)]
    if not linear:
        zero = operands[:1] == [_ZERO] and name in ("broadcast_in_dim", "convert_element_type")
        return [_ZERO if zero else _FREE] * len(eqn.outvars)
    # A cast to integers rounds.
    if not all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):  # type: ignore[attr-defined]
        raise _NotLinear
    axis = linear[0]
    is_select = name == "select_n" and operands[0] == _FREE
    summed = operands[1:] if is_select else operands
    if (is_select or name in _SAME_AXIS) and _FREE not in summed and set(linear) == {axis}:
        return [axis]
    if name == "mul" and operands.count(_FREE) == 1 or name == "div" and operands[1] == _FREE:
        return [axis]
    if name == "dot_general" and len(linear) == 1 and _FREE in operands:
        precision = jax.tree.leaves(eqn.params["precision"])
        if not all(isinstance(x, lax.Precision) for x in precision):
            # The algorithm of a product may cast its operands.
            raise _NotLinear
        return [_moved(eqn, 0 if operands[1] == _FREE else 1, axis)]
    if name in _MOVES and len(operands) == 1:
        return [_moved(eqn, 0, axis)]
    raise _NotLinear


def _moved(eqn: core.JaxprEqn, n: int, axis: int) -> int:
    """Finds the rows' axis of the result of an equation whose operand `n` is linear."""
    dims = kept_dims(eqn, n, eqn.outvars[0])
    if axis not in dims:
        raise _NotLinear
    return int(dims[axis])
