"""Layers for Flax NNX. They hold parameters and call the ops, nothing more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ikbo_jax.ops.linear_compression import linear_compression

Initializer = Callable[..., Any]


class LinearCompression(nnx.Module):
    """Compresses every candidate's embeddings and those of its user, which are never copied.

        out[b] = w_cand · e_cand[b] + w_user · e_user[cand_to_user[b]]

    Attributes:
      w_user: [features, user_rows] parameter.
      w_cand: [features, cand_rows] parameter.
    """

    def __init__(
        self,
        user_rows: int,
        cand_rows: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        precision: str | jax.lax.Precision | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the parameters.

        Args:
          user_rows: embedding rows of a user, K_user.
          cand_rows: embedding rows of a candidate, K_cand.
          features: compressed rows, M.
          dtype: what is computed in and returned; None promotes parameters and inputs.
          param_dtype: of the parameters.
          kernel_init: initialises the weight [user_rows + cand_rows, features] of users and
            candidates together, of which the parameters are the transposed parts; None is
            `default_kernel_init`.
          precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
          rngs: the key "params" is drawn from.
        """
        init = default_kernel_init if kernel_init is None else kernel_init
        kernel = init(rngs.params(), (user_rows + cand_rows, features), param_dtype)
        self.w_user = nnx.Param(kernel[:user_rows].T)
        self.w_cand = nnx.Param(kernel[user_rows:].T)
        self.dtype = dtype
        self.precision = precision

    def __call__(self, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array) -> jax.Array:
        """Compresses.

        Args:
          e_user: [U, user_rows, N].
          e_cand: [B, cand_rows, N].
          cand_to_user: [B] int32, the user of every candidate, in [0, U), in any order.

        Returns:
          [B, features, N] in `dtype`.

        Raises:
          ValueError: ranks or sizes disagree.
        """
        return compress(
            self.w_cand[...],
            self.w_user[...],
            e_cand,
            e_user,
            cand_to_user,
            self.dtype,
            self.precision,
        )


#: Of both weights together, so that the result's variance is that of one dense layer.
default_kernel_init = nnx.initializers.lecun_normal()


def compress(
    w_cand: jax.Array,
    w_user: jax.Array,
    e_cand: jax.Array,
    e_user: jax.Array,
    cand_to_user: jax.Array,
    dtype: Any,
    precision: str | jax.lax.Precision | None,
) -> jax.Array:
    """`linear_compression` in `dtype`, or in what all inputs promote to."""
    arrays = (w_cand, w_user, e_cand, e_user)
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    w_cand, w_user, e_cand, e_user = (x.astype(dtype) for x in arrays)
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if precision is not None:
        context = jax.default_matmul_precision(jax.lax.Precision(precision).name.lower())
    with context:
        return linear_compression(w_cand, w_user, e_cand, e_user, cand_to_user)
