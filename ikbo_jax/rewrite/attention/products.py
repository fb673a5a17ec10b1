"""Attention of candidates' queries to looked-up keys and values, as written in models.

A batched product of queries with looked-up keys would need a copy of the keys for every candidate.
It is not computed but represented by `Scores`, which pass through scale, mask, casts and softmax.
At the product of the probabilities with the looked-up values, one call of `ikbo.attention` replaces
all of these equations; with an activation instead of the softmax, one call of `ikbo.gdpa`. If any
other equation uses the scores, they are computed as the program is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.rewrite.attention import (
    block_attention,
    blocks,
    masked_keys,
    pointwise,
    weighted_values,
)
from ikbo_jax.rewrite.attention.block_parts import reordered
from ikbo_jax.rewrite.attention.scores import (
    BATCH,
    HEAD,
    KEY,
    QUERY,
    WIDTH,
    Label,
    Logits,
    Scores,
    labels_of_product,
    only,
)
from ikbo_jax.rewrite.facts import activations, curves
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import (
    Lazy,
    has_lineage,
    is_only_broadcast,
    is_plain,
    origins_of,
    spread_axes,
)
from ikbo_jax.rewrite.values.registry import NotCovered

#: The dtypes that the ops accept.
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def start(
    ctx: Context,
    eqn: Any,
    lhs: Any,
    rhs: Any,
    plain_product: Callable[[Context], jax.Array],
) -> Scores | None:
    """The scores of a product of queries with looked-up keys; None for any other product.

    `plain_product` computes the product as the program is written.
    """
    (contract, batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (
        one_user(ctx, lhs, batch[0], rhs, batch[1]),
        one_user(ctx, rhs, batch[1], lhs, batch[0]),
    )
    sides = [(lhs, contract[0], batch[0]), (rhs, contract[1], batch[1])]
    key_first = _first_is_key(sides)
    if key_first:
        sides.reverse()
    (query, query_contract, query_batch), (key, key_contract, key_batch) = sides
    if not has_lineage(key) or key.axis not in key_batch:
        return None
    if has_lineage(query) and query.lineage is key.lineage:
        return None
    key_free = [d for d in range(len(key.shape)) if d not in (*key_contract, *key_batch)]
    if len(query_contract) != 1 or len(key_free) != 1 or key.dtype != query.dtype:
        return None
    (out,) = eqn.outvars
    if key.dtype not in _DTYPES or out.aval.dtype not in (key.dtype, jnp.float32):
        return None
    if not has_default_precision(eqn):
        return None
    user_dim = list(key_batch).index(key.axis)
    heads_key = [d for d in key_batch if d != key.axis]
    heads_query = [d for n, d in enumerate(query_batch) if n != user_dim]
    if has_lineage(query):
        reason = "queries that are looked up by another index than their keys"
        query = ctx.materialise(eqn, query, reason)
    query = ctx.build(query)
    queries = [d for d in range(query.ndim) if d not in (*query_contract, *query_batch)]
    key_order = [key.axis, *key_free, *heads_key, *key_contract]
    key = spread_axes(key, range(len(key.shape)))
    key = dataclasses.replace(
        key,
        base=_transposed(key.base, key_order),
        shape=tuple(key.shape[d] for d in key_order),
        axis=0,
    )
    root = Logits(
        _transposed(query, [query_batch[user_dim], *queries, *heads_query, *query_contract]),
        key,
        tuple(query.shape[d] for d in queries),
        tuple(query.shape[d] for d in heads_query),
    )
    heads = iter(range(len(heads_query)))
    labels: list[Label] = [
        (BATCH, 0) if n == user_dim else (HEAD, next(heads)) for n in range(len(key_batch))
    ]
    free: list[Label] = [(QUERY, n) for n in range(len(queries))]
    labels += [(KEY, 0), *free] if key_first else [*free, (KEY, 0)]
    shape, dtype = tuple(out.aval.shape), out.aval.dtype
    return Scores(root, "logits", tuple(labels), shape, dtype, plain_product, curves.logits(dtype))


def _first_is_key(sides: list[tuple[Any, Any, Any]]) -> bool:
    """Whether the first operand of a batched product holds the looked-up keys.

    If both operands are looked up, as queries from a table of items by the candidates' ids, the
    keys are the operand with more elements, of those with one free dimension.
    """

    def may_be_key(x: Any, contract: Any, batch: Any) -> bool:
        return has_lineage(x) and len(x.shape) - len(contract) - len(batch) == 1

    first, second = (may_be_key(*side) for side in sides)
    if not (first and second):
        return first or (not second and has_lineage(sides[0][0]))
    return not lineage.is_at_least(*(lineage.size_of(x.shape) for x, _, _ in reversed(sides)))


def has_default_precision(eqn: Any) -> bool:
    """Whether a product sets no precision, or the algorithm by which the ops compute anyway."""
    precision, default = eqn.params["precision"], lax.Precision.DEFAULT
    half = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
    if isinstance(precision, lax.DotAlgorithmPreset):
        return all(precision.name == half.get(str(v.aval.dtype)) for v in eqn.invars)
    return precision in (None, default, (default, default), (None, None))


def one_user(ctx: Context, x: Any, batch: Any, other: Any, other_batch: Any) -> Any:
    """A value that is broadcast along one batch dimension, as a lookup in a batch of one user."""
    if not isinstance(x, Lazy) or x.lineage is not None or is_plain(other) is False:
        return x
    shared = [
        d
        for d, o in zip(batch, other_batch, strict=True)
        if x.base.shape[d] == 1 and x.shape[d] > 1 and other.shape[o] > 1
    ]
    if len(shared) != 1 or len(x.shape) < 3:
        return x
    size = x.shape[shared[0]]
    index = ctx.scope.of_one_user(size)
    return dataclasses.replace(x, lineage=index, axis=shared[0])


def _transposed(x: jax.Array, order: list[int]) -> jax.Array:
    return x if order == list(range(x.ndim)) else staged.transpose(x, order)


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Probabilities or activated scores times looked-up values: the last product of attention."""
    scores = only((lhs, rhs))
    if isinstance(scores.root, blocks.Blocks):
        if scores.stage not in ("probabilities", "logits", "elementwise"):
            raise NotCovered(f"attention is not recognised: product with its {scores.stage}")
        if not has_default_precision(eqn):
            raise NotCovered("attention is not recognised: its product sets a precision")
        return block_attention.product(ctx, eqn, lhs, rhs, scores, pointwise.call)
    changed: weighted_values.Weights | None = scores.weights if scores.stage == "weighted" else None
    activation = _activation(ctx, scores, scores if changed is None else changed.of)
    if not has_default_precision(eqn):
        raise NotCovered("attention is not recognised: its product sets a precision")
    side = 0 if scores is lhs else 1
    root = scores.root
    value, base = _values(eqn, scores, side, (rhs, lhs)[side])
    if changed is not None:
        out = weighted_values.attend(ctx, changed, base, activation)
    elif activation is None:
        out = masked_keys.attend(ctx, scores, base)
    else:
        name, scale, output_scale, _ = activation
        out = masked_keys.attend_activated(root, base, name, scale, output_scale)
    origins = origins_of(root.key, value) | root.mask_origins
    origins |= changed.origins if changed is not None else frozenset()
    op = "attention" if activation is None else "gdpa"
    ctx.recorder.saved(eqn, origins, op, True)
    return _as_the_product(eqn, scores, side, out)


def _activation(ctx: Context, scores: Scores, unchanged: Scores) -> activations.Match | None:
    """The activation of weights that are no probabilities; None for probabilities.

    `unchanged` are the weights before they are changed after the softmax or the activation.
    """
    activation = None
    if unchanged.stage == "curve" and unchanged.curve is not None:
        activation = activations.match(unchanged.curve)
    elif unchanged.stage == "logits" and not unchanged.root.fills:
        activation = activations.Match("identity", unchanged.root.scale, 1.0, True)
    if unchanged.stage != "probabilities" and activation is None:
        raise NotCovered(f"attention is not recognised: product with its {scores.stage}")
    if activation is not None and not activation.same_slope:
        if ctx.differentiated:
            raise NotCovered(
                f"attention is not recognised: {activation.activation} with another slope"
            )
        ctx.gradient_differs()
    return activation


def _values(eqn: Any, scores: Scores, side: int, value: Any) -> tuple[Any, jax.Array]:
    """The looked-up values of attention, and their rows [users, keys, *heads, width].

    Args:
      eqn: the product of the weights with the values.
      scores: the weights.
      side: which operand the weights are.
      value: the other operand.
    """
    (contract, batch) = eqn.params["dimension_numbers"]
    root = scores.root
    pairs = dict(zip((scores.labels[d] for d in batch[side]), batch[1 - side], strict=True))
    axis = pairs.get((BATCH, 0))
    shared = is_only_broadcast(value) and axis is not None
    if shared and value.base.shape[axis] == root.key.base.shape[0] == 1:
        # All candidates share the values, as they share the keys.
        value = dataclasses.replace(value, lineage=root.lineage, axis=axis)
    if not has_lineage(value) or value.lineage is not root.lineage:
        raise NotCovered("attention is not recognised: its values are not looked up like its keys")
    heads: list[Any] = [pairs.get((HEAD, n)) for n in range(len(root.heads))]
    summed = (*contract[1 - side], *batch[1 - side])
    free = [d for d in range(len(value.shape)) if d not in summed]
    if (
        [scores.labels[d] for d in contract[side]] != [(KEY, 0)]
        or axis != value.axis
        or None in heads
        or len(pairs) != 1 + len(heads)
        or len(free) != 1
        or value.shape[free[0]] != root.key.shape[-1]
    ):
        raise NotCovered("attention is not recognised: another product with its values")
    value = spread_axes(value, range(len(value.shape)))
    base = _transposed(value.base, [value.axis, *contract[1 - side], *heads, *free])
    dtype = root.key.dtype
    for x in (base, eqn.outvars[0].aval):
        if jnp.finfo(x.dtype).eps < jnp.finfo(dtype).eps:
            raise NotCovered(f"attention is not recognised: {x.dtype} values of {dtype} logits")
    return value, base.astype(dtype)


def _as_the_product(eqn: Any, scores: Scores, side: int, out: jax.Array) -> jax.Array:
    """The result [batch, *queries, *heads, width] with the axes and dtype of the product."""
    have: list[Label] = [(BATCH, 0)]
    have += [(QUERY, n) for n in range(len(scores.root.queries))]
    have += [(HEAD, n) for n in range(len(scores.root.heads))] + [WIDTH]
    aval: Any = eqn.outvars[0].aval
    out = reordered(out, have, labels_of_product(eqn, scores, side), tuple(aval.shape))
    return staged.cast(out, aval.dtype)
