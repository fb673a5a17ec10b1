"""Which kernels a step spends its time in, by JAX's profiler.

Every kernel belongs to the operation of XLA's program that launched it, whose metadata hold the
`jax.named_scope` under which it was traced.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

#: Compiler options with which a GPU launches every kernel by itself, so that the profile names the
#: operation of each.
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
#: Steps in a profile, and lines of kernels that are printed.
STEPS, LINES = 4, 30
#: The named scopes by which time is summed, see `models.ranking`, `training_gdpa`, `training_task`.
PARTS = (
    "embedding",
    "self_attention",
    "pooling",
    "attention",
    "feed_forward",
    "compression",
    "interaction",
    "head",
    "pma",
    "pffn",
    "update",
)
_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = .*?op_name=\"(?P<scope>[^\"]*)\"", re.M
)


@dataclasses.dataclass(frozen=True)
class Shares:
    """The time of a step on the device.

    Attributes:
      busy_ms: milliseconds in which a kernel runs.
      wall_ms: milliseconds from the first kernel of a step to the first one of the next.
      kernels: number of kernels.
      by_part: milliseconds of a part's kernels, forward and backward, the longest first.
      by_kernel: milliseconds, launches, kernel and scope, the longest first.
    """

    busy_ms: float
    wall_ms: float
    kernels: float
    by_part: dict[str, float]
    by_kernel: list[tuple[float, float, str, str]]

    def __str__(self) -> str:
        lines = [
            f"  busy {self.busy_ms:.3f} of {self.wall_ms:.3f} ms, {self.kernels:.0f} kernels; "
            + ", ".join(f"{part} {ms:.3f}" for part, ms in self.by_part.items())
        ]
        lines += [
            f"  {ms:8.4f} ms {count:5.1f}x {name[:60]:60s} {scope[-70:]}"
            for ms, count, name, scope in self.by_kernel[:LINES]
        ]
        return "\n".join(lines)


def part_of(scope: str) -> str:
    """The part that an operation belongs to, e.g. "attention backward"."""
    found = [part for part in PARTS if re.search(rf"(?<![\w]){part}(?![\w])", scope)]
    direction = " backward" if "transpose(" in scope else ""
    return (found[-1] if found else "other") + direction


def shares(step: Callable[[], Any], program: str) -> Shares:
    """Profiles a few steps.

    Args:
      step: runs one step; its result is waited for after the last one.
      program: the text of the compiled program.
    """
    jax.block_until_ready(step())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            out = None
            for _ in range(STEPS):
                out = step()
            jax.block_until_ready(out)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    scopes = {match["name"]: match["scope"] for match in _OPERATION.finditer(program)}
    return _summed(data, scopes)


def _summed(data: Any, scopes: dict[str, str]) -> Shares:
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    parts: collections.Counter[str] = collections.Counter()
    spans = []
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                operation = str(dict(event.stats).get("hlo_op", ""))
                scope = scopes.get(operation, operation)
                times[event.name, scope] += event.duration_ns
                counts[event.name, scope] += 1
                parts[part_of(scope)] += event.duration_ns
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy, reached = 0, 0
    for begin, end in sorted(spans):
        busy += max(0, end - max(begin, reached))
        reached = max(reached, end)
    wall = reached - min((begin for begin, _ in spans), default=0)
    scale = 1e-6 / STEPS
    return Shares(
        busy * scale,
        wall * scale,
        len(spans) / STEPS,
        {part: ns * scale for part, ns in parts.most_common()},
        [(ns * scale, counts[key] / STEPS, *key) for key, ns in times.most_common()],
    )
