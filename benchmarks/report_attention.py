"""Makes the documentation's tables and plot of attention; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Mapping
from typing import Any

from benchmarks import attention
from benchmarks.attention_providers import COPIES, GROUPED_CUDNN, LABELS, OURS, XLA
from benchmarks.harness import provider_of

IMAGE = "docs/images/attention_lengths.svg"
#: Providers in the table over S.
COLUMNS = (COPIES.name, GROUPED_CUDNN.name, XLA.name, OURS.name)


def _points(results: Mapping[str, Any], over_lengths: bool) -> list[Mapping[str, Any]]:
    return [point for point in results["points"] if (point["sweep"] == "s") == over_lengths]


def lengths(results: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table over S: time of every provider, our fraction, the bars."""
    header = ("S", *(f"{LABELS[name]}, ms" for name in COLUMNS), "fraction", "bar")
    rows = []
    for point in _points(results, over_lengths=True):
        records = [provider_of(point, name) for name in COLUMNS]
        times = ["not run" if r is None else f"{r['median_ms']:.4f}" for r in records]
        fraction = "-" if records[-1] is None else f"{records[-1]['fraction']:.3f}"
        bar = attention.bars(point, results["points"])
        rows.append((str(point["problem"]["kv_len"]), *times, fraction, bar))
    return header, rows


def sweeps(results: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of the other sweeps: our time, and cuDNN on grouped queries."""
    header = ("point", "ms", f"{LABELS[GROUPED_CUDNN.name]}, ms", "fraction", "bar")
    rows: list[tuple[str, ...]] = []
    for point in _points(results, over_lengths=False):
        ours, grouped = (provider_of(point, p.name) for p in (OURS, GROUPED_CUDNN))
        if ours is None:
            rows.append((f"{point['sweep']}: {point['label']}", "not run", "", "", ""))
            continue
        rows.append(
            (
                f"{point['sweep']}: {point['label']}",
                f"{ours['median_ms']:.4f}",
                "not run" if grouped is None else f"{grouped['median_ms']:.4f}",
                f"{ours['fraction']:.3f}",
                attention.bars(point, results["points"]),
            )
        )
    return header, rows


def draw(
    results: Mapping[str, Any], root: pathlib.Path, images: Container[str] = (IMAGE,)
) -> list[pathlib.Path]:
    """Plots the sweep over S if it was measured and its file is in `images`; returns the file."""
    if IMAGE not in images or not _points(results, over_lengths=True):
        return []
    attention.draw(results, root / IMAGE)
    return [root / IMAGE]
