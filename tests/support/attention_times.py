"""Times of attention on an H100, in us; the last size of "kernel" on an H200. None: not timed.

- "cut": the kernel for few queries, and the other one with tiles that span users, that `balance`
  cuts, and of one user. Some have lengths, which the models do not know.
- "item": one configuration of the kernel for few queries, with a sorted index and with one that is
  not; `lists`: CTAs then list their candidates.
- "kernel": the best of the kernel for few queries, and of the one whose tiles span users.
"""

import json
import pathlib

from ikbo_jax.problems import FewQueriesConfig

TIMES = pathlib.Path(__file__).with_suffix(".jsonl")
_LINES = [json.loads(line) for line in TIMES.read_text().splitlines()]


def timed(kind: str) -> dict[tuple[int, ...], list[float | None]]:
    """Times by sizes."""
    return {tuple(x["sizes"]): x["us"] for x in _LINES if x["kind"] == kind}


def items() -> list[tuple[tuple[int, ...], FewQueriesConfig, float | None, float | None, bool]]:
    """Sizes, configuration, times and `lists` of each item."""
    return [
        (tuple(x["sizes"]), FewQueriesConfig(**x["config"]), *x["us"], x["lists"])
        for x in _LINES
        if x["kind"] == "item"
    ]
