"""The implementations of broadcast attention that the benchmark compares, and their oracle."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax


class Inputs(NamedTuple):
    """The arrays of `ikbo_jax.attention`.

    `lengths` is [U] int32 or None; `is_sorted` says whether `cand_to_user` is sorted.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    lengths: jax.Array | None
    is_sorted: bool


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of the op.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      prepare: takes the inputs; returns a function and its arguments, before the timing. Raises
        NotImplementedError with the reason if the provider cannot run here.
      finish: converts the function's result to [B, T, N, H], after the timing.
    """

    name: str
    stage: str
    prepare: Callable[[Inputs], tuple[Callable[..., jax.Array], tuple]]
    finish: Callable[[jax.Array, Inputs], jax.Array] = lambda out, inputs: out


def _attention(inputs: Inputs, implementation: str | None) -> tuple[Callable, tuple]:
    def run(query: Any, key: Any, value: Any, index: Any, lengths: Any) -> Any:
        return ikbo_jax.attention(
            query,
            key,
            value,
            index,
            key_value_seq_lengths=lengths,
            indices_are_sorted=inputs.is_sorted,
            implementation=implementation,
        )

    return run, inputs[:5]


def _require_gpu_for_cudnn() -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"cuDNN needs a GPU, but this is a {jax.default_backend()}")


def _copies_cudnn(inputs: Inputs) -> tuple[Callable, tuple]:
    _require_gpu_for_cudnn()

    def run(query: Any, key: Any, value: Any, index: Any, lengths: Any) -> Any:
        # The barrier forces XLA to materialise the copies.
        keys, values = jax.lax.optimization_barrier((key[index], value[index]))
        return jax.nn.dot_product_attention(
            query,
            keys,
            values,
            key_value_seq_lengths=None if lengths is None else lengths[index],
            implementation="cudnn",
        )

    return run, inputs[:5]


def _users_and_ranks(inputs: Inputs) -> tuple[np.ndarray, np.ndarray, int]:
    """For every candidate its user and its rank among the user's candidates.

    The last result is the largest number of candidates of one user.
    """
    index = np.asarray(inputs.cand_to_user)
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=inputs.key.shape[0])
    ranks = np.empty_like(index)
    ranks[order] = np.arange(len(index)) - (np.cumsum(counts) - counts)[index[order]]
    return index, ranks, int(counts.max())


def _grouped_query(inputs: Inputs) -> jax.Array:
    """[U, max_candidates * T, N, H]: the queries of each user, padded to the longest."""
    users, ranks, max_candidates = _users_and_ranks(inputs)
    _, q_len, heads, width = inputs.query.shape
    shape = (inputs.key.shape[0], max_candidates, q_len, heads, width)
    grouped = jnp.zeros(shape, inputs.query.dtype).at[users, ranks].set(inputs.query)
    return grouped.reshape(shape[0], max_candidates * q_len, heads, width)


def _ungrouped(out: jax.Array, inputs: Inputs) -> jax.Array:
    users, ranks, max_candidates = _users_and_ranks(inputs)
    _, q_len, heads, width = inputs.query.shape
    return out.reshape(-1, max_candidates, q_len, heads, width)[users, ranks]


def _grouped(attend: Callable[..., jax.Array], inputs: Inputs) -> tuple[Callable, tuple]:
    def run(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return attend(query, key, value, key_value_seq_lengths=lengths)

    return run, (_grouped_query(inputs), inputs.key, inputs.value, inputs.lengths)


def _grouped_cudnn(inputs: Inputs) -> tuple[Callable, tuple]:
    _require_gpu_for_cudnn()
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return _grouped(attend, inputs)


def _grouped_tokamax(inputs: Inputs) -> tuple[Callable, tuple]:
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"its kernel needs a GPU, not a {jax.default_backend()}")
    import tokamax

    attend = functools.partial(tokamax.dot_product_attention, implementation="mosaic")
    return _grouped(attend, inputs)


OURS = Provider("ikbo", "ikbo_jax.attention", functools.partial(_attention, implementation=None))
XLA = Provider(
    "xla",
    "grouped by user and chunked, in XLA (implementation='xla')",
    functools.partial(_attention, implementation="xla"),
)
COPIES = Provider("copies-cudnn", "keys and values copied, then cuDNN", _copies_cudnn)
GROUPED_CUDNN = Provider(
    "grouped-cudnn", "queries grouped by hand before, cuDNN", _grouped_cudnn, _ungrouped
)
GROUPED_TOKAMAX = Provider(
    "grouped-tokamax", "queries grouped by hand before, tokamax", _grouped_tokamax, _ungrouped
)
ALL = (COPIES, GROUPED_CUDNN, GROUPED_TOKAMAX, XLA, OURS)
#: Names of the providers in plots and tables.
LABELS = {
    COPIES.name: "cuDNN, keys and values copied",
    GROUPED_CUDNN.name: "cuDNN, queries grouped by hand",
    GROUPED_TOKAMAX.name: "tokamax, queries grouped by hand",
    XLA.name: "ikbo-jax in XLA",
    OURS.name: "ikbo-jax",
}


def oracle(inputs: Inputs, rows: Sequence[int]) -> tuple[np.ndarray, float]:
    """NumPy f64 results of some candidates, and the largest error that the error rule allows.

    The rule allows twice the error of attention in the inputs' dtype, which rounds the softmax
    probabilities before they are multiplied by the values, plus one rounding of the largest result.
    """
    index = np.asarray(inputs.cand_to_user)
    lengths = None if inputs.lengths is None else np.asarray(inputs.lengths)
    dtype = inputs.query.dtype
    found, same_dtype = [], []
    for row in rows:
        user = int(index[row])
        length = inputs.key.shape[1] if lengths is None else int(lengths[user])
        query, key, value = (
            np.asarray(array).astype(np.float64)
            for array in (inputs.query[row], inputs.key[user, :length], inputs.value[user, :length])
        )
        repeats = query.shape[1] // key.shape[1]
        key, value = np.repeat(key, repeats, axis=1), np.repeat(value, repeats, axis=1)
        scores = np.einsum("tnh,snh->tns", query, key) * query.shape[-1] ** -0.5
        probabilities = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        probabilities /= np.maximum(probabilities.sum(-1, keepdims=True), 1e-300)
        found.append(np.einsum("tns,snh->tnh", probabilities, value))
        rounded = probabilities.astype(dtype).astype(np.float64)
        same_dtype.append(np.einsum("tns,snh->tnh", rounded, value))
    exact = np.stack(found)
    plain = np.stack(same_dtype).astype(dtype).astype(np.float64)
    # The error of f32 accumulation; only f32 results need it, since 16-bit rounding is larger.
    accumulation = 2.0**-24 * inputs.key.shape[1] ** 0.5 * np.abs(exact).max()
    one_rounding = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact).max()
    return exact, float(2 * (np.abs(plain - exact).max() + accumulation) + one_rounding)
