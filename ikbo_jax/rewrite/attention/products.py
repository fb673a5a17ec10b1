"""Attention of candidates' queries to looked-up keys and values, as written in models.

A batched product of queries with looked-up keys would need a copy of the keys for every candidate.
It is not computed but represented by `Scores`, which pass through scale, mask, casts and softmax.
At the product of the probabilities with the looked-up values, one call of `ikbo.attention` replaces
all of these equations; with an activation instead of the softmax, one call of `ikbo.gdpa`. If any
other equation uses the scores, they are computed as the program is written.

The program may change the weights after the softmax. Factors and masks by user and key apply to the
values, at user batch. Weights over their sum need the sum of the exponentials, which the op returns
as its lse.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.rewrite.attention import block_attention, blocks, masked_keys, pointwise
from ikbo_jax.rewrite.attention.scores import (
    DTYPES,
    WIDTH,
    Fill,
    Label,
    Logits,
    Scores,
    labels_of_product,
    of_product,
    only,
    order_of_values,
)
from ikbo_jax.rewrite.facts import activations, curves, proofs
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules.elementwise import of_one_user
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Lazy
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Describes attention weights after the softmax or the activation.

    Attributes:
      of: the probabilities or the curve that the weights are computed from.
      scale: a factor of all weights.
      factors: arrays [users, keys, *heads], with 1 in place of a size, that multiply the weights;
        booleans for 0 and 1.
      masks: where the weights become 0.
      nan_is_zero: whether weights that are NaN become 0.
      divided: None; or ("add", e) if the weights are divided by their sum plus e; or ("max", e) if
        they are divided by the larger of their sum and e.
      unnormalised: whether `divided` counts for the exponentials instead of the probabilities.
      origins: the broadcasts that factors and masks stem from.
    """

    of: Scores
    scale: float = 1.0
    factors: tuple[jax.Array, ...] = ()
    masks: tuple[Fill, ...] = ()
    nan_is_zero: bool = False
    divided: tuple[str, float] | None = None
    unnormalised: bool = False
    origins: frozenset = frozenset()


def start(
    ctx: Context, eqn: Any, lhs: Any, rhs: Any, plain_product: Callable[[Context], jax.Array]
) -> Scores | None:
    """Returns the scores of a product of queries with looked-up keys; None for other products.

    `plain_product` computes the product as the program is written.
    """
    (contract, batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (
        _shared(ctx, lhs, batch[0], rhs, batch[1]),
        _shared(ctx, rhs, batch[1], lhs, batch[0]),
    )
    sides = [(lhs, contract[0], batch[0]), (rhs, contract[1], batch[1])]
    key_first = _first_is_key(sides)
    if key_first:
        sides.reverse()
    (query, query_contract, query_batch), (key, key_contract, key_batch) = sides
    if not lineage.has_lineage(key) or key.axis not in key_batch:
        return None
    if lineage.has_lineage(query) and query.lineage is key.lineage:
        return None
    key_free = [d for d in range(len(key.shape)) if d not in (*key_contract, *key_batch)]
    if len(query_contract) != 1 or len(key_free) != 1 or key.dtype != query.dtype:
        return None
    (out,) = eqn.outvars
    if key.dtype not in DTYPES or out.aval.dtype not in (key.dtype, jnp.float32):
        return None
    if not has_default_precision(eqn):
        return None
    user_dim = list(key_batch).index(key.axis)
    if lineage.base_of(query).shape[query_batch[user_dim]] == 1:
        # Learned queries of a pooling: a product at user batch.
        return None
    if lineage.has_lineage(query):
        reason = "queries that are looked up by another index than their keys"
        query = ctx.materialise(eqn, query, reason)
    query_side = ctx.build(query), query_contract, query_batch
    key_side = lineage.spread_axes(key, range(len(key.shape))), key_contract, key_batch
    curve = curves.logits(out.aval.dtype)
    return of_product(Logits, eqn, query_side, key_side, user_dim, key_first, plain_product, curve)


def _first_is_key(sides: list[tuple[Any, Any, Any]]) -> bool:
    """Whether the first operand of a batched product holds the looked-up keys.

    If both operands are looked up, as queries from a table of items by the candidates' ids, the
    keys are the operand with more elements, if both have one free dimension.
    """

    def may_be_key(x: Any, contract: Any, batch: Any) -> bool:
        return lineage.has_lineage(x) and len(x.shape) - len(contract) - len(batch) == 1

    first, second = (may_be_key(*side) for side in sides)
    if not (first and second):
        return first or (not second and lineage.has_lineage(sides[0][0]))
    return not lineage.is_at_least(*(math.prod(x.shape) for x, _, _ in reversed(sides)))


def has_default_precision(eqn: Any) -> bool:
    """Whether a product sets no precision, or the algorithm by which the ops compute anyway."""
    precision, default = eqn.params["precision"], lax.Precision.DEFAULT
    half = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
    if isinstance(precision, lax.DotAlgorithmPreset):
        return all(precision.name == half.get(str(v.aval.dtype)) for v in eqn.invars)
    return precision in (None, default, (default, default), (None, None))


def _shared(ctx: Context, x: Any, batch: Any, other: Any, other_batch: Any) -> Any:
    """Looks a value that is broadcast along one batch dimension up in a batch of one user."""
    if not isinstance(x, Lazy) or x.lineage is not None or lineage.is_plain(other) is False:
        return x
    shared = [
        d
        for d, o in zip(batch, other_batch, strict=True)
        if x.base.shape[d] == 1 and 1 not in (x.shape[d], other.shape[o])
    ]
    return x if len(shared) != 1 or len(x.shape) < 3 else of_one_user(ctx, x, shared[0])


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Multiplies probabilities or activated scores with looked-up values: the last product."""
    scores = only((lhs, rhs))
    side, value = (0, rhs) if scores is lhs else (1, lhs)
    if not has_default_precision(eqn):
        raise NotCovered("attention is not recognised: its product sets a precision")
    if isinstance(scores.root, blocks.Blocks):
        if scores.stage not in ("probabilities", "logits", "elementwise"):
            raise NotCovered(f"attention is not recognised: product with its {scores.stage}")
        is_softmax = scores.stage == "probabilities"
        kind = block_attention.Call if is_softmax else pointwise.PointwiseCall
        return block_attention.product(ctx, eqn, scores, side, value, kind)
    scores, (value,) = scores.aligned(ctx, value)
    weights: Weights = scores.weights if scores.stage == "weighted" else Weights(scores)
    activation, root = _activation(ctx, scores, weights.of), scores.root
    value, base = _values(eqn, scores, side, value)
    out = attend(ctx, weights, base, activation)
    origins = lineage.origins_of(root.key, value) | root.mask_origins | weights.origins
    op = "attention" if activation is None else "gdpa"
    ctx.recorder.saved(eqn, origins, op, True)
    have: list[Label] = [*root.labels[:-1], WIDTH]
    out = blocks.arranged_array(out, have, labels_of_product(eqn, scores, side))
    return staged.cast(out, eqn.outvars[0].aval.dtype)


def _activation(ctx: Context, scores: Scores, unchanged: Scores) -> activations.Match | None:
    """Finds the activation of `unchanged` weights; None for probabilities."""
    activation = None
    if unchanged.stage == "curve" and unchanged.curve is not None:
        activation = activations.match(unchanged.curve)
    elif unchanged.stage == "logits" and unchanged.root.is_only_scaled:
        activation = activations.Match("identity", unchanged.root.scale, 1.0, True)
    if unchanged.stage != "probabilities" and activation is None:
        raise NotCovered(f"attention is not recognised: product with its {scores.stage}")
    if activation is not None and not activation.same_slope:
        if ctx.differentiated:
            reason = f"{activation.activation} with another slope"
            raise NotCovered(f"attention is not recognised: {reason}")
        ctx.gradient_differs()
    return activation


def _values(eqn: Any, scores: Scores, side: int, value: Any) -> tuple[Any, jax.Array]:
    """Returns the looked-up values of attention, and their rows [users, keys, *heads, width].

    `side` is the position of the weights among the operands of their product with `value`.
    """
    root, order = scores.root, order_of_values(eqn, scores, side, value)
    axis, *_, width = order
    if lineage.is_only_broadcast(value) and value.base.shape[axis] == root.key.base.shape[0] == 1:
        # All candidates share the values, as they share the keys.
        value = dataclasses.replace(value, lineage=root.lineage, axis=axis)
    if not lineage.has_lineage(value) or value.lineage is not root.lineage:
        raise NotCovered("attention is not recognised: its values are not looked up like its keys")
    if axis != value.axis or value.shape[width] != root.key.shape[-1]:
        raise NotCovered("attention is not recognised: another product with its values")
    value = lineage.spread_axes(value, range(len(value.shape)))
    base = staged.transpose(value.base, [d for d in order if d >= 0])
    base = staged.expand_dims(base, [n for n, d in enumerate(order) if d < 0])
    base = lineage.spread(base, (*base.shape[:2], *root.heads, base.shape[-1]))
    dtype = root.key.dtype
    for x in (base, eqn.outvars[0].aval):
        if jnp.finfo(x.dtype).eps < jnp.finfo(dtype).eps:
            raise NotCovered(f"attention is not recognised: {x.dtype} values of {dtype} logits")
    return value, base.astype(dtype)


def attend(ctx: Context, weights: Weights, value: jax.Array, activation: Any) -> jax.Array:
    """Multiplies values [users, keys, *heads, width] with weights.

    Its shape is [batch, *queries, *heads, width]. `activation` is an `activations.Match` if the
    weights are computed from a curve.
    """
    root = weights.of.root
    if weights.divided and all(x.dtype == jnp.bool_ for x in weights.factors):
        # The weights are those of the keys that the factors keep. 0 / 0 has NaN gradients, as has a
        # row of -inf by addition.
        kept_keys = [Fill(0.0, value.dtype, kept=x) for x in weights.factors]
        weights = dataclasses.replace(weights, factors=(), masks=(*weights.masks, *kept_keys))
    masks, unmasked = [mask.kept for mask in weights.masks], value
    for factor in weights.factors:
        if factor.dtype != jnp.bool_ and {value.dtype, factor.dtype} != {jnp.dtype(jnp.float32)}:
            raise NotCovered("attention is not recognised: weights of 16 bits are scaled")
        value = value * factor[..., None].astype(value.dtype)
    kept = functools.reduce(operator.and_, masks) if masks else None
    if kept is not None:
        # As a weight of 0 times the value, in value and gradient, also if these are NaN.
        value = value * kept[..., None].astype(value.dtype)
    nan, by_user = None, all(fill.seen is None for fill in root.fills)
    if root.biases and masks and by_user and not weights.nan_is_zero:
        # The weights of such rows are NaN and 0, and the gradients of their logits are NaN.
        (bias,) = root.biases
        nan = masked_keys.nan_rows(bias, root.fills)
        root = dataclasses.replace(root, biases=(jnp.where(nan, 0, bias),))
        weights = dataclasses.replace(weights, of=dataclasses.replace(weights.of, root=root))
    if activation is not None:
        if kept is not None:
            # A key that is hidden may be NaN.
            key = jnp.where(kept[..., None], root.key.base, jnp.zeros((), root.key.dtype))
            root = dataclasses.replace(root, key=dataclasses.replace(root.key, base=key))
        out = masked_keys.attend_activated(root, value, activation)
    else:
        nan_remains = weights.divided is not None and weights.divided[1] == 0
        out = _attend(ctx, weights, unmasked if nan_remains else value, kept)
        if nan is not None:
            ctx.run_original_if(jnp.any(nan))
    return out if weights.scale == 1 else (out * weights.scale).astype(out.dtype)


def _attend(ctx: Context, weights: Weights, value: jax.Array, kept: jax.Array | None) -> jax.Array:
    root, fills = weights.of.root, weights.of.root.fills
    users, keys = value.shape[:2]
    if kept is not None and any(n != 1 for n in kept.shape[2:]):
        if fills or weights.divided:
            raise NotCovered("attention is not recognised: its weights are masked by head")
        kept = None
    if kept is not None:
        kept = jnp.broadcast_to(kept.reshape(kept.shape[:2]), (users, keys))
    if weights.divided is None:
        return masked_keys.attend(ctx, weights.of, value, kept, weights.nan_is_zero)
    by_row = any(fill.seen is not None for fill in fills)
    keeps = kept is not None or weights.unnormalised
    if by_row or not keeps or weights.factors or weights.nan_is_zero:
        raise NotCovered("attention is not recognised: weights over their sum")
    if weights.unnormalised:
        kept = jnp.ones((users, keys), jnp.bool_) if kept is None else kept
        return masked_keys.renormalised(root, value, kept, weights.divided, False)
    assert kept is not None
    same = all(proofs.same_source(x.source, y.source) for x in fills for y in weights.masks)
    if not same or len(fills) > 1 or fills and fills[0].added is not None:
        raise NotCovered("attention is not recognised: weights over their sum")
    if weights.divided[1] == 0:
        lengths = fills[0].lengths if fills else None
        fill = Fill(-math.inf, weights.masks[-1].added, kept=kept, lengths=lengths)
        masked = dataclasses.replace(root, fills=(fill,))
        out = masked_keys.attend(ctx, dataclasses.replace(weights.of, root=masked), value)
        for bias in root.biases:
            # 0 over a sum of 0 also makes the gradients of hidden keys NaN.
            ctx.run_original_if(jnp.any(masked_keys.nan_rows(bias, masked.fills)))
        return out
    if fills and fills[0].value <= masked_keys.LARGE:
        # The sum of a row is 1, or 0.
        how, number = weights.divided
        out = masked_keys.attend(ctx, weights.of, value, kept)
        total = 1 + number if how == "add" else max(1.0, number)
        return out if total == 1 else (out / total).astype(out.dtype)
    return masked_keys.renormalised(root, value, kept, weights.divided, True)
