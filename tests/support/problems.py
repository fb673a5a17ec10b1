"""Shapes, seeded inputs, oracles and the error rule, for the CPU and the GPU suites."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
        query, key, value = _f64(self[:3])
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


class _Attended(NamedTuple):
    """Broadcast attention of every candidate on its own, in f64.

    Attributes:
      weights: softmax, [B, T, N, S + T_self].
      lse: [B, T, N].
      keys: [B, S + T_self, N, H]; those that do not exist are zeros.
      values: likewise.
      users: the user of each candidate.
      slope: of the cap of scores, [B, T, N, S + T_self], or 1.
    """

    weights: np.ndarray
    lse: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    users: np.ndarray
    slope: Any = 1


def ranges_of_keys(batch: int, keys: int, seed: int = 0) -> np.ndarray:
    """[batch, 2] int32, ranges of keys: from the first one, any, empty, and out of bounds."""
    rng = np.random.default_rng(seed)
    ranges = rng.integers(-3, keys + 4, (batch, 2))
    ranges[::2].sort(axis=1)
    ranges[1::3, 0] = 0
    ranges[3::5] = -(2**31), 2**31 - 1
    return ranges.astype(np.int32)


def _attended(
    inputs: AttentionInputs,
    scale: float,
    self_key: Any = None,
    self_value: Any = None,
    ranges: Any = None,
    logit_cap: float | None = None,
) -> _Attended:
    query, key, value, index, lengths = inputs.f64()
    users = np.clip(index, 0, key.shape[0] - 1)
    exists = np.ones((len(users), key.shape[1]), bool)
    if lengths is not None:
        exists = np.arange(key.shape[1])[None] < lengths[users][:, None]
    if ranges is not None:
        place, ranges = np.arange(key.shape[1])[None], np.asarray(ranges)
        exists &= (ranges[:, :1] <= place) & (place < ranges[:, 1:])

    def of_candidates(array: np.ndarray, own: Any) -> np.ndarray:
        each = np.where(exists[:, :, None, None], array[users], 0)
        if own is not None:
            each = np.concatenate((each, *_f64([own])), axis=1)
        return np.repeat(each, query.shape[2] // key.shape[2], axis=2)

    keys, values = of_candidates(key, self_key), of_candidates(value, self_value)
    is_own = np.ones((len(users), keys.shape[1] - key.shape[1]), bool)
    exists = np.concatenate((exists, is_own), axis=1)
    scores, slope = scale * np.einsum("btnh,bsnh->btns", query, keys), 1
    if logit_cap is not None:
        inner = np.tanh(scores / logit_cap)
        scores, slope = logit_cap * inner, 1 - inner**2
    scores = np.where(exists[:, None, None], scores, -np.inf)
    row_max = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    row_max = np.where(row_max == -np.inf, 0, row_max)
    powers = np.exp(scores - row_max)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(total))[..., 0]
    return _Attended(powers / np.where(total == 0, 1, total), lse, keys, values, users, slope)


def numpy_attention_oracle(
    inputs: AttentionInputs, *, scale: float, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Broadcast attention in NumPy and f64: out [B, T, N, H] and lse [B, T, N].

    `options`: self_key, self_value, ranges and logit_cap.
    """
    weights, lse, _, values, *_ = _attended(inputs, scale, **options)
    return np.einsum("btns,bsnh->btnh", weights, values), lse


def numpy_attention_of_rounded_weights(
    inputs: AttentionInputs, *, scale: float, **options: Any
) -> np.ndarray:
    """Out, if weights are rounded to the inputs' dtype before they meet the values.

    The largest weight of a row is 1 then, and the sum that divides is that of exact weights.
    """
    weights, _, _, values, *_ = _attended(inputs, scale, **options)
    weights = weights / np.maximum(np.max(weights, axis=-1, keepdims=True), 1e-30)
    total = np.maximum(np.sum(weights, axis=-1, keepdims=True), 1e-30)
    rounded = weights.astype(inputs.query.dtype).astype(np.float64)
    return (np.einsum("btns,bsnh->btnh", rounded, values) / total).astype(inputs.query.dtype)


def numpy_attention_gradients(
    inputs: AttentionInputs,
    d_out: Any,
    d_lse: Any,
    *,
    scale: float,
    logit_cap: float | None = None,
    merged: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of <d_out, out> + <d_lse, lse> by query, key and value, in NumPy and f64.

    `merged`: out and lse, if the rows attend to further keys, too.
    """
    weights, own_lse, keys, values, users, slope = _attended(inputs, scale, logit_cap=logit_cap)
    query, key, value, _, _ = inputs.f64()
    d_out, d_lse = _f64([d_out, d_lse])
    d_weights = np.einsum("btnh,bsnh->btns", d_out, values)
    expected = np.sum(weights * d_weights, axis=-1, keepdims=True)
    if merged is not None:
        out, lse = _f64(merged)
        with np.errstate(invalid="ignore"):  # of rows without keys
            weights = weights * np.nan_to_num(np.exp(own_lse - lse))[..., None]
        expected = np.sum(d_out * out, axis=-1, keepdims=True)
    d_scores = scale * slope * weights * (d_weights - expected + d_lse[..., None])
    d_query = np.einsum("btns,bsnh->btnh", d_scores, keys)

    def summed(per_candidate: np.ndarray, like: np.ndarray) -> np.ndarray:
        """[B, S, N, H] summed over the candidates of a user and the query heads of a key head."""
        batch, kv_len, _, width = per_candidate.shape
        heads = per_candidate.reshape(batch, kv_len, like.shape[2], -1, width).sum(3)
        total = np.zeros_like(like)
        np.add.at(total, users, heads)
        return total

    d_key = summed(np.einsum("btns,btnh->bsnh", d_scores, query), key)
    return d_query, d_key, summed(np.einsum("btns,btnh->bsnh", weights, d_out), value)


@functools.partial(jax.jit, static_argnames="scale")
def same_dtype_attention(
    query: Any, key: Any, value: Any, cand_to_user: Any, lengths: Any = None, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Out and lse as plain jnp has them: copies, f32 scores, weights rounded to the dtype."""
    rows = jnp.clip(cand_to_user, 0, key.shape[0] - 1)
    heads = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(array[rows], heads, axis=2) for array in (key, value))
    scores = jnp.einsum("btnh,bsnh->btns", query, keys, preferred_element_type=jnp.float32)
    scores = scores * jnp.float32(scale)
    if lengths is not None:
        exists = jnp.arange(key.shape[1], dtype=jnp.int32)[None] < lengths[rows][:, None]
        scores = jnp.where(exists[:, None, None], scores, -jnp.inf)
    empty = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    safe = jnp.where(empty, 0.0, scores)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(safe, axis=-1)).astype(query.dtype)
    out = jnp.einsum("btns,bsnh->btnh", weights, values, preferred_element_type=jnp.float32)
    lse = jnp.where(empty[..., 0], -jnp.inf, jax.nn.logsumexp(safe, axis=-1))
    return out.astype(query.dtype), lse


def assert_attention_within_error_rule(
    actual: tuple[Any, Any],
    inputs: AttentionInputs,
    *,
    scale: float,
    exact: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Asserts the error rule for out, and for lse, whose infinities must be the oracle's."""
    out, lse = actual
    exact_out, exact_lse = exact or numpy_attention_oracle(inputs, scale=scale)
    plain_out, plain_lse = same_dtype_attention(*inputs, scale=scale)
    assert_within_error_rule(out, exact_out, plain_out)
    assert jax.device_put(lse).dtype == jnp.float32
    is_empty = exact_lse == -np.inf
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, is_empty)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[is_empty], 0)
    found, exactly, plain = (np.asarray(x)[~is_empty] for x in (lse, exact_lse, plain_lse))
    # An lse near 0 is the difference of terms that are not, so its error may be that of 1.
    np.testing.assert_allclose(
        found, exactly, rtol=1e-6, atol=2 * np.max(np.abs(plain - exactly), initial=0.0) + 1e-6
    )


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
    x, reference, plain = _f64([actual, oracle, same_dtype_jnp])
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
