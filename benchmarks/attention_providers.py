"""The implementations of broadcast attention that the benchmark compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import yardsticks
from benchmarks.harness import Provider
from ikbo_jax.cases.attention import Case, Inputs
from ikbo_jax.models.strategies import Fold, fold_by_user


def _copies_cudnn(case: Case, inputs: Inputs) -> tuple[Callable, tuple]:
    yardsticks.cudnn()
    return case.contender("materialised-cudnn"), inputs


def _fold_of(inputs: Inputs) -> Fold:
    """The layout with a slot for each candidate of the user who has the most."""
    most = np.bincount(np.asarray(inputs.cand_to_user)).max()
    return fold_by_user(inputs.cand_to_user, inputs.key.shape[0], int(most))


def _ungrouped(out: jax.Array, inputs: Inputs) -> jax.Array:
    return _fold_of(inputs).unfold(out)


def _grouped(attend: Callable[..., jax.Array], inputs: Inputs) -> tuple[Callable, tuple]:
    def run(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return attend(query, key, value, key_value_seq_lengths=lengths)

    query = _fold_of(inputs).fold(inputs.query)
    return run, (query, inputs.key, inputs.value, inputs.lengths)


def _grouped_by(
    yardstick: Callable[[], Callable[..., jax.Array]],
) -> Callable[[Case, Inputs], tuple[Callable, tuple]]:
    return lambda case, inputs: _grouped(yardstick(), inputs)


OURS = Provider.of_case("ikbo", "ikbo_jax.attention", "automatic")
XLA = Provider.of_case(
    "xla", "grouped by user and chunked, in XLA (implementation='xla')", "decomposed"
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
