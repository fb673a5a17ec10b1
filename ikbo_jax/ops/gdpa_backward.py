"""Gradients of generalised dot-product attention by kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.ops import dispatch
from ikbo_jax.ops.op import gradient_config
from ikbo_jax.problems import (
    GdpaBackwardConfig,
    GdpaBackwardProblem,
    GdpaBackwardTuning,
    GdpaProblem,
)
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference import jagged
from ikbo_jax.reference.activations import SOFTMAX, one_by_one
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences, out_shape

#: Largest number of parts that the queries of one key-value sequence are divided into.
MAX_PARTS = 8


def choose(
    request: dispatch.Request, problem: GdpaProblem
) -> tuple[GdpaBackwardTuning | None, str]:
    """The configuration for the gradient of `problem`, or None for XLA; and the reason."""
    backward = GdpaBackwardProblem.of(problem)
    return gradient_config(request, backward, configs.illegal_reason(problem))


def kernel_vjp(
    arrays: Arrays,
    settings: Settings,
    d_out: jax.Array,
    *,
    num_sms: int,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    query_config: GdpaBackwardConfig | None = None,
    key_config: GdpaBackwardConfig | None = None,
    dtype: Any = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pulls a cotangent of the result back to query, key and value, like `chunked_vjp`.

    Args (the others are as for `reference.gdpa_chunked_vjp.chunked_vjp`; the kernels must be legal,
    `problems.gdpa_backward.illegal_reason`):
      out: the result; only needed with a softmax.
      lse: [rows of out, N] f32, natural logarithm of the softmax's denominator; likewise.
      query_config: configuration of the kernel for d_query; None takes the default.
      key_config: configuration of the kernel for d_key and d_value; None takes the default.
      interpret: as in `pallas.gdpa_backward.kernels.gradient_kernel`.

    Returns:
      Gradients of query, key and value in their shapes and dtypes, each summed in f32 and rounded
      once; deterministic. With broadcast queries, d_query of every sequence is written in f32
      before the sum over sequences.
    """
    # Imported here because a machine without a GPU never needs it.
    from ikbo_jax.pallas.gdpa_backward import kernels

    query, key, value = arrays[:3]
    query_config = query_config or configs.default_config(query.shape[-1])
    key_config = key_config or configs.default_config(query.shape[-1])
    blocks = (query_config.block, key_config.block)
    parts = _parts(arrays, settings, num_sms)
    make = _planned if interpret else _listed
    plan = make(arrays, settings, _Residuals(out, lse, d_out), blocks, parts)
    options: dict[str, Any] = {
        "activations": settings.activations,
        "approx": one_by_one(settings.approx),
        "scale": settings.scale,
        "output_scale": settings.output_scale,
        "num_sms": num_sms,
        "statistics": plan.statistics,
        "interpret": interpret,
    }
    (d_query,) = kernels.gradient_kernel(
        *(query, key, value, d_out, plan.queries),
        is_for_keys=False,
        config=query_config,
        out_dtype=jnp.float32 if settings.broadcast_q else None,
        **options,
    )
    if settings.broadcast_q:
        d_query = jnp.sum(d_query.reshape(-1, *query.shape), axis=0).astype(query.dtype)
    d_key, d_value = _d_key_value(
        arrays, plan.keys, d_out, parts, key_config, out_dtype=dtype, options=options
    )
    return d_query, d_key, d_value


class _Residuals(NamedTuple):
    """What a softmax's statistics are computed from."""

    out: Any  # like lse, None without a softmax
    lse: Any
    d_out: jax.Array


class _Plan(NamedTuple):
    """Work of both kernels (`pallas.worklist.work.Work`), and statistics of a softmax."""

    queries: Any
    keys: Any
    statistics: jax.Array | None


def _listed(
    arrays: Arrays,
    settings: Settings,
    residuals: _Residuals,
    blocks: tuple[int, int],
    parts: int,
) -> _Plan:
    """The plan by one launch; by XLA if the launch does not take so many sequences.

    `blocks` are the blocks' rows in the kernels for queries and for keys.
    """
    from ikbo_jax.pallas.gdpa_backward import statistics as statistics_by_xla
    from ikbo_jax.pallas.worklist import work_kernel

    has_softmax = SOFTMAX in settings.activations
    found = work_kernel.works(
        *arrays[3:],
        q_rows=arrays.query.shape[0],
        kv_rows=arrays.key.shape[0],
        max_seqlen_q=settings.max_seqlen_q,
        max_seqlen_kv=settings.max_seqlen_kv,
        query_block=blocks[0],
        key_block=blocks[1],
        group=arrays.query.shape[1] // arrays.key.shape[1],
        has_statistics=has_softmax,
        parts=parts,
    )
    if found is None:
        return _planned(arrays, settings, residuals, blocks, parts, interpret=False)
    queries, keys, rows = found
    statistics = None
    if rows is not None:
        statistics = statistics_by_xla.statistics_of(
            rows, *residuals, output_scale=settings.output_scale, block=blocks[1]
        )
    return _Plan(queries, keys, statistics)


def _planned(
    arrays: Arrays,
    settings: Settings,
    residuals: _Residuals,
    blocks: tuple[int, int],
    parts: int,
    *,
    interpret: bool = True,
) -> _Plan:
    """The plan by XLA, but for the order of sequences that share keys unless `interpret`.

    Every n-th query sequence belongs to part n of the keys, which are copied for each part.
    """
    from ikbo_jax.pallas.gdpa_backward import statistics as statistics_by_xla
    from ikbo_jax.pallas.worklist import work

    query, key, _, cu_q, cu_kv, q_to_kv = arrays
    batch, batch_kv = num_sequences(arrays), cu_kv.shape[0] - 1
    total_q = out_shape(arrays, settings)[0]
    number = jnp.arange(batch, dtype=jnp.int32)
    kv_of = number if q_to_kv is None else jnp.clip(q_to_kv, 0, batch_kv - 1)
    if cu_q is None:
        length = jnp.full_like(number, query.shape[0])
        q = work.Sequences(jnp.zeros_like(number), number * length, length, jnp.zeros_like(number))
    else:
        start, length = jagged.bounds(cu_q, total_q, settings.max_seqlen_q)
        q = work.Sequences(start, start, length, jnp.zeros_like(start))
    start, length = jagged.bounds(cu_kv, key.shape[0], settings.max_seqlen_kv)
    kv = work.Sequences(start, start, length, jnp.zeros_like(start))
    statistics = None
    if SOFTMAX in settings.activations:
        q, statistics = statistics_by_xla.with_statistics(
            q, *residuals, output_scale=settings.output_scale, block=blocks[1]
        )
    is_bounded = settings.max_seqlen_q is not None and cu_q is not None
    queries = work.query_work(q, kv, kv_of, total_q, block=blocks[0], is_bounded=is_bounded)
    if parts > 1:
        first = jnp.repeat(jnp.arange(parts, dtype=jnp.int32) * key.shape[0], batch_kv)
        source, target, length, zeros = (jnp.tile(x, parts) for x in kv)
        kv = work.Sequences(source + first, target + first, length, zeros)
        kv_of = kv_of + number % parts * batch_kv
    keys = work.key_work(
        kv,
        q,
        kv_of,
        key.shape[0] * parts,
        block=blocks[1],
        group=query.shape[1] // key.shape[1],
        is_sorted=q_to_kv is None,
        # Rows between two copies may belong to no sequence, too.
        is_bounded=settings.max_seqlen_kv is not None or parts > 1,
        interpret=interpret,
    )
    return _Plan(queries, keys, statistics)


def _parts(arrays: Arrays, settings: Settings, num_sms: int) -> int:
    """Into how many parts the queries of a key-value sequence are divided.

    A tile of keys takes all queries that share it. Where many queries share few keys, the tiles
    would leave most of the device idle.
    """
    if arrays.q_to_kv is None:
        return 1
    rows, heads, _ = arrays.key.shape
    batch, batch_kv = num_sequences(arrays), arrays.cu_seqlens_kv.shape[0] - 1
    most = jagged.most_tiles(batch_kv, rows, TILE_ROWS, settings.max_seqlen_kv)
    return max(1, min(num_sms // max(most * heads, 1), -(-batch // max(batch_kv, 1)), MAX_PARTS))


def _d_key_value(
    arrays: Arrays,
    work: Any,
    d_out: jax.Array,
    parts: int,
    config: GdpaBackwardConfig,
    *,
    out_dtype: Any,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Gradients of key and value; every n-th query sequence belongs to part n.

    With several parts there are as many copies of keys and values, which are few then. The parts'
    gradients are f32 and added before they are rounded.
    """
    from ikbo_jax.pallas.gdpa_backward import kernels

    query, key, value = arrays[:3]
    rows = key.shape[0]
    if parts > 1:
        key, value = (jnp.tile(x, (parts, 1, 1)) for x in (key, value))
    d_key, d_value = kernels.gradient_kernel(
        *(query, key, value, d_out, work),
        is_for_keys=True,
        config=config,
        out_dtype=jnp.float32 if parts > 1 else out_dtype,
        **options,
    )
    if parts > 1:
        d_key, d_value = (
            jnp.sum(x.reshape(parts, rows, *x.shape[1:]), axis=0).astype(out_dtype or query.dtype)
            for x in (d_key, d_value)
        )
    return d_key, d_value
