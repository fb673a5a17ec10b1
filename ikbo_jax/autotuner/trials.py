"""Operands, runners and result checks of the autotuner for linear compression."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases.error_rule import UNTUNED
from ikbo_jax.ops.dispatch import num_sms as num_sms_of_device
from ikbo_jax.pallas.linear_compression.kernel import linear_compression_kernel
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.reference import linear_compression

LinearCompressionOperands = tuple[
    tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array | None, ...]
]
#: Candidates of linear compression that one check compares, which bounds the oracle's memory.
CHECK_ROWS = 128


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
    num_sms = num_sms_of_device() if num_sms is None else num_sms
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
