"""Which kernels a step spends its time in, by JAX's profiler.

Every kernel belongs to the operation of XLA's program that launched it, whose metadata hold the
`jax.named_scope` under which it was traced.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from ikbo_jax._timing import device_time

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
    events = device_time.record(step, STEPS)
    scopes = {match["name"]: match["scope"] for match in _OPERATION.finditer(program)}
    return _summed(events, scopes)


def _summed(events: Sequence[device_time.Event], scopes: dict[str, str]) -> Shares:
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    parts: collections.Counter[str] = collections.Counter()
    for event in events:
        scope = scopes.get(event.operation, event.operation)
        ns = round(event.end_ns - event.begin_ns)
        times[event.name, scope] += ns
        counts[event.name, scope] += 1
        parts[part_of(scope)] += ns
    wall = max((e.end_ns for e in events), default=0) - min((e.begin_ns for e in events), default=0)
    scale = 1e-6 / STEPS
    return Shares(
        device_time.busy_ns(events) * scale,
        wall * scale,
        len(events) / STEPS,
        {part: ns * scale for part, ns in parts.most_common()},
        [(ns * scale, counts[key] / STEPS, *key) for key, ns in times.most_common()],
    )
