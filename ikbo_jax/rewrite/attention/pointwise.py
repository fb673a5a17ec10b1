"""Attention of concatenated tokens with any elementwise function instead of the softmax.

HSTU weighs values by `silu(query · key) · mask`. The equations between the logits and the product
with the values are run block by block: a block of queries and keys of the user at user batch, a
block that the mask provably sets to 0 not at all. If the function of a candidate's logits is an
activation of `ikbo_jax.gdpa`, the op looks the user's keys up.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.attention.block_attention import Call
from ikbo_jax.rewrite.attention.block_functions import BlockFunctions
from ikbo_jax.rewrite.attention.block_parts import Part, at_users, lineage_of, weighted
from ikbo_jax.rewrite.attention.blocks import arranged_array
from ikbo_jax.rewrite.attention.operands import Operands, Visible
from ikbo_jax.rewrite.attention.scores import BATCH, DTYPES, HEAD, KEY, QUERY, Fill, Label, Scores
from ikbo_jax.rewrite.facts import activations
from ikbo_jax.rewrite.interpret import shape_of
from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE, common_shape, slice_along
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage, is_plain, origins_of, spread
from ikbo_jax.rewrite.values.registry import NotCovered


def _may_be_sliced(x: Any, batch: int) -> bool:
    """Whether a value is looked up along its dimension `batch` alone, or not at all."""
    if isinstance(x, Concat):
        return all(_may_be_sliced(part, batch) for part in x.parts)
    return is_plain(x) or isinstance(x, Lazy) and x.axis in (batch, -1)


class _Block(NamedTuple):
    """Holds the keys of a block, and what is known of its weights.

    Attributes:
      key: the keys that some query may see.
      call: the attention, with the masks of the block as the masks of its logits.
      activation: the activation of gdpa that the weights are where no mask hides them, or None.
    """

    key: Part
    call: PointwiseCall
    activation: activations.Match | None


class PointwiseCall(Call):
    """Computes one attention by an elementwise function: every part of its queries by itself."""

    def attended(self, query: Part) -> Any:
        """Returns the result of some queries: [batch, *queries, *heads, width]."""
        live = self._blocks(query)
        users = lineage_of(query.value)
        shape = list(query.value.shape)
        shape[-1] = self.keys[0].values.shape[-1]
        self.sizes = query.value.shape[1 : 1 + len(self.root.queries)]
        if not live:
            return jnp.zeros(shape, self.dtype)
        if users is not None and all(self.of_users(block.key, users) for block in live):
            of_blocks = (self._at_users(query, block.key, users) for block in live)
            out = functools.reduce(lax.add, of_blocks)
            out = staged.reshape(staged.cast(out, self.dtype), (out.shape[0], *shape[1:]))
            return Lazy(out, tuple(shape), users, 0, origins_of(query.value))
        reason = "queries that attend to keys of the candidate"
        array = self.ctx.materialise(self.eqn, query.value, reason)
        of_blocks = (self._of_candidates(query, block, array) for block in live)
        total = functools.reduce(lax.add, of_blocks)
        return staged.reshape(staged.cast(total, self.dtype), shape)

    def _blocks(self, query: Part) -> list[_Block]:
        """Returns the blocks of some queries, without keys whose weights are all proven to be 0."""
        functions = self.ctx.scope.once(
            ("functions",), (self.scores,), lambda: BlockFunctions(self.scores)
        )
        # A number that was put in before the function hides a key only if the function of it is 0.
        unmasked, found = dataclasses.replace(self.root, fills=()), []
        for key in self.keys:
            function = functions.of_block(
                self.ctx, functools.partial(self._cut_by_labels, query, key)
            )
            if function.is_zero:
                continue
            call = copy.copy(self)
            try:
                call.root = unmasked
                for mask in function.masks:
                    # What sets weights to 0 is a mask of the logits.
                    call.root = call.root.masked(
                        self.ctx, mask.scores, mask.value, mask.keeps, Fill(0.0)
                    )
                live = call._trimmed(query, key)
            except NotCovered:
                call, live = self, key
                function = function._replace(activation=None)
            if live is not None:
                found.append(_Block(live, call, function.activation))
        return found

    def _cut_by_labels(
        self, query: Part, key: Part, x: np.ndarray, labels: tuple[Label, ...]
    ) -> np.ndarray:
        """Returns the block of an array whose dimensions have these labels."""
        index = [slice(None)] * x.ndim
        for label, part in (((KEY, 0), key), ((QUERY, self.axis - 1), query)):
            if label in labels and x.shape[labels.index(label)] != 1:
                index[labels.index(label)] = slice(part.start, part.stop)
        return x[tuple(index)]

    def _at_users(self, query: Part, key: Part, users: Lineage) -> jax.Array:
        weights = self._block(self.scores, query, key, users, {})
        values = self.user_rows(key.values, users)
        return self._weighted(weights, users.users, key, values)

    def _of_candidates(self, query: Part, block: _Block, array: jax.Array) -> jax.Array:
        key, users = block.key, lineage_of(block.key.value)
        if users is not None and block.activation is not None:
            try:
                return self._by_gdpa(query, block, array, users)
            except NotCovered:
                pass
        reason = "attention by another function than those of gdpa"
        weights = self._block(self.scores, query, key, None, {})
        values = self.ctx.materialise(self.eqn, key.values, reason)
        return self._weighted(weights, array.shape[0], key, self.flat(values, key.stop - key.start))

    def _by_gdpa(self, query: Part, block: _Block, array: jax.Array, users: Lineage) -> jax.Array:
        """Attends by an op to keys that it looks up: [batch, queries, heads, width] float32."""
        key, found = block.key, block.activation
        assert found is not None
        if key.values.shape[-1] != key.value.shape[-1] or array.dtype not in DTYPES:
            raise NotCovered("attention by another function than those of gdpa")
        if not found.same_slope:
            if self.ctx.differentiated:
                raise NotCovered(f"attention is not recognised: {found.activation}, another slope")
            self.ctx.gradient_differs()
        flat = self.flat(array, math.prod(self.sizes))
        keys, values = (
            staged.cast(self.user_rows(x, users), array.dtype) for x in (key.value, key.values)
        )
        operands = Operands(flat, keys, values, users.index, 1.0)
        block.call.sizes = self.sizes
        kept, seen = block.call._visible(query, [key], users)
        visible = None if kept is None and seen is None else Visible(seen, kept)
        out = operands.activated(found.activation, found.scale, found.output_scale, visible=visible)
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

    # The equations between the logits and the product, block by block.

    def _block(
        self, x: Scores, query: Part, key: Part, users: Lineage | None, found: dict[int, jax.Array]
    ) -> jax.Array:
        """Computes a block of scores; `found` holds blocks of other scores by identity."""
        if id(x) not in found:
            found[id(x)] = self._equation(x, query, key, users, found)
        return found[id(x)]

    def _equation(
        self, x: Scores, query: Part, key: Part, users: Lineage | None, found: dict[int, jax.Array]
    ) -> jax.Array:
        if x.made is None:
            return self._product(x, query, key, users)
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
            return staged.transpose(arrays[0], eqn.params["permutation"])
        if name == "custom_jvp_call":
            return any_shape.run_custom_jvp(eqn, arrays)
        out: jax.Array = self.ctx.bind(eqn, *common_shape(eqn, arrays))
        return out

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
        for label, part in (((KEY, 0), key), ((QUERY, self.axis - 1), query)):
            if label in labels:
                x = slice_along(x, part.start, part.stop, labels.index(label))
        if users is None:
            return self.ctx.build(x)
        array = at_users(x, users, batch)
        if array is None:
            raise NotCovered("attention is not recognised: a mask or bias differs by candidate")
        return array
