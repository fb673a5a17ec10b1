"""What a program's equations prove of one block of attention weights that are no softmax's.

The weights are an elementwise function of the logits, of masks and of biases. A mask is an operand
that can be two numbers: a factor of 0 or 1, before or after the function, the condition of a
select, or a bias of 0 or -1e9. For each choice of its number, the equations are a function of the
logits alone (`facts.curves`). A number for which this function is 0 everywhere, with slope 0, hides
keys; so masks count alike wherever a program applies them. If one choice alone does not hide, its
function may be an activation of `ikbo_jax.gdpa`.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.attention.scores import Label, Scores
from ikbo_jax.rewrite.facts import activations, curves, known, masks
from ikbo_jax.rewrite.facts.curves import Curve
from ikbo_jax.rewrite.interpret import Context, shape_of

#: With more masks than this, the equations are not tried with all of their numbers.
_MOST_MASKS = 4


class Mask(NamedTuple):
    """Describes an operand that sets weights to 0.

    Attributes:
      value: the operand, of the dimensions `scores.labels`.
      scores: the result of the equation that it is an operand of.
      keeps: whether it keeps the keys at which it is other than 0; if not, those at which it is 0.
    """

    value: Any
    scores: Scores
    keeps: bool


class BlockFunction(NamedTuple):
    """Describes the weights of a block.

    Attributes:
      is_zero: whether all weights are 0.
      masks: what sets weights of the block to 0.
      activation: the activation that the weights are where no mask hides them; None if unknown.
    """

    is_zero: bool
    masks: tuple[Mask, ...] = ()
    activation: activations.Match | None = None


class BlockFunctions:
    """Finds the functions of the blocks of one attention.

    Attributes:
      scores: the weights.
    """

    def __init__(self, scores: Scores) -> None:
        # Without the context, which keeps this object: a cycle would outlive the tracing.
        self.scores = scores
        self._masks: dict[int, tuple[Any, Scores]] = {}
        self._found: dict[Any, tuple[bool, Curve | None]] = {}
        self._read(scores, set())

    def _read(self, x: Scores, seen: set[int]) -> None:
        """Finds the operands, other than scores, of all equations that lead to some scores."""
        if id(x) in seen or x.made is None:
            return
        seen.add(id(x))
        for y in x.made[1]:
            if isinstance(y, Scores):
                self._read(y, seen)
            else:
                self._masks.setdefault(id(y), (y, x))

    def of_block(
        self, ctx: Context, cut: Callable[[np.ndarray, tuple[Label, ...]], np.ndarray]
    ) -> BlockFunction:
        """Finds the function of a block; `cut` takes it out of a whole array with these labels."""
        numbers = {key: _numbers(ctx, y, x, cut) for key, (y, x) in self._masks.items()}
        open_ = [key for key, found in numbers.items() if found is not None and len(found) == 2]
        if len(open_) > _MOST_MASKS:
            numbers |= dict.fromkeys(open_)
            open_ = []
        fixed = {key: found[0] for key, found in numbers.items() if found and len(found) == 1}
        alive: list[tuple[tuple[float, ...], Curve | None]] = []
        for choice in itertools.product(*(numbers[key] or () for key in open_)):
            is_zero, found = self._chosen(fixed | dict(zip(open_, choice, strict=True)))
            if not is_zero:
                alive.append((choice, found))
        hiding = []
        for n, key in enumerate(open_):
            kept = {choice[n] for choice, _ in alive}
            if len(kept) == 1 and 0.0 in (numbers[key] or ()):
                hiding.append(Mask(*self._masks[key], keeps=kept != {0.0}))
        is_one = len(alive) == 1 and len(hiding) == len(open_)
        function = alive[0][1] if is_one else None
        activation = activations.match(function) if isinstance(function, Curve) else None
        return BlockFunction(not alive, tuple(hiding), activation)

    def _chosen(self, numbers: dict[int, float]) -> tuple[bool, Curve | None]:
        """Returns whether weights with these operands are 0, and their function if it is known."""
        key = frozenset(numbers.items())
        if key not in self._found:
            chosen = _Choice(numbers)
            found = chosen.of(self.scores)
            is_zero = found is not None and activations.vanishes(found)
            self._found[key] = is_zero, None if chosen.is_biased else found
        return self._found[key]


def _numbers(ctx: Context, y: Any, x: Scores, cut: Any) -> tuple[float, ...] | None:
    """Returns the one or two numbers that an operand can be in a block; None for others."""
    number, state = ctx.scope.once(("numbers",), (y,), lambda: _known(ctx, y))
    if len(shape_of(y)) not in (0, len(x.labels)):
        return None
    if number is not None:
        found = np.unique((cut(number, x.labels) if number.ndim else number).astype(np.float64))
        return tuple(found.tolist()) if len(found) <= 2 else None
    if state is None:
        return None
    few, elements = state
    elements = cut(elements, x.labels) if elements.ndim else elements
    if len(few) == 2 and 0.0 in few:
        if (elements == 0).all():
            return (0.0,)
        if (elements == 1).all():
            return tuple(few - {0.0})
    return tuple(few) if len(few) <= 2 else None


def _known(ctx: Context, y: Any) -> tuple[Any, Any]:
    """Returns the numbers that a program fixes, or the few numbers and what is known of them."""
    if (number := known.known(ctx, y)) is not None:
        return number, None
    few = masks.few_numbers(ctx, y)
    return None, None if few is None else (few, masks.known_mask(ctx, y))


class _Choice:
    """Computes scores as functions of the logits, for fixed numbers of their other operands.

    Attributes:
      is_biased: whether unknown operands, such as biases, were found.
    """

    def __init__(self, numbers: dict[int, float]) -> None:
        self.is_biased = False
        self._numbers = numbers
        self._found: dict[int, Any] = {}

    def of(self, x: Any) -> Any:
        """Returns the curve of scores, or a number; None if it is unknown and no logit.

        Scores with an unknown operand become a curve by themselves, as if they were logits.
        """
        if not isinstance(x, Scores):
            return self._numbers.get(id(x))
        if id(x) not in self._found:
            found = curves.logits(x.dtype) if x.made is None else self._result(x)
            if found is None and jnp.issubdtype(x.dtype, jnp.floating):
                found, self.is_biased = curves.logits(x.dtype), True
            self._found[id(x)] = found
        return self._found[id(x)]

    def _result(self, x: Scores) -> Any:
        eqn, operands = x.made
        name = eqn.primitive.name
        if name == "transpose":
            return self.of(operands[0])
        if name == "select_n" and len(operands) == 3 and not isinstance(operands[0], Scores):
            which = self._numbers.get(id(operands[0]))
            return None if which is None else self.of(operands[1 + int(which != 0)])
        found = [self.of(y) for y in operands]
        if name == "mul" and any(isinstance(y, float) and y == 0 for y in found):
            # As everywhere in a rewrite, NaN and infinity at hidden positions are not kept.
            return 0.0
        if name not in curves.ELEMENTWISE or any(y is None for y in found):
            return None
        curve = curves.then(eqn, found)
        if curve is None or any(isinstance(y, Curve) for y in found):
            return curve
        with np.errstate(all="ignore"):
            return float(curve(np.zeros(1)).value[0])
