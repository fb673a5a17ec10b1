"""The product of values with attention weights that the program changes after the softmax.

Factors and masks by user and key apply to the values, at user batch. Weights over their sum need
the sum of the exponentials, which the op returns as its lse.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.rewrite.attention import biases, masked_keys
from ikbo_jax.rewrite.attention.scores import Fill, Scores
from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Holds a mask of weights.

    Attributes:
      kept: bool [users, keys, *heads], with 1 in place of a size; False where a weight becomes 0.
      source: see `proofs.source_of_mask`; None if unknown.
    """

    kept: jax.Array
    source: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Describes attention weights after the softmax or the activation.

    Attributes:
      of: the probabilities or the curve that the weights are computed from.
      scale: a factor of all weights.
      factors: arrays [users, keys, *heads], with 1 in place of a size, that multiply the weights.
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
    masks: tuple[Mask, ...] = ()
    nan_is_zero: bool = False
    divided: tuple[str, float] | None = None
    unnormalised: bool = False
    origins: frozenset = frozenset()


def attend(ctx: Context, weights: Weights, value: jax.Array, activation: Any) -> jax.Array:
    """Multiplies values [users, keys, *heads, width] with weights.

    Its shape is [batch, *queries, *heads, width]. `activation` is an `activations.Match` if the
    weights are computed from a curve.
    """
    root = weights.of.root
    for factor in weights.factors:
        if value.dtype != jnp.float32 or factor.dtype != jnp.float32:
            raise NotCovered("attention is not recognised: weights of 16 bits are scaled")
        value = value * factor[..., None]
    masks, unmasked = [mask.kept for mask in weights.masks], value
    kept = functools.reduce(operator.and_, masks) if masks else None
    if kept is not None:
        # As a weight of 0 times the value, in value and gradient, also if these are NaN.
        value = value * kept[..., None].astype(value.dtype)
    nan, by_user = None, all(fill.seen is None for fill in root.fills)
    if root.bias is not None and masks and by_user and not weights.nan_is_zero:
        # The weights of such rows are NaN and 0, and the gradients of their logits are NaN.
        nan = biases.nan_rows(root.bias, root.fills)
        root = dataclasses.replace(root, bias=jnp.where(nan, 0, root.bias))
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
    if any(fill.seen is not None for fill in fills):
        raise NotCovered("attention is not recognised: weights over their sum")
    if kept is None and not weights.unnormalised or weights.factors or weights.nan_is_zero:
        raise NotCovered("attention is not recognised: weights over their sum")
    if weights.unnormalised:
        kept = jnp.ones((users, keys), jnp.bool_) if kept is None else kept
        return masked_keys.renormalised(root, value, kept, weights.divided, False)
    assert kept is not None
    of = weights.of
    if weights.divided[1] == 0 or fills:
        same = len(fills) == 1 and all(
            proofs.same_source(fills[0].source, mask.source) for mask in weights.masks
        )
        if fills and (not same or fills[0].added is not None):
            raise NotCovered("attention is not recognised: weights over their sum")
    if weights.divided[1] == 0:
        fill = Fill(-math.inf, kept=kept, lengths=fills[0].lengths if fills else None)
        masked = dataclasses.replace(root, fills=(fill,))
        out = masked_keys.attend(ctx, dataclasses.replace(of, root=masked), value)
        if root.bias is not None:
            # 0 over a sum of 0 also makes the gradients of hidden keys NaN.
            ctx.run_original_if(jnp.any(biases.nan_rows(root.bias, masked.fills)))
        return out
    if fills and fills[0].value <= masked_keys.LARGE:
        # The sum of a row is 1, or 0.
        how, number = weights.divided
        out = masked_keys.attend(ctx, of, value, kept)
        total = 1 + number if how == "add" else max(1.0, number)
        return out if total == 1 else (out / total).astype(out.dtype)
    return masked_keys.renormalised(root, value, kept, weights.divided, True)
