"""Makes the documentation's tables and plot of drawn workloads; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container

from benchmarks import plots, production_summary
from benchmarks.production_draws import DRAWS
from benchmarks.records import OUR_NAME, Record, provider_of
from benchmarks.tables import Block, Plot, Table

IMAGE = "docs/images/production.svg"
NAME = "production-table"


def means(results: Record) -> Table:
    """Header and rows of the table of geometric means."""
    header = ("point", "points", "of the roofline", "speed-up", "slower", "bar")
    rows: list[tuple[str, ...]] = [
        (
            found.sweep.replace("_", " ").replace("both", "with gradients"),
            str(len(found.compared)),
            f"{found.fraction:.2f}",
            f"{found.speedup:.2f}×",
            str(found.slower),
            f"{found.bars[0] or '-'}, {found.bars[1]}×, none slower",
        )
        for found in production_summary.means(results)
    ]
    return header, rows


def worst(results: Record) -> Table:
    """Header and rows of the table of the slowest points."""
    header = ("point", "best alternative", "its ms", "ms", "roofline, ms", "speed-up")
    rows: list[tuple[str, ...]] = []
    for ratio, point in production_summary.compared(results["points"])[: production_summary.WORST]:
        ours, other = provider_of(point, OUR_NAME), production_summary.alternative(point)
        assert ours is not None
        assert other is not None
        rows.append(
            (
                f"{point['sweep'].replace('_', ' ')}, {point['label']}",
                other["name"],
                f"{other['median_ms']:.4f}",
                f"{ours['median_ms']:.4f}",
                f"{point['roofline_ms']:.4f}",
                f"{ratio:.2f}×",
            )
        )
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The tables of means and of the slowest points."""
    words = (
        "Sizes drawn from stated distributions (`benchmarks/production_draws.py`), none of them "
        "tuned for. The speed-up is relative to the best alternative; both columns are geometric "
        "means.\n\n"
    )
    slowest = "The points where this library is slowest relative to the best alternative:\n\n"
    return [(NAME, words, means(results)), ("production-worst", slowest, worst(results))]


def plots_of(results: Record) -> list[Plot]:
    """The plot of all points."""
    del results
    return [(NAME, IMAGE, "drawn workloads: fraction of the roofline and speed-up, one dot each")]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] | None = None
) -> list[pathlib.Path]:
    """Plots fraction and speed-up of every point over its roofline; returns the file."""
    if images is not None and IMAGE not in images:
        return []
    path = root / IMAGE
    with plots.saved(path, 2, size=(9, 4.2)) as (figure, panels):
        by_fraction, by_speedup = panels
        for op in DRAWS:
            found = [
                (r, p)
                for r, p in production_summary.compared(results["points"])
                if p["sweep"].startswith(op)
            ]
            if not found:
                continue
            roofline = [point["roofline_ms"] for _, point in found]
            ours = [provider_of(point, OUR_NAME) for _, point in found]
            fractions = [float(record["fraction"]) for record in ours if record is not None]
            style = {"s": 12, "label": op.replace("_", " ")}
            by_fraction.scatter(roofline, fractions, **style)
            by_speedup.scatter(roofline, [ratio for ratio, _ in found], **style)
        by_fraction.set_ylim(0, 1)
        by_fraction.set_ylabel("fraction of the roofline")
        by_speedup.axhline(1 / production_summary.SLOWEST_BAR, color="0.7", linestyle=":")
        by_speedup.set_yscale("log")
        by_speedup.set_ylabel("speed-up over the best alternative")
        for axis in (by_fraction, by_speedup):
            axis.set_xscale("log")
            axis.set_xlabel("roofline, ms")
        plots.legend_below(figure, by_fraction, len(DRAWS))
        figure.suptitle(f"drawn workloads: {results['environment']['device']}")
    return [path]
