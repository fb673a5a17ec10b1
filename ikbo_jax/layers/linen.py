"""Layers for Flax Linen, with the parameters of their NNX twins.

A layer takes the sizes of its inputs that are None from its parameters, or from the first inputs
while it makes the parameters. Every layer raises ValueError, naming the size, if a size is no
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
    """Compresses every candidate's embeddings and those of its user, which are never copied.

        out[b] = w_cand · e_cand[b] + w_user · e_user[cand_to_user[b]]

    Attributes:
      user_rows: embedding rows of a user, K_user; None takes those of `e_user`.
      cand_rows: embedding rows of a candidate, K_cand; None takes those of `e_cand`.
      features: compressed rows, M; must be given.
      dtype: what is computed in and returned; None promotes parameters and inputs.
      param_dtype: of the parameters "w_user" [features, user_rows] and "w_cand" [features,
        cand_rows].
      kernel_init: initialises the weight [user_rows + cand_rows, features] of users and candidates
        together, of which the parameters are the transposed parts.
      precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
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
        """Compresses [U, user_rows, N] and [B, cand_rows, N] by [B] int32 to [B, features, N]."""
        user_rows, cand_rows, features = functional.compression_sizes(
            _size(self, self.user_rows, functional.E_USER, e_user, "w_user", 1),
            _size(self, self.cand_rows, functional.E_CAND, e_cand, "w_cand", 1),
            self.features,
        )

        def both(key: jax.Array) -> jax.Array:
            return self.kernel_init(key, (user_rows + cand_rows, features), self.param_dtype)

        # One key for both, as one weight: `self.param` would give each a key of its own.
        drawn = self.make_rng("params") if self.is_initializing() else None

        def key(own: jax.Array) -> jax.Array:
            return own if drawn is None else drawn

        w_user = self.param("w_user", lambda own: both(key(own))[:user_rows].T)
        w_cand = self.param("w_cand", lambda own: both(key(own))[user_rows:].T)
        return functional.compress(
            {"w_user": w_user, "w_cand": w_cand},
            e_user,
            e_cand,
            cand_to_user,
            dtype=self.dtype,
            precision=self.precision,
        )


class CandidateAttention(linen.Module):
    """Attends from every candidate to what its user holds; keys and values are made once a user.

    Attributes:
      cand_features: width of what candidates hold; None takes the width of `x_cand`.
      user_features: width of what users hold; None takes the width of `x_user`.
      num_heads: N; must be given.
      head_dim: H; must be given.
      out_features: width of the result; None is `cand_features`.
      dtype: what is computed in and returned; None promotes parameters and inputs.
      param_dtype: of the parameters "w_query", "w_key", "w_value" and "w_out", shaped as those of
        `nnx.CandidateAttention`.
      kernel_init: initialises every parameter as a matrix, the heads side by side.
      precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
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
        """[B, T, cand_features] to [U, S, user_features] by [B] int32: [B, T, out_features]."""
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
    """Pools jagged sequences by attention of a few learned seeds, through `ikbo_jax.gdpa`.

    Attributes:
      in_features: width of the sequences; None takes the width of `x`.
      num_seeds: rows that a sequence is pooled to; must be given.
      num_heads: N; must be given.
      head_dim: H; must be given. Scores are divided by its square root.
      out_features: width of seeds and result; None is `in_features`.
      activation: as of `ikbo_jax.gdpa`.
      output_scale: as of `ikbo_jax.gdpa`.
      dtype: what is computed in and returned; None promotes parameters and inputs.
      param_dtype: of the parameters "seeds", "w_query", "w_key", "w_value" and "w_out", shaped as
        those of `nnx.PMA`.
      kernel_init: initialises every parameter as a matrix.
      precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
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
        """Pools [total, in_features] to [batch, num_seeds, out_features]."""
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
    """A feed-forward net whose two layers are made from its sequence's memory (`ikbo_jax.gdpa`).

    Attributes:
      features: width of the rows and of the result; None takes the width of `x`.
      memory_features: width of the memory; None takes the width of `memory`.
      num_heads: N; must be given.
      head_dim: H; must be given. Scores are divided by its square root.
      activation: as of `ikbo_jax.gdpa`.
      output_scale: as of `ikbo_jax.gdpa`.
      dtype: what is computed in and returned; None promotes parameters and inputs.
      param_dtype: of the parameters "w_query", "w_key", "w_value" and "w_out", shaped as those of
        `nnx.PFFN`.
      kernel_init: initialises every parameter as a matrix.
      precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
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
        """[total, features] with [total_memory, memory_features]: [total, features]."""
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
    given: int | None,
    spec: functional.Input,
    array: jax.Array,
    param: str,
    axis: int,
) -> int:
    """The size of an input: as given, else as `param` has it on `axis`, else as `array` has it."""
    if given is not None:
        return given
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
