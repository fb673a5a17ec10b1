"""Layers for Flax NNX. They hold parameters and call the ops, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ikbo_jax.layers import functional

Initializer = Callable[..., Any]
#: Of weights that belong together as one, so that the result's variance is that of a dense layer.
default_kernel_init = nnx.initializers.lecun_normal()


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

        Raises:
          ValueError: a size is no integer of at least 1.
        """
        functional.compression_sizes(user_rows, cand_rows, features)
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
        return functional.compress(
            _parameters(self, ("w_user", "w_cand")),
            e_user,
            e_cand,
            cand_to_user,
            dtype=self.dtype,
            precision=self.precision,
        )


class _Attending(nnx.Module):
    """What the layers below share: parameters made from specs, and how they compute."""

    def _setup(
        self,
        specs: dict[str, functional.Spec],
        dtype: Any,
        param_dtype: Any,
        kernel_init: Initializer | None,
        precision: str | jax.lax.Precision | None,
        rngs: nnx.Rngs,
    ) -> None:
        init = default_kernel_init if kernel_init is None else kernel_init
        for name, (_, make) in specs.items():
            key = rngs.params()
            setattr(
                self, name, nnx.Param(make(lambda shape, key=key: init(key, shape, param_dtype)))
            )
        self.names = tuple(specs)
        self.options = {"dtype": dtype, "precision": precision}


class CandidateAttention(_Attending):
    """Attends from every candidate to what its user holds; keys and values are made once a user.

        out[b] = Attention(x_cand[b] · w_query, x_user[u] · w_key, x_user[u] · w_value) · w_out,
        u = cand_to_user[b]

    Attributes:
      w_query: [cand_features, num_heads, head_dim] parameter.
      w_key: [user_features, num_heads, head_dim] parameter.
      w_value: [user_features, num_heads, head_dim] parameter.
      w_out: [num_heads, head_dim, out_features] parameter.
    """

    def __init__(
        self,
        cand_features: int,
        user_features: int,
        num_heads: int,
        head_dim: int,
        out_features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        precision: str | jax.lax.Precision | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the parameters.

        Args:
          cand_features: width of what candidates hold.
          user_features: width of what users hold.
          num_heads: N.
          head_dim: H.
          out_features: width of the result; None is `cand_features`.
          dtype: what is computed in and returned; None promotes parameters and inputs.
          param_dtype: of the parameters.
          kernel_init: initialises every parameter as a matrix, the heads side by side; None is
            `default_kernel_init`.
          precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
          rngs: the key "params" is drawn from.

        Raises:
          ValueError: a size is no integer of at least 1.
        """
        out = cand_features if out_features is None else out_features
        specs = functional.attention_specs(cand_features, user_features, out, num_heads, head_dim)
        self._setup(specs, dtype, param_dtype, kernel_init, precision, rngs)

    def __call__(
        self,
        x_cand: jax.Array,
        x_user: jax.Array,
        cand_to_user: jax.Array,
        *,
        key_value_seq_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          x_cand: [B, T, cand_features].
          x_user: [U, S, user_features].
          cand_to_user: [B] int32, the user of every candidate, in [0, U), in any order.
          key_value_seq_lengths: [U] int32, how many of a user's S rows exist; None is S.

        Returns:
          [B, T, out_features] in `dtype`.

        Raises:
          ValueError: ranks or sizes disagree.
        """
        return functional.attend(
            _parameters(self, self.names),
            x_cand,
            x_user,
            cand_to_user,
            key_value_seq_lengths=key_value_seq_lengths,
            **self.options,
        )


class PMA(_Attending):
    """Pools jagged sequences by attention of a few learned seeds, through `ikbo_jax.gdpa`.

    Attributes:
      seeds: [num_seeds, out_features] parameter.
      w_query: [out_features, num_heads, head_dim] parameter.
      w_key: [in_features, num_heads, head_dim] parameter.
      w_value: [in_features, num_heads, head_dim] parameter.
      w_out: [num_heads, head_dim, out_features] parameter.

    Source: Lee et al., "Set Transformer", 2019 (pooling by multi-head attention).
    """

    def __init__(
        self,
        in_features: int,
        num_seeds: int,
        num_heads: int,
        head_dim: int,
        out_features: int | None = None,
        *,
        activation: str | tuple[str, ...] = "softmax",
        output_scale: float = 1.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        precision: str | jax.lax.Precision | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the parameters.

        Args:
          in_features: width of the sequences.
          num_seeds: rows that a sequence is pooled to.
          num_heads: N.
          head_dim: H; scores are divided by its square root.
          out_features: width of seeds and result; None is `in_features`.
          activation: as of `ikbo_jax.gdpa`.
          output_scale: as of `ikbo_jax.gdpa`; sums over the keys of an activation that is no
            softmax grow with the sequence.
          dtype: what is computed in and returned; None promotes parameters and inputs.
          param_dtype: of the parameters.
          kernel_init: initialises every parameter as a matrix; None is `default_kernel_init`.
          precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
          rngs: the key "params" is drawn from.

        Raises:
          ValueError: a size is no integer of at least 1.
        """
        out = in_features if out_features is None else out_features
        specs = functional.pma_specs(num_seeds, in_features, out, num_heads, head_dim)
        self._setup(specs, dtype, param_dtype, kernel_init, precision, rngs)
        self.options |= {"activation": activation, "output_scale": output_scale}

    def __call__(
        self, x: jax.Array, cu_seqlens: jax.Array, *, max_seqlen: int | None = None
    ) -> jax.Array:
        """Pools.

        Args:
          x: [total, in_features], sequence after sequence.
          cu_seqlens: [batch + 1] int32, as of `ikbo_jax.gdpa`.
          max_seqlen: bound of the lengths, known while tracing; rows beyond it have no effect.

        Returns:
          [batch, num_seeds, out_features] in `dtype`.

        Raises:
          ValueError: ranks or sizes disagree, or the activation is unknown.
        """
        params = _parameters(self, self.names)
        return functional.pma(params, x, cu_seqlens, max_seqlen=max_seqlen, **self.options)


class PFFN(_Attending):
    """A feed-forward net whose two layers are made from its sequence's memory (`ikbo_jax.gdpa`).

        out[i] = output_scale · act(x[i] · w_query · keyᵀ / √H) · value · w_out

    with key = memory · w_key and value = memory · w_value of row i's own sequence.

    Attributes:
      w_query: [features, num_heads, head_dim] parameter.
      w_key: [memory_features, num_heads, head_dim] parameter.
      w_value: [memory_features, num_heads, head_dim] parameter.
      w_out: [num_heads, head_dim, features] parameter.
    """

    def __init__(
        self,
        features: int,
        memory_features: int,
        num_heads: int,
        head_dim: int,
        *,
        activation: str | tuple[str, ...] = "gelu",
        output_scale: float = 1.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        precision: str | jax.lax.Precision | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the parameters.

        Args:
          features: width of the rows and of the result.
          memory_features: width of the memory.
          num_heads: N.
          head_dim: H; scores are divided by its square root.
          activation: as of `ikbo_jax.gdpa`.
          output_scale: as of `ikbo_jax.gdpa`; sums grow with the memory's rows.
          dtype: what is computed in and returned; None promotes parameters and inputs.
          param_dtype: of the parameters.
          kernel_init: initialises every parameter as a matrix; None is `default_kernel_init`.
          precision: of f32 products; a name or `jax.lax.Precision`, or None for JAX's default.
          rngs: the key "params" is drawn from.

        Raises:
          ValueError: a size is no integer of at least 1.
        """
        specs = functional.pffn_specs(features, memory_features, num_heads, head_dim)
        self._setup(specs, dtype, param_dtype, kernel_init, precision, rngs)
        self.options |= {"activation": activation, "output_scale": output_scale}

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
        """Runs every row through the net of its sequence.

        Args:
          x: [total, features], sequence after sequence.
          memory: [total_memory, memory_features], likewise.
          cu_seqlens: [batch + 1] int32, as of `ikbo_jax.gdpa`.
          cu_seqlens_memory: [batch_memory + 1] int32.
          x_to_memory: [batch] int32, the memory of every sequence (the user of a candidate); None:
            each its own.
          max_seqlen: bound of the lengths, known while tracing.
          max_seqlen_memory: likewise of the memory.

        Returns:
          [total, features] in `dtype`; 0 in rows of no sequence.

        Raises:
          ValueError: ranks or sizes disagree, or the activation is unknown.
        """
        return functional.pffn(
            _parameters(self, self.names),
            x,
            memory,
            cu_seqlens,
            cu_seqlens_memory,
            x_to_memory,
            max_seqlen=max_seqlen,
            max_seqlen_memory=max_seqlen_memory,
            **self.options,
        )


def _parameters(module: nnx.Module, names: tuple[str, ...]) -> dict[str, jax.Array]:
    return {name: getattr(module, name)[...] for name in names}
