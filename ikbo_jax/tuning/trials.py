"""What the autotuner runs and checks for attention: operands, runners, the check of a result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.pallas.attention import attention_kernel
from ikbo_jax.reference.attention import materialised
from ikbo_jax.reference.attention_grouped import decomposed
from ikbo_jax.tuning.configs import AttentionConfig, AttentionProblem

#: Candidates whose results in XLA are compared with the oracle, and how many of them at once.
SAMPLED, SAMPLED_AT_ONCE = 32, 4


class AttentionOperands(NamedTuple):
    """Arguments of attention; the index is sorted, counts are ragged."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array


def attention_operands(problem: AttentionProblem, seed: int = 0) -> AttentionOperands:
    """Random operands on the device."""
    p, dtype = problem, jnp.dtype(problem.dtype)
    keys = jax.random.split(jax.random.key(seed), 4)
    of_user = (p.users, p.kv_len, p.kv_heads, p.head_dim)
    shapes = ((p.batch, p.q_len, p.q_heads, p.head_dim), of_user, of_user)
    query, key, value = (
        jax.random.normal(k, shape, dtype) for k, shape in zip(keys[:3], shapes, strict=True)
    )
    index = jax.random.randint(keys[3], (p.batch,), 0, p.users, jnp.int32)
    return AttentionOperands(query, key, value, jnp.sort(index))


def attention_runner(
    problem: AttentionProblem, config: AttentionConfig | None
) -> Callable[..., jax.Array]:
    """The kernel with a configuration, or the XLA path for None."""
    scale = problem.head_dim**-0.5
    if config is None:
        return jax.jit(lambda *operands: decomposed(*operands, scale=scale)[0])
    num_sms = getattr(jax.devices()[0], "core_count", 1)

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


@functools.partial(jax.jit, static_argnames="scale")
def _sampled_errors(
    xla: jax.Array, operands: AttentionOperands, rows: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Largest error of the XLA path in `rows` against the f32 oracle, and the largest value."""
    query, key, value, index = operands
    query, key, value = (x.astype(jnp.float32) for x in (query[rows], key, value))
    oracle, _ = materialised(query, key, value, index[rows], scale=scale)
    return jnp.max(jnp.abs(xla[rows].astype(jnp.float32) - oracle)), jnp.max(jnp.abs(oracle))


@jax.jit
def _largest_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    difference = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    # Not jnp.max alone: in a fused reduction, XLA's maximum on CPU drops NaN.
    return jnp.where(jnp.isnan(difference).any(), jnp.nan, jnp.max(difference))


def check_attention(actual: jax.Array, operands: AttentionOperands) -> tuple[float, float]:
    """Returns the largest difference of `actual` to the XLA path, and the largest admitted.

    The XLA path's own error is measured against the f32 oracle for some candidates. A result that
    keeps the error rule (twice that, and one rounding) is at most three times that and two
    roundings away. A difference of NaN is not admitted: compare with `difference <= bound`.
    """
    batch, width = operands.query.shape[0], operands.query.shape[-1]
    scale = width**-0.5
    xla = jax.jit(functools.partial(decomposed, scale=scale))(*operands)[0]
    sample = np.linspace(0, batch - 1, SAMPLED).astype(np.int32)
    found = [
        jax.device_get(_sampled_errors(xla, operands, jnp.asarray(rows), scale))
        for rows in np.split(sample, SAMPLED // SAMPLED_AT_ONCE)
    ]
    own, largest = (float(x) for x in np.max(np.asarray(found), axis=0))
    # f32 sums in another order differ, which only an f32 result is close enough to show.
    own += 2.0**-24 * (width + operands.key.shape[1]) ** 0.5 * largest
    roundings = float(jnp.finfo(actual.dtype).eps) * largest
    return float(_largest_difference(actual, xla)), 3 * own + roundings
