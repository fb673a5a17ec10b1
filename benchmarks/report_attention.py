"""Makes the documentation's tables and plot of attention; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container

from benchmarks import attention
from benchmarks.attention_providers import COPIES, GROUPED_CUDNN, LABELS, OURS, XLA
from benchmarks.records import Record, points_of, provider_of
from benchmarks.tables import Block, Plot, Table, figures, name_of, number

IMAGE = "docs/images/attention_lengths.svg"
#: Providers in the table over S.
COLUMNS = (COPIES.name, GROUPED_CUDNN.name, XLA.name, OURS.name)


def lengths(results: Record) -> Table:
    """Header and rows of the table over S: time of every provider, our fraction, the bars."""
    header = ("S", *(f"{LABELS[name]}, ms" for name in COLUMNS), "fraction", "bar")
    rows = [
        (str(p["problem"]["kv_len"]), *figures(p, COLUMNS), attention.bars(p, results["points"]))
        for p in points_of(results, "s")
    ]
    return header, rows


def sweeps(results: Record) -> Table:
    """Header and rows of the table of the other sweeps: our time, and cuDNN on grouped queries."""
    header = ("point", "ms", f"{LABELS[GROUPED_CUDNN.name]}, ms", "fraction", "bar")
    rows: list[tuple[str, ...]] = []
    for point in results["points"]:
        if point["sweep"] == "s":
            continue
        ours, grouped = (provider_of(point, p.name) for p in (OURS, GROUPED_CUDNN))
        cells = ["not run", "", "", ""]
        if ours is not None:
            times = (number(r, "median_ms") for r in (ours, grouped))
            cells = [*times, number(ours, "fraction", 3), attention.bars(point, results["points"])]
        rows.append((name_of(point), *cells))
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The tables."""
    return [
        ("attention-lengths", "", lengths(results)),
        ("attention-sweeps", "", sweeps(results)),
    ]


def plots_of(results: Record) -> list[Plot]:
    """The plot over S."""
    return [("attention-lengths", IMAGE, "fraction of the matmul over the keys of a user")]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] = (IMAGE,)
) -> list[pathlib.Path]:
    """Plots the sweep over S if it was measured and its file is in `images`; returns the file."""
    if IMAGE not in images or not points_of(results, "s"):
        return []
    attention.draw(results, root / IMAGE)
    return [root / IMAGE]
