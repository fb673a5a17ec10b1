"""Shapes, seeded inputs, oracles and the error rule, for the CPU and the GPU suites."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.problems import LinearCompressionProblem

HALF_DTYPES = ("bfloat16", "float16")
DTYPES = (*HALF_DTYPES, "float32")


def in_turn(names: Iterable[Any]) -> list[tuple[Any, str]]:
    """Each with one dtype, by turns: every one meets several, at a third of the programs."""
    return list(zip(names, itertools.cycle(DTYPES), strict=False))


class LinearCompressionShape(NamedTuple):
    """Sizes of a two-level problem, and the kind of its index (see `ragged_index`)."""

    users: int
    candidates: int
    m: int
    k_user: int
    k_cand: int
    n: int
    index: str = "sorted"  # type: ignore[assignment]  # hides tuple.index, which nobody calls


#: One name for every branch. N is a multiple of 8, which the kernel needs, unless the name says so.
#: The kernel's tiles are 128 embedding columns by up to 256 compressed rows by 64 or 128 of K.
LINEAR_COMPRESSION_SHAPES = {
    "one_candidate": LinearCompressionShape(1, 1, 16, 32, 24, 16),
    "one_user": LinearCompressionShape(1, 9, 32, 40, 24, 16),
    "a_user_each": LinearCompressionShape(6, 6, 32, 40, 24, 16, "unsorted"),
    "odd_counts": LinearCompressionShape(4, 13, 48, 40, 56, 24),
    "unsorted": LinearCompressionShape(5, 17, 24, 16, 40, 32, "unsorted"),
    "users_without_candidates": LinearCompressionShape(9, 7, 24, 16, 40, 32, "gaps"),
    "more_users_than_candidates": LinearCompressionShape(11, 3, 24, 16, 40, 16, "gaps"),
    "tile": LinearCompressionShape(2, 5, 224, 64, 64, 128),
    "tile_minus_one": LinearCompressionShape(2, 5, 223, 63, 63, 120),
    "tile_plus_one": LinearCompressionShape(2, 5, 225, 65, 65, 136, "unsorted"),
    "two_tiles_each_way": LinearCompressionShape(2, 5, 448, 128, 128, 256, "unsorted"),
    "tails_of_default": LinearCompressionShape(3, 7, 433, 154, 98, 128, "unsorted"),
    "tiny": LinearCompressionShape(2, 5, 1, 1, 1, 8, "unsorted"),
    "no_user_rows": LinearCompressionShape(2, 5, 16, 0, 24, 16),
    "n_not_multiple_of_8": LinearCompressionShape(3, 7, 16, 24, 17, 13, "unsorted"),
}


class LinearCompressionInputs(NamedTuple):
    """Arguments of `linear_compression`, in its order."""

    w_cand: jax.Array
    w_user: jax.Array
    e_cand: jax.Array
    e_user: jax.Array
    cand_to_user: jax.Array

    @property
    def levels(self) -> tuple[tuple, tuple, tuple]:
        """Weights, embeddings and parents, coarsest first."""
        return ((self.w_user, self.w_cand), (self.e_user, self.e_cand), (None, self.cand_to_user))


def ragged_index(
    rng: np.random.Generator, users: int, candidates: int, kind: str = "sorted"
) -> np.ndarray:
    """[candidates] int32, a user for every candidate, with ragged counts per user.

    "sorted" and "unsorted" give every user a candidate where there are enough candidates; "gaps"
    leaves at least a third of the users (none of a single one) without, and is unsorted.
    """
    if kind == "gaps":
        served = rng.choice(users, size=max(1, users - max(users // 3, 1)), replace=False)
    else:
        served = np.arange(users)
    index = rng.choice(served, size=candidates)
    covered = min(len(served), candidates)
    index[:covered] = served[:covered]
    index = np.sort(index) if kind == "sorted" else rng.permutation(index)
    return index.astype(np.int32)


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Normal values in `dtype`, none of them zero.

    Not by `jnp.asarray`, which compiles a program for each new shape, in 8 ms: 40 % of the programs
    of some files were these.
    """
    values = rng.standard_normal(tuple(shape), dtype=np.float32)
    values += np.where(np.abs(values) < 1e-3, np.float32(0.5), np.float32(0))
    return jax.device_put(values.astype(jnp.dtype(dtype)))


def vectors(users: int, candidates: int, width: int) -> tuple[Any, ...]:
    """Returns a generator, vectors of users and candidates, a weight, an unsorted index."""
    rng = np.random.default_rng(0)
    shapes = ((users, width), (candidates, width), (width, width))
    arrays = [random_array(rng, shape, "float32") for shape in shapes]
    return rng, *arrays, jnp.asarray(ragged_index(rng, users, candidates, "unsorted"))


def _weight(rng: np.random.Generator, m: int, k: int, dtype: Any) -> jax.Array:
    """In NumPy: jnp would compile a program for each shape."""
    values = np.asarray(random_array(rng, (m, k), jnp.float32)) * np.float32(max(k, 1) ** -0.5)
    return jax.device_put(values.astype(jnp.dtype(dtype)))


def make_inputs(
    shape: LinearCompressionShape, dtype: Any = "bfloat16", seed: int = 0
) -> LinearCompressionInputs:
    """Random inputs; every element of the result has a variance near 2."""
    rng = np.random.default_rng(seed)

    return LinearCompressionInputs(
        _weight(rng, shape.m, shape.k_cand, dtype),
        _weight(rng, shape.m, shape.k_user, dtype),
        random_array(rng, (shape.candidates, shape.k_cand, shape.n), dtype),
        random_array(rng, (shape.users, shape.k_user, shape.n), dtype),
        jax.device_put(ragged_index(rng, shape.users, shape.candidates, shape.index)),
    )


def make_levels(
    batches: Sequence[int],
    ks: Sequence[int],
    m: int,
    n: int,
    dtype: Any,
    seed: int = 0,
    index: str | Sequence[int] = "unsorted",
) -> tuple[tuple, tuple, tuple]:
    """Random weights, embeddings and parents of a multi-level problem, coarsest first.

    `index` is the kind of all parents, or those of the finest of two levels.
    """
    rng = np.random.default_rng(seed)
    weights = tuple(_weight(rng, m, k, dtype) for k in ks)
    embeddings = tuple(
        random_array(rng, (b, k, n), dtype) for b, k in zip(batches, ks, strict=True)
    )
    parents = tuple(
        jax.device_put(
            ragged_index(rng, coarser, finer, index)
            if isinstance(index, str)
            else np.asarray(index, np.int32)
        )
        for coarser, finer in zip(batches[:-1], batches[1:], strict=True)
    )
    return weights, embeddings, (None, *parents)


@dataclasses.dataclass(frozen=True)
class CompressionCase:
    """A multi-level problem, and its `index` as `make_levels` takes it."""

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    m: int
    n: int
    _: dataclasses.KW_ONLY
    index: str | tuple[int, ...] = "unsorted"
    dtype: str = "bfloat16"

    @property
    def problem(self) -> LinearCompressionProblem:
        return LinearCompressionProblem(self.batches, self.ks, self.m, self.n, self.dtype)

    def arrays_of_levels(self, seed: int = 0) -> tuple[tuple, tuple, tuple]:
        return make_levels(self.batches, self.ks, self.m, self.n, self.dtype, seed, self.index)


class AttentionShape(NamedTuple):
    """Sizes of a broadcast attention, the kind of its index (see `ragged_index`), its lengths.

    `lengths` is "full" (there are none), or "ragged": any from 0 to S, of the first user S and of
    the last, if there is another, 0.
    """

    users: int
    candidates: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    index: str = "sorted"  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    lengths: str = "full"


#: One name for every branch of shapes; the kernel's tiles are 64 or 128 queries by 64 to 128 keys.
ATTENTION_SHAPES = {
    "one_candidate": AttentionShape(1, 1, 4, 16, 2, 2, 16),
    "one_user": AttentionShape(1, 9, 4, 24, 2, 2, 16),
    "a_user_each": AttentionShape(6, 6, 4, 24, 2, 1, 16, "unsorted"),
    "odd_counts": AttentionShape(4, 13, 3, 37, 3, 3, 24, "sorted", "ragged"),
    "unsorted": AttentionShape(5, 17, 2, 20, 2, 2, 16, "unsorted"),
    "users_without_candidates": AttentionShape(9, 7, 5, 20, 2, 2, 16, "gaps", "ragged"),
    "one_wide": AttentionShape(2, 3, 1, 1, 1, 1, 1),
    "tile_plus_one": AttentionShape(2, 5, 65, 129, 1, 1, 64, "unsorted", "ragged"),
    "grouped_heads": AttentionShape(3, 8, 4, 40, 8, 2, 16, "unsorted", "ragged"),
}


class AttentionInputs(NamedTuple):
    """Arguments of `attention`: its four arrays in its order, and the lengths."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    key_value_seq_lengths: jax.Array | None = None

    def f64(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The same in NumPy, floats in f64."""
        query, key, value = f64_of(self[:3])
        index, lengths = np.asarray(self.cand_to_user), self.key_value_seq_lengths
        return query, key, value, index, None if lengths is None else np.asarray(lengths)


def make_attention_inputs(
    shape: AttentionShape, dtype: Any = "bfloat16", seed: int = 0
) -> AttentionInputs:
    """Random normal inputs, so that scores scaled by 1 / sqrt(H) have a variance near 1."""
    rng = np.random.default_rng(seed)
    keys = (shape.users, shape.kv_len, shape.kv_heads, shape.head_dim)
    queries = (shape.candidates, shape.q_len, shape.q_heads, shape.head_dim)
    lengths = None
    if shape.lengths == "ragged":
        drawn = rng.integers(0, shape.kv_len + 1, shape.users)
        drawn[-1] = 0
        drawn[0] = shape.kv_len
        lengths = jax.device_put(np.asarray(drawn, np.int32))
    return AttentionInputs(
        random_array(rng, queries, dtype),
        random_array(rng, keys, dtype),
        random_array(rng, keys, dtype),
        jax.device_put(ragged_index(rng, shape.users, shape.candidates, shape.index)),
        lengths,
    )


def _ancestors(embeddings: Sequence[Any], parents: Sequence[Any]) -> list[np.ndarray]:
    """For every level, the row that each row of the finest level belongs to."""
    rows = [np.arange(embeddings[-1].shape[0])]
    for level in range(len(embeddings) - 1, 0, -1):
        parent = np.asarray(parents[level])[rows[0]]
        rows.insert(0, np.clip(parent, 0, embeddings[level - 1].shape[0] - 1))
    return rows


def f64_of(arrays: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array).astype(np.float64) for array in arrays]


def numpy_oracle(
    weights: Sequence[Any], embeddings: Sequence[Any], parents: Sequence[Any]
) -> np.ndarray:
    """Linear compression in NumPy and f64: [B_last, M, N]."""
    rows = _ancestors(embeddings, parents)
    levels = zip(f64_of(weights), f64_of(embeddings), rows, strict=True)
    return np.sum([(weight @ embedding)[row] for weight, embedding, row in levels], axis=0)


def numpy_oracle_gradients(
    weights: Sequence[Any], embeddings: Sequence[Any], parents: Sequence[Any], cotangent: Any
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Gradients of <cotangent, result> by the weights and the embeddings, in NumPy and f64."""
    rows = _ancestors(embeddings, parents)
    (upstream,) = f64_of([cotangent])
    d_weights, d_embeddings = [], []
    for weight, embedding, row in zip(f64_of(weights), f64_of(embeddings), rows, strict=True):
        d_weights.append(np.einsum("bmn,bkn->mk", upstream, embedding[row]))
        d_embedding = np.zeros_like(embedding)
        np.add.at(d_embedding, row, np.einsum("mk,bmn->bkn", weight, upstream))
        d_embeddings.append(d_embedding)
    return tuple(d_weights), tuple(d_embeddings)


def assert_near(found: Any, expected: Any, part: float) -> None:
    """Holds each array of `found` to a part of the largest value of its like in `expected`."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = (np.asarray(array, np.float32) for array in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=part * np.abs(y).max())


def assert_within_units(found: jax.Array, wanted: jax.Array) -> None:
    """Both have the same shape and dtype, and differ by some roundings at most."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    unit, exact = float(jnp.finfo(wanted.dtype).eps), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2 * unit, atol=8 * unit)


def assert_within_error_rule(actual: Any, oracle: Any, same_dtype_jnp: Any) -> None:
    """Asserts max|actual - oracle| <= 2 max|same_dtype_jnp - oracle| + one rounding (f32: four).

    Args:
      actual: what is tested; must have `oracle`'s shape and `same_dtype_jnp`'s dtype.
      oracle: the result in f32 or f64, of the same (already rounded) inputs.
      same_dtype_jnp: what plain jnp makes of them in their own dtype.
    """
    dtype = jax.device_put(same_dtype_jnp).dtype
    assert jax.device_put(actual).dtype == dtype, (
        f"{jax.device_put(actual).dtype}, expected {dtype}"
    )
    assert np.shape(actual) == np.shape(oracle), f"{np.shape(actual)}, expected {np.shape(oracle)}"
    x, reference, plain = f64_of([actual, oracle, same_dtype_jnp])
    if not reference.size:
        return
    assert np.all(np.isfinite(x)), f"{np.count_nonzero(~np.isfinite(x))} values are not finite"
    # In f32, the oracle's own dtype, plain jnp is but one order of the sums: a few roundings more.
    roundings = 4 if dtype == jnp.float32 else 1
    rounding = roundings * float(jnp.finfo(dtype).eps) / 2 * np.max(np.abs(reference))
    bound = 2 * np.max(np.abs(plain - reference)) + rounding
    difference = np.abs(x - reference)
    worst = np.unravel_index(np.argmax(difference), difference.shape)
    assert difference[worst] <= bound, (
        f"largest error {difference[worst]:.3e} at {tuple(map(int, worst))} is above {bound:.3e}: "
        f"{x[worst]} instead of {reference[worst]}; "
        f"{np.count_nonzero(difference > bound)} of {difference.size} values are above it"
    )
