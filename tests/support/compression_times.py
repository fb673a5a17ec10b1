"""Times of linear compression at 14 sizes: one H100 SXM, sums of kernels by CUPTI, commit beaeb97.

In us: `XLA` of `implementation="xla"`, `ROW` of the first configuration of row tiles, `PACKED` of
packed tiles by (block_n, block_m, num_stages, cluster), `RESIDENT` of resident weights by the
fields of `ResidentCompressionConfig`. `drawn` has times on the same card by the profiler, commit
70873ea, of 81 sizes of `benchmarks.production_draws`.
"""

import json
import math
import pathlib
from collections.abc import Iterator

from ikbo_jax.problems import (
    Config,
    LinearCompressionConfig,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.problems import LinearCompressionProblem as Problem

DRAWN = pathlib.Path(__file__).with_name("compression_times_drawn.jsonl")

PROBLEMS = {
    "A": Problem((100, 8192), (200, 40), 16, 32, "bfloat16"),
    "B": Problem((29, 8367), (1116, 22), 233, 16, "float16"),
    "C": Problem((1, 602), (480, 20), 15, 32, "bfloat16"),
    "D": Problem((200, 601), (121, 138), 48, 128, "bfloat16"),
    "E": Problem((10095, 10095), (24, 136), 8, 64, "float16"),
    "F": Problem((1, 118), (1160, 111), 20, 512, "bfloat16"),
    "G": Problem((547, 3829), (225, 27), 351, 96, "bfloat16"),
    "d0": Problem((1, 229), (88, 386), 42, 64, "bfloat16"),
    "d1": Problem((108, 326), (40, 791), 28, 64, "bfloat16"),
    "d2": Problem((1, 184), (1815, 34), 14, 32, "bfloat16"),
    "d3": Problem((11, 1033), (982, 250), 240, 16, "bfloat16"),
    "d4": Problem((227, 681), (79, 44), 189, 32, "bfloat16"),
    "d5": Problem((149, 2549), (17, 35), 199, 32, "bfloat16"),
}

#: Of "Bs" the candidates are sorted by user, of "B" they are not.
PROBLEMS["Bs"] = Problem((29, 8367), (1116, 22), 233, 16, "bfloat16")

XLA = {
    "A": 27.74,
    "B": 133.43,
    "Bs": 133.3,
    "C": 5.98,
    "D": 35.36,
    "E": 103.28,
    "F": 16.22,
    "G": 698.13,
    "d0": 11.87,
    "d1": 21.66,
    "d2": 7.52,
    "d3": 46.02,
    "d4": 21.49,
    "d5": 82.66,
}

ROW = {
    "A": 54.24,
    "B": 219.35,
    "Bs": 164.84,
    "C": 9.97,
    "D": 20.67,
    "E": 240.02,
    "F": 13.04,
    "G": 302.82,
    "d0": 11.68,
    "d1": 24.53,
    "d2": 11.07,
    "d3": 58.95,
    "d4": 34.11,
    "d5": 67.83,
}

PACKED = {
    "A": {
        (512, 16, 3, 1): 16.26,
        (256, 16, 6, 1): 18.67,
    },
    "B": {
        (256, 80, 4, 1): 59.84,
        (128, 128, 6, 1): 64.42,
    },
    "Bs": {
        (256, 80, 4, 1): 57.7,
        (128, 128, 6, 1): 59.49,
    },
    "C": {
        (256, 16, 6, 1): 7.71,
        (128, 16, 8, 1): 8.67,
    },
    "D": {
        (256, 48, 5, 1): 20.34,
        (384, 48, 3, 1): 21.54,
    },
    "E": {
        (512, 16, 3, 1): 110.08,
        (384, 16, 4, 1): 114.48,
    },
    "F": {
        (512, 32, 3, 1): 13.14,
        (768, 32, 2, 1): 17.23,
    },
    "G": {
        (128, 176, 4, 1): 250.97,
        (256, 96, 4, 1): 269.64,
    },
    "d0": {
        (128, 48, 8, 1): 9.74,
    },
    "d1": {
        (256, 32, 5, 1): 16.74,
        (128, 32, 8, 1): 17.63,
    },
    "d2": {
        (128, 16, 8, 1): 10.85,
    },
    "d3": {
        (128, 128, 6, 1): 21.63,
    },
    "d4": {
        (128, 96, 7, 1): 13.89,
        (256, 96, 4, 1): 14.83,
    },
    "d5": {
        (256, 112, 4, 1): 27.38,
        (128, 208, 4, 1): 29.81,
    },
}

RESIDENT = {
    "A": {
        (2, 16, 2, 3, False, 640, 1): 12.66,
        (2, 16, 2, 2, False, 160, 1): 12.91,
        (4, 16, 2, 1, False, 640, 1): 13.15,
        (4, 16, 2, 1, False, 320, 1): 13.22,
        (4, 16, 2, 1, False, 160, 1): 13.79,
        (3, 16, 2, 1, False, 160, 1): 14.11,
    },
    "B": {
        (2, 64, 2, 2, False, 1280, 1): 37.28,
        (2, 48, 2, 2, False, 1280, 1): 38.51,
        (1, 80, 2, 2, False, 1280, 1): 40.75,
        (1, 48, 2, 3, False, 1280, 1): 41.46,
        (2, 48, 2, 2, False, 640, 1): 46.69,
        (2, 48, 2, 2, False, 320, 1): 57.35,
    },
    "Bs": {
        (2, 48, 2, 2, False, 1280, 1): 36.5,
        (2, 48, 2, 2, False, 640, 1): 36.59,
        (1, 48, 2, 3, False, 1280, 1): 38.88,
        (1, 80, 2, 2, False, 1280, 1): 40.32,
        (2, 48, 2, 2, False, 320, 1): 48.16,
    },
    "C": {
        (3, 16, 2, 1, True, 640, 1): 3.14,
        (2, 16, 2, 1, True, 640, 1): 3.62,
        (1, 16, 2, 1, True, 640, 1): 3.74,
        (3, 16, 2, 1, False, 160, 1): 4.3,
        (3, 16, 2, 1, False, 320, 1): 4.32,
        (3, 16, 2, 4, False, 640, 1): 4.7,
    },
    "D": {
        (2, 48, 2, 1, True, 640, 1): 11.2,
        (1, 48, 2, 2, True, 640, 1): 11.47,
        (2, 48, 2, 1, False, 640, 1): 19.41,
        (2, 48, 2, 1, False, 160, 1): 19.44,
    },
    "E": {
        (2, 16, 2, 2, True, 640, 1): 72.87,
        (3, 16, 2, 1, True, 640, 1): 73.41,
        (4, 16, 2, 1, True, 640, 1): 73.65,
        (4, 16, 2, 1, False, 640, 1): 98.79,
        (4, 16, 2, 1, False, 160, 1): 98.96,
    },
    "F": {
        (2, 32, 2, 2, False, 640, 1): 10.34,
        (2, 32, 2, 1, False, 640, 1): 10.43,
        (4, 32, 2, 1, False, 640, 1): 10.46,
        (4, 32, 2, 1, False, 1280, 1): 10.56,
        (3, 32, 2, 1, False, 640, 1): 10.69,
        (4, 32, 2, 1, False, 320, 1): 10.79,
    },
    "G": {
        (1, 96, 2, 1, True, 640, 2): 190.97,
        (2, 64, 1, 1, True, 640, 2): 230.47,
        (2, 48, 2, 1, True, 640, 4): 253.81,
        (2, 48, 2, 3, False, 320, 2): 275.69,
        (2, 48, 2, 3, False, 640, 2): 275.82,
        (2, 64, 2, 2, False, 640, 1): 280.63,
    },
    "d0": {
        (2, 48, 1, 1, True, 640, 1): 7.44,
        (1, 48, 2, 1, True, 640, 1): 7.94,
        (1, 48, 2, 1, False, 160, 1): 8.58,
        (1, 48, 2, 1, False, 320, 1): 8.58,
    },
    "d1": {
        (1, 32, 1, 1, True, 640, 1): 17.5,
        (1, 32, 1, 1, False, 160, 1): 19.81,
        (1, 32, 1, 1, False, 320, 1): 19.81,
    },
    "d2": {
        (1, 16, 2, 1, False, 160, 1): 4.64,
        (2, 16, 2, 1, False, 160, 1): 4.83,
        (3, 16, 2, 1, False, 160, 1): 5.09,
        (1, 16, 2, 1, False, 320, 1): 5.31,
        (1, 16, 2, 1, False, 640, 1): 7.17,
        (1, 16, 2, 4, False, 1280, 1): 8.93,
    },
    "d3": {
        (1, 128, 2, 1, False, 1280, 2): 18.3,
        (2, 64, 2, 1, False, 640, 2): 19.04,
        (2, 64, 2, 1, False, 1280, 2): 19.5,
        (1, 80, 2, 1, False, 320, 1): 19.65,
        (1, 64, 1, 2, False, 1280, 2): 20.03,
        (1, 128, 2, 1, False, 1280, 1): 20.1,
    },
    "d4": {
        (1, 48, 2, 3, True, 640, 4): 10.27,
        (2, 48, 2, 2, True, 640, 4): 10.4,
        (1, 96, 2, 2, True, 640, 2): 10.78,
        (1, 64, 2, 4, False, 640, 1): 14.88,
        (1, 96, 2, 2, False, 640, 2): 15.23,
    },
    "d5": {
        (2, 64, 2, 2, True, 640, 4): 22.88,
        (2, 64, 2, 2, True, 640, 2): 22.9,
        (1, 64, 2, 4, True, 640, 4): 24.53,
        (1, 112, 2, 2, True, 640, 1): 24.74,
        (1, 112, 2, 2, False, 640, 1): 26.72,
    },
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
        sizes = found["problem"]
        batches, ks = tuple(sizes.pop("batches")), tuple(sizes.pop("ks"))
        yield Problem(batches, ks, **sizes), times
