"""Operands, runners and result checks of the autotuner for generalised dot-product attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases.attention import _difference as largest_difference
from ikbo_jax.cases.error_rule import UNTUNED
from ikbo_jax.ops.dispatch import num_sms as device_sms
from ikbo_jax.pallas.flash.gdpa import gdpa_kernel
from ikbo_jax.problems import GdpaConfig, GdpaProblem
from ikbo_jax.reference import gdpa_chunked
from ikbo_jax.reference.gdpa import Arrays, Settings, materialised

#: Number of sequences whose XLA result is compared with the oracle.
SAMPLED = 8
#: Allowed error of an approximation for a score of 1; the XLA path is exact. For "tanh_bf16" it is
#: an eighth of the largest error, 2⁻⁶, since errors of many scores have either sign and cancel.
APPROX_ERRORS = {"tanh": 2.0**-12, "tanh_bf16": 2.0**-9}


class _Sequences(NamedTuple):
    """Offsets of the sequences and the index that pairs them.

    Attributes:
      queries: [batch + 1] int32; None if all sequences have the same queries.
      keys: [batch_kv + 1] int32.
      q_to_kv: [batch] int32; None pairs query sequence b with key-value sequence b.
    """

    queries: np.ndarray | None
    keys: np.ndarray
    q_to_kv: np.ndarray | None

    def lengths(self, seeds: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of queries and of keys of every query sequence, [batch] each.

        `seeds` is the number of queries if all sequences have the same queries.
        """
        keys = np.diff(self.keys)
        keys = keys if self.q_to_kv is None else keys[self.q_to_kv]
        return np.full_like(keys, seeds) if self.queries is None else np.diff(self.queries), keys


def offsets(rows: int, sequences: int, longest: int | None) -> np.ndarray:
    """Offsets [sequences + 1] int32 of sequences that fill `rows`, with lengths in random order.

    Lengths are spread evenly around their mean, as widely as the limits 1 and `longest` allow: from
    1 to `longest` if the mean is half of `longest`, all equal if the mean is `longest` or `longest`
    is None. Equal arguments return equal offsets, as self-attention needs.
    """
    top = rows if longest is None else max(min(longest * sequences, 2 * rows - sequences), rows)
    # Lengths grow from (2 rows - top) / sequences to top / sequences, in integer arithmetic, so
    # that they add up to `rows`.
    ends = [
        (i * sequences * (2 * rows - top) + (top - rows) * i * i) // sequences**2
        for i in range(sequences + 1)
    ]
    lengths = np.random.default_rng(0).permutation(np.diff(ends))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _sequences(problem: GdpaProblem) -> _Sequences:
    p = problem
    index = None
    if p.batch != p.batch_kv:
        index = np.sort(np.random.default_rng(1).integers(0, p.batch_kv, p.batch, dtype=np.int32))
    queries = None if p.broadcast_q else offsets(p.q_rows, p.batch, p.max_seqlen_q)
    return _Sequences(queries, offsets(p.kv_rows, p.batch_kv, p.max_seqlen_kv), index)


def _seeds(problem: GdpaProblem) -> int:
    """Number of queries of a sequence if all sequences have the same queries."""
    return problem.q_rows // problem.batch


def gdpa_flops(problem: GdpaProblem) -> int:
    """Useful FLOPs of the operands of `gdpa_operands`."""
    lengths = _sequences(problem).lengths(_seeds(problem))
    q_lens, kv_lens = (x.astype(np.int64) for x in lengths)
    return problem.useful_flops(int(np.dot(q_lens, kv_lens)))


def gdpa_operands(problem: GdpaProblem, seed: int = 0) -> Arrays:
    """Random operands on the device; every row belongs to a sequence.

    If `batch` and `batch_kv` differ, a sorted random index pairs the sequences.
    """
    p, sequences = problem, _sequences(problem)
    kv_shape = (p.kv_rows, p.kv_heads, p.head_dim)
    q_rows = _seeds(p) if p.broadcast_q else p.q_rows
    shapes = ((q_rows, p.q_heads, p.head_dim), kv_shape, kv_shape)
    query, key, value = (
        jax.random.normal(k, shape, jnp.dtype(p.dtype))
        for k, shape in zip(jax.random.split(jax.random.key(seed), 3), shapes, strict=True)
    )
    return Arrays(query, key, value, *jax.tree.map(jnp.asarray, sequences))


def settings_of(problem: GdpaProblem) -> Settings:
    """Settings with which scores are near 1 and the result overflows in no dtype."""
    p = problem
    return Settings(
        p.activations * p.q_heads if len(p.activations) == 1 else p.activations,
        p.approx,
        p.head_dim**-0.5,
        p.batch_kv / p.kv_rows,
        p.broadcast_q,
        p.max_seqlen_q,
        p.max_seqlen_kv,
    )


def gdpa_runner(
    problem: GdpaProblem, config: GdpaConfig | None, num_sms: int | None = None
) -> Callable[..., jax.Array]:
    """The kernel with `config`, including its tile list; the XLA path if `config` is None.

    `num_sms` is the device's number of SMs if None.
    """
    settings = settings_of(problem)
    if config is None:
        return jax.jit(lambda *arrays: gdpa_chunked.chunked(Arrays(*arrays), settings)[0])
    num_sms = device_sms() if num_sms is None else num_sms

    def run(*arrays: jax.Array) -> jax.Array:
        return gdpa_kernel(
            Arrays(*arrays), settings, return_residuals=False, config=config, num_sms=num_sms
        )[0]

    return jax.jit(run)


@functools.lru_cache(maxsize=1)
def _xla_runner(problem: GdpaProblem) -> Callable[..., jax.Array]:
    """The XLA path; cached, so that the checks of all configurations share one program."""
    return gdpa_runner(problem, None)


class _SequenceRows(NamedTuple):
    """The rows of one sequence, int32 scalars.

    Attributes:
      out_start: first row of the result.
      q_start: first query.
      q_length: number of queries and of rows of the result.
      kv_start: first key.
      kv_length: number of keys.
    """

    out_start: jax.Array
    q_start: jax.Array
    q_length: jax.Array
    kv_start: jax.Array
    kv_length: jax.Array


@functools.partial(
    jax.jit, static_argnames=("settings", "q_len", "kv_len"), compiler_options=UNTUNED
)
def _sampled_errors(
    xla: jax.Array,
    arrays: Arrays,
    sequence: _SequenceRows,
    settings: Settings,
    q_len: int,
    kv_len: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares the XLA path with the f32 oracle for one sequence, padded to q_len and kv_len.

    Returns:
      The XLA path's largest error; the oracle's largest value; and the largest sum over keys of
      |score| · |value|, times |output_scale|, by which errors proportional to scores are bounded.
    """

    def rows(array: jax.Array, begin: jax.Array, number: int) -> jax.Array:
        row = begin + jnp.arange(number, dtype=jnp.int32)
        return array[jnp.minimum(row, array.shape[0] - 1)].astype(jnp.float32)

    def offsets_of_one(length: jax.Array) -> jax.Array:
        return jnp.stack([jnp.zeros_like(length), length])

    query = rows(arrays.query, sequence.q_start, q_len)
    key, value = (rows(x, sequence.kv_start, kv_len) for x in (arrays.key, arrays.value))
    q_offsets, kv_offsets = offsets_of_one(sequence.q_length), offsets_of_one(sequence.kv_length)
    one = Arrays(query, key, value, q_offsets, kv_offsets)
    exact = materialised(one, settings._replace(broadcast_q=False))
    is_query = (jnp.arange(q_len, dtype=jnp.int32) < sequence.q_length)[:, None, None]
    error = jnp.where(is_query, jnp.abs(rows(xla, sequence.out_start, q_len) - exact), 0)
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    scores = jnp.float32(settings.scale) * jnp.einsum("inh,jnh->nij", query, key)
    is_key = jnp.arange(kv_len, dtype=jnp.int32) < sequence.kv_length
    scores = jnp.where(is_key, jnp.abs(scores), 0)
    magnitude = jnp.einsum("nij,jnh->inh", scores, jnp.abs(value))
    return jnp.max(error), jnp.max(jnp.abs(exact)), abs(settings.output_scale) * jnp.max(magnitude)


def check_gdpa(problem: GdpaProblem, actual: jax.Array, operands: Arrays) -> tuple[float, float]:
    """Returns the largest difference of `actual` to the XLA path, and the largest one allowed.

    Let e be the error of the XLA path against the f32 oracle, measured for some sequences including
    the longest. The error rule allows 2e plus one rounding, so a correct result differs from the
    XLA path by at most 3e plus two roundings; an approximate tanh adds its error. The difference
    may be NaN, which is not allowed: compare with `difference <= bound`.
    """
    settings, sequences = settings_of(problem), _sequences(problem)
    xla = _xla_runner(problem)(*operands)
    q_lens, kv_lens = sequences.lengths(_seeds(problem))
    out_starts = np.cumsum(q_lens) - q_lens
    q_starts = out_starts if sequences.queries is not None else np.zeros_like(out_starts)
    index = slice(-1) if sequences.q_to_kv is None else sequences.q_to_kv
    kv_starts = sequences.keys[index]
    sample = np.linspace(0, problem.batch - 1, SAMPLED).astype(np.int32)
    found = []
    for b in np.unique(np.argsort(kv_lens, stable=True)[sample]):
        numbers = (x[b] for x in (out_starts, q_starts, q_lens, kv_starts, kv_lens))
        sequence = _SequenceRows(*(jnp.int32(x) for x in numbers))
        longest = {"q_len": int(q_lens.max()), "kv_len": int(kv_lens.max())}
        found.append(jax.device_get(_sampled_errors(xla, operands, sequence, settings, **longest)))
    xla_error, largest, magnitude = (float(x) for x in np.max(np.asarray(found), axis=0))
    # f32 sums in another order differ; this matters only for f32 results.
    xla_error += 2.0**-24 * float(problem.head_dim + kv_lens.max()) ** 0.5 * largest
    bound = 3 * xla_error + float(jnp.finfo(actual.dtype).eps) * largest
    bound += APPROX_ERRORS.get(settings.approx or "", 0.0) * magnitude
    return float(largest_difference(actual, xla)), bound
