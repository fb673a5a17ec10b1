"""Makes the documentation's tables and plots of the ranking network; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Container, Sequence
from operator import itemgetter
from typing import Any

from benchmarks import plots, ranking, tables
from benchmarks.records import Record, points_of, provider_of
from benchmarks.tables import Block, Plot, Table, number

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
    (ranking.REWRITTEN_TUNED.name, "`ikbo.rewrite` of the materialised, K aligned, cuDNN"),
)
#: Providers in the tables and plots of sweeps, without the tuned copies: provider, description.
SWEPT = (
    (ranking.COPIES.name, "materialised (users copied)"),
    (ranking.BY_HAND.name, "hand-optimised for XLA, cuDNN"),
    (ranking.OURS.name, "this library's layers"),
    (ranking.REWRITTEN.name, "ikbo.rewrite of the materialised"),
)
#: Another column, where it was measured.
SERVED = (ranking.SERVED.name, "this library's layers, parameters prepared, concurrent graphs")


def _memory(record: Record) -> int | None:
    """Peak bytes of the device; if they were not measured, the bytes that the compiler reports."""
    return record.get("peak_bytes") or record.get("total_bytes")


def headline(results: Record) -> Table:
    """Header and rows of the table of all versions at the default point."""
    header = ("version", "ms", "speed-up", "memory, MiB", "µs a candidate")
    rows: list[tuple[str, ...]] = []
    for record, cells in tables.headline(results, HEADLINE):
        memory = _memory(record)
        memory_text = "-" if memory is None else f"{memory / 2**20:.0f}"
        rows.append((*cells, memory_text, number(record, "us_per_candidate", 2)))
    return header, rows


def sizes(results: Record) -> str:
    """The sizes of the default point as text."""
    for point in points_of(results, "default")[:1]:
        p = point["problem"]
        return (
            f"{p['candidates']} candidates of {p['users']} users, at most {point['most']} of one; "
            f"{p['layers']} layers, {p['dtype']}:"
        )
    return ""


def sweep(results: Record, name: str) -> Table:
    """Header and rows of the table of the sweep `name`: time of every version."""
    points = points_of(results, name)
    is_served = any(provider_of(point, SERVED[0]) for point in points)
    versions = (*SWEPT, SERVED) if is_served else SWEPT
    header = ("point", *(f"{words}, ms" for _, words in versions), "µs a candidate")
    rows = []
    for point in points:
        times = (number(provider_of(point, name), "median_ms", 3) for name, _ in versions)
        ours = provider_of(point, ranking.OURS.name)
        rows.append((tables.name_of(point), *times, number(ours, "us_per_candidate", 2, "-")))
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The table of the default point and the tables of the sweeps."""
    return [
        ("ranking-table", f"{sizes(results)}\n\n", headline(results)),
        *((f"ranking-{name}", "", sweep(results, name)) for name in AXIS_LABELS),
    ]


def plots_of(results: Record) -> list[Plot]:
    """The plots of the sweeps."""
    words = "latency and memory of the ranking network over {}"
    axes = AXIS_LABELS.items()
    return [(f"ranking-{name}", IMAGE.format(name), words.format(axis)) for name, axis in axes]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] | None = None
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
            _curves(row[0], measured, itemgetter("median_ms"))
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


def _curves(axis: Any, measured: Sequence[Record], value: Callable[[Record], float]) -> None:
    for name, words in SWEPT:
        plots.curve(axis, [provider_of(point, name) for point in measured], value, label=words)
