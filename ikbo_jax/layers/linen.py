"""Layers for Flax Linen, with the parameters of their NNX twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from ikbo_jax.layers import nnx


class LinearCompression(linen.Module):
    """Compresses every candidate's embeddings and those of its user, which are never copied.

        out[b] = w_cand · e_cand[b] + w_user · e_user[cand_to_user[b]]

    Attributes:
      user_rows: embedding rows of a user, K_user.
      cand_rows: embedding rows of a candidate, K_cand.
      features: compressed rows, M.
      dtype: what is computed in and returned; None promotes parameters and inputs.
      param_dtype: of the parameters "w_user" [features, user_rows] and "w_cand" [features,
        cand_rows].
      kernel_init: initialises the weight [user_rows + cand_rows, features] of users and candidates
        together, of which the parameters are the transposed parts.
      precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
    """

    user_rows: int
    cand_rows: int
    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    @linen.compact
    def __call__(self, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array) -> jax.Array:
        """Compresses [U, user_rows, N] and [B, cand_rows, N] by [B] int32 to [B, features, N]."""
        rows = self.user_rows + self.cand_rows

        def both(key: jax.Array) -> jax.Array:
            return self.kernel_init(key, (rows, self.features), self.param_dtype)

        # One key for both, as one weight: `self.param` would give each a key of its own.
        drawn = self.make_rng("params") if self.is_initializing() else None

        def key(own: jax.Array) -> jax.Array:
            return own if drawn is None else drawn

        w_user = self.param("w_user", lambda own: both(key(own))[: self.user_rows].T)
        w_cand = self.param("w_cand", lambda own: both(key(own))[self.user_rows :].T)
        return nnx.compress(
            w_cand, w_user, e_cand, e_user, cand_to_user, self.dtype, self.precision
        )
