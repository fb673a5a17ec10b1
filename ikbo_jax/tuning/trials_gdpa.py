"""What the autotuner runs and checks for generalised dot-product attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.pallas.gdpa import gdpa_kernel
from ikbo_jax.reference import gdpa_chunked
from ikbo_jax.reference.gdpa import Arrays, Settings, materialised
from ikbo_jax.tuning.gdpa_configs import GdpaConfig, GdpaProblem
from ikbo_jax.tuning.trials import UNTUNED, device_sms, largest_difference

#: Sequences whose results in XLA are compared with the oracle.
SAMPLED = 8
#: What an approximation may err by for a score of 1, where XLA's path is exact; an eighth of that
#: for "tanh_bf16", since errors of many weights are of either sign.
APPROX_ERRORS = {"tanh": 2.0**-12, "tanh_bf16": 2.0**-9}


class _Sequences(NamedTuple):
    """Offsets [sequences + 1] of queries and keys, and [batch] which keys, or None: each its own.

    `queries` is None if all sequences have the same queries.
    """

    queries: np.ndarray | None
    keys: np.ndarray
    q_to_kv: np.ndarray | None

    def lengths(self, seeds: int) -> tuple[np.ndarray, np.ndarray]:
        """[batch] queries, or `seeds` if all have the same, and keys of every query sequence."""
        keys = np.diff(self.keys)
        keys = keys if self.q_to_kv is None else keys[self.q_to_kv]
        return np.full_like(keys, seeds) if self.queries is None else np.diff(self.queries), keys


def offsets(rows: int, sequences: int, longest: int | None) -> np.ndarray:
    """[sequences + 1] int32 offsets of sequences that fill `rows`, in a random order.

    Lengths lie evenly about their mean, as far from it as 1 and `longest` admit: with a mean of
    half the longest from 1 to the longest, with a mean of the longest at it. They are equal without
    `longest`. The same arguments give the same offsets, as self-attention needs.
    """
    top = rows if longest is None else max(min(longest * sequences, 2 * rows - sequences), rows)
    # Lengths grow from (2 rows - top) / sequences to top / sequences; in integers, so that they add
    # up to `rows`.
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
    """Queries of a sequence if all have the same."""
    return problem.q_rows // problem.batch


def gdpa_flops(problem: GdpaProblem) -> int:
    """Useful FLOPs of the trials' operands."""
    lengths = _sequences(problem).lengths(_seeds(problem))
    q_lens, kv_lens = (x.astype(np.int64) for x in lengths)
    return problem.useful_flops(int(np.dot(q_lens, kv_lens)))


def gdpa_operands(problem: GdpaProblem, seed: int = 0) -> Arrays:
    """Random operands on the device; there are no rows of no sequence.

    Where there are more or fewer sequences of keys than of queries, a sorted index joins them.
    """
    p, sequences = problem, _sequences(problem)
    of_keys = (p.kv_rows, p.kv_heads, p.head_dim)
    q_rows = _seeds(p) if p.broadcast_q else p.q_rows
    shapes = ((q_rows, p.q_heads, p.head_dim), of_keys, of_keys)
    query, key, value = (
        jax.random.normal(k, shape, jnp.dtype(p.dtype))
        for k, shape in zip(jax.random.split(jax.random.key(seed), 3), shapes, strict=True)
    )
    return Arrays(query, key, value, *jax.tree.map(jnp.asarray, sequences))


def settings_of(problem: GdpaProblem) -> Settings:
    """Scores near 1 and a result that no dtype overflows at."""
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
    """The kernel with a configuration, its lists of tiles included, or the XLA path for None.

    `num_sms` is the device's if None.
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
    """One program for the checks of all configurations."""
    return gdpa_runner(problem, None)


class _Place(NamedTuple):
    """First row of a sequence's result and queries, their number; likewise of its keys."""

    target: jax.Array
    query: jax.Array
    queries: jax.Array
    key: jax.Array
    keys: jax.Array


@functools.partial(
    jax.jit, static_argnames=("settings", "q_len", "kv_len"), compiler_options=UNTUNED
)
def _sampled_errors(
    xla: jax.Array, arrays: Arrays, place: _Place, settings: Settings, q_len: int, kv_len: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of one sequence, padded to the longest: XLA's largest error, the largest value, the reach.

    The last is what the scores' sizes add up to beside the values.
    """

    def rows(array: jax.Array, begin: jax.Array, number: int) -> jax.Array:
        row = begin + jnp.arange(number, dtype=jnp.int32)
        return array[jnp.minimum(row, array.shape[0] - 1)].astype(jnp.float32)

    def only(number: jax.Array) -> jax.Array:
        return jnp.stack([jnp.zeros_like(number), number])

    query = rows(arrays.query, place.query, q_len)
    key, value = (rows(x, place.key, kv_len) for x in (arrays.key, arrays.value))
    one = Arrays(query, key, value, only(place.queries), only(place.keys))
    exact = materialised(one, settings._replace(broadcast_q=False))
    is_own = (jnp.arange(q_len, dtype=jnp.int32) < place.queries)[:, None, None]
    error = jnp.where(is_own, jnp.abs(rows(xla, place.target, q_len) - exact), 0)
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    scores = jnp.float32(settings.scale) * jnp.einsum("inh,jnh->nij", query, key)
    is_key = jnp.arange(kv_len, dtype=jnp.int32) < place.keys
    scores = jnp.where(is_key, jnp.abs(scores), 0)
    reach = jnp.einsum("nij,jnh->inh", scores, jnp.abs(value))
    return jnp.max(error), jnp.max(jnp.abs(exact)), abs(settings.output_scale) * jnp.max(reach)


def check_gdpa(problem: GdpaProblem, actual: jax.Array, operands: Arrays) -> tuple[float, float]:
    """Returns the largest difference of `actual` to the XLA path, and the largest admitted.

    The XLA path's own error is measured against the f32 oracle for some sequences, the longest
    among them. A result that keeps the error rule (twice that, and one rounding) is at most three
    times that and two roundings away; an approximate tanh adds its own error. A difference of NaN
    is not admitted: compare with `difference <= bound`.
    """
    settings, sequences = settings_of(problem), _sequences(problem)
    xla = _xla_runner(problem)(*operands)
    q_lens, kv_lens = sequences.lengths(_seeds(problem))
    targets = np.cumsum(q_lens) - q_lens
    sources = targets if sequences.queries is not None else np.zeros_like(targets)
    keys = sequences.keys[:-1] if sequences.q_to_kv is None else sequences.keys[sequences.q_to_kv]
    sample = np.linspace(0, problem.batch - 1, SAMPLED).astype(np.int32)
    found = []
    for b in np.unique(np.argsort(kv_lens, stable=True)[sample]):
        numbers = (x[b] for x in (targets, sources, q_lens, keys, kv_lens))
        place = _Place(*(jnp.int32(x) for x in numbers))
        longest = {"q_len": int(q_lens.max()), "kv_len": int(kv_lens.max())}
        found.append(jax.device_get(_sampled_errors(xla, operands, place, settings, **longest)))
    own, largest, reach = (float(x) for x in np.max(np.asarray(found), axis=0))
    # f32 sums in another order differ, which only an f32 result is close enough to show.
    own += 2.0**-24 * float(problem.head_dim + kv_lens.max()) ** 0.5 * largest
    bound = 3 * own + float(jnp.finfo(actual.dtype).eps) * largest
    bound += APPROX_ERRORS.get(settings.approx or "", 0.0) * reach
    return float(largest_difference(actual, xla)), bound
