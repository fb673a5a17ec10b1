"""What the layers compute, as functions of their parameters by name; Flax is not needed here.

Arrays are cast to `dtype`, or to what all of them promote to if it is None. `precision` is that of
f32 products: a name or `jax.lax.Precision`, or None for JAX's default. Letters: N heads of width H.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.linear_compression import linear_compression

Parameters = Mapping[str, jax.Array]
#: A shape, and a function that makes an array of it from an initialiser of matrices.
Spec = tuple[tuple[int, ...], Callable[[Callable[..., jax.Array]], jax.Array]]


def check_sizes(layer: str, **sizes: int) -> None:
    """Raises ValueError, naming the size and its value, unless all are integers of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{layer} needs {name} of at least 1, but {name} is {size!r}")


def check_width(layer: str, name: str, array: jax.Array, features: int, size_name: str) -> None:
    """Raises ValueError, naming both sizes, unless rows of `array` are `features` wide."""
    if array.ndim < 1 or array.shape[-1] != features:
        raise ValueError(
            f"{layer} was made for {size_name}={features}, but {name} has shape {array.shape}"
        )


def matrix(shape: tuple[int, ...], *, into: bool) -> Spec:
    """The spec of a projection into heads, [features, N, H], or out of them, [N, H, features].

    The initialiser sees a matrix, so that its variance is that of a dense layer.
    """
    flat = (shape[0], math.prod(shape[1:])) if into else (math.prod(shape[:-1]), shape[-1])
    return shape, lambda init: init(flat).reshape(shape)


def attention_specs(
    query_features: int, key_features: int, out_features: int, num_heads: int, head_dim: int
) -> dict[str, Spec]:
    """Parameters of the layers that attend, by name; ValueError unless all sizes are positive."""
    check_sizes(
        "an attention layer",
        query_features=query_features,
        key_features=key_features,
        out_features=out_features,
        num_heads=num_heads,
        head_dim=head_dim,
    )
    return {
        "w_query": matrix((query_features, num_heads, head_dim), into=True),
        "w_key": matrix((key_features, num_heads, head_dim), into=True),
        "w_value": matrix((key_features, num_heads, head_dim), into=True),
        "w_out": matrix((num_heads, head_dim, out_features), into=False),
    }


def pma_specs(
    num_seeds: int, features: int, out_features: int, num_heads: int, head_dim: int
) -> dict[str, Spec]:
    """Parameters of `pma`, by name; seeds are as wide as the result."""
    check_sizes("PMA", num_seeds=num_seeds)
    seeds = (num_seeds, out_features)
    of_attention = attention_specs(out_features, features, out_features, num_heads, head_dim)
    return {"seeds": (seeds, lambda init: init(seeds)), **of_attention}


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., features] by [features, N, H] to [..., N, H]."""
    return jnp.einsum("...f,fnh->...nh", x, weight)


def merge_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., N, H] by [N, H, features] to [..., features]."""
    return jnp.einsum("...nh,nhf->...f", x, weight)


def compress(
    params: Parameters,
    e_user: jax.Array,
    e_cand: jax.Array,
    cand_to_user: jax.Array,
    *,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """`linear_compression` of [U, K_user, N] and [B, K_cand, N] to [B, M, N].

    Parameters: "w_user" [M, K_user], "w_cand" [M, K_cand].
    """
    params, (e_user, e_cand) = _cast(params, (e_user, e_cand), dtype)
    with _precision(precision):
        return linear_compression(params["w_cand"], params["w_user"], e_cand, e_user, cand_to_user)


def attend(
    params: Parameters,
    x_cand: jax.Array,
    x_user: jax.Array,
    cand_to_user: jax.Array,
    *,
    key_value_seq_lengths: jax.Array | None = None,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Attention from [B, T, F_cand] to the candidate's user's [U, S, F_user]: [B, T, F_out].

    Parameters: "w_query" [F_cand, N, H], "w_key" and "w_value" [F_user, N, H], "w_out"
    [N, H, F_out].
    """
    layer = "CandidateAttention"
    check_width(layer, "x_cand", x_cand, params["w_query"].shape[0], "cand_features")
    check_width(layer, "x_user", x_user, params["w_key"].shape[0], "user_features")
    params, (x_cand, x_user) = _cast(params, (x_cand, x_user), dtype)
    with _precision(precision):
        out = attention(
            project(x_cand, params["w_query"]),
            project(x_user, params["w_key"]),
            project(x_user, params["w_value"]),
            cand_to_user,
            key_value_seq_lengths=key_value_seq_lengths,
        )
        assert isinstance(out, jax.Array)
        return merge_heads(out, params["w_out"])


def pma(
    params: Parameters,
    x: jax.Array,
    cu_seqlens: jax.Array,
    *,
    activation: str | tuple[str, ...] = "softmax",
    output_scale: float = 1.0,
    max_seqlen: int | None = None,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Pools the jagged sequences of [total, F] to [batch, num_seeds, F_out].

    Parameters: "seeds" [num_seeds, F_out], "w_query" [F_out, N, H], "w_key" and "w_value"
    [F, N, H], "w_out" [N, H, F_out].
    """
    check_width("PMA", "x", x, params["w_key"].shape[0], "in_features")
    params, (x,) = _cast(params, (x,), dtype)
    seeds = params["seeds"]
    with _precision(precision):
        out = gdpa(
            project(seeds, params["w_query"]),
            project(x, params["w_key"]),
            project(x, params["w_value"]),
            None,
            cu_seqlens,
            activation=activation,
            scale=params["w_query"].shape[2] ** -0.5,
            output_scale=output_scale,
            broadcast_q=True,
            max_seqlen_kv=max_seqlen,
        )
        return merge_heads(out.reshape(-1, seeds.shape[0], *out.shape[1:]), params["w_out"])


def pffn(
    params: Parameters,
    x: jax.Array,
    memory: jax.Array,
    cu_seqlens: jax.Array,
    cu_seqlens_memory: jax.Array,
    x_to_memory: jax.Array | None = None,
    *,
    activation: str | tuple[str, ...] = "gelu",
    output_scale: float = 1.0,
    max_seqlen: int | None = None,
    max_seqlen_memory: int | None = None,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """The two-layer net that every sequence's memory makes, on the rows of [total, F]: [total, F].

    Parameters: "w_query" [F, N, H], "w_key" and "w_value" [F_memory, N, H], "w_out" [N, H, F].
    """
    check_width("PFFN", "x", x, params["w_query"].shape[0], "features")
    check_width("PFFN", "memory", memory, params["w_key"].shape[0], "memory_features")
    params, (x, memory) = _cast(params, (x, memory), dtype)
    with _precision(precision):
        out = gdpa(
            project(x, params["w_query"]),
            project(memory, params["w_key"]),
            project(memory, params["w_value"]),
            cu_seqlens,
            cu_seqlens_memory,
            activation=activation,
            scale=params["w_query"].shape[2] ** -0.5,
            output_scale=output_scale,
            q_to_kv=x_to_memory,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen_memory,
        )
        return merge_heads(out, params["w_out"])


def _cast(
    params: Parameters, arrays: tuple[jax.Array, ...], dtype: Any
) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
    if dtype is None:
        dtype = jnp.result_type(*params.values(), *arrays)
    cast = {name: param.astype(dtype) for name, param in params.items()}
    return cast, tuple(x.astype(dtype) for x in arrays)


def _precision(
    precision: str | jax.lax.Precision | None,
) -> contextlib.AbstractContextManager[Any]:
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(jax.lax.Precision(precision).name.lower())
