"""Seeded draws of sizes that ranking teams run, from stated distributions.

Every function takes a NumPy generator and draws one workload. Sizes are log-uniform unless a
choice with weights says otherwise, and are drawn again while the workload's arrays or FLOPs exceed
`MAX_BYTES` and `MAX_FLOPS`, which no request of a ranking service does.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import attention
from ikbo_jax.cases.attention import Inputs
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.linear_compression import Case
from ikbo_jax.problems import AttentionProblem, LinearCompressionProblem

Generator = np.random.Generator

#: Limits of one workload: all arrays of its forward pass, and the FLOPs of that pass.
MAX_BYTES, MAX_FLOPS = 4 * 2**30, 2e12
#: Probabilities of head widths.
HEAD_DIMS = {64: 0.4, 96: 0.1, 128: 0.35, 192: 0.05, 256: 0.1}
HEADS = {1: 0.25, 2: 0.25, 4: 0.35, 8: 0.15}
#: Probabilities of key heads, by query heads.
KV_HEADS = {
    1: {1: 1.0},
    2: {2: 0.75, 1: 0.25},
    4: {4: 0.75, 2: 0.15, 1: 0.1},
    8: {8: 0.75, 2: 0.15, 1: 0.1},
}
DTYPES = {"bfloat16": 0.9, "float16": 0.1}


def _log_uniform(rng: Generator, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _choice(rng: Generator, weights: Mapping[Any, float]) -> Any:
    names = list(weights)
    return names[rng.choice(len(names), p=np.fromiter(weights.values(), float))]


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws normal values on the device."""
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return draw(jax.random.key(seed), shape, jnp.dtype(dtype))


def _users(rng: Generator, batch: int) -> int:
    """Draws one user for 30 % of the requests, as many users as candidates for 10 %."""
    kind = rng.random()
    if kind < 0.3:
        return 1
    return batch if kind < 0.4 else max(1, batch // _log_uniform(rng, 2, 1000))


def _user_index(batch: int, users: int, kind: str) -> np.ndarray:
    """Draws every candidate's user, [batch] int32; some users may be absent unless "even"."""
    counts: np.ndarray = np.random.default_rng(0).multinomial(batch, np.full(users, 1 / users))
    if kind == "even":
        counts = np.diff(np.linspace(0, batch, users + 1).astype(np.int64))
    index = np.repeat(np.arange(users, dtype=np.int32), counts)
    return np.random.default_rng(1).permutation(index) if kind == "unsorted" else index


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Target attention. `AttentionProblem` describes the sizes.

    The index is "ragged" (random numbers of candidates), "even" or "unsorted". With `has_lengths`,
    the users' histories have lengths in shortest..S.
    """

    batch: int
    users: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    index: str
    has_lengths: bool
    shortest: int = 1

    @property
    def cand_to_user(self) -> np.ndarray:
        """Index of every candidate's user, [B] int32."""
        return _user_index(self.batch, self.users, self.index)

    @property
    def lengths(self) -> np.ndarray:
        """Number of keys of every user, [U] int32."""
        if not self.has_lengths:
            return np.full(self.users, self.kv_len, np.int32)
        drawn = np.random.default_rng(2).integers(self.shortest, self.kv_len + 1, self.users)
        return drawn.astype(np.int32)

    @property
    def is_sorted(self) -> bool:
        return self.index != "unsorted"

    def inputs(self) -> Inputs:
        """Draws the arrays of `ikbo_jax.attention` on the device."""
        keys = (self.users, self.kv_len, self.kv_heads, self.head_dim)
        query = normal(0, (self.batch, self.q_len, self.q_heads, self.head_dim), self.dtype)
        key, value = (normal(n, keys, self.dtype) for n in (1, 2))
        lengths = jnp.asarray(self.lengths) if self.has_lengths else None
        return Inputs(query, key, value, jnp.asarray(self.cand_to_user), lengths)

    def check(self, actual: jax.Array, inputs: Inputs) -> Check:
        """Compares a result with the oracle for some candidates, and with the XLA path for all."""
        return attention.Case(AttentionProblem(*dataclasses.astuple(self)[:8])).check(
            actual, inputs
        )

    @property
    def flops(self) -> float:
        """Number of useful FLOPs of the forward pass, of keys within the lengths."""
        keys = self.lengths[self.cand_to_user].sum(dtype=np.int64)
        return 4.0 * self.q_len * self.q_heads * self.head_dim * float(keys)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the forward pass must read and write, of keys within the lengths."""
        rows = self.batch * self.q_len * self.q_heads * 2
        keys = int(self.lengths.sum(dtype=np.int64)) * self.kv_heads * 2
        return 2 * self.head_dim * (rows + keys)

    @property
    def label(self) -> str:
        lengths = " lengths" if self.has_lengths else ""
        return (
            f"B={self.batch} U={self.users} T={self.q_len} S={self.kv_len} N={self.q_heads} "
            f"K={self.kv_heads} H={self.head_dim} {self.dtype} {self.index}{lengths}"
        )


class CompressionShape(Case):
    """Linear compression of candidates' and users' embeddings."""

    @property
    def flops(self) -> int:
        return self.useful_flops

    @property
    def num_bytes(self) -> int:
        p = self.problem
        rows = p.batches[-1] * p.m + sum(b * k for b, k in zip(p.batches, p.ks, strict=True))
        return 2 * (p.n * rows + p.m * sum(p.ks))

    @property
    def label(self) -> str:
        return f"{self.problem.describe()} {self.index}"


@dataclasses.dataclass(frozen=True)
class GdpaShape:
    """Activation attention over jagged sequences.

    Lengths are "log-normal" (median 100, sigma 1), "uniform" in 1..longest or "short" (uniform in
    1..64), the same for queries and keys; "pffn": log-normal queries, `longest` keys; "pma":
    `longest` seeds as queries of every sequence, log-normal keys.
    """

    batch: int
    lengths: str
    longest: int
    heads: int
    head_dim: int
    dtype: str
    activation: str

    def _log_normal(self) -> np.ndarray:
        drawn = np.random.default_rng(3).lognormal(math.log(100), 1, self.batch)
        return np.clip(drawn.astype(np.int64), 1, 2048)

    @property
    def is_broadcast(self) -> bool:
        return self.lengths == "pma"

    @property
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of queries and of keys of every sequence, [batch] each."""
        same = np.full(self.batch, self.longest, np.int64)
        if self.lengths == "pffn":
            return self._log_normal(), same
        if self.lengths == "pma":
            return same, self._log_normal()
        if self.lengths == "log-normal":
            return self._log_normal(), self._log_normal()
        drawn = np.random.default_rng(3).integers(1, self.longest + 1, self.batch)
        return drawn, drawn

    @property
    def flops(self) -> float:
        queries, keys = self.numbers
        return 4.0 * self.heads * self.head_dim * float(np.dot(queries, keys))

    @property
    def num_bytes(self) -> int:
        queries, keys = (int(x.sum()) for x in self.numbers)
        read = self.longest if self.is_broadcast else queries
        return 2 * self.heads * self.head_dim * (read + queries + 2 * keys)

    @property
    def label(self) -> str:
        return (
            f"B={self.batch} {self.lengths} {self.longest} N={self.heads} H={self.head_dim} "
            f"{self.dtype} {self.activation}"
        )


Shape = AttentionShape | CompressionShape | GdpaShape


def _of_both(rng: Generator, heads: int, head_dims: Mapping[int, float]) -> dict[str, Any]:
    return {
        "kv_heads": _choice(rng, KV_HEADS[heads]),
        "head_dim": _choice(rng, head_dims),
        "dtype": _choice(rng, DTYPES),
        "index": _choice(rng, {"ragged": 0.7, "even": 0.15, "unsorted": 0.15}),
        "has_lengths": rng.random() < 0.3,
    }


def attention_shape(rng: Generator) -> AttentionShape:
    """Draws B in 64..16,384, T = 1 for half of them, S in 32..16,384, odd for half of them."""
    batch, heads = _log_uniform(rng, 64, 16_384), _choice(rng, HEADS)
    kv_len = _log_uniform(rng, 32, 16_384)
    if rng.random() < 0.5:
        kv_len = -(-kv_len // 64) * 64
    users = _users(rng, batch)
    q_len = _choice(rng, {1: 0.5, 2: 0.05, 4: 0.1, 8: 0.1, 16: 0.1, 32: 0.05, 64: 0.1})
    return AttentionShape(batch, users, q_len, kv_len, heads, **_of_both(rng, heads, HEAD_DIMS))


def few_queries_shape(rng: Generator) -> AttentionShape:
    """Draws T in 1..16, S in 64..4,096, 1 to 10,000 candidates a user, H = 64 or 128.

    A user has few queries or few keys, as in training.
    """
    batch, heads = _log_uniform(rng, 64, 16_384), _choice(rng, HEADS)
    users, q_len = max(1, batch // _log_uniform(rng, 1, 10_000)), _log_uniform(rng, 1, 16)
    sizes = batch, users, q_len, _log_uniform(rng, 64, 4096), heads
    return AttentionShape(*sizes, **_of_both(rng, heads, {64: 0.5, 128: 0.5}))


def compression_shape(rng: Generator) -> CompressionShape:
    """Draws B in 64..16,384, M in 8..1,024, K in 16..2,048, N in 16..512."""
    batch = _log_uniform(rng, 64, 16_384)
    users, m = _users(rng, batch), _log_uniform(rng, 8, 1024)
    n = _choice(rng, {16: 0.1, 32: 0.15, 64: 0.25, 96: 0.1, 128: 0.2, 256: 0.15, 512: 0.05})
    k_cand, k_user = (_log_uniform(rng, 16, 2048) for _ in range(2))
    dtype, index = _choice(rng, DTYPES), _choice(rng, {"ragged": 0.85, "unsorted": 0.15})
    problem = LinearCompressionProblem((users, batch), (k_user, k_cand), m, n, dtype)
    return CompressionShape(problem, index)


def gdpa_shape(rng: Generator) -> GdpaShape:
    """Draws B in 64..4,096; PFFN with 16 to 512 keys, PMA with 8 to 64 seeds."""
    kinds = {"log-normal": 0.3, "uniform": 0.2, "short": 0.2, "pffn": 0.15, "pma": 0.15}
    kind = _choice(rng, kinds)
    longest = {
        "log-normal": 2048,
        "uniform": _log_uniform(rng, 65, 2048),
        "short": 64,
        "pffn": _log_uniform(rng, 16, 512),
        "pma": _log_uniform(rng, 8, 64),
    }[kind]
    activations = {"gelu_tanh": 0.4, "silu": 0.2, "relu": 0.1, "gelu": 0.05, "softmax": 0.25}
    batch, heads = _log_uniform(rng, 64, 4096), _choice(rng, HEADS)
    head_dim = _choice(rng, {64: 0.45, 96: 0.1, 128: 0.4, 256: 0.05})
    dtype, activation = _choice(rng, DTYPES), _choice(rng, activations)
    return GdpaShape(batch, kind, longest, heads, head_dim, dtype, activation)


#: Functions that draw one workload, by op.
KINDS: dict[str, Callable[[Generator], Shape]] = {
    "attention": attention_shape,
    "linear_compression": compression_shape,
    "gdpa": gdpa_shape,
    "few_queries": few_queries_shape,
}


def draw(op: str, rng: Generator) -> Any:
    """Draws one workload within the limits."""
    while (shape := KINDS[op](rng)).num_bytes > MAX_BYTES or shape.flops > MAX_FLOPS:
        pass
    return shape


#: What is timed of an op; without "few_queries forward": these sizes are drawn for training.
SWEEPS = tuple(
    sweep
    for op in KINDS
    for direction in ("forward", "both")
    if (sweep := f"{op} {direction}") != "few_queries forward"
)


def shapes(op: str, number: int, seed: int = 0) -> list[Shape]:
    """Draws workloads of an op; a larger number or another seed adds new ones."""
    rng = np.random.default_rng([seed, list(KINDS).index(op)])
    return [draw(op, rng) for _ in range(number)]
