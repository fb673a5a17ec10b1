"""Facts about a value, proven from its producing equations: its number, bounds and pattern.

An index that is proven to be in bounds needs no rows for indices out of bounds. A scale or the
number of a mask must be proven to be a constant. A comparison with `arange` proves that a mask
keeps the first keys of every user.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ikbo_jax.rewrite.facts.known import COMPUTED, known, positions
from ikbo_jax.rewrite.values.equations import constant_array
from ikbo_jax.rewrite.values.lineage import (
    base_of,
    is_at_least,
    is_only_broadcast,
    is_plain,
    most,
)
from ikbo_jax.rewrite.values.staged import shape_of

Interval = tuple[int, int]

#: Primitives that move or repeat elements and change none.
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "pvary", "reshard")
#: The depth to which producing equations are followed.
_DEPTH = 16
#: Constant arrays of at most this size are searched for a few numbers.
_SMALL = 1 << 16


def constant(ctx: Any, value: Any) -> float | None:
    """Finds the number that all elements of a value equal; None if that is not proven."""
    if is_only_broadcast(value) and value.base.size == 1:
        produced = ctx.producer(value)
        return constant(ctx, produced[1][0]) if produced else constant(ctx, value.base)
    if not is_plain(value) or np.size(value) != 1:
        return None
    if not isinstance(value, jax.core.Tracer):
        array = constant_array(value).reshape(())
        return float(array.astype(np.float64)) if array.dtype.kind in "biufV" else None
    name, eqn, operands = ctx.made_by(value)
    numbers = [constant(ctx, x) for x in operands]
    if None in numbers or name not in _ARITHMETIC:
        return None
    return float(_rounded(eqn, [numbers])[0])


def _rounded(eqn: Any, choices: Iterable[Any]) -> np.ndarray:
    """Computes an equation for numbers of its operands; the program rounds results to its dtype."""
    compute, aval = _ARITHMETIC[eqn.primitive.name], eqn.outvars[0].aval
    with np.errstate(all="ignore"):
        results = [compute(eqn.params, *numbers) for numbers in choices]
        return np.asarray(results).astype(aval.dtype).astype(np.float64)


#: Primitives whose results' elements are elements of some operands, and these operands.
_ONE_OF = {
    "concatenate": slice(None),
    "pad": slice(None),
    "scatter": slice(0, None, 2),
    "select_n": slice(1, None),
}
#: Primitives that compute few numbers from few numbers.
_OF_FEW = ("add", "max", "min", "mul", "sub")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "reshard", "squeeze"), lambda _, x: x),
    **{name: COMPUTED[name] for name in (*_OF_FEW, "convert_element_type", "neg", "pvary")},
    "sqrt": lambda _, x: np.sqrt(x),
    "rsqrt": lambda _, x: np.divide(1, np.sqrt(x)),
    "div": lambda _, x, y: np.divide(x, y),
    "pow": lambda _, x, y: np.power(x, y),
    "integer_pow": lambda params, x: np.power(x, float(params["y"])),
}


def possible_values(ctx: Any, value: Any, depth: int = _DEPTH) -> set[float] | None:
    """Finds the few numbers that the elements of a value can be; None if there may be others."""
    number = constant(ctx, value)
    if number is not None:
        return {number}
    if getattr(value, "dtype", None) == np.bool_:
        return {0.0, 1.0}
    if is_plain(value) and not isinstance(value, jax.core.Tracer) and np.size(value) <= _SMALL:
        array = constant_array(value)
        numbers: Any = np.unique(array.astype(np.float64)) if array.dtype.kind in "biufV" else []
        few = 0 < len(numbers) <= 4 and not np.isnan(numbers).any()
        return set(map(float, numbers)) if few else None
    name, eqn, operands = ctx.made_by(value)
    if depth == 0:
        return None
    if name == "gather":
        of_operand = possible_values(ctx, operands[0], depth - 1)
        return None if _may_fill(eqn) else of_operand
    if name in MOVES:
        return possible_values(ctx, operands[0], depth - 1)
    if name == "convert_element_type":
        of_operand = possible_values(ctx, operands[0], depth - 1)
        # The cast to a narrower dtype may overflow.
        return of_operand and set(_rounded(eqn, zip(of_operand)).tolist())
    if name in _ONE_OF:
        operands = operands[_ONE_OF[name]]
    elif name not in _OF_FEW:
        fixed = known(ctx, value) if name == "jit" else None
        return None if fixed is None else possible_values(ctx, fixed)
    choices = [possible_values(ctx, x, depth - 1) for x in operands]
    if any(x is None for x in choices):
        return None
    numbers = [x for x in choices if x is not None]
    if name in _ONE_OF:
        found = np.asarray([n for x in numbers for n in x])
    else:
        found = _rounded(eqn, itertools.product(*numbers))
    values = set(found.tolist())
    return values if len(values) <= 4 and not np.isnan(found).any() else None


def _may_fill(eqn: Any) -> bool:
    """Whether a lookup may return another number than its operand's, out of bounds."""
    return eqn.params["fill_value"] is not None or "FILL" in str(eqn.params["mode"])


def is_fixed(ctx: Any, value: Any) -> bool:
    """Whether a value is proven to be the same for all inputs: made of constants and positions."""
    values, seen = [value], {id(value)}
    while values:
        x = values.pop()
        if is_plain(x) and not isinstance(x, jax.core.Tracer):
            continue
        name, eqn, operands = ctx.made_by(x)
        if not name or eqn.effects or len(seen) > _FEW_EQUATIONS:
            return False
        values += [y for y in operands if id(y) not in seen]
        seen.update(map(id, operands))
    return True


#: The number of values among which `is_fixed` searches for inputs.
_FEW_EQUATIONS = 64


def source_of_mask(ctx: Any, mask: Any, names: Any) -> tuple[Any, tuple[Any, ...]]:
    """Finds the value that a mask is cast and expanded from, with names of its dimensions.

    Masks with one source and the same names are equal. `names` name the mask's dimensions.
    """
    names = list(names)
    while (produced := ctx.producer(mask)) is not None and produced[1]:
        eqn, (first, *rest) = produced
        shape, name = np.shape(first) if is_plain(first) else first.shape, eqn.primitive.name
        if name == "broadcast_in_dim" and not rest:
            names = [names[d] for d in eqn.params["broadcast_dimensions"]]
        elif name in ("reshape", "squeeze"):
            sizes = eqn.outvars[0].aval.shape
            if [n for n in shape if n != 1] != [n for n in sizes if n != 1]:
                break
            kept = iter([name for name, n in zip(names, sizes, strict=True) if n != 1])
            names = [next(kept) if n != 1 else None for n in shape]
        elif name != "convert_element_type" or getattr(first, "dtype", None) != np.bool_:
            break
        mask = first
    shape = np.shape(mask) if is_plain(mask) else mask.shape
    return mask, tuple(name if n != 1 else None for name, n in zip(names, shape, strict=True))


def same_source(first: Any, second: Any) -> bool:
    """Whether two masks have one source; False if the source of one is None."""
    if first is None or second is None:
        return False
    return first[0] is second[0] and first[1] == second[1]


def counts_along(ctx: Any, value: Any, dim: int) -> bool:
    """Whether the elements of an array are proven to be 0, 1, ... along one of its dimensions."""
    found, shape = known(ctx, value), shape_of(value)
    if found is None or found.ndim != len(shape) or found.shape[dim] != shape[dim]:
        return False
    return bool(np.all(found == positions(shape, dim)))


def is_along_one(value: Any, size: int) -> bool:
    """Whether an array has `size` elements along one dimension, and size 1 along all others.

    Reshapes and transposes of such arrays keep the order of the elements. With two dimensions, a
    reshape after a transpose shuffles them.
    """
    return [n for n in np.shape(base_of(value)) if n != 1] == [size] * (size != 1)


def within(ctx: Any, value: Any, low: int, high: Any) -> bool:
    """Whether all elements are proven to lie in [low, high]."""
    bounds = interval(ctx, value)
    return bounds is not None and low <= bounds[0] and is_at_least(high, bounds[1])


def single(ctx: Any, value: Any, depth: int = _DEPTH) -> int | None:
    """Finds the integer that all elements are proven to equal; None if that is not proven."""
    bounds = interval(ctx, value, depth)
    return bounds[0] if bounds is not None and bounds[0] == bounds[1] else None


def interval(ctx: Any, value: Any, depth: int = _DEPTH) -> Interval | None:
    """Bounds [low, high] of an integer or boolean array; None if none are proven."""
    if is_plain(value) and not isinstance(value, jax.core.Tracer):
        array = np.asarray(value)
        if array.size == 0 or array.dtype.kind not in "iub":
            return None
        return int(array.min()), int(array.max())
    name, eqn, operands = ctx.made_by(value)
    if depth == 0:
        return None
    if name == "iota":
        numbers = 0, most(eqn.params["shape"][eqn.params["dimension"]]) - 1
        return numbers if _fits(numbers, eqn.outvars[0].aval.dtype) else None
    if name == "select_n":
        return _select(ctx, operands, depth)
    if name == "cumsum":
        sums = _cumsum(ctx, operands[0], depth)
        return sums if sums and _fits(sums, eqn.outvars[0].aval.dtype) else None
    if name == "gather":
        return None if _may_fill(eqn) else interval(ctx, operands[0], depth - 1)
    bounds = [interval(ctx, x, depth - 1) for x in operands]
    first = bounds[0] if bounds else None
    if name in (*MOVES, "slice"):
        return first
    if name == "convert_element_type":
        # Integers that the new dtype cannot hold wrap around.
        kept = first is not None and _fits(first, eqn.outvars[0].aval.dtype)
        return first if kept else None
    if name in ("max", "min") and len(bounds) == 2 and (bounds[0] or bounds[1]):
        return _extremum(name, bounds)
    if name == "clamp" and bounds[0] and bounds[2]:
        # The upper bound counts where it is below the lower one.
        return min(bounds[0][0], bounds[2][0]), bounds[2][1]
    if name == "concatenate" and all(bounds):
        return min(x[0] for x in bounds if x), max(x[1] for x in bounds if x)
    if name in ("and", "or") and all(
        np.result_type(getattr(x, "dtype", x)) == np.bool_ for x in operands
    ):
        return _extremum("min" if name == "and" else "max", [x or (0, 1) for x in bounds])
    if len(bounds) != 2 or not bounds[0] or not bounds[1]:
        return None
    result = _of_two(name, bounds[0], bounds[1])
    # Results that the dtype cannot hold wrap around.
    return result if result and _fits(result, eqn.outvars[0].aval.dtype) else None


def _fits(bounds: Interval, dtype: Any) -> bool:
    if np.dtype(dtype).kind not in "iu":
        return np.dtype(dtype) == np.bool_ and bounds[0] >= 0 and bounds[1] <= 1
    limits = np.iinfo(dtype)
    return limits.min <= bounds[0] and bounds[1] <= limits.max


def _of_two(name: str, first: Interval, second: Interval) -> Interval | None:
    (a, b), (c, d) = first, second
    less, greater, same = (b < c, a >= d), (a > d, b <= c), (a == b == c == d, b < c or d < a)
    if (found := {"lt": less, "gt": greater, "eq": same}.get(name)) is not None:
        return int(found[0]), int(not found[1])
    if (found := {"ge": less, "le": greater, "ne": same}.get(name)) is not None:
        return int(found[1]), int(not found[0])
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "rem" and a >= 0 and c > 0:
        return 0, min(b, d - 1)
    if name == "div" and a >= 0 and c > 0:
        return a // d, b // c
    return None


def _extremum(name: str, bounds: list[Interval | None]) -> Interval | None:
    pick = max if name == "max" else min
    lows, highs = zip(*(x or (-(2**63), 2**63) for x in bounds), strict=True)
    return pick(lows), pick(highs)


def _select(ctx: Any, operands: Any, depth: int) -> Interval | None:
    """Bounds of `select_n`, in particular of `where(x < 0, x + n, x)`, as indexing writes it."""
    which, first, second = operands if len(operands) == 3 else (None, None, None)
    case = single(ctx, which, depth - 1)
    if case is not None and case < len(operands) - 1:
        return interval(ctx, operands[1 + case], depth - 1)
    test, _, compared = ctx.made_by(which)
    if test == "lt" and compared[0] is first and constant(ctx, compared[1]) == 0:
        bounds, (name, _, added) = interval(ctx, first, depth - 1), ctx.made_by(second)
        if bounds and name == "add" and added[0] is first:
            size = interval(ctx, added[1], depth - 1)
            if size is not None:
                ranges = [(max(bounds[0], 0), bounds[1])] if bounds[1] >= 0 else []
                if bounds[0] < 0:
                    ranges.append((bounds[0] + size[0], min(bounds[1], -1) + size[1]))
                return min(r[0] for r in ranges), max(r[1] for r in ranges)
    cases = [interval(ctx, x, depth - 1) for x in operands[1:]]
    if not all(cases):
        return None
    return min(x[0] for x in cases if x), max(x[1] for x in cases if x)


def selected(ctx: Any, value: Any) -> Any:
    """Returns the operand that a `select_n` provably selects everywhere; keeps other values."""
    name, _, operands = ctx.made_by(value)
    which = single(ctx, operands[0]) if name == "select_n" else None
    return value if which is None else selected(ctx, operands[1 + which])


def unwrapped(ctx: Any, value: Any, rows: int, *, clips: bool) -> tuple[Any, bool]:
    """Returns x of `where(x < 0, x + rows, x)`, as indexing writes it, and whether it is that.

    If an index out of bounds takes the nearest row (`clips`), also x of `jnp.clip(x, 0, rows - 1)`.
    """
    name, _, operands = ctx.made_by(value)
    if name in ("max", "min") and clips:
        for y, x in itertools.permutations(operands):
            if (bound := single(ctx, y)) is not None and (
                bound <= 0 if name == "max" else bound >= rows - 1
            ):
                return unwrapped(ctx, x, rows, clips=True)[0], False
    which, x, wrapped = operands if name == "select_n" and len(operands) == 3 else (None,) * 3
    (test, _, compared), (added, _, sum_of) = ctx.made_by(which), ctx.made_by(wrapped)
    if test != "lt" or added != "add" or compared[0] is not x or sum_of[0] is not x:
        return value, False
    is_wrapped = (constant(ctx, compared[1]), single(ctx, sum_of[1])) == (0, rows)
    return (x, True) if is_wrapped else (value, False)


def _cumsum(ctx: Any, operand: Any, depth: int) -> Interval | None:
    """Bounds of a running sum; sums of scattered counts, as in `jnp.repeat`, get closer bounds."""
    name, _, scattered = ctx.made_by(operand)
    bounds = interval(ctx, operand, depth - 1)
    if name != "scatter-add":
        if bounds is None or bounds[0] < 0:
            return None
        return bounds[0], bounds[1] * most(math.prod(np.shape(operand)))
    start, _, updates = scattered
    before, added = interval(ctx, start, depth - 1), interval(ctx, updates, depth - 1)
    if before != (0, 0) or added is None or added[0] < 0:
        return None
    # `np.size` of a lazy value would be 1.
    return 0, added[1] * most(math.prod(np.shape(updates)))
