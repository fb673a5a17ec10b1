"""Along which dimensions an equation keeps the rows of an operand, and where they are afterwards.

Proofs follow the rows of users through a program with this table.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core

#: By an operand's dimension, the dimension of the result along which an equation keeps its rows.
Dims = dict[int, int]


def kept_dims(eqn: core.JaxprEqn, n: int, result: Any) -> Dims:
    """Finds the dimensions of operand `n` that stay whole in the variable `result`.

    The equation is elementwise, or one of a primitive in `RULES`.
    """
    before: tuple[int, ...] = eqn.invars[n].aval.shape  # type: ignore[attr-defined]
    after: tuple[int, ...] = result.aval.shape
    found = RULES.get(eqn.primitive.name, _ALL)(eqn, before, after, n)
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
RULES: dict[str, Callable[..., Dims]] = {
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
