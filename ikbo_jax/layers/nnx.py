"""Layers for Flax NNX: they hold parameters and call `functional`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ikbo_jax.layers import functional

Initializer = Callable[..., Any]
#: Default initialiser. It gets the shape of a matrix, so that the result has the variance of a
#: dense layer.
default_kernel_init = nnx.initializers.lecun_normal()


class LinearCompression(nnx.Module):
    """Compresses the embeddings of every candidate and its user; never copies the user.

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
          user_rows: K_user, embedding rows of a user.
          cand_rows: K_cand, embedding rows of a candidate.
          features: M, compressed rows.
          dtype: dtype of computation and result; None promotes parameters and inputs.
          param_dtype: dtype of the parameters.
          kernel_init: initialises one weight [user_rows + cand_rows, features]; its first
            `user_rows` rows, transposed, are `w_user`, the others `w_cand`. None means
            `default_kernel_init`.
          precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
            default.
          rngs: its stream "params" supplies the key.

        Raises:
          ValueError: a size is not an integer of at least 1.
        """
        functional.compression_sizes(user_rows, cand_rows, features)
        init = default_kernel_init if kernel_init is None else kernel_init
        kernel = init(rngs.params(), (user_rows + cand_rows, features), param_dtype)
        self.w_user = nnx.Param(kernel[:user_rows].T)
        self.w_cand = nnx.Param(kernel[user_rows:].T)
        self.dtype = dtype
        self.precision = precision

    def __call__(self, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array) -> jax.Array:
        """Compresses the embeddings.

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
    """Base of the layers below: makes parameters from specs and keeps the keyword arguments."""

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
    """Attends from every candidate to its user's rows; projects keys and values once per user.

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
          cand_features: width of the candidates' rows.
          user_features: width of the users' rows.
          num_heads: N.
          head_dim: H.
          out_features: width of the result; None means `cand_features`.
          dtype: dtype of computation and result; None promotes parameters and inputs.
          param_dtype: dtype of the parameters.
          kernel_init: initialises every parameter as a matrix with the heads side by side; None
            means `default_kernel_init`.
          precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
            default.
          rngs: its stream "params" supplies the keys.

        Raises:
          ValueError: a size is not an integer of at least 1.
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
          key_value_seq_lengths: [U] int32, the number of valid rows of every user; None means S.

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
    """Pools jagged sequences: a few learned seeds attend to each one, through `ikbo_jax.gdpa`.

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
          head_dim: H; scores are divided by √H.
          out_features: width of seeds and result; None means `in_features`.
          activation: as in `ikbo_jax.gdpa`.
          output_scale: as in `ikbo_jax.gdpa`. Without softmax, results grow with the number of
            keys; a smaller scale compensates.
          dtype: dtype of computation and result; None promotes parameters and inputs.
          param_dtype: dtype of the parameters.
          kernel_init: initialises every parameter as a matrix; None means `default_kernel_init`.
          precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
            default.
          rngs: its stream "params" supplies the keys.

        Raises:
          ValueError: a size is not an integer of at least 1.
        """
        out = in_features if out_features is None else out_features
        specs = functional.pma_specs(num_seeds, in_features, out, num_heads, head_dim)
        self._setup(specs, dtype, param_dtype, kernel_init, precision, rngs)
        self.options |= {"activation": activation, "output_scale": output_scale}

    def __call__(
        self, x: jax.Array, cu_seqlens: jax.Array, *, max_seqlen: int | None = None
    ) -> jax.Array:
        """Pools every sequence.

        Args:
          x: [total, in_features], sequence after sequence.
          cu_seqlens: [batch + 1] int32, offsets as in `ikbo_jax.gdpa`.
          max_seqlen: bound of the lengths, known while tracing; rows beyond it have no effect.

        Returns:
          [batch, num_seeds, out_features] in `dtype`.

        Raises:
          ValueError: ranks or sizes disagree, or the activation is unknown.
        """
        params = _parameters(self, self.names)
        return functional.pma(params, x, cu_seqlens, max_seqlen=max_seqlen, **self.options)


class PFFN(_Attending):
    """A feed-forward net whose two weights are projected from a memory, by `ikbo_jax.gdpa`.

        out[i] = output_scale · act(x[i] · w_query · keyᵀ / √H) · value · w_out

    with key = memory · w_key and value = memory · w_value over the memory of row i's sequence.

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
          head_dim: H; scores are divided by √H.
          activation: as in `ikbo_jax.gdpa`.
          output_scale: as in `ikbo_jax.gdpa`. Without softmax, results grow with the number of
            memory rows; a smaller scale compensates.
          dtype: dtype of computation and result; None promotes parameters and inputs.
          param_dtype: dtype of the parameters.
          kernel_init: initialises every parameter as a matrix; None means `default_kernel_init`.
          precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's
            default.
          rngs: its stream "params" supplies the keys.

        Raises:
          ValueError: a size is not an integer of at least 1.
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
        """Applies to every row the net of its sequence.

        Args:
          x: [total, features], sequence after sequence.
          memory: [total_memory, memory_features], sequence after sequence.
          cu_seqlens: [batch + 1] int32, offsets of `x` as in `ikbo_jax.gdpa`.
          cu_seqlens_memory: [batch_memory + 1] int32, offsets of `memory`.
          x_to_memory: [batch] int32, the memory sequence of every sequence (the user of a
            candidate); None pairs sequence b with memory sequence b.
          max_seqlen: bound of the lengths of `x`, known while tracing.
          max_seqlen_memory: bound of the lengths of `memory`, known while tracing.

        Returns:
          [total, features] in `dtype`; 0 in rows outside all sequences.

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
