"""`attention_fn`: makes Flax's attention layers attend to the history of every candidate's user."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.layers.functional import cast, with_precision
from ikbo_jax.ops.dot_product_attention import dot_product_attention


def attention_fn(cand_to_user: jax.Array) -> Callable[..., jax.Array]:
    """Makes an `attention_fn` for `flax.nnx.MultiHeadAttention` and Linen's.

    The layer then takes queries of candidates, [B, T, features], beside keys and values of users,
    [U, S, features], and computes what it would on `keys[cand_to_user]`.

    Args:
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order.

    Returns:
      A function of query, key, value, bias and mask as `ikbo_jax.dot_product_attention` takes them,
      with the options of Flax's; a mask may also hold numbers, 0 for hidden, as Flax's own do. It
      raises NotImplementedError for dropout, for `sow_weights`, and where `dot_product_attention`
      raises it.
    """

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng
        if dropout_rate and not deterministic:
            raise NotImplementedError(
                f"attention_fn has no dropout of attention weights, but dropout_rate={dropout_rate}"
            )
        if module is not None:
            raise NotImplementedError(
                "attention_fn keeps no attention weights for sow_weights=True"
            )
        if mask is not None and jnp.issubdtype(getattr(mask, "dtype", bool), jnp.number):
            # The masks that Flax makes, also while decoding, hold 0 and 1 in float32.
            mask = mask != 0
        _, (query, key, value) = cast("attention_fn", {}, dtype, query=query, key=key, value=value)
        with with_precision(precision):
            out: jax.Array = dot_product_attention(
                *(query, key, value, bias, mask), cand_to_user=cand_to_user, is_causal=is_causal
            )
        return out

    return attend
