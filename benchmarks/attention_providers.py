"""The implementations of broadcast attention that the benchmark compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import yardsticks
from ikbo_jax.cases.attention import Case, Inputs


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of the op.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      prepare: takes the case and its inputs; returns a function and its arguments, before the
        timing. Raises NotImplementedError with the reason if the provider cannot run here.
      finish: converts the function's result to [B, T, N, H], after the timing.
    """

    name: str
    stage: str
    prepare: Callable[[Case, Inputs], tuple[Callable[..., jax.Array], tuple]]
    finish: Callable[[jax.Array, Inputs], jax.Array] = lambda out, inputs: out


def _contender(name: str) -> Callable[[Case, Inputs], tuple[Callable, tuple]]:
    return lambda case, inputs: (case.contender(name), inputs)


def _copies_cudnn(case: Case, inputs: Inputs) -> tuple[Callable, tuple]:
    yardsticks.cudnn()
    return case.contender("materialised-cudnn"), inputs


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


def _grouped_by(
    yardstick: Callable[[], Callable[..., jax.Array]],
) -> Callable[[Case, Inputs], tuple[Callable, tuple]]:
    return lambda case, inputs: _grouped(yardstick(), inputs)


OURS = Provider("ikbo", "ikbo_jax.attention", _contender("automatic"))
XLA = Provider(
    "xla",
    "grouped by user and chunked, in XLA (implementation='xla')",
    _contender("decomposed"),
)
COPIES = Provider("copies-cudnn", "keys and values copied, then cuDNN", _copies_cudnn)
GROUPED_CUDNN = Provider(
    "grouped-cudnn",
    "queries grouped by hand before, cuDNN",
    _grouped_by(yardsticks.cudnn),
    _ungrouped,
)
GROUPED_TOKAMAX = Provider(
    "grouped-tokamax",
    "queries grouped by hand before, tokamax",
    _grouped_by(yardsticks.tokamax),
    _ungrouped,
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
