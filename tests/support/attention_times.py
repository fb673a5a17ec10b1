"""Times of attention on an H100, in us; the last size of "kernel" on an H200. None: not timed.

- "cut": the kernel for few queries, and the other one with tiles that span users, that `balance`
  cuts, and of one user. Some have lengths, which the models do not know.
- "kernel": the best of the kernel for few queries, and of the one whose tiles span users.
"""

import json
import pathlib

TIMES = pathlib.Path(__file__).with_suffix(".jsonl")


def timed(kind: str) -> dict[tuple[int, ...], list[float | None]]:
    """Times by sizes."""
    found = map(json.loads, TIMES.read_text().splitlines())
    return {tuple(x["sizes"]): x["us"] for x in found if x["kind"] == kind}
