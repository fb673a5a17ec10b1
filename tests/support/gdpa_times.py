"""Times of GDPA's forward pass on a GPU, in us.

Sums of kernels, times by CUPTI, medians of 12, the least of two rounds and of four H200s;
2026-11-26, jax 0.11.2. Both fastest configurations of every kind that was timed; "short" is the
kernel for short sequences.
"""

import json
import pathlib
from typing import Any

from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig

FILE = pathlib.Path(__file__).with_suffix(".jsonl")
KINDS: dict[str, Any] = {"short": ShortGdpaConfig, "long": GdpaConfig}


def _timed(problem: dict[str, Any], us: list[Any]) -> tuple[GdpaProblem, dict[Any, float]]:
    problem["activations"] = tuple(problem["activations"])
    return GdpaProblem(**problem), {KINDS[kind](**fields): time for time, kind, fields in us}


#: Problems and the times of their configurations, by name.
TIMES = {
    found.pop("name"): _timed(**found) for found in map(json.loads, FILE.read_text().splitlines())
}
