"""Layers for Flax Linen, with the same parameters as the layers in `nnx`.

Where an input size is None, a layer takes it from its parameters, or from its first inputs while it
initialises the parameters. Every layer raises ValueError, naming the size, if a size is not an
integer of at least 1, and naming both sizes if inputs do not fit the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from ikbo_jax.layers import functional, nnx


class LinearCompression(linen.Module):
    """Compresses the embeddings of every candidate and its user; never copies the user.

        out[b] = w_cand · e_cand[b] + w_user · e_user[cand_to_user[b]]

    Attributes:
      user_rows: K_user, embedding rows of a user; None takes the size from `e_user`.
      cand_rows: K_cand, embedding rows of a candidate; None takes the size from `e_cand`.
      features: M, compressed rows; required.
      dtype: dtype of computation and result; None promotes parameters and inputs.
      param_dtype: dtype of the parameters "w_user" [features, user_rows] and "w_cand" [features,
        cand_rows].
      kernel_init: initialises one weight [user_rows + cand_rows, features]; its first `user_rows`
        rows, transposed, are "w_user", the others "w_cand".
      precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
        default.
    """

    user_rows: int | None = None
    cand_rows: int | None = None
    features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    @linen.compact
    def __call__(self, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array) -> jax.Array:
        """Compresses the embeddings; arguments and result are as in `nnx.LinearCompression`."""
        user_rows, cand_rows, features = functional.compression_sizes(
            _size(self, self.user_rows, functional.E_USER, e_user, "w_user", 1),
            _size(self, self.cand_rows, functional.E_CAND, e_cand, "w_cand", 1),
            self.features,
        )

        def both(key: jax.Array) -> jax.Array:
            return self.kernel_init(key, (user_rows + cand_rows, features), self.param_dtype)

        # Both parameters are parts of one weight and need one key; `self.param` would pass a
        # different key to each initialiser.
        shared_key = self.make_rng("params") if self.is_initializing() else None

        def key(param_key: jax.Array) -> jax.Array:
            return param_key if shared_key is None else shared_key

        w_user = self.param("w_user", lambda param_key: both(key(param_key))[:user_rows].T)
        w_cand = self.param("w_cand", lambda param_key: both(key(param_key))[user_rows:].T)
        return functional.compress(
            {"w_user": w_user, "w_cand": w_cand},
            e_user,
            e_cand,
            cand_to_user,
            dtype=self.dtype,
            precision=self.precision,
        )


class CandidateAttention(linen.Module):
    """Attends from every candidate to its user's rows; projects keys and values once per user.

    Attributes:
      cand_features: width of the candidates' rows; None takes the width of `x_cand`.
      user_features: width of the users' rows; None takes the width of `x_user`.
      num_heads: N; required.
      head_dim: H; required.
      out_features: width of the result; None means `cand_features`.
      dtype: dtype of computation and result; None promotes parameters and inputs.
      param_dtype: dtype of the parameters "w_query", "w_key", "w_value" and "w_out", which have
        the shapes in `nnx.CandidateAttention`.
      kernel_init: initialises every parameter as a matrix with the heads side by side.
      precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
        default.
    """

    cand_features: int | None = None
    user_features: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    @linen.compact
    def __call__(
        self,
        x_cand: jax.Array,
        x_user: jax.Array,
        cand_to_user: jax.Array,
        *,
        key_value_seq_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Attends; arguments and result are as in `nnx.CandidateAttention`."""
        width = _size(self, self.cand_features, functional.X_CAND, x_cand, "w_query", 0)
        user_width = _size(self, self.user_features, functional.X_USER, x_user, "w_key", 0)
        out = width if self.out_features is None else self.out_features
        specs = functional.attention_specs(width, user_width, out, self.num_heads, self.head_dim)
        return functional.attend(
            _parameters(self, specs),
            x_cand,
            x_user,
            cand_to_user,
            key_value_seq_lengths=key_value_seq_lengths,
            dtype=self.dtype,
            precision=self.precision,
        )


class PMA(linen.Module):
    """Pools jagged sequences: a few learned seeds attend to each one, through `ikbo_jax.gdpa`.

    Attributes:
      in_features: width of the sequences; None takes the width of `x`.
      num_seeds: rows that a sequence is pooled to; required.
      num_heads: N; required.
      head_dim: H; required. Scores are divided by √H.
      out_features: width of seeds and result; None means `in_features`.
      activation: as in `ikbo_jax.gdpa`.
      output_scale: as in `ikbo_jax.gdpa`.
      dtype: dtype of computation and result; None promotes parameters and inputs.
      param_dtype: dtype of the parameters "seeds", "w_query", "w_key", "w_value" and "w_out", which
        have the shapes in `nnx.PMA`.
      kernel_init: initialises every parameter as a matrix.
      precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
        default.
    """

    in_features: int | None = None
    num_seeds: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    activation: str | tuple[str, ...] = "softmax"
    output_scale: float = 1.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    @linen.compact
    def __call__(
        self, x: jax.Array, cu_seqlens: jax.Array, *, max_seqlen: int | None = None
    ) -> jax.Array:
        """Pools; arguments and result are as in `nnx.PMA`."""
        width = _size(self, self.in_features, functional.PMA_X, x, "w_key", 0)
        out = width if self.out_features is None else self.out_features
        specs = functional.pma_specs(self.num_seeds, width, out, self.num_heads, self.head_dim)
        return functional.pma(
            _parameters(self, specs),
            x,
            cu_seqlens,
            activation=self.activation,
            output_scale=self.output_scale,
            max_seqlen=max_seqlen,
            dtype=self.dtype,
            precision=self.precision,
        )


class PFFN(linen.Module):
    """A feed-forward net whose two weights are projected from a memory, by `ikbo_jax.gdpa`.

    Attributes:
      features: width of the rows and of the result; None takes the width of `x`.
      memory_features: width of the memory; None takes the width of `memory`.
      num_heads: N; required.
      head_dim: H; required. Scores are divided by √H.
      activation: as in `ikbo_jax.gdpa`.
      output_scale: as in `ikbo_jax.gdpa`.
      dtype: dtype of computation and result; None promotes parameters and inputs.
      param_dtype: dtype of the parameters "w_query", "w_key", "w_value" and "w_out", which have
        the shapes in `nnx.PFFN`.
      kernel_init: initialises every parameter as a matrix.
      precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
        default.
    """

    features: int | None = None
    memory_features: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    activation: str | tuple[str, ...] = "gelu"
    output_scale: float = 1.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        cu_seqlens: jax.Array,
        cu_seqlens_memory: jax.Array,
        x_to_memory: jax.Array | None = None,
        *,
        max_seqlen: int | None = None,
        max_seqlen_memory: int | None = None,
    ) -> jax.Array:
        """Applies the net; arguments and result are as in `nnx.PFFN`."""
        width = _size(self, self.features, functional.PFFN_X, x, "w_query", 0)
        memory_width = _size(self, self.memory_features, functional.PFFN_MEMORY, memory, "w_key", 0)
        specs = functional.pffn_specs(width, memory_width, self.num_heads, self.head_dim)
        return functional.pffn(
            _parameters(self, specs),
            x,
            memory,
            cu_seqlens,
            cu_seqlens_memory,
            x_to_memory,
            activation=self.activation,
            output_scale=self.output_scale,
            max_seqlen=max_seqlen,
            max_seqlen_memory=max_seqlen_memory,
            dtype=self.dtype,
            precision=self.precision,
        )


def _size(
    module: linen.Module,
    attribute: int | None,
    spec: functional.Input,
    array: jax.Array,
    param: str,
    axis: int,
) -> int:
    """Size of an input: `attribute` if not None, else axis `axis` of `param`, else from `array`."""
    if attribute is not None:
        return attribute
    if module.has_variable("params", param):
        size: int = module.get_variable("params", param).shape[axis]
        return size
    return spec.size_of(array)


def _parameters(module: Any, specs: dict[str, functional.Spec]) -> dict[str, jax.Array]:
    def param(name: str, make: Callable[..., jax.Array]) -> jax.Array:
        def init(key: jax.Array) -> jax.Array:
            return make(lambda shape: module.kernel_init(key, shape, module.param_dtype))

        value: jax.Array = module.param(name, init)
        return value

    return {name: param(name, make) for name, (_, make) in specs.items()}
