"""Gradients of generalised dot-product attention by kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.problems import GdpaBackwardConfig
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.reference import jagged
from ikbo_jax.reference.activations import one_by_one
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences, out_shape


def kernel_vjp(
    arrays: Arrays,
    settings: Settings,
    d_out: jax.Array,
    *,
    num_sms: int,
    query_config: GdpaBackwardConfig | None = None,
    key_config: GdpaBackwardConfig | None = None,
    dtype: Any = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pulls a cotangent of the result back to query, key and value, like `chunked_vjp`.

    Args:
      arrays: as in `reference.gdpa_chunked.chunked_vjp`; the kernels must be legal
        (`problems.gdpa_backward.illegal_reason`).
      settings: as in `reference.gdpa_chunked.chunked_vjp`.
      d_out: cotangent of the result, in the shape and dtype of the result.
      num_sms: number of streaming multiprocessors of the device.
      query_config: configuration of the kernel for d_query; None takes the default.
      key_config: configuration of the kernel for d_key and d_value; None takes the default.
      dtype: dtype of the gradients of key and value; None means the inputs'.
      interpret: as in `pallas.gdpa_backward.kernels.d_query_kernel`.

    Returns:
      Gradients of query, key and value in their shapes and dtypes, each summed in f32 and rounded
      once; deterministic. With broadcast queries, d_query of every sequence is written in f32
      before the sum over sequences.
    """
    # Imported here because a machine without a GPU never needs it.
    from ikbo_jax.pallas.gdpa_backward import kernels, tiles

    query, key, value, cu_q, cu_kv, q_to_kv = arrays
    batch, batch_kv = num_sequences(arrays), cu_kv.shape[0] - 1
    total_q = out_shape(arrays, settings)[0]
    query_config = query_config or configs.default_config(query.shape[-1])
    key_config = key_config or configs.default_config(query.shape[-1])
    number = jnp.arange(batch, dtype=jnp.int32)
    kv_of = number if q_to_kv is None else jnp.clip(q_to_kv, 0, batch_kv - 1)
    if cu_q is None:
        length = jnp.full_like(number, query.shape[0])
        q = tiles.Sequences(jnp.zeros_like(number), number * length, length)
    else:
        start, length = jagged.bounds(cu_q, total_q, settings.max_seqlen_q)
        q = tiles.Sequences(start, start, length)
    start, length = jagged.bounds(cu_kv, key.shape[0], settings.max_seqlen_kv)
    kv = tiles.Sequences(start, start, length)
    options: dict[str, Any] = {
        "activations": settings.activations,
        "approx": one_by_one(settings.approx),
        "scale": settings.scale,
        "output_scale": settings.output_scale,
        "num_sms": num_sms,
        "interpret": interpret,
    }
    is_bounded = settings.max_seqlen_q is not None and cu_q is not None
    query_work = tiles.query_work(
        q, kv, kv_of, total_q, block=query_config.block, is_bounded=is_bounded
    )
    d_query = kernels.d_query_kernel(
        query,
        key,
        value,
        d_out,
        query_work,
        config=query_config,
        out_dtype=jnp.float32 if settings.broadcast_q else None,
        **options,
    )
    if settings.broadcast_q:
        d_query = jnp.sum(d_query.reshape(-1, *query.shape), axis=0).astype(query.dtype)
    key_work = tiles.key_work(
        kv,
        q,
        kv_of,
        key.shape[0],
        block=key_config.block,
        group=query.shape[1] // key.shape[1],
        is_sorted=q_to_kv is None,
        is_bounded=settings.max_seqlen_kv is not None,
    )
    d_key, d_value = kernels.d_key_value_kernel(
        query, key, value, d_out, key_work, config=key_config, out_dtype=dtype, **options
    )
    return d_query, d_key, d_value
