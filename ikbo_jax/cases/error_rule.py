"""The error rule: whether a result is close enough to the oracle, and by how much.

    max|x - oracle| ≤ 2 · max|same-dtype jnp - oracle| + one rounding

The same jnp in another order of summation is as accurate. So the error of same-dtype jnp includes
the random sum of the f32 roundings of a sum; this matters only for f32 results, since one rounding
of 16 bits is larger.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: Compiler options of programs that check results. By default XLA would time all GEMM algorithms
#: for an oracle: 12 s for a program that runs a few times.
UNTUNED: Mapping[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


class Check(NamedTuple):
    """Holds the largest error of a result, which may be NaN, and the largest allowed error."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the result is within the error rule; False for NaN."""
        return self.error <= self.bound


def compare(actual: jax.Array, oracle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest error of `actual`, and the oracle's largest absolute value."""
    return largest_difference(actual, oracle), jnp.max(jnp.abs(oracle), initial=0.0)


@jax.jit
def largest_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes the largest absolute difference of two arrays, f32; NaN if a difference is NaN."""
    difference = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    # XLA's maximum on CPU drops NaN in a fused reduction, so NaN is handled explicitly.
    return jnp.where(jnp.isnan(difference).any(), jnp.nan, jnp.max(difference, initial=0.0))


def bound(plain_error: float, largest: float, dtype: Any, terms: float) -> float:
    """Computes the largest error that the rule allows of `dtype`, for sums of `terms` terms."""
    return 2 * _plain_error(plain_error, largest, terms) + float(jnp.finfo(dtype).eps) / 2 * largest


def checks(
    errors: tuple[float, float, float], largest: float, dtype: Any, terms: float, more: float = 0.0
) -> tuple[Check, Check]:
    """Checks a result's error, and its difference to the XLA path; both may be larger by `more`.

    `errors` are these, and the XLA path's error e, which counts as at most a few roundings of
    bfloat16: a larger one is a fault. The difference is at most 3e plus two roundings.
    """
    error, difference, of_xla = errors
    of_xla = min(of_xla, 2.0**-6 * largest)
    apart = 3 * _plain_error(of_xla, largest, terms) + float(jnp.finfo(dtype).eps) * largest
    within = bound(of_xla, largest, dtype, terms)
    return Check(error, within + more), Check(difference, apart + more)


def _plain_error(plain_error: float, largest: float, terms: float) -> float:
    return plain_error + 2.0**-24 * terms**0.5 * largest
