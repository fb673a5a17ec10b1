"""Attention of concatenated tokens with any elementwise function instead of the softmax.

HSTU weighs values by `silu(query · key) · mask`. The equations between the logits and the product
with the values are run block by block: a block of queries and keys of the user at user batch, a
block that the mask provably sets to 0 not at all. If the function of a candidate's logits is an
activation of `ikbo_jax.gdpa`, the op looks the user's keys up.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.attention import masked_keys
from ikbo_jax.rewrite.attention.block_attention import Call
from ikbo_jax.rewrite.attention.block_parts import Part, at_users, block_of, lineage_of, weighted
from ikbo_jax.rewrite.attention.blocks import arranged_array
from ikbo_jax.rewrite.attention.scores import BATCH, HEAD, KEY, QUERY, Label, Logits, Scores
from ikbo_jax.rewrite.facts import activations, curves, known, masks
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import shape_of
from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE, common_shape
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Lazy, Lineage, origins_of, spread
from ikbo_jax.rewrite.values.registry import NotCovered

#: Primitives of one operand that keep 0.
_KEEPS_ZERO = ("convert_element_type", "copy", "neg", "transpose", "abs", "sign", "sqrt", "tanh")


def _sum(arrays: list[jax.Array]) -> jax.Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = lax.add(total, array)
    return total


class PointwiseCall(Call):
    """Computes one attention by an elementwise function: every part of its queries by itself."""

    def attended(self, query: Part) -> Any:
        """Returns the result of some queries: [batch, *queries, *heads, width]."""
        live = [key for key in self.keys if not self._zero(self.scores, query, key)]
        users = lineage_of(query.value)
        shape = list(query.value.shape)
        shape[-1] = self.keys[0].values.shape[-1]
        self.sizes = query.value.shape[1 : 1 + len(self.root.queries)]
        if not live:
            return jnp.zeros(shape, self.dtype)
        if users is not None and all(self.of_users(key, users) for key in live):
            out = _sum([self._at_users(query, key, users) for key in live])
            out = staged.reshape(staged.cast(out, self.dtype), (out.shape[0], *shape[1:]))
            return Lazy(out, tuple(shape), users, 0, origins_of(query.value))
        reason = "queries that attend to keys of the candidate"
        array = self.ctx.materialise(self.eqn, query.value, reason)
        total = _sum([self._of_candidates(query, key, array) for key in live])
        return staged.reshape(staged.cast(total, self.dtype), shape)

    def _at_users(self, query: Part, key: Part, users: Lineage) -> jax.Array:
        weights = self._block(self.scores, query, key, users, {})
        values = self.user_rows(key.values, users)
        return self._weighted(weights, users.users, key, values)

    def _of_candidates(self, query: Part, key: Part, array: jax.Array) -> jax.Array:
        users = lineage_of(key.value)
        activation = self._activation(query, key) if users is not None else None
        if activation is not None:
            name, scale, output_scale, _ = activation
            dtype = array.dtype
            rows = tuple(array.shape[1 : 1 + len(self.root.queries)])
            root = Logits(array, key.value, rows, self.root.heads)
            values = spread(key.values.base, (key.values.base.shape[0], *key.values.shape[1:]))
            values = staged.cast(values, dtype)
            out = masked_keys.attend_activated(root, values, name, scale, output_scale)
            shape = staged.shape_of(out)
            out = staged.reshape(out, (shape[0], math.prod(rows), self.heads, shape[-1]))
            return staged.cast(out, np.dtype(np.float32))
        reason = "attention by another function than those of gdpa"
        weights = self._block(self.scores, query, key, None, {})
        values = self.ctx.materialise(self.eqn, key.values, reason)
        return self._weighted(weights, array.shape[0], key, self.flat(values, key.stop - key.start))

    def _weighted(self, weights: jax.Array, rows: int, key: Part, values: Any) -> jax.Array:
        """Computes the weighted sum of values [batch, queries, heads, width], in float32."""
        labels = self.root.labels
        weights = arranged_array(weights, self.scores.labels, labels)
        keys = key.stop - key.start
        weights = spread(weights, (rows, *self.sizes, *self.root.heads, keys))
        weights = staged.reshape(weights, (rows, math.prod(self.sizes), self.heads, keys))
        weights = staged.cast(staged.transpose(weights, (0, 2, 1, 3)), values.dtype)
        return weighted(weights, values)

    def _activation(self, query: Part, key: Part) -> Any:
        """Finds the activation of gdpa that the function of these logits is; None if it is none."""
        curve = self._curve(self.scores, query, key)
        if curve is None or key.values.shape[-1] != key.value.shape[-1]:
            return None
        found = activations.match(curve)
        if found is None or str(self.root.key.dtype) not in ("bfloat16", "float16", "float32"):
            return None
        if not found.same_slope:
            if self.ctx.differentiated:
                return None
            self.ctx.gradient_differs()
        return found

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
        out = staged.product(rows, columns, numbers, x.dtype)
        have: list[Label] = [(BATCH, 0), *((HEAD, n) for n in range(heads))]
        have += [*((QUERY, n) for n in range(count)), (KEY, 0)]
        return staged.transpose(out, [have.index(label) for label in x.labels])

    def _operand(
        self, x: Any, labels: tuple[Label, ...], query: Part, key: Part, users: Lineage | None
    ) -> Any:
        """Returns the block of a mask, bias or other operand; `labels` are its dimensions."""
        if len(shape_of(x)) == 0:
            return self.ctx.build(x)
        for label, part in (((KEY, 0), key), ((QUERY, self.axis - 1), query)):
            if label in labels:
                x = block_of(x, labels.index(label), part.start, part.stop)
        if users is None:
            return self.ctx.build(x)
        array = at_users(x, users, labels.index((BATCH, 0)))
        if array is None:
            raise NotCovered("attention is not recognised: a mask or bias differs by candidate")
        return array

    def _fixed(
        self, x: Any, labels: tuple[Label, ...], query: Part, key: Part
    ) -> np.ndarray | None:
        """Returns the block of an operand as far as the program fixes it; `UNKNOWN` elsewhere."""
        state = known.known(self.ctx, x)
        if state is None:
            name, _, operands = self.ctx.made_by(x)
            x = operands[0] if name == "convert_element_type" else x
            if getattr(x, "dtype", None) != np.bool_:
                return None
            state = masks.known_mask(self.ctx, x)
        if state.ndim == 0:
            return state
        index = [slice(None)] * state.ndim
        for label, part in (((KEY, 0), key), ((QUERY, self.axis - 1), query)):
            if label in labels and state.shape[labels.index(label)] != 1:
                index[labels.index(label)] = slice(part.start, part.stop)
        return state[tuple(index)]

    def _zero(self, x: Scores, query: Part, key: Part) -> bool:
        """Whether a block is proven to be 0."""
        if x.made is None:
            return False
        operands, name = x.made[1], x.made[0].primitive.name

        def zero(y: Any) -> bool:
            if isinstance(y, Scores):
                return self._zero(y, query, key)
            state = self._fixed(y, x.labels, query, key)
            return state is not None and bool((state == 0).all())

        if name == "mul":
            return any(map(zero, operands))
        if name in _KEEPS_ZERO or name == "div":
            return zero(operands[0])
        if name == "select_n" and len(operands) == 3:
            chosen = self._chosen(x, query, key)
            return all(map(zero, operands[1:] if chosen is None else [operands[1 + chosen]]))
        return False

    def _chosen(self, x: Scores, query: Part, key: Part) -> int | None:
        """Finds the case that a `select_n` provably takes in a whole block; None if unknown."""
        which = x.made[1][0]
        state = None if isinstance(which, Scores) else self._fixed(which, x.labels, query, key)
        if state is None or (state == masks.UNKNOWN).any():
            return None
        return 0 if not state.any() else 1 if state.all() else None

    def _curve(self, x: Scores, query: Part, key: Part) -> curves.Curve | None:
        """Returns a block as an elementwise function of its logits, where masks hide nothing."""
        if x.made is None:
            return curves.logits(x.dtype)
        (eqn, operands), name = x.made, x.made[0].primitive.name
        if name == "select_n" and len(operands) == 3:
            chosen = self._chosen(x, query, key)
            case = None if chosen is None else operands[1 + chosen]
            return self._curve(case, query, key) if isinstance(case, Scores) else None
        arguments: list[Any] = []
        for y in operands:
            if isinstance(y, Scores):
                arguments.append(self._curve(y, query, key))
            elif name == "mul" and self._is_one(y, x.labels, query, key):
                arguments.append(1.0)
            else:
                arguments.append(constant(self.ctx, y))
        if any(y is None for y in arguments) or name not in curves.ELEMENTWISE:
            return None
        return curves.then(eqn, arguments)

    def _is_one(self, x: Any, labels: tuple[Label, ...], query: Part, key: Part) -> bool:
        state = self._fixed(x, labels, query, key)
        return state is not None and bool((state == 1).all())
