"""The case of gdpa: inputs, XLA path, kernel and a check."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import case as cases
from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import UNTUNED, Check
from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig
from ikbo_jax.reference import gdpa_chunked
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Arrays, Settings, materialised

#: Number of sequences whose XLA result is compared with the oracle.
SAMPLED = 8
#: Allowed error of an approximation for a score of 1; the XLA path is exact. For "tanh_bf16" the
#: allowed error is an eighth of the largest, 2⁻⁶: errors of many scores have both signs and cancel.
APPROX_ERRORS = {"tanh": 2.0**-12, "tanh_bf16": 2.0**-9}
#: Rows of random numbers that are drawn at once; a GPU's counters take eight times their bytes.
PART_ROWS = 2**16


class Sequences(NamedTuple):
    """Offsets of the sequences, and the index that pairs queries with keys.

    Attributes:
      queries: [batch + 1] int32; None if all sequences have the same queries.
      keys: [batch_kv + 1] int32.
      q_to_kv: [batch] int32; None pairs query sequence b with key-value sequence b.
    """

    queries: np.ndarray | None
    keys: np.ndarray
    q_to_kv: np.ndarray | None


def spread_offsets(rows: int, sequences: int, longest: int | None) -> np.ndarray:
    """Returns offsets [sequences + 1] int32 of sequences that fill `rows`, in random order.

    Lengths are spread evenly around their mean, as widely as the limits 1 and `longest` allow; all
    are equal if the mean is `longest` or `longest` is None. Equal arguments return equal offsets.
    """
    top = rows if longest is None else max(min(longest * sequences, 2 * rows - sequences), rows)
    # Lengths grow from (2 rows - top) / sequences to top / sequences, in integer arithmetic, so
    # that they add up to `rows`.
    ends = [
        (i * sequences * (2 * rows - top) + (top - rows) * i * i) // sequences**2
        for i in range(sequences + 1)
    ]
    return offsets_of(np.random.default_rng(0).permutation(np.diff(ends)))


def uniform_lengths(sequences: int, longest: int) -> np.ndarray:
    """Draws lengths [sequences], uniform in 1..longest."""
    return np.random.default_rng(0).integers(1, longest + 1, sequences)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Sums lengths to offsets [sequences + 1] int32."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """Combines a problem with lengths of sequences that contain every row.

    If `batch` and `batch_kv` differ, a sorted random index pairs the sequences. `lengths`: "spread"
    (see `spread_offsets`) or "uniform" (`uniform_lengths` up to `max_seqlen_kv`).
    """

    problem: GdpaProblem
    lengths: str = "spread"

    @functools.cached_property
    def sequences(self) -> Sequences:
        p, index = self.problem, None
        if self.lengths == "uniform":
            assert p.max_seqlen_kv is not None
            queries = keys = offsets_of(uniform_lengths(p.batch, p.max_seqlen_kv))
        else:
            queries = spread_offsets(p.q_rows, p.batch, p.max_seqlen_q)
            keys = spread_offsets(p.kv_rows, p.batch_kv, p.max_seqlen_kv)
        if p.batch != p.batch_kv:
            rng = np.random.default_rng(1)
            index = np.sort(rng.integers(0, p.batch_kv, p.batch, dtype=np.int32))
        return Sequences(None if p.broadcast_q else queries, keys, index)

    @property
    def broadcast_queries(self) -> int:
        """Number of queries of a sequence if all sequences have the same queries."""
        return self.problem.q_rows // self.problem.batch

    @property
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of queries, and number of keys, of every query sequence: [batch] each."""
        queries, keys, index = self.sequences
        kv_lens = np.diff(keys) if index is None else np.diff(keys)[index]
        if queries is None:
            return np.full_like(kv_lens, self.broadcast_queries), kv_lens
        return np.diff(queries), kv_lens

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key of the same sequence."""
        q_lens, kv_lens = (x.astype(np.int64) for x in self.numbers)
        return int(np.dot(q_lens, kv_lens))

    @property
    def useful_flops(self) -> int:
        return self.problem.useful_flops(self.pairs)

    @property
    def settings(self) -> Settings:
        """Settings that keep scores near 1, so that no dtype overflows."""
        p = self.problem
        return Settings(
            p.activations * p.q_heads if len(p.activations) == 1 else p.activations,
            p.approx,
            p.head_dim**-0.5,
            1.0 if SOFTMAX in p.activations else p.batch_kv / p.kv_rows,
            broadcast_q=p.broadcast_q,
            max_seqlen_q=p.max_seqlen_q,
            max_seqlen_kv=p.max_seqlen_kv,
        )

    def inputs(self, seed: int = 0) -> Arrays:
        p = self.problem
        q_rows = self.broadcast_queries if p.broadcast_q else p.q_rows
        kv_shape = (p.kv_rows, p.kv_heads, p.head_dim)
        shapes = ((q_rows, p.q_heads, p.head_dim), kv_shape, kv_shape)
        keys = jax.random.split(jax.random.key(seed), 4)[:3]
        arrays = (_normal(key, shape, p.dtype) for key, shape in zip(keys, shapes, strict=True))
        return Arrays(*arrays, *jax.tree.map(jnp.asarray, self.sequences))

    def cotangent(self, seed: int = 0) -> jax.Array:
        """Draws a cotangent of the result."""
        p, key = self.problem, jax.random.split(jax.random.key(seed), 4)[3]
        return _normal(key, (p.q_rows, p.q_heads, p.head_dim), p.dtype)

    def xla_path(self) -> Callable[..., jax.Array]:
        settings = self.settings
        return lambda *arrays: gdpa_chunked.chunked(Arrays(*arrays), settings)[0]

    def kernel(
        self, config: GdpaConfig | ShortGdpaConfig, num_sms: int
    ) -> Callable[..., jax.Array]:
        """Returns the kernel, including its tile list."""
        from ikbo_jax.pallas.flash.gdpa import gdpa_kernel

        options: dict[str, Any] = {"return_residuals": False, "config": config, "num_sms": num_sms}
        return lambda *arrays: gdpa_kernel(Arrays(*arrays), settings=self.settings, **options)[0]

    def check(self, actual: jax.Array, inputs: Arrays) -> Check:
        """Compares with the f32 oracle for some sequences, and with the XLA path for all."""
        xla = _xla_runner(self)(*inputs)
        kv_lens = self.numbers[1]
        sample = np.linspace(0, self.problem.batch - 1, SAMPLED).astype(np.int32)
        found = [
            jax.device_get(_sampled_errors(self, xla, actual, inputs, jnp.int32(b)))
            for b in np.unique(np.argsort(kv_lens, stable=True)[sample])
        ]
        xla_error, error, largest, magnitude = map(float, np.max(np.asarray(found), axis=0))
        terms = self.problem.head_dim + int(kv_lens.max())
        approx = APPROX_ERRORS.get(self.problem.approx or "", 0.0) * magnitude
        errors = error, float(error_rule.largest_difference(actual, xla)), xla_error
        return cases.nearest(error_rule.checks(errors, largest, actual.dtype, terms, approx))


def one_sequence(case: Case, arrays: Arrays, sequence: jax.Array) -> tuple[Arrays, jax.Array]:
    """Returns the arrays of a sequence, padded to the longest, and the first row of its result."""
    q_len, kv_len = (int(lengths.max()) for lengths in case.numbers)

    def alone(cu: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.stack([jnp.zeros_like(number), cu[number + 1] - cu[number]])

    kv = sequence if arrays.q_to_kv is None else arrays.q_to_kv[sequence]
    begin_kv, cu_kv = arrays.cu_seqlens_kv[kv], alone(arrays.cu_seqlens_kv, kv)
    key, value = (rows_from(x, begin_kv, kv_len) for x in (arrays.key, arrays.value))
    if arrays.cu_seqlens_q is None:
        return Arrays(arrays.query, key, value, None, cu_kv), sequence * q_len
    begin = arrays.cu_seqlens_q[sequence]
    query = rows_from(arrays.query, begin, q_len)
    return Arrays(query, key, value, alone(arrays.cu_seqlens_q, sequence), cu_kv), begin


def rows_from(array: jax.Array, begin: jax.Array, number: int) -> jax.Array:
    """Takes `number` rows of an array from row `begin`; past the end, the last row."""
    row = begin + jnp.arange(number, dtype=jnp.int32)
    return array[jnp.minimum(row, array.shape[0] - 1)]


def masks(one: Arrays) -> tuple[jax.Array, jax.Array]:
    """Masks the queries and the keys that `one_sequence` added as padding."""
    q_row, kv_row = (jnp.arange(x.shape[0], dtype=jnp.int32) for x in (one.query, one.key))
    is_query = jnp.ones_like(q_row, bool)
    if one.cu_seqlens_q is not None:
        is_query = q_row < one.cu_seqlens_q[1]
    return is_query, kv_row < one.cu_seqlens_kv[1]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    part = (min(shape[0], PART_ROWS), *shape[1:])
    keys = jax.random.split(key, -(-shape[0] // part[0]))
    parts = jax.lax.map(lambda k: jax.random.normal(k, part, jnp.dtype(dtype)), keys)
    return parts.reshape(-1, *shape[1:])[: shape[0]]


@functools.lru_cache(maxsize=1)
def _xla_runner(case: Case) -> Callable[..., jax.Array]:
    """Caches the XLA path, so that the checks of all configurations share one program."""
    return case.runner(None)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _sampled_errors(
    case: Case, xla: jax.Array, actual: jax.Array, arrays: Arrays, sequence: jax.Array
) -> tuple[jax.Array, ...]:
    """Compares the XLA path and a result with the f32 oracle for one sequence.

    Returns their largest errors; the oracle's largest value; and |output_scale| times the largest
    sum over keys of |score| · |value|, which bounds errors that are proportional to scores.
    """
    settings = case.settings
    one, begin = one_sequence(case, arrays, sequence)
    one = cases.widened(one)
    exact = materialised(one, settings)
    is_query, is_key = masks(one)
    errors = [largest_error(x, begin, exact, is_query) for x in (xla, actual)]
    heads = one.query.shape[1] // one.key.shape[1]
    key, value = (jnp.repeat(x, heads, axis=1) for x in (one.key, one.value))
    scores = jnp.float32(settings.scale) * jnp.einsum("inh,jnh->nij", one.query, key)
    scores = jnp.where(is_key, jnp.abs(scores), 0)
    magnitude = jnp.einsum("nij,jnh->inh", scores, jnp.abs(value))
    magnitude = abs(settings.output_scale) * jnp.max(magnitude)
    return *errors, jnp.max(jnp.abs(exact)), magnitude


def largest_error(x: jax.Array, begin: jax.Array, exact: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes the largest error of the rows of `x` from row `begin` that `mask` keeps."""
    found = rows_from(x, begin, exact.shape[0]).astype(jnp.float32)
    return error_rule.largest_difference(jnp.where(mask[:, None, None], found, exact), exact)
