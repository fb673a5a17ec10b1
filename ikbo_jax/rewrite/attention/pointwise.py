"""Attention of concatenated tokens with any elementwise function instead of the softmax.

HSTU weighs values by `silu(query · key) · mask`. The equations between the logits and the product
with the values are run block by block: a block of queries and keys of the user at user batch, a
block that the mask provably sets to 0 not at all. If the function of a candidate's logits is an
activation of `ikbo_jax.gdpa`, the op looks the user's keys up.

The weights are an elementwise function of the logits, of masks and of biases. A mask is an operand
that can be two numbers: a factor of 0 or 1, before or after the function, the condition of a
select, or a bias of 0 or -1e9. For each choice of its number, the equations are a function of the
logits alone (`facts.curves`). A number for which this function is 0 everywhere, with slope 0, hides
keys; so masks count alike wherever a program applies them. If one choice alone does not hide, its
function may be an activation of `ikbo_jax.gdpa`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.attention.block_attention import Call
from ikbo_jax.rewrite.attention.blocks import Part, arranged_array, at_users, lineage_of, weighted
from ikbo_jax.rewrite.attention.operands import Operands
from ikbo_jax.rewrite.attention.scores import BATCH, DTYPES, HEAD, KEY, QUERY, Fill, Label, Scores
from ikbo_jax.rewrite.facts import activations, curves, known, masks
from ikbo_jax.rewrite.facts.curves import Curve
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE, common_shape
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage, is_plain, origins_of, spread
from ikbo_jax.rewrite.values.registry import NotCovered


def _may_be_sliced(x: Any, batch: int) -> bool:
    """Whether a value is looked up along its dimension `batch` alone, or not at all."""
    if isinstance(x, Concat):
        return all(_may_be_sliced(part, batch) for part in x.parts)
    return is_plain(x) or isinstance(x, Lazy) and x.axis in (batch, -1)


class PointwiseCall(Call):
    """Computes one attention by an elementwise function: every part of its queries by itself."""

    def attended(self, query: Part) -> Any:
        """Returns the result of some queries: [batch, *queries, *heads, width]."""
        users, shape = lineage_of(query.value), list(query.value.shape)
        self.sizes = tuple(shape[1 : 1 + len(self.root.queries)])
        shape[-1] = self.keys[0].values.shape[-1]
        live = self._blocks(query)
        if not live:
            return jnp.zeros(shape, self.dtype)
        if users is not None and all(self.of_users(key, users) for key, *_ in live):
            of_blocks = (self._at_users(query, key, users) for key, *_ in live)
            out = functools.reduce(lax.add, of_blocks)
            out = staged.reshape(staged.cast(out, self.dtype), (out.shape[0], *shape[1:]))
            return Lazy(out, tuple(shape), users, 0, origins_of(query.value))
        reason = "queries that attend to keys of the candidate"
        array = self.ctx.materialise(self.eqn, query.value, reason)
        of_blocks = (call._of_candidates(query, key, found, array) for key, call, found in live)
        total = functools.reduce(lax.add, of_blocks)
        return staged.reshape(staged.cast(total, self.dtype), shape)

    def _blocks(self, query: Part) -> list[tuple[Part, PointwiseCall, activations.Match | None]]:
        """Finds the blocks of some queries, without keys whose weights are all proven to be 0.

        Returns:
          For each block, the keys that some query may see; the attention, with the masks of the
          block as the masks of its logits; and the activation of gdpa that the weights are where no
          mask hides them, or None.
        """
        functions = self.ctx.scope.once(
            ("functions",), (self.scores,), lambda: BlockFunctions(self.scores)
        )
        # A number that was put in before the function hides a key only if the function of it is 0.
        unmasked, blocks = dataclasses.replace(self.root, fills=()), []
        for key in self.keys:
            cut = functools.partial(self._cut, query=query, key=key)
            found = functions.of_block(self.ctx, cut)
            if found is None:
                continue
            hiding, activation = found
            call = copy.copy(self)
            try:
                call.root = unmasked
                for mask in hiding:
                    # What sets weights to 0 is a mask of the logits.
                    call.root = call.root.masked(self.ctx, *mask, Fill(0.0))
                live = call._trimmed(query, key)
            except NotCovered:
                call, live, activation = self, key, None
            if live is not None:
                blocks.append((live, call, activation))
        return blocks

    def _at_users(self, query: Part, key: Part, users: Lineage) -> jax.Array:
        weights = self._block(self.scores, query, key, users, {})
        return self._weighted(weights, users.users, key, self.user_rows(key.values, users))

    def _of_candidates(
        self, query: Part, key: Part, activation: activations.Match | None, array: jax.Array
    ) -> jax.Array:
        users = lineage_of(key.value)
        if users is not None and activation is not None:
            try:
                return self._by_gdpa(query, key, activation, array, users)
            except NotCovered:
                pass
        reason = "attention by another function than those of gdpa"
        weights = self._block(self.scores, query, key, None, {})
        values = self.ctx.materialise(self.eqn, key.values, reason)
        return self._weighted(weights, array.shape[0], key, self.flat(values))

    def _by_gdpa(
        self,
        query: Part,
        key: Part,
        found: activations.Match,
        array: jax.Array,
        users: Lineage,
    ) -> jax.Array:
        """Attends by an op to keys that it looks up: [batch, queries, heads, width] float32."""
        if key.values.shape[-1] != key.value.shape[-1] or array.dtype not in DTYPES:
            raise NotCovered("attention by another function than those of gdpa")
        if not found.same_slope:
            if self.ctx.differentiated:
                raise NotCovered(f"attention is not recognised: {found.activation}, another slope")
            self.ctx.gradient_differs()
        flat = self.flat(array)
        keys, values = (
            staged.cast(self.user_rows(x, users), array.dtype) for x in (key.value, key.values)
        )
        operands = Operands(flat, keys, values, users.index, 1.0)
        kept, seen = self._visible(query, [key], users)
        out = operands.activated(*found[:3], seen=seen, kept=kept)
        return staged.cast(out, np.dtype(np.float32))

    def _weighted(self, weights: jax.Array, rows: int, key: Part, values: Any) -> jax.Array:
        """Computes the weighted sum of values [batch, queries, heads, width], in float32."""
        (batch, *between, last), count = self.root.labels, len(self.root.queries)
        heads_first = [batch, *between[count:], *between[:count], last]
        weights = arranged_array(weights, self.scores.labels, heads_first)
        keys = key.stop - key.start
        weights = spread(weights, (rows, *self.root.heads, *self.sizes, keys))
        weights = staged.reshape(weights, (rows, self.heads, math.prod(self.sizes), keys))
        return weighted(weights, values)

    # The equations between the logits and the product, block by block. Nested functions that call
    # each other would outlive the tracing.

    def _block(
        self, x: Scores, query: Part, key: Part, users: Lineage | None, found: dict[int, jax.Array]
    ) -> jax.Array:
        """Computes a block of scores; `found` holds blocks of other scores by identity."""
        if id(x) in found:
            return found[id(x)]
        if x.made is None:
            found[id(x)] = self._product(x, query, key, users)
            return found[id(x)]
        eqn, operands = x.made
        name = eqn.primitive.name
        if name not in (*ELEMENTWISE, "transpose", "custom_jvp_call"):
            raise NotCovered(f"attention is not recognised: {name} of its scores")
        arrays = [
            self._block(y, query, key, users, found)
            if isinstance(y, Scores)
            else self._operand(y, x.labels, query, key, users)
            for y in operands
        ]
        if name == "transpose":
            found[id(x)] = staged.transpose(arrays[0], eqn.params["permutation"])
        elif name == "custom_jvp_call":
            found[id(x)] = any_shape.run_custom_jvp(eqn, arrays)
        else:
            found[id(x)] = self.ctx.bind(eqn, *common_shape(eqn, arrays))
        return found[id(x)]

    def _product(self, x: Scores, query: Part, key: Part, users: Lineage | None) -> jax.Array:
        """Computes the logits of a block, as the program's product does."""
        if users is not None:
            rows, columns = (
                spread(y.base, (users.users, *y.shape[1:])) for y in (query.value, key.value)
            )
        else:
            reason = "attention by another function than those of gdpa"
            rows, columns = (
                self.ctx.materialise(self.eqn, y, reason) for y in (query.value, key.value)
            )
        count, heads = len(self.root.queries), len(self.root.heads)
        numbers = (
            ((rows.ndim - 1,), (columns.ndim - 1,)),
            ((0, *range(1 + count, 1 + count + heads)), (0, *range(2, 2 + heads))),
        )
        out = lax.dot_general(rows, columns, numbers, preferred_element_type=x.dtype)
        have: list[Label] = [(BATCH, 0), *((HEAD, n) for n in range(heads))]
        have += [*((QUERY, n) for n in range(count)), (KEY, 0)]
        return staged.transpose(out, [have.index(label) for label in x.labels])

    def _operand(
        self, x: Any, labels: tuple[Label, ...], query: Part, key: Part, users: Lineage | None
    ) -> Any:
        """Returns the block of a mask, bias or other operand; `labels` are its dimensions."""
        batch = labels.index((BATCH, 0))
        if len(shape_of(x)) == 0 or not _may_be_sliced(x, batch):
            x = self.ctx.build(x)
        if len(shape_of(x)) == 0:
            return x
        x = self._sliced(x, query, key, labels)
        if users is None:
            return self.ctx.build(x)
        array = at_users(x, users, batch)
        if array is None:
            raise NotCovered("attention is not recognised: a mask or bias differs by candidate")
        return array


#: With more masks than this, the equations are not tried with all of their numbers.
_MOST_MASKS = 4


#: A mask: the result of an equation, the operand of it that sets weights to 0, of the dimensions of
#: this result, and whether it keeps the keys at which it is other than 0 or those at which it is 0.
Mask = tuple[Scores, Any, bool]


class BlockFunctions:
    """Finds the functions of the blocks of one attention.

    Attributes:
      scores: the weights.
    """

    def __init__(self, scores: Scores) -> None:
        # Without the context, which keeps this object: a cycle would outlive the tracing.
        self.scores = scores
        self._masks: dict[int, tuple[Scores, Any]] = {}
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
                self._masks.setdefault(id(y), (x, y))

    def of_block(
        self, ctx: Context, cut: Callable[..., np.ndarray]
    ) -> tuple[list[Mask], activations.Match | None] | None:
        """Finds the function of a block; `cut` takes it out of an array with `labels`.

        Returns:
          The masks that set weights of the block to 0, and the activation that the weights are
          where no mask hides them, None if unknown. Or None if all weights of the block are 0.
        """
        numbers = {key: _numbers(ctx, y, x, cut) for key, (x, y) in self._masks.items()}
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
        if not alive:
            return None
        hiding: list[Mask] = []
        for n, key in enumerate(open_):
            kept = {choice[n] for choice, _ in alive}
            if len(kept) == 1 and 0.0 in (numbers[key] or ()):
                hiding.append((*self._masks[key], kept != {0.0}))
        is_one = len(alive) == 1 and len(hiding) == len(open_)
        function = alive[0][1] if is_one else None
        activation = activations.match(function) if isinstance(function, Curve) else None
        return hiding, activation

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

    def block(array: np.ndarray) -> np.ndarray:
        return cut(array, labels=x.labels) if array.ndim else array

    number, state = ctx.scope.once(("numbers",), (y,), lambda: _known(ctx, y))
    if len(shape_of(y)) not in (0, len(x.labels)):
        return None
    if number is not None:
        found = np.unique(block(number).astype(np.float64))
        return tuple(found.tolist()) if len(found) <= 2 else None
    if state is None:
        return None
    few, elements = state
    elements = block(elements)
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
