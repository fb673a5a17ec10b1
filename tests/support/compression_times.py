"""Times of linear compression at 14 sizes: one H100 SXM, sums of kernels by CUPTI, commit beaeb97.

`drawn` has times on the same card by the profiler, commit 70873ea, of 81 sizes of
`benchmarks.production_draws`.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ikbo_jax.problems import (
    Config,
    LinearCompressionConfig,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.problems import LinearCompressionProblem as Problem

TIMES = pathlib.Path(__file__).with_suffix(".jsonl")
LARGE_TIMES = pathlib.Path(__file__).with_name("compression_times_large.jsonl")
DRAWN = pathlib.Path(__file__).with_name("compression_times_drawn.jsonl")


class Timed(NamedTuple):
    """A size and its times in us.

    Attributes:
      problem: the size.
      xla: of `implementation="xla"`.
      row: of the first configuration of row tiles.
      packed: of packed tiles by (block_n, block_m, num_stages, cluster).
      resident: of resident weights by the fields of `ResidentCompressionConfig`.
    """

    problem: Problem
    xla: float
    row: float
    packed: dict[tuple, float]
    resident: dict[tuple, float]


def _problem(sizes: dict[str, Any]) -> Problem:
    batches, ks = tuple(sizes.pop("batches")), tuple(sizes.pop("ks"))
    return Problem(batches, ks, **sizes)


def _timed(xla: float, row: float, **found: Any) -> Timed:
    packed, resident = (
        {tuple(fields): us for *fields, us in found[kind]} for kind in ("packed", "resident")
    )
    return Timed(_problem(found["problem"]), xla, row, packed, resident)


#: By name. Of "Bs" the candidates are sorted by user, of "B" they are not.
SIZES = {
    found.pop("name"): _timed(**found) for found in map(json.loads, TIMES.read_text().splitlines())
}

#: Times of sizes of more compressed rows, commit 4ae70eb: of the first configuration of packed
#: tiles, row tiles and resident weights, by the models.
LARGE = {
    _problem(found): us
    for found in map(json.loads, LARGE_TIMES.read_text().splitlines())
    if (us := found.pop("us"))
}


def drawn() -> Iterator[tuple[Problem, dict[Config, float]]]:
    """Problems, and the us of each configuration that took less than 1.5 of the fastest."""
    kinds: dict[str, type[Config]] = {
        "packed": PackedCompressionConfig,
        "rows": LinearCompressionConfig,
        "resident": ResidentCompressionConfig,
    }
    for line in DRAWN.read_text().splitlines():
        found = json.loads(line)
        times = {kinds[kind](*fields): us for kind in kinds for *fields, us in found[kind]}
        yield _problem(found["problem"]), times
