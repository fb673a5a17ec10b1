"""What is known of a value from the equations that made it: its numbers, bounds and pattern.

An index that is known to lie in bounds needs no care for rows out of bounds; a scale or a mask's
fill has to be a known number; a mask that counts keys is known from what it compares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ikbo_jax.rewrite.lineage import Lazy, base_of, is_plain

Interval = tuple[int, int]

#: Primitives that move elements or repeat them, and change none.
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy")
#: How far back the equations are followed.
_DEPTH = 16


# Numbers.


def constant(ctx: Any, value: Any) -> float | None:
    """The number that a value is everywhere; None if it is none, or unknown."""
    if isinstance(value, Lazy) and value.lineage is None and value.base.size == 1:
        made = ctx.producer(value)
        return constant(ctx, made[1][0]) if made else constant(ctx, value.base)
    if not is_plain(value) or np.size(value) != 1:
        return None
    if not isinstance(value, jax.core.Tracer):
        array = np.asarray(value).reshape(())
        return float(array.astype(np.float64)) if array.dtype.kind in "biufV" else None
    made = ctx.producer(value)
    if made is None:
        return None
    eqn, operands = made
    of = [constant(ctx, x) for x in operands]
    if None in of or eqn.primitive.name not in _ARITHMETIC:
        return None
    with np.errstate(all="ignore"):
        found = _ARITHMETIC[eqn.primitive.name](eqn, *of)
        # As the program rounds it.
        return float(np.asarray(found, eqn.outvars[0].aval.dtype).astype(np.float64))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "convert_element_type": lambda _, x: x,
    "broadcast_in_dim": lambda _, x: x,
    "reshape": lambda _, x: x,
    "squeeze": lambda _, x: x,
    "sqrt": lambda _, x: np.sqrt(x),
    "rsqrt": lambda _, x: np.divide(1, np.sqrt(x)),
    "neg": lambda _, x: -x,
    "mul": lambda _, x, y: x * y,
    "div": lambda _, x, y: np.divide(x, y),
    "add": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "pow": lambda _, x, y: np.power(x, y),
    "integer_pow": lambda eqn, x: np.power(x, float(eqn.params["y"])),
}


def possible_values(ctx: Any, value: Any, depth: int = _DEPTH) -> set[float] | None:
    """The few numbers that a value can hold; None if they are many, or unknown."""
    number = constant(ctx, value)
    if number is not None:
        return {number}
    if getattr(value, "dtype", None) == np.bool_:
        return {0.0, 1.0}
    made = ctx.producer(value)
    if made is None or depth == 0:
        return None
    eqn, operands = made
    name = eqn.primitive.name
    if name == "gather":
        found = possible_values(ctx, operands[0], depth - 1)
        # Rows out of bounds may hold another number.
        filled = eqn.params["fill_value"] is not None or "FILL" in str(eqn.params["mode"])
        return None if filled else found
    if name in MOVES:
        return possible_values(ctx, operands[0], depth - 1)
    if name == "convert_element_type":
        found = possible_values(ctx, operands[0], depth - 1)
        if found is None:
            return None
        with np.errstate(all="ignore"):
            # A narrower dtype may make an infinity of a number.
            cast = np.asarray(list(found)).astype(eqn.outvars[0].aval.dtype)
        return set(cast.astype(np.float64).tolist())
    if name == "select_n":
        operands = operands[1:]
    elif name not in ("add", "sub", "mul"):
        return None
    of = [possible_values(ctx, x, depth - 1) for x in operands]
    if any(x is None for x in of):
        return None
    if name == "select_n":
        return set().union(*(x for x in of if x))
    pairs = itertools.product(*(x for x in of if x is not None))
    with np.errstate(all="ignore"):
        values = [_ARITHMETIC[name](eqn, *pair) for pair in pairs]
        rounded = np.asarray(values, eqn.outvars[0].aval.dtype).astype(np.float64)
    return set(rounded.tolist()) if len(set(values)) <= 4 and not np.isnan(rounded).any() else None


# Patterns.


def moved_from(ctx: Any, value: Any) -> Any:
    """The operand of the move that made a value; None if no move did, or if it is unknown."""
    made = ctx.producer(value)
    return made[1][0] if made is not None and made[0].primitive.name in MOVES else None


def is_true(ctx: Any, value: Any) -> bool:
    """Whether all elements are known to be true, or not 0."""
    while not is_plain(value) or isinstance(value, jax.core.Tracer):
        value = moved_from(ctx, value)
        if value is None:
            return False
    return bool(np.all(np.asarray(value)))


def counts_up(ctx: Any, value: Any, size: int) -> bool:
    """Whether an array holds 0, 1, ..., size - 1 along one dimension."""
    if np.size(base_of(value)) != size:
        return False
    while not is_plain(value) or isinstance(value, jax.core.Tracer):
        made = ctx.producer(value)
        if made is not None and made[0].primitive.name == "iota":
            return True
        if made is None or made[0].primitive.name not in (*MOVES, "convert_element_type"):
            return False
        value = made[1][0]
    return np.array_equal(np.ravel(value), np.arange(size))


def lengths(ctx: Any, mask: Any, users: int, keys: int) -> Any:
    """[users] values, if a mask by user and key is `iota < values`; else None."""
    value = mask
    while (made := ctx.producer(value)) is not None:
        eqn, operands = made
        name = eqn.primitive.name
        if name in ("lt", "gt"):
            position, length = operands if name == "lt" else reversed(operands)
            found = base_of(length)
            if counts_up(ctx, position, keys) and np.size(found) == users:
                whole = getattr(found, "dtype", np.dtype(int)).kind in "iu"
                return found.reshape(users) if whole and np.ndim(found) else None
            return None
        if name == "and":
            trues = [is_true(ctx, x) for x in operands]
            if sum(trues) != 1:
                return None
            value = operands[trues.index(False)]
        elif name in MOVES:
            value = operands[0]
        else:
            return None
    return None


# Bounds.


def within(ctx: Any, value: Any, low: int, high: int) -> bool:
    """Whether all elements are known to lie in [low, high]."""
    known = interval(ctx, value)
    return known is not None and low <= known[0] and known[1] <= high


def interval(ctx: Any, value: Any, depth: int = _DEPTH) -> Interval | None:
    """The smallest and largest value that an integer array can hold; None if unknown."""
    if is_plain(value) and not isinstance(value, jax.core.Tracer):
        array = np.asarray(value)
        if array.size == 0 or array.dtype.kind not in "iub":
            return None
        return int(array.min()), int(array.max())
    made = ctx.producer(value)
    if made is None or depth == 0:
        return None
    eqn, operands = made
    name = eqn.primitive.name
    if name == "iota":
        return 0, eqn.params["shape"][eqn.params["dimension"]] - 1
    if name == "select_n":
        return _select(ctx, operands, depth)
    if name == "cumsum":
        sums = _cumsum(ctx, operands[0], depth)
        return sums if sums and _fits(sums, eqn.outvars[0].aval.dtype) else None
    of = [interval(ctx, x, depth - 1) for x in operands]
    first = of[0] if of else None
    if name in (*MOVES, "slice"):
        return first
    if name == "convert_element_type":
        # Into a narrower type, values may wrap around.
        kept = first is not None and _fits(first, eqn.outvars[0].aval.dtype)
        return first if kept else None
    if name in ("max", "min") and len(of) == 2 and (of[0] or of[1]):
        return _extremum(name, of)
    if name == "clamp" and of[0] and of[2]:
        return of[0][0], of[2][1]
    if name == "concatenate" and all(of):
        return min(x[0] for x in of if x), max(x[1] for x in of if x)
    if name in ("and", "or") and on_truth_values(operands):
        return _extremum("min" if name == "and" else "max", [x or (0, 1) for x in of])
    if len(of) != 2 or not of[0] or not of[1]:
        return None
    found = _of_two(name, of[0], of[1])
    # What does not fit the dtype wraps around.
    return found if found and _fits(found, eqn.outvars[0].aval.dtype) else None


def _fits(known: Interval, dtype: Any) -> bool:
    if np.dtype(dtype).kind not in "iu":
        return np.dtype(dtype) == np.bool_ and known[0] >= 0 and known[1] <= 1
    limits = np.iinfo(dtype)
    return limits.min <= known[0] and known[1] <= limits.max


def on_truth_values(operands: Any) -> bool:
    """Whether all operands are truth values."""
    return all(np.result_type(x.dtype if hasattr(x, "dtype") else x) == np.bool_ for x in operands)


def _of_two(name: str, first: Interval, second: Interval) -> Interval | None:
    (a, b), (c, d) = first, second
    if name in ("lt", "ge"):
        always, never = b < c, a >= d
    elif name in ("gt", "le"):
        always, never = a > d, b <= c
    elif name in ("eq", "ne"):
        always, never = a == b == c == d, b < c or d < a
    if name in ("lt", "gt", "eq"):
        return int(always), int(not never)
    if name in ("ge", "le", "ne"):
        return int(never), int(not always)
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "rem" and a >= 0 and c > 0:
        return 0, min(b, d - 1)
    if name == "div" and a >= 0 and c > 0:
        return a // d, b // c
    return None


def _extremum(name: str, of: list[Interval | None]) -> Interval | None:
    """Of two values, one of which may be unknown: then one bound is."""
    pick = max if name == "max" else min
    lows, highs = zip(*(x or (-(2**63), 2**63) for x in of), strict=True)
    return pick(lows), pick(highs)


def _select(ctx: Any, operands: Any, depth: int) -> Interval | None:
    """`where(x < 0, x + n, x)`, as indexing writes it, or any choice of two known ones."""
    which, first, second = operands if len(operands) == 3 else (None, None, None)
    chosen = interval(ctx, which, depth - 1)
    if chosen is not None and chosen[0] == chosen[1] and chosen[0] < len(operands) - 1:
        return interval(ctx, operands[1 + chosen[0]], depth - 1)
    made = ctx.producer(which)
    is_lt = made is not None and made[0].primitive.name == "lt" and made[1][0] is first
    if made and is_lt and constant(ctx, made[1][1]) == 0:
        known, added = interval(ctx, first, depth - 1), ctx.producer(second)
        if known and added and added[0].primitive.name == "add" and added[1][0] is first:
            size = interval(ctx, added[1][1], depth - 1)
            if size is not None:
                candidates = [(max(known[0], 0), known[1])] if known[1] >= 0 else []
                if known[0] < 0:
                    candidates.append((known[0] + size[0], min(known[1], -1) + size[1]))
                return min(c[0] for c in candidates), max(c[1] for c in candidates)
    of = [interval(ctx, x, depth - 1) for x in operands[1:]]
    if not all(of):
        return None
    return min(x[0] for x in of if x), max(x[1] for x in of if x)


def chosen(ctx: Any, value: Any) -> Any:
    """The operand that a choice is known to take everywhere; another value itself."""
    made = ctx.producer(value)
    if made is not None and made[0].primitive.name == "select_n":
        which = interval(ctx, made[1][0])
        if which is not None and which[0] == which[1]:
            return chosen(ctx, made[1][1 + which[0]])
    return value


def _cumsum(ctx: Any, operand: Any, depth: int) -> Interval | None:
    """Running counts of marks, as `jnp.repeat` makes them: at most as many as there are marks."""
    made = ctx.producer(operand)
    known = interval(ctx, operand, depth - 1)
    if made is None or made[0].primitive.name != "scatter-add":
        if known is None or known[0] < 0:
            return None
        return known[0], known[1] * math.prod(np.shape(operand))
    start, _, updates = made[1]
    before, added = interval(ctx, start, depth - 1), interval(ctx, updates, depth - 1)
    if before != (0, 0) or added is None or added[0] < 0:
        return None
    # `np.size` of a lazy value would be 1.
    return 0, added[1] * math.prod(np.shape(updates))
