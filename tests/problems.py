"""Shapes, seeded inputs, oracles and the error rule, for the CPU and the GPU suites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HALF_DTYPES = ("bfloat16", "float16")
DTYPES = (*HALF_DTYPES, "float32")


class LinearCompressionShape(NamedTuple):
    """Sizes of a two-level problem, and the kind of its index (see `ragged_index`)."""

    users: int
    candidates: int
    m: int
    k_user: int
    k_cand: int
    n: int
    index: str = "sorted"


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
        return (
            (self.w_user, self.w_cand),
            (self.e_user, self.e_cand),
            (None, self.cand_to_user),
        )


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
    """Normal values in `dtype`, none of them zero."""
    values = rng.standard_normal(tuple(shape), dtype=np.float32)
    values += np.where(np.abs(values) < 1e-3, np.float32(0.5), np.float32(0))
    return jnp.asarray(values).astype(dtype)


def make_inputs(
    shape: LinearCompressionShape, dtype: Any = "bfloat16", seed: int = 0
) -> LinearCompressionInputs:
    """Random inputs; every element of the result has a variance near 2."""
    rng = np.random.default_rng(seed)

    def weight(k: int) -> jax.Array:
        values = random_array(rng, (shape.m, k), jnp.float32)
        return (values * np.float32(max(k, 1) ** -0.5)).astype(dtype)

    return LinearCompressionInputs(
        weight(shape.k_cand),
        weight(shape.k_user),
        random_array(rng, (shape.candidates, shape.k_cand, shape.n), dtype),
        random_array(rng, (shape.users, shape.k_user, shape.n), dtype),
        jnp.asarray(ragged_index(rng, shape.users, shape.candidates, shape.index)),
    )


def make_levels(
    batches: Sequence[int], ks: Sequence[int], m: int, n: int, dtype: Any, seed: int = 0
) -> tuple[tuple, tuple, tuple]:
    """Random weights, embeddings and parents of a multi-level problem, coarsest first."""
    rng = np.random.default_rng(seed)
    weights = tuple(
        (random_array(rng, (m, k), jnp.float32) * np.float32(max(k, 1) ** -0.5)).astype(dtype)
        for k in ks
    )
    embeddings = tuple(
        random_array(rng, (b, k, n), dtype) for b, k in zip(batches, ks, strict=True)
    )
    parents = tuple(
        jnp.asarray(ragged_index(rng, coarser, finer, "unsorted"))
        for coarser, finer in zip(batches[:-1], batches[1:], strict=True)
    )
    return weights, embeddings, (None, *parents)


def _ancestors(embeddings: Sequence[Any], parents: Sequence[Any]) -> list[np.ndarray]:
    """For every level, the row that each row of the finest level belongs to."""
    rows = [np.arange(embeddings[-1].shape[0])]
    for level in range(len(embeddings) - 1, 0, -1):
        parent = np.asarray(parents[level])[rows[0]]
        rows.insert(0, np.clip(parent, 0, embeddings[level - 1].shape[0] - 1))
    return rows


def _f64(arrays: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array).astype(np.float64) for array in arrays]


def numpy_oracle(
    weights: Sequence[Any], embeddings: Sequence[Any], parents: Sequence[Any]
) -> np.ndarray:
    """Linear compression in NumPy and f64: [B_last, M, N]."""
    rows = _ancestors(embeddings, parents)
    levels = zip(_f64(weights), _f64(embeddings), rows, strict=True)
    return np.sum([(weight @ embedding)[row] for weight, embedding, row in levels], axis=0)


def numpy_oracle_gradients(
    weights: Sequence[Any], embeddings: Sequence[Any], parents: Sequence[Any], cotangent: Any
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Gradients of <cotangent, result> by the weights and the embeddings, in NumPy and f64."""
    rows = _ancestors(embeddings, parents)
    (upstream,) = _f64([cotangent])
    d_weights, d_embeddings = [], []
    for weight, embedding, row in zip(_f64(weights), _f64(embeddings), rows, strict=True):
        d_weights.append(np.einsum("bmn,bkn->mk", upstream, embedding[row]))
        d_embedding = np.zeros_like(embedding)
        np.add.at(d_embedding, row, np.einsum("mk,bmn->bkn", weight, upstream))
        d_embeddings.append(d_embedding)
    return tuple(d_weights), tuple(d_embeddings)


def assert_within_error_rule(actual: Any, oracle: Any, same_dtype_jnp: Any) -> None:
    """Asserts max|actual - oracle| <= 2 max|same_dtype_jnp - oracle| + one rounding.

    Args:
      actual: what is tested; must have `oracle`'s shape and `same_dtype_jnp`'s dtype.
      oracle: the result in f32 or f64, of the same (already rounded) inputs.
      same_dtype_jnp: what plain jnp makes of them in their own dtype.
    """
    dtype = jnp.asarray(same_dtype_jnp).dtype
    assert jnp.asarray(actual).dtype == dtype, f"{jnp.asarray(actual).dtype}, expected {dtype}"
    assert np.shape(actual) == np.shape(oracle), f"{np.shape(actual)}, expected {np.shape(oracle)}"
    x, reference, plain = _f64([actual, oracle, same_dtype_jnp])
    if not reference.size:
        return
    assert np.all(np.isfinite(x)), f"{np.count_nonzero(~np.isfinite(x))} values are not finite"
    rounding = float(jnp.finfo(dtype).eps) / 2 * np.max(np.abs(reference))
    bound = 2 * np.max(np.abs(plain - reference)) + rounding
    difference = np.abs(x - reference)
    worst = np.unravel_index(np.argmax(difference), difference.shape)
    assert difference[worst] <= bound, (
        f"largest error {difference[worst]:.3e} at {tuple(map(int, worst))} is above {bound:.3e}: "
        f"{x[worst]} instead of {reference[worst]}; "
        f"{np.count_nonzero(difference > bound)} of {difference.size} values are above it"
    )
