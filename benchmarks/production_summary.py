"""What a run of `benchmarks.production` found, in short: speed relative to the alternatives."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.production_draws import SWEEPS
from benchmarks.records import OUR_NAME, Record, points_of, provider_of

#: Largest time relative to the best alternative.
SLOWEST_BAR = 1.03
#: Points that are named as the worst.
WORST = 10
#: Bars of the geometric means: fraction of the roofline (None: no bar), speed relative to the best
#: alternative.
MEAN_BARS = {
    "attention": (0.62, 1.6),
    "linear_compression": (0.70, 2.0),
    "gdpa": (0.62, 2.5),
    "few_queries": (None, 1.3),
}


def alternative(point: Record) -> Record | None:
    """The fastest contender besides this library; None if none could run."""
    timed = [p for p in point["providers"] if p["name"] != OUR_NAME and "median_ms" in p]
    return min(timed, key=lambda p: float(p["median_ms"]), default=None)


def alternative_name(point: Record) -> str:
    """Name of the fastest contender besides this library; "-" if none could run."""
    other = alternative(point)
    return "-" if other is None else str(other["name"])


def speedup(point: Record) -> float | None:
    """Time of the best alternative relative to this library's; None if either is missing."""
    ours, other = provider_of(point, OUR_NAME), alternative(point)
    if ours is None or other is None:
        return None
    return float(other["median_ms"]) / float(ours["median_ms"])


def bars(point: Record, all_points: Sequence[Record]) -> str:
    """The best alternative of a point, and this library's speed relative to it."""
    del all_points
    ratio = speedup(point)
    if ratio is None:
        return ""
    slow = f", bar {1 / SLOWEST_BAR:.2f}" if ratio < 1 / SLOWEST_BAR else ""
    return f"{ratio:.2f} x {alternative_name(point)}{slow}"


class Means(NamedTuple):
    """A sweep in short.

    Attributes:
      sweep: its name.
      compared: points with an alternative, and this library's speed relative to the best one, the
        slowest first.
      fraction: geometric mean of this library's fractions of the roofline.
      speedup: geometric mean of its speeds relative to the best alternative.
      slower: number of points below `SLOWEST_BAR`.
      bars: of `fraction` and `speedup`.
    """

    sweep: str
    compared: list[tuple[float, Record]]
    fraction: float
    speedup: float
    slower: int
    bars: tuple[float | None, float]


def compared(points: Sequence[Record]) -> list[tuple[float, Record]]:
    """Points with an alternative, and this library's speed relative to it, the slowest first."""
    found = [(ratio, p) for p in points if (ratio := speedup(p)) is not None]
    return sorted(found, key=lambda pair: pair[0])


def means(results: Record) -> Iterator[Means]:
    """Yields every sweep that has points with an alternative."""
    for sweep in SWEEPS:
        found = compared(points_of(results, sweep))
        if not found:
            continue
        ours = [record for _, p in found if (record := provider_of(p, OUR_NAME)) is not None]
        yield Means(
            sweep,
            found,
            statistics.geometric_mean(float(record["fraction"]) for record in ours),
            statistics.geometric_mean(ratio for ratio, _ in found),
            sum(ratio < 1 / SLOWEST_BAR for ratio, _ in found),
            MEAN_BARS[sweep.split()[0]],
        )


def summary(results: Record) -> str:
    """Geometric means of every sweep, points that lose, and the ten worst, as text."""
    lines = []
    for sweep in means(results):
        lines.append(
            f"{sweep.sweep}: {len(sweep.compared)} points, {sweep.fraction:.2f} of the roofline "
            f"(bar {sweep.bars[0] or 'none'}), {sweep.speedup:.2f} x the best alternative "
            f"(bar {sweep.bars[1]}), {sweep.slower} slower (bar 0)"
        )
        for ratio, point in sweep.compared[:WORST]:
            lines.append(f"    {ratio:.2f} x {alternative_name(point)}: {point['label']}")
    return "\n".join(lines)
