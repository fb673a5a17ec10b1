"""Which values an integer array can hold, as far as the equations that made it tell.

`jnp.take` and `jnp.repeat` fill rows out of bounds with NaN. Where an index is known to lie in
bounds there are no such rows, and nothing has to be kept for them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ikbo_jax.rewrite.lineage import is_plain

Interval = tuple[int, int]


def within(ctx: Any, value: Any, low: int, high: int) -> bool:
    """Whether all elements are known to lie in [low, high]."""
    known = interval(ctx, value)
    return known is not None and low <= known[0] and known[1] <= high


def interval(ctx: Any, value: Any, depth: int = 16) -> Interval | None:
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
        return _cumsum(ctx, operands[0], depth)
    of = [interval(ctx, x, depth - 1) for x in operands]
    first = of[0] if of else None
    if name in ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "slice", "copy"):
        return first
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
    return _of_two(name, of[0], of[1])


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
    if made and made[0].primitive.name == "lt" and made[1][0] is first and _is_zero(made[1][1]):
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


def _is_zero(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0 and int(value) == 0


def _cumsum(ctx: Any, operand: Any, depth: int) -> Interval | None:
    """Running counts of marks, as `jnp.repeat` makes them: at most as many as there are marks."""
    made = ctx.producer(operand)
    known = interval(ctx, operand, depth - 1)
    if made is None or made[0].primitive.name != "scatter-add":
        if known is None or known[0] < 0:
            return None
        return known[0], known[1] * operand.size
    start, _, updates = made[1]
    before, added = interval(ctx, start, depth - 1), interval(ctx, updates, depth - 1)
    if before != (0, 0) or added is None or added[0] < 0:
        return None
    return 0, added[1] * int(np.size(updates))
