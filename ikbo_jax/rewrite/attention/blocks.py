"""Attention over a concatenation of a user's tokens and a candidate's own, block by block.

A sequence [history, candidate] is a concatenation of rows that are looked up and rows of the
candidate, and so are its queries, keys and values. The logits are blocks, one for each pair of a
part of the queries and a part of the keys; they are not computed until the product with the values
shows that they are a softmax's logits. Then every part of the queries is computed by itself:

- Queries of the user whose mask hides all keys of the candidate depend on the user alone. They are
  computed at user batch, so that the next layer finds a concatenation again.
- All other queries attend by `ikbo_jax.attention` to the keys of the user, which are not copied,
  and to the keys of the candidate as own tokens.

A block is left out only if the program's own equations prove that its mask is False everywhere, and
that every query keeps some other key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.attention.scores import (
    BATCH,
    DTYPES,
    KEY,
    QUERY,
    Fill,
    Label,
    Root,
    Scores,
    of_product,
)
from ikbo_jax.rewrite.facts import masks, proofs
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import elementwise
from ikbo_jax.rewrite.rules.batched import dims_of
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage, of_bases
from ikbo_jax.rewrite.values.registry import NotCovered


class Blocks(Root):
    """Holds the logits of concatenated tokens.

    The query may be concatenated along one of its dimensions `queries`, the key along the keys.
    """

    def masked(self, ctx: Context, scores: Scores, mask: Any, keeps: bool, fill: Fill) -> Blocks:
        """Adds a mask to the logits."""
        labels, wanted = scores.labels, self.labels

        def block(ctx: Context, x: Any, keep: bool) -> tuple[Any, np.ndarray]:
            kept, state = of_bases(lambda x: kept_by(x, keep), x), masks.known_mask(ctx, x)
            state = state if keep else masks.negated(state)
            return arranged(kept, labels, wanted), arranged_array(state, labels, wanted)

        def factors(ctx: Context, region: masks.Region) -> list[Any]:
            def found() -> list[Any]:
                dim = labels.index((KEY, 0))
                positions = [(KEY, 0) if label == (QUERY, 0) else label for label in labels]
                return [
                    (
                        *block(ctx, x, keep),
                        masks.is_interval(ctx, x, keep, dim),
                        (id(source), names, keep),
                    )
                    for x, keep in masks.factors(ctx, mask, keeps, region)
                    for source, names in [proofs.source_of_mask(ctx, x, positions)]
                ]

            return ctx.scope.once(("factors", *key, region), (mask,), found)

        key = (keeps, labels, tuple(wanted))
        kept, state = ctx.scope.once(
            ("mask of blocks", *key), (mask,), lambda: block(ctx, mask, keeps)
        )
        source = proofs.source_of_mask(ctx, mask, labels) if keeps else None
        found = {"kept": kept, "state": state, "source": source}
        new = dataclasses.replace(fill, labels=labels, factors=factors, **found)
        origins = self.mask_origins | lineage.origins_of(mask)
        return dataclasses.replace(self, fills=(*self.fills, new), mask_origins=origins)

    def biased(self, scores: Scores, bias: Any, *, subtracts: bool) -> Blocks:
        """Adds a bias to the logits."""
        if any(fill.added is None for fill in self.fills):
            raise NotCovered("attention is not recognised: a bias is added to masked logits")
        bias = arranged(bias, scores.labels, self.labels)
        biases = *self.biases, of_bases(lax.neg, bias) if subtracts else bias
        origins = self.mask_origins | lineage.origins_of(bias)
        return dataclasses.replace(self, biases=biases, mask_origins=origins)


def kept_by(mask: Any, keeps: bool) -> Any:
    """Returns where an array keeps keys, or without `keeps` where it hides none."""
    kept = mask if mask.dtype == np.bool_ else mask != 0
    return kept if keeps else ~kept


def unspread(ctx: Context, mask: Any, keeps: bool) -> Any:
    """Computes where a mask keeps keys; dimensions along which it is broadcast have size 1."""
    state = masks.known_mask(ctx, mask)
    if masks.UNKNOWN not in state:
        return (state == 1) == keeps
    if isinstance(mask, Lazy):
        shape = list(mask.base.shape)
        if lineage.has_lineage(mask):
            shape[mask.axis] = mask.shape[mask.axis]
        mask = dataclasses.replace(mask, shape=tuple(shape))
    return kept_by(ctx.build(mask), keeps)


def of_one_user(ctx: Context, x: Any, axis: int) -> Any:
    """Looks tokens that are the same in all rows up in a batch of one user.

    Not if most tokens are the candidate's, as beside a learned token.
    """
    if not isinstance(x, Concat) or x.axis == axis or any(map(lineage.has_lineage, x.parts)):
        return x
    parts = tuple(elementwise.of_one_user(ctx, part, axis) for part in x.parts)
    of_user = sum(n for part, n in zip(parts, x.sizes, strict=True) if lineage.has_lineage(part))
    return x if lineage.is_at_least(x.shape[x.axis], 2 * of_user) else Concat(parts, x.axis)


def start(
    ctx: Context, eqn: Any, lhs: Any, rhs: Any, plain_product: Callable[[Context], jax.Array]
) -> Scores | None:
    """Returns the scores of a batched product with concatenated keys; None for other products."""
    contract, batch = dims_of(eqn)
    for left, right in zip(*batch, strict=True):
        lhs, rhs = of_one_user(ctx, lhs, left), of_one_user(ctx, rhs, right)
    user_dim = _user_dimension(lhs, rhs, batch)
    if user_dim is None or len(contract[0]) != 1 or lhs.dtype != rhs.dtype:
        return None
    sides = list(zip((lhs, rhs), contract, batch, strict=True))
    free = [[d for d in range(len(shape_of(x))) if d not in (*c, *b)] for x, c, b in sides]
    # The keys are the operand that is concatenated along its only free dimension; if both may be,
    # the second one, as models write the product.
    key_side = next((n for n in (1, 0) if _may_be_keys(sides[n][0], free[n])), None)
    if key_side is None:
        return None
    (query, *_), (key, *_) = of_query, of_key = sides[1 - key_side], sides[key_side]
    if isinstance(query, Concat) and query.axis not in free[1 - key_side]:
        return None
    if lineage.has_lineage(query):
        # A product by parts keeps the user's part at user batch.
        return None
    is_usual = isinstance(query, (Concat, Lazy)) or lineage.is_plain(query)
    (out,) = eqn.outvars
    if not is_usual or key.dtype not in DTYPES or out.aval.dtype not in (key.dtype, jnp.float32):
        return None
    return of_product(Blocks, eqn, of_query, of_key, user_dim, key_side == 0, plain_product)


def _user_dimension(lhs: Any, rhs: Any, batch: list[list[int]]) -> int | None:
    """Finds the number of the batch dimension along which parts are looked up; None without one."""
    found: set[int] = set()
    for x, dims in ((lhs, batch[0]), (rhs, batch[1])):
        for part in x.parts if isinstance(x, Concat) else (x,):
            if not lineage.is_plain(part) and not isinstance(part, Lazy):
                return None
            if lineage.has_lineage(part):
                if part.axis not in dims:
                    return None
                found.add(dims.index(part.axis))
    return found.pop() if len(found) == 1 else None


def _may_be_keys(x: Any, free: list[int]) -> bool:
    return isinstance(x, Concat) and free == [x.axis] and any(map(lineage.has_lineage, x.parts))


def arranged(x: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """Transposes a value with labelled dimensions to other labels; missing ones have size 1."""
    if isinstance(x, Concat):
        parts = tuple(arranged(part, labels, wanted) for part in x.parts)
        if labels[x.axis] not in wanted:
            raise NotCovered("attention is not recognised: its mask is a concatenation")
        return Concat(parts, wanted.index(labels[x.axis]))
    if lineage.is_plain(x):
        return arranged_array(x, labels, wanted)
    if not isinstance(x, Lazy):
        raise NotCovered("attention is not recognised: its mask is computed from scores")
    base = arranged_array(x.base, labels, wanted)
    shape = tuple(x.shape[labels.index(w)] if w in labels else 1 for w in wanted)
    axis = wanted.index(labels[x.axis]) if lineage.has_lineage(x) else -1
    return Lazy(base, shape, x.lineage, axis, x.origins)


def arranged_array(x: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """Does what `arranged` does, for an array, also of NumPy."""
    dims = [labels.index(w) if w in labels else None for w in wanted]
    kept = [d for d in dims if d is not None]
    rest = [d for d in range(len(labels)) if d not in kept]
    if any(x.shape[d] != 1 for d in rest):
        raise NotCovered("attention is not recognised: its mask has other dimensions")
    shape = [1 if d is None else x.shape[d] for d in dims]
    moves: Any = np if isinstance(x, np.ndarray) else staged
    return moves.reshape(moves.transpose(x, [*kept, *rest]), shape)


def grouped(x: Any, labels: Sequence[Label], groups: Sequence[tuple[str, Sequence[int]]]) -> Any:
    """Arranges an array, also of NumPy, as [batch, *groups, keys], each group as one dimension.

    `groups` are kinds of dimensions, with all sizes. A group without differences has size 1.
    """
    between: list[Label] = [(kind, n) for kind, sizes in groups for n in range(len(sizes))]
    x = arranged_array(x, labels, [(BATCH, 0), *between, (KEY, 0)])
    (batch, *rest, keys), whole, flat = x.shape, list[int](), list[int]()
    for _, sizes in groups:
        own, rest = rest[: len(sizes)], rest[len(sizes) :]
        own = own if math.prod(own) == 1 else [*sizes]
        whole += own
        flat.append(math.prod(own))
    if isinstance(x, np.ndarray):
        return np.broadcast_to(x, (batch, *whole, keys)).reshape(batch, *flat, keys)
    return staged.reshape(lineage.spread(x, (batch, *whole, keys)), (batch, *flat, keys))


@dataclasses.dataclass(frozen=True)
class Part:
    """Holds the rows `start` to `stop` of the queries, or of the keys with their values."""

    value: Any
    start: int
    stop: int
    values: Any = None


def parts_of(x: Any, axis: int, values: Any = None) -> list[Part]:
    """Splits a value along an axis into its parts, with the same parts of the values."""
    if not isinstance(x, Concat):
        return [Part(x, 0, shape_of(x)[axis] if axis < len(shape_of(x)) else 1, values)]
    if values is not None and (not isinstance(values, Concat) or values.sizes != x.sizes):
        raise NotCovered("attention is not recognised: its values are not concatenated as its keys")
    parts = []
    for n, (part, begin, end) in enumerate(x.pieces()):
        own = None if values is None else values.parts[n]
        if own is not None and lineage_of(own) is not lineage_of(part):
            reason = "its values are not looked up as its keys"
            raise NotCovered(f"attention is not recognised: {reason}")
        parts.append(Part(part, begin, end, own))
    return parts


def lineage_of(x: Any) -> Lineage | None:
    """Returns the lineage of a value; None without one."""
    return x.lineage if lineage.has_lineage(x) else None


def at_users(x: Any, users: Lineage, axis: int = 0) -> Any:
    """Returns the array at user batch along `axis`; None if the value differs by candidate."""
    if isinstance(x, Concat):
        return None
    if lineage.has_lineage(x):
        return x.base if x.lineage is users and x.axis == axis else None
    array = lineage.base_of(x)
    return array if array.shape[axis] == 1 else None


# These are jitted, so that JAX traces them once for all layers.


@functools.partial(jax.jit, static_argnames=("scale", "cap", "numbers"))
def masked_logits(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    masks: Sequence[jax.Array],
    *,
    scale: float,
    cap: float | None,
    numbers: tuple[float, ...],
) -> jax.Array:
    """Computes logits in float32, [batch, heads, queries, keys]: the numbers where masks are False.

    Bias and masks are [batch, heads, queries, keys]; sizes may be 1. Each mask has its number.
    """
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    logits = logits if cap is None else jnp.tanh(logits) * cap
    logits = logits if bias is None else logits + bias
    for mask, number in zip(masks, numbers, strict=True):
        logits = jnp.where(mask, logits, number)
    return logits


@jax.jit
def weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the weighted sum of values in float32: [batch, queries, heads, width]."""
    weights = weights.astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, preferred_element_type=jnp.float32)


@jax.jit
def softmax_of_keys(logits: jax.Array) -> jax.Array:
    """Computes the softmax of logits over the keys; NaN for a row of -inf."""
    exponentials = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, 3, keepdims=True)))
    return exponentials / jnp.sum(exponentials, 3, keepdims=True)
