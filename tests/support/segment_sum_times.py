"""Times of segment sums on an H100, in us.

Sums of kernels, times by CUPTI, medians of 10, the mean of two turns; 2026-11-28, jax 0.11.2. None
is XLA's scatter in f32. In hot problems, a user has half of all candidates; no choice knows that.
"""

import json
import pathlib
from typing import Any

from ikbo_jax.problems.look_up import SegmentSumConfig, SegmentSumProblem

FILE = pathlib.Path(__file__).with_suffix(".jsonl")
Timed = tuple[SegmentSumProblem, dict[SegmentSumConfig | None, float]]


def _timed(us: list[Any], **found: Any) -> Timed:
    times = {fields and SegmentSumConfig(*fields): time for time, fields in us}
    return SegmentSumProblem(**found["problem"]), times


_LINES = [json.loads(line) for line in FILE.read_text().splitlines()]
#: Problems and the times of their configurations, by name.
TIMES, HOT = (
    {x["name"]: _timed(**x) for x in _LINES if x["is_hot"] == is_hot} for is_hot in (False, True)
)
