"""Makes the documentation's tables and plots of the ranking network; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

from benchmarks import plots, ranking
from benchmarks.harness import provider_of

#: One plot for each sweep, since a results file may have only one of them.
IMAGE = "docs/images/ranking_{}.svg"
#: Axis labels of the sweeps.
AXIS_LABELS = {"ratio": "candidates a user", "candidates": "candidates"}
#: Rows of the table at the default point: provider, description.
HEADLINE = (
    (ranking.COPIES.name, "materialised: every user copied to its candidates"),
    (ranking.TUNED.name, "materialised, K aligned, cuDNN"),
    (ranking.BY_HAND.name, "optimised by hand for XLA, cuDNN"),
    (ranking.OURS.name, "this library's layers"),
    (ranking.REWRITTEN.name, "`ikbo.rewrite` of the materialised"),
)
#: Providers in the tables and plots of sweeps, without the tuned copies: provider, description.
SWEPT = (
    (ranking.COPIES.name, "materialised (users copied)"),
    (ranking.BY_HAND.name, "hand-optimised for XLA, cuDNN"),
    (ranking.OURS.name, "this library's layers"),
    (ranking.REWRITTEN.name, "ikbo.rewrite of the materialised"),
)
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def points_of(results: Mapping[str, Any], sweep: str) -> list[Mapping[str, Any]]:
    """The points of one sweep."""
    return [point for point in results["points"] if point["sweep"] == sweep]


def _memory(record: Mapping[str, Any]) -> int | None:
    """Peak bytes of the device; if they were not measured, the bytes that the compiler reports."""
    return record.get("peak_bytes") or record.get("total_bytes")


def headline(results: Mapping[str, Any]) -> Table:
    """Header and rows of the table of all versions at the default point."""
    header = ("version", "ms", "speed-up", "memory, MiB", "µs a candidate")
    rows: list[tuple[str, ...]] = []
    for point in points_of(results, "default")[:1]:
        baseline = provider_of(point, HEADLINE[0][0])
        for name, words in HEADLINE:
            record = provider_of(point, name)
            if record is None:
                continue
            speedup, memory = "-", _memory(record)
            if baseline is not None:
                speedup = f"{baseline['median_ms'] / record['median_ms']:.1f}×"
            rows.append(
                (
                    words,
                    f"{record['median_ms']:.3f}",
                    speedup,
                    "-" if memory is None else f"{memory / 2**20:.0f}",
                    f"{record['us_per_candidate']:.2f}",
                )
            )
    return header, rows


def sizes(results: Mapping[str, Any]) -> str:
    """The sizes of the default point as text."""
    for point in points_of(results, "default")[:1]:
        p = point["problem"]
        return (
            f"{p['candidates']} candidates of {p['users']} users, at most {point['most']} of one; "
            f"{p['layers']} layers, {p['dtype']}:"
        )
    return ""


def sweep(results: Mapping[str, Any], name: str) -> Table:
    """Header and rows of the table of the sweep `name`: time of every version."""
    header = ("point", *(f"{words}, ms" for _, words in SWEPT), "µs a candidate")
    rows = []
    for point in points_of(results, name):
        records = [provider_of(point, name) for name, _ in SWEPT]
        times = ["not run" if r is None else f"{r['median_ms']:.3f}" for r in records]
        ours = provider_of(point, ranking.OURS.name)
        cost = "-" if ours is None else f"{ours['us_per_candidate']:.2f}"
        rows.append((f"{name}: {point['label']}", *times, cost))
    return header, rows


def draw(
    results: Mapping[str, Any], root: pathlib.Path, images: Container[str] | None = None
) -> list[pathlib.Path]:
    """Plots latency and memory over every measured sweep; returns the files.

    `images` limits the plots to these files, relative to `root`.
    """
    names = [
        name
        for name in AXIS_LABELS
        if points_of(results, name) and (images is None or IMAGE.format(name) in images)
    ]
    drawn = []
    for name in names:
        measured = points_of(results, name)
        labels = [point["label"].split("=")[-1] for point in measured]
        path = root / IMAGE.format(name)
        with plots.saved(path, 2, size=(9, 4.2)) as (figure, row):
            _curves(row[0], measured, lambda r: r["median_ms"])
            _curves(row[1], measured, lambda r: (r.get("total_bytes") or 0) / 2**20)
            for axis, unit in zip(row, ("time, ms", "memory, MiB"), strict=True):
                axis.set_xticks(range(len(labels)), labels)
                axis.set_xlabel(AXIS_LABELS[name])
                axis.set_ylabel(unit)
                plots.plain_log_scale(axis)
            plots.legend_below(figure, row[0], 2)
            figure.suptitle(f"ranking network on {results['environment']['device']}")
        drawn.append(path)
    return drawn


def _curves(axis: Any, measured: Sequence[Mapping[str, Any]], value: Any) -> None:
    for name, words in SWEPT:
        records = [provider_of(point, name) for point in measured]
        values = [float("nan") if r is None else value(r) for r in records]
        axis.plot(range(len(values)), values, marker="o", label=words)
