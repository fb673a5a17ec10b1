"""Operands, runners and result checks of the autotuner for linear compression and attention.

Generalised attention has `trials_gdpa`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.pallas.flash.attention import attention_kernel
from ikbo_jax.pallas.linear_compression.kernel import linear_compression_kernel
from ikbo_jax.problems import (
    AttentionConfig,
    AttentionProblem,
    LinearCompressionConfig,
    LinearCompressionProblem,
)
from ikbo_jax.reference import linear_compression
from ikbo_jax.reference.attention import materialised
from ikbo_jax.reference.attention_grouped import decomposed

LinearCompressionOperands = tuple[
    tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array | None, ...]
]
#: Candidates of linear compression that one check compares, which bounds the oracle's memory.
CHECK_ROWS = 128
#: Compiler options of programs that check results. By default XLA would time all GEMM algorithms
#: for an oracle: 12 s for a program that runs a few times.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
#: Number of candidates whose XLA result is compared with the oracle, in total and at once.
SAMPLED, SAMPLED_AT_ONCE = 32, 4


def device_sms() -> int:
    """Number of streaming multiprocessors of the device; 1 if it has none."""
    return getattr(jax.devices()[0], "core_count", 1)


# Linear compression.


def linear_compression_operands(
    problem: LinearCompressionProblem, seed: int = 0
) -> LinearCompressionOperands:
    """Random (weights, embeddings, parents) on the device; parents are random and sorted."""
    dtype = jnp.dtype(problem.dtype)
    key = jax.random.key(seed)
    weights, embeddings = [], []
    parents: list[jax.Array | None] = []
    for level, (batch, k) in enumerate(zip(problem.batches, problem.ks, strict=True)):
        weight_key, embedding_key, parent_key = jax.random.split(jax.random.fold_in(key, level), 3)
        # The scale keeps outputs near one for every K, so that f16 cannot overflow.
        scale = jnp.asarray(max(k, 1) ** -0.5, dtype)
        weights.append(jax.random.normal(weight_key, (problem.m, k), dtype) * scale)
        embeddings.append(jax.random.normal(embedding_key, (batch, k, problem.n), dtype))
        if level == 0:
            parents.append(None)
        else:
            coarse = problem.batches[level - 1]
            index = jax.random.randint(parent_key, (batch,), 0, coarse, jnp.int32)
            parents.append(jnp.sort(index))
    return tuple(weights), tuple(embeddings), tuple(parents)


def linear_compression_runner(
    problem: LinearCompressionProblem,
    config: LinearCompressionConfig | None,
    num_sms: int | None = None,
) -> Callable[..., jax.Array]:
    """The kernel with `config`, or the XLA path for None, for a device with `num_sms` SMs."""
    del problem  # The operands hold all sizes.
    if config is None:
        return jax.jit(linear_compression.decomposed)
    num_sms = device_sms() if num_sms is None else num_sms
    return jax.jit(functools.partial(linear_compression_kernel, config=config, num_sms=num_sms))


#: Largest size in bytes of a float32 oracle of linear compression that is cached between checks.
MAX_CACHED_BYTES = 2 << 30


class _Truth(NamedTuple):
    """For some rows: the f32 oracle, the largest error of same-dtype jnp, the oracle's maximum."""

    oracle: jax.Array
    same_dtype: jax.Array
    largest: jax.Array


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _truth(operands: LinearCompressionOperands, rows: jax.Array) -> _Truth:
    weights, embeddings, parents = operands
    embeddings = (*embeddings[:-1], embeddings[-1][rows])
    last = parents[-1]
    parents = (*parents[:-1], None if last is None else last[rows])
    oracle = linear_compression.materialised(
        tuple(w.astype(jnp.float32) for w in weights),
        tuple(e.astype(jnp.float32) for e in embeddings),
        parents,
    )
    same_dtype = linear_compression.materialised(weights, embeddings, parents).astype(jnp.float32)
    return _Truth(oracle, jnp.max(jnp.abs(same_dtype - oracle)), jnp.max(jnp.abs(oracle)))


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _error(actual: jax.Array, oracle: jax.Array, rows: jax.Array) -> jax.Array:
    difference = jnp.abs(actual[rows].astype(jnp.float32) - oracle)
    # XLA's maximum on CPU drops NaN in a fused reduction, so NaN is handled explicitly.
    return jnp.where(jnp.isnan(difference).any(), jnp.nan, jnp.max(difference))


#: The operands of the last check, and their truths by first row. The tuner checks a hundred results
#: of the same operands, and the oracle takes longer than all of these results together.
_cached: tuple[LinearCompressionOperands, dict[int, _Truth]] | None = None


def check_linear_compression(
    actual: jax.Array, operands: LinearCompressionOperands
) -> tuple[float, float]:
    """Returns the largest error of `actual` and the largest error that the error rule allows.

    The rule allows twice the error of same-dtype jnp, plus one rounding of the largest value. The
    error may be NaN, which is not allowed: compare with `error <= bound`.
    """
    global _cached
    if _cached is None or _cached[0] is not operands:
        _cached = (operands, {})
    cached, batch = _cached[1], actual.shape[0]
    may_cache = 4 * actual.size <= MAX_CACHED_BYTES
    found = []
    for start in range(0, batch, CHECK_ROWS):
        rows = jnp.minimum(jnp.arange(start, start + CHECK_ROWS, dtype=jnp.int32), batch - 1)
        if (truth := cached.get(start)) is None:
            truth = _truth(operands, rows)
            if may_cache:
                cached[start] = truth
        error = _error(actual, truth.oracle, rows)
        found.append(jax.device_get((error, truth.same_dtype, truth.largest)))
    error, same_dtype, largest = (float(x) for x in np.max(np.asarray(found), axis=0))
    # The f32 sums of the oracle round, too; this matters only for f32 results.
    accumulation = 2.0**-24 * sum(w.shape[1] for w in operands[0]) ** 0.5 * largest
    one_rounding = float(jnp.finfo(actual.dtype).eps) / 2 * largest
    return error, 2 * (same_dtype + accumulation) + one_rounding


# Attention.


class AttentionOperands(NamedTuple):
    """Arguments of attention; `cand_to_user` is random and sorted."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array


def attention_operands(problem: AttentionProblem, seed: int = 0) -> AttentionOperands:
    """Random operands on the device."""
    p, dtype = problem, jnp.dtype(problem.dtype)
    keys = jax.random.split(jax.random.key(seed), 4)
    kv_shape = (p.users, p.kv_len, p.kv_heads, p.head_dim)
    shapes = ((p.batch, p.q_len, p.q_heads, p.head_dim), kv_shape, kv_shape)
    query, key, value = (
        jax.random.normal(k, shape, dtype) for k, shape in zip(keys[:3], shapes, strict=True)
    )
    index = jax.random.randint(keys[3], (p.batch,), 0, p.users, jnp.int32)
    return AttentionOperands(query, key, value, jnp.sort(index))


def attention_runner(
    problem: AttentionProblem, config: AttentionConfig | None, num_sms: int | None = None
) -> Callable[..., jax.Array]:
    """The kernel with `config`, or the XLA path for None, for a device with `num_sms` SMs."""
    scale = problem.head_dim**-0.5
    if config is None:
        return jax.jit(lambda *operands: decomposed(*operands, scale=scale)[0])
    num_sms = device_sms() if num_sms is None else num_sms

    def run(query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        out, _ = attention_kernel(
            query,
            key,
            value,
            index,
            None,
            scale=scale,
            order=None,
            return_residuals=False,
            config=config,
            num_sms=num_sms,
        )
        result: jax.Array = out
        return result

    return jax.jit(run)


@functools.partial(jax.jit, static_argnames="scale", compiler_options=UNTUNED)
def _xla_attention(operands: AttentionOperands, scale: float) -> jax.Array:
    return decomposed(*operands, scale=scale)[0]


@functools.partial(jax.jit, static_argnames="scale", compiler_options=UNTUNED)
def _sampled_errors(
    xla: jax.Array, operands: AttentionOperands, rows: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The XLA path's largest error in `rows` against the f32 oracle, and the oracle's maximum."""
    query, key, value, index = operands
    query, key, value = (x.astype(jnp.float32) for x in (query[rows], key, value))
    oracle, _ = materialised(query, key, value, index[rows], scale=scale)
    return jnp.max(jnp.abs(xla[rows].astype(jnp.float32) - oracle)), jnp.max(jnp.abs(oracle))


@jax.jit
def largest_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Largest absolute difference of two arrays of one shape, f32; NaN if any difference is NaN."""
    difference = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    # XLA's maximum on CPU drops NaN in a fused reduction, so NaN is handled explicitly.
    return jnp.where(jnp.isnan(difference).any(), jnp.nan, jnp.max(difference))


def check_attention(actual: jax.Array, operands: AttentionOperands) -> tuple[float, float]:
    """Returns the largest difference of `actual` to the XLA path, and the largest one allowed.

    Let e be the error of the XLA path against the f32 oracle, measured for some candidates. The
    error rule allows 2e plus one rounding, so a correct result differs from the XLA path by at most
    3e plus two roundings. The difference may be NaN, which is not allowed: compare with
    `difference <= bound`.
    """
    batch, width = operands.query.shape[0], operands.query.shape[-1]
    scale = width**-0.5
    xla = _xla_attention(operands, scale)
    sample = np.linspace(0, batch - 1, SAMPLED).astype(np.int32)
    found = [
        jax.device_get(_sampled_errors(xla, operands, jnp.asarray(rows), scale))
        for rows in np.split(sample, SAMPLED // SAMPLED_AT_ONCE)
    ]
    xla_error, largest = (float(x) for x in np.max(np.asarray(found), axis=0))
    # f32 sums in another order differ; this matters only for f32 results.
    xla_error += 2.0**-24 * (width + operands.key.shape[1]) ** 0.5 * largest
    roundings = float(jnp.finfo(actual.dtype).eps) * largest
    return float(largest_difference(actual, xla)), 3 * xla_error + roundings
