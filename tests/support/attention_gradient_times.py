"""Times of attention's gradient on a GPU, in us of kernels by CUPTI, median of 10.

Sizes are those of the tests that read them; so are the fields of a configuration.

- "large", H100, 2026-11-27: of each way, the fastest two configurations that were timed. Heads of
  192 and 256 columns have the fastest two stored ones and the fastest launch, with all that the
  device did.
- "small", H200, 2026-11-26: with the kernels of the result.
"""

import json
import pathlib

TIMES = pathlib.Path(__file__).with_suffix(".jsonl")


def timed(kind: str) -> dict[tuple[int, ...], dict[tuple, float]]:
    """By sizes, the times of configurations by their fields."""
    found = map(json.loads, TIMES.read_text().splitlines())
    return {
        tuple(x["sizes"]): {tuple(fields): us for *fields, us in x["us"]}
        for x in found
        if x["kind"] == kind
    }
