"""What a program's equations prove about masks: which elements are fixed, and intervals of keys.

A mask may be written in booleans or in numbers: as a product of masks, or as a bias that is 0 where
a key is kept. `_reading` finds how an equation's result is other than 0 by its operands. With it,

- `known_mask` finds the elements that the program fixes where others depend on inputs, as in a
  causal mask combined with lengths;
- `factors` splits a mask into masks that must all keep a key, as those of user and candidate;
- `is_interval` proves that each row of a mask keeps keys that follow each other, as the rows of
  `arange(S) < n` for any n, of a window or of a triangle.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.facts.known import OF_TWO, cuts, known
from ikbo_jax.rewrite.values.equations import kept_dims
from ikbo_jax.rewrite.values.lineage import base_of
from ikbo_jax.rewrite.values.staged import shape_of

#: An element of `known_mask` that depends on inputs.
UNKNOWN = 2
_DEPTH = 64

_MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "pvary"),
    *("reshape", "slice", "squeeze", "transpose"),
)
_OF_TWO = OF_TWO | {"div": np.divide}
#: How a result may be other than 0, where its first or second operand is.
_READINGS: tuple[tuple[str, tuple[int, ...], Callable[[bool, bool], bool]], ...] = (
    ("same", (0,), lambda x, y: x),
    ("same", (1,), lambda x, y: y),
    ("not", (0,), lambda x, y: not x),
    ("not", (1,), lambda x, y: not y),
    ("and", (0, 1), lambda x, y: x and y),
    ("or", (0, 1), lambda x, y: x or y),
)

_NOTHING: tuple[str, Any, Sequence[Any]] = ("", None, ())


def _reading(ctx: Any, value: Any) -> tuple[str, Any, Sequence[Any]]:
    """Finds how the elements of a value that are other than 0 follow from those of its operands.

    Returns:
      "and", "or", "not", "same", "select" or "move", the equation, and the operands that count; ""
      if they do not follow.
    """
    name, eqn, operands = ctx.made_by(value)
    if name in _MOVES:
        return "move", eqn, operands
    if name in ("and", "or", "not") and _is_bool(value):
        return name, eqn, operands
    if name in ("abs", "neg", "sign", "stop_gradient"):
        return "same", eqn, operands
    if name == "select_n" and len(operands) == 3 and _is_bool(operands[0]):
        which, *cases = operands
        if_false, if_true = (proofs.constant(ctx, x) for x in cases)
        if None not in (if_false, if_true) and (if_false == 0) != (if_true == 0):
            return "same" if if_false == 0 else "not", eqn, [which]
        if if_false == 0:
            return "and", eqn, [which, cases[1]]
        return ("or", eqn, [which, cases[0]]) if if_true else ("select", eqn, operands)
    if name == "convert_element_type":
        numbers = few_numbers(ctx, operands[0])
        same = numbers and all(_is_nonzero(eqn, x) == (x != 0) for x in numbers)
        return "same" if _is_bool(value) or same else "", eqn, operands
    if name in _OF_TWO and len(operands) == 2:
        first, second = (few_numbers(ctx, x) for x in operands)
        if name in ("eq", "ne"):
            # Every number is 0 or another one.
            first, second = (
                {0.0, 1.0} if mine is None and other == {0.0} else mine
                for mine, other in ((first, second), (second, first))
            )
        with np.errstate(all="ignore"):
            results = {
                (x != 0, y != 0, _is_nonzero(eqn, _OF_TWO[name](x, y)))
                for x in first or ()
                for y in second or ()
            }
        for how, of, rule in _READINGS:
            if results and all(rule(x, y) == result for x, y, result in results):
                return how, eqn, [operands[n] for n in of]
    return "", eqn, ()


def few_numbers(ctx: Any, value: Any) -> set[float] | None:
    """Finds the few numbers that the elements of a value can be; None if there may be others."""
    found = proofs.possible_values(ctx, value)
    if found is not None or (number := known(ctx, value)) is None:
        return found
    unique = set(np.unique(number.astype(np.float64)).tolist())
    return unique if len(unique) <= 4 and not any(x != x for x in unique) else None


def _is_bool(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.bool_


def _is_nonzero(eqn: core.JaxprEqn, number: Any) -> bool | None:
    """Whether a number is other than 0 in the dtype of an equation's result.

    None for numbers so small that XLA may take them for 0.
    """
    aval: Any = eqn.outvars[0].aval
    with np.errstate(all="ignore"):
        rounded = abs(float(np.asarray(number).astype(aval.dtype).astype(np.float64)))
    return None if 0 < rounded < 2.0**-125 else rounded != 0


def known_mask(ctx: Any, mask: Any) -> np.ndarray:
    """Finds which elements of a mask are 0 or False (0), are not (1), or depend on inputs.

    The latter are `UNKNOWN`. The array has the rank of the mask and broadcasts to its shape.
    """
    return _known(ctx, mask, _DEPTH)


def _known(ctx: Any, mask: Any, depth: int) -> np.ndarray:
    how, eqn, operands = _reading(ctx, mask) if depth else _NOTHING
    if not how:
        number = known(ctx, mask)
        return _bounded(ctx, mask) if number is None else (number != 0).astype(np.int8)
    masks = [_known(ctx, x, depth - 1) for x in operands]
    if how != "move":
        found = _LOGIC[how](*masks).astype(np.int8)
        # An operand that counts alone may be a number.
        return found.reshape((1,) * (len(shape_of(mask)) - found.ndim) + found.shape)
    return _moved(eqn, masks, [shape_of(x) for x in operands], eqn.outvars[0].aval.shape)


def _bounded(ctx: Any, mask: Any) -> np.ndarray:
    """Finds what bounds of integers prove of their comparison: `arange(S) < maximum(n, 1)`."""
    found = np.full((1,) * len(shape_of(mask)), UNKNOWN, np.int8)
    name, _, operands = ctx.made_by(mask)
    if name not in ("ge", "gt", "le", "lt"):
        return found
    ends: list[Any] = []
    for x in operands if name in ("lt", "le") else reversed(operands):
        number = known(ctx, x)
        ends.append(proofs.interval(ctx, x) if number is None else (number, number))
    if None in ends or all(np.ndim(x[0]) == 0 for x in ends):
        return found
    ((low, high), (least, most)), compare = ends, OF_TWO["lt" if name[1] == "t" else "le"]
    always, never = compare(high, least), ~compare(low, most)
    return np.where(always, 1, np.where(never, 0, found)).astype(np.int8)


def negated(state: np.ndarray) -> np.ndarray:
    """Returns what `known_mask` finds of the negated mask."""
    return np.where(state == UNKNOWN, UNKNOWN, 1 - state)


def _chosen(which: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    either = np.where(first == second, first, UNKNOWN)
    return np.where(which == 0, first, np.where(which == 1, second, either))


_LOGIC: dict[str, Callable[..., np.ndarray]] = {
    "and": lambda x, y: np.where((x == 0) | (y == 0), 0, np.maximum(x, y)),
    "or": lambda x, y: np.where((x == 1) | (y == 1), 1, np.maximum(x, y)),
    "not": negated,
    "same": lambda x: x,
    "select": _chosen,
}


def _moved(
    eqn: core.JaxprEqn, masks: list[np.ndarray], shapes: list[Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Moves the elements of a mask as an equation does; dimensions of size 1 stay if possible."""
    name, params, x = eqn.primitive.name, eqn.params, masks[0]
    if name == "slice":
        sliced = (y if n != 1 else slice(None) for y, n in zip(cuts(params), x.shape, strict=True))
        return x[tuple(sliced)]
    if name == "concatenate":
        axis = params["dimension"]
        common = np.broadcast_shapes(*((*y.shape[:axis], 1, *y.shape[axis + 1 :]) for y in masks))
        full = [
            np.broadcast_to(y, (*common[:axis], own[axis], *common[axis + 1 :]))
            for y, own in zip(masks, shapes, strict=True)
        ]
        return np.concatenate(full, axis)
    # Dimensions stay whole, or all elements along them are equal.
    dims = kept_dims(eqn, 0, eqn.outvars[0])
    order = sorted(range(x.ndim), key=lambda d: dims.get(d, -1))
    if any(n != 1 and d not in dims for d, n in enumerate(x.shape)):
        return np.full((1,) * len(shape), UNKNOWN, np.int8)
    sizes = [1] * len(shape)
    for d, k in dims.items():
        sizes[k] *= x.shape[d]
    return x.transpose(order).reshape(sizes)


#: Slices of a mask: a dimension, its first element, and the element after its last.
Region = tuple[tuple[int, int, int], ...]


def factors(ctx: Any, mask: Any, keeps: bool = True, region: Region = ()) -> list[tuple[Any, bool]]:
    """Splits a mask into masks whose conjunction it is, each with whether it keeps what it is at.

    Without `keeps`, of the mask's negation. A mask of numbers keeps where it is other than 0. The
    result counts in `region`; masks that the program fixes there are left out.
    """
    whole = [(mask, keeps)]
    how, eqn, operands = _reading(ctx, mask)
    if how in ("and", "or"):
        counts = [x for x in operands if not _is_fixed(ctx, x, how == "and", region)]
        if len(counts) > 1 and how != ("and" if keeps else "or"):
            return whole
        counts = [_spread(ctx, x, shape_of(mask)) for x in counts]
        return [part for x in counts for part in factors(ctx, x, keeps, region)] or whole
    if how in ("same", "not"):
        only = _spread(ctx, operands[0], shape_of(mask))
        return factors(ctx, only, keeps == (how == "same"), region)
    if how != "move" or len(operands) != 1:
        return whole
    inner = []
    for dim, start, stop in region if eqn.primitive.name != "slice" else ():
        source = _moved_dim(eqn, dim)
        if source is not None and source >= 0:
            inner.append((source, start, stop))
    parts = factors(ctx, operands[0], keeps, tuple(inner))
    if parts[0][0] is operands[0]:
        return whole
    return [(moved(ctx, eqn, part), keep) for part, keep in parts]


def _is_fixed(ctx: Any, mask: Any, value: bool, region: Region) -> bool:
    """Whether all elements of a region of a mask are proven to have one value."""
    return bool((cut(known_mask(ctx, mask), region) == value).all())


def cut(x: np.ndarray, region: Region) -> np.ndarray:
    """Slices an array; a dimension of size 1, along which all elements are equal, stays."""
    index = [slice(None)] * x.ndim
    for dim, start, stop in region:
        if x.shape[dim] != 1:
            index[dim] = slice(start, stop)
    return x[tuple(index)]


def _spread(ctx: Any, mask: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts a mask to the shape of the equation that it is an operand of."""
    if shape_of(mask) == shape:
        return mask
    dims = range(len(shape_of(mask)))
    like = jax.ShapeDtypeStruct(shape_of(mask), mask.dtype)
    (eqn,) = jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, shape, dims))(like).eqns
    (result,) = ctx.run_equation(eqn, [mask])
    return result


def moved(ctx: Any, eqn: core.JaxprEqn, x: Any) -> Any:
    """Runs an equation that moves elements on a value of another dtype."""

    def run() -> Any:
        aval: Any = eqn.outvars[0].aval
        out = core.Var(aval.update(dtype=np.dtype(x.dtype), weak_type=False))
        (result,) = ctx.run_equation(eqn.replace(outvars=[out]), [x])
        return result

    # The layers of a model share the mask, and what is computed from it.
    return ctx.scope.once(("moved mask", id(eqn)), (x, eqn), run)


# Intervals. `_keeps` proves properties of what a mask keeps along one of its dimensions.

#: The elements that are kept follow each other; they are the first ones, or the last ones.
_INTERVAL, _FIRST, _LAST = 1, 3, 5
#: All elements are kept, or none is.
_EQUAL = _FIRST | _LAST
#: The properties of a negated mask.
_NEGATED = {_FIRST: _LAST, _LAST: _FIRST, _EQUAL: _EQUAL}


def is_interval(ctx: Any, mask: Any, keeps: bool, dim: int) -> bool:
    """Whether the elements along `dim` that a mask keeps, or hides, provably follow each other."""
    state = known_mask(ctx, mask)
    if UNKNOWN not in state:
        return are_intervals(np.moveaxis(state == keeps, dim, -1))
    return _found(ctx, mask, keeps, dim) != 0


def keeps_first(ctx: Any, mask: Any, keeps: bool, dim: int) -> bool:
    """Whether the elements along `dim` that a mask keeps, or hides, are provably the first ones."""
    return _found(ctx, mask, keeps, dim) in (_FIRST, _EQUAL)


def _found(ctx: Any, mask: Any, keeps: bool, dim: int) -> int:
    found = _keeps(ctx, mask, dim, _DEPTH)
    return found if keeps else _NEGATED.get(found, 0)


def are_intervals(kept: np.ndarray) -> bool:
    """Whether the True elements along the last dimension follow each other in every row."""
    padded = np.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(1, 0)])
    return bool(((padded[..., 1:] & ~padded[..., :-1]).sum(-1) <= 1).all())


def _keeps(ctx: Any, mask: Any, dim: int | None, depth: int) -> int:
    if dim is None or shape_of(base_of(mask))[dim : dim + 1] in ((), (1,)):
        return _EQUAL
    how, eqn, operands = _reading(ctx, mask) if depth else _NOTHING
    number = None if how else known(ctx, mask)
    if number is not None:
        kept = np.moveaxis(np.broadcast_to(number, shape_of(mask)) != 0, dim, -1)
        first, last = (bool((x[..., 1:] <= x[..., :-1]).all()) for x in (kept, kept[..., ::-1]))
        return _FIRST * first | _LAST * last | _INTERVAL * are_intervals(kept)
    if how == "move":
        source = _moved_dim(eqn, dim)
        return 0 if source == -1 else _all(_keeps(ctx, x, source, depth - 1) for x in operands)
    if how == "select":
        which, *cases = (_keeps(ctx, x, dim, depth - 1) for x in operands)
        return _all(cases) if which == _EQUAL else 0
    if how:
        found = [_keeps(ctx, x, dim, depth - 1) for x in operands]
        if how in ("same", "not"):
            return found[0] if how == "same" else _NEGATED.get(found[0], 0)
        if _EQUAL in found or how == "and":
            return _all(found)
        # Two intervals may lie apart.
        return both if (both := _all(found)) != _INTERVAL else 0
    return _compared(ctx, mask, dim)


def _all(found: Any) -> int:
    result = _EQUAL
    for x in found:
        result &= x
    return result


def _moved_dim(eqn: Any, dim: int) -> int | None:
    """Finds the operand's dimension that becomes `dim`; None if it is new, -1 if unknown."""
    name, (result,) = eqn.primitive.name, eqn.outvars
    if name == "slice":
        return dim
    sources = {k: d for d, k in kept_dims(eqn, 0, result).items()}
    is_new = name == "broadcast_in_dim" or result.aval.shape[dim] == 1
    return sources.get(dim, None if is_new else -1)


def _compared(ctx: Any, mask: Any, dim: int) -> int:
    """Finds what a comparison keeps: one of an operand that rises or falls along `dim`."""
    name, _, operands = ctx.made_by(mask)
    if name not in ("eq", "ge", "gt", "le", "lt"):
        return 0
    x, y = (_direction(ctx, z, dim, _DEPTH) for z in operands)
    if x is None or y is None or x * y > 0:
        return 0
    rises = x - y
    if rises == 0:
        return _EQUAL
    if name == "eq":
        return _INTERVAL
    return _FIRST if (rises > 0) == (name in ("lt", "le")) else _LAST


def _direction(ctx: Any, x: Any, dim: int | None, depth: int) -> int | None:
    """Says whether the numbers of each row never fall (1), never rise (-1), or are equal (0).

    None if that is not proven.
    """
    if dim is None or shape_of(base_of(x))[dim : dim + 1] in ((), (1,)):
        return 0
    number = known(ctx, x)
    if number is not None:
        steps = np.diff(np.broadcast_to(number, shape_of(x)).astype(np.float64), axis=dim)
        return 1 if (steps >= 0).all() else -1 if (steps <= 0).all() else None
    name, eqn, operands = ctx.made_by(x)
    if not depth or name not in _MOVES or len(operands) != 1:
        return None
    source = _moved_dim(eqn, dim)
    return None if source == -1 else _direction(ctx, operands[0], source, depth - 1)
