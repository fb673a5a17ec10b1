"""Times of linear compression at 14 sizes: one H100 SXM, sums of kernels by CUPTI, commit beaeb97.

`drawn` has times on the same card by the profiler, commit 70873ea, of 81 sizes of
`benchmarks.production_draws`.
"""

import json
import math
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
    Problem((1, 162), (47, 171), 388, 128, "bfloat16"): (18.9, 18.9, 13.3),
    Problem((35, 214), (90, 33), 400, 64, "bfloat16"): (18.3, 22.1, 9.3),
    Problem((1, 624), (195, 130), 420, 64, "bfloat16"): (32.2, 44.5, 34.2),
    Problem((1, 837), (205, 30), 436, 64, "bfloat16"): (29.1, 42.7, 24.6),
    Problem((6, 66), (774, 36), 445, 16, "bfloat16"): (12.2, 15.2, 7.1),
    Problem((78, 236), (272, 73), 445, 128, "float16"): (37.3, 38.9, 30.1),
    Problem((1, 85), (894, 103), 449, 128, "bfloat16"): (math.inf, 17.0, 16.7),
    Problem((1, 137), (38, 32), 468, 32, "bfloat16"): (8.6, 12.8, 5.0),
    Problem((1, 648), (220, 18), 502, 96, "bfloat16"): (38.0, 43.4, 40.1),
    Problem((1376, 1376), (105, 98), 510, 64, "bfloat16"): (165.7, 295.3, 65.8),
    Problem((200, 601), (121, 138), 534, 128, "bfloat16"): (103.1, 91.3, 67.6),
    Problem((1, 912), (69, 97), 544, 64, "bfloat16"): (41.1, 58.8, 37.3),
    Problem((740, 2220), (46, 32), 568, 64, "bfloat16"): (162.1, 241.5, 70.8),
    Problem((1, 204), (672, 27), 664, 32, "float16"): (14.1, 23.9, 8.9),
    Problem((104, 104), (370, 106), 750, 256, "bfloat16"): (95.8, 92.4, 45.8),
    Problem((617, 5558), (63, 39), 808, 128, "bfloat16"): (725.4, 695.6, 495.1),
    Problem((30, 8890), (731, 50), 829, 16, "bfloat16"): (133.6, 555.9, 152.9),
    Problem((8, 830), (72, 211), 859, 64, "bfloat16"): (62.8, 116.5, 67.6),
    Problem((1304, 9134), (20, 161), 867, 16, "bfloat16"): (233.8, 1247.8, 181.3),
    Problem((8, 173), (121, 229), 876, 32, "bfloat16"): (16.9, 34.0, 19.0),
    Problem((1, 152), (24, 37), 952, 64, "bfloat16"): (16.4, 21.1, 10.2),
    Problem((15938, 15938), (39, 36), 960, 64, "bfloat16"): (2783.6, 4592.6, 816.6),
    Problem((1, 207), (98, 39), 990, 64, "bfloat16"): (21.2, 29.1, 13.6),
    Problem((69, 6980), (435, 33), 992, 32, "float16"): (225.6, 670.8, 280.8),
    Problem((1, 79), (117, 275), 1006, 64, "float16"): (16.4, 25.5, 16.6),
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
