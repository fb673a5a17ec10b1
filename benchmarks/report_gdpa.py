"""Makes the documentation's tables and plots of generalised dot-product attention; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Mapping
from typing import Any

from benchmarks import gdpa, plots
from benchmarks.gdpa_providers import CUDNN, OURS, TOKAMAX, XLA
from benchmarks.harness import provider_of

IMAGE = "docs/images/{}_lengths.svg"
#: Columns of the tables: provider, description; a yardstick only if it was timed.
COLUMNS = (
    (XLA.name, "ikbo-jax in XLA"),
    (CUDNN.name, "cuDNN softmax (another function)"),
    (TOKAMAX.name, "tokamax softmax (another function)"),
    (OURS.name, "ikbo-jax"),
)
#: Labels of the curves, by sweep.
CURVES = {
    "full": "self-attention, equal lengths",
    "half": "self-attention, lengths uniform in 1..max",
    "kv256": f"{gdpa.SHORT_KV} keys, many queries",
}
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def prefix(results: Mapping[str, Any]) -> str:
    """Prefix of the names of blocks and plot; results of backward passes only have another one."""
    directions = {p["direction"] for p in results["points"]}
    return "gdpa-backward" if directions == {"backward"} else "gdpa"


def image(results: Mapping[str, Any]) -> str:
    """The file of the plot."""
    return IMAGE.format(prefix(results).replace("-", "_"))


def _points(results: Mapping[str, Any], over_lengths: bool) -> list[Mapping[str, Any]]:
    every = results["points"]
    return [p for p in every if (p["sweep"] in gdpa.LENGTH_SWEEPS) == over_lengths]


def _table(results: Mapping[str, Any], over_lengths: bool) -> Table:
    points = _points(results, over_lengths)
    columns = [
        (name, words)
        for name, words in COLUMNS
        if name in (XLA.name, OURS.name) or any(provider_of(p, name) for p in points)
    ]
    header = ("point", *(f"{words}, ms" for _, words in columns), "fraction", "bar")
    on_gpu = results["environment"]["platform"] == "gpu"  # The bars are for Hopper.
    rows = []
    for point in points:
        records = [provider_of(point, name) for name, _ in columns]
        times = ["not run" if r is None else f"{r['median_ms']:.4f}" for r in records]
        fraction = "-" if records[-1] is None else f"{records[-1]['fraction']:.3f}"
        bar = gdpa.bars(point, results["points"]) if on_gpu else ""
        rows.append((f"{point['sweep']}: {point['label']}", *times, fraction, bar))
    return header, rows


def lengths(results: Mapping[str, Any]) -> Table:
    """Header and rows of the table over the largest length: times, our fraction, the bars."""
    return _table(results, over_lengths=True)


def sweeps(results: Mapping[str, Any]) -> Table:
    """Header and rows of the table of the other sweeps: times, our fraction, the bars."""
    return _table(results, over_lengths=False)


def draw(
    results: Mapping[str, Any], root: pathlib.Path, images: Container[str] | None = None
) -> list[pathlib.Path]:
    """Plots our fraction over the largest length, with dotted lines for the bars; returns the file.

    The plot has one panel for the forward pass and one for the backward pass. Returns no file if
    neither was measured, or if the file is not in `images`.
    """
    measured = [p for p in _points(results, over_lengths=True) if p["direction"] != "both"]
    directions = [d for d in gdpa.DIRECTIONS if any(p["direction"] == d for p in measured)]
    if not directions or (images is not None and image(results) not in images):
        return []
    path = root / image(results)
    size = (4.5 * len(directions) if len(directions) > 1 else 7, 4.5)
    with plots.saved(path, len(directions), size=size, sharey=True) as (figure, row):
        for axis, direction in zip(row, directions, strict=True):
            for number, (sweep, words) in enumerate(CURVES.items()):
                points = [p for p in measured if (p["sweep"], p["direction"]) == (sweep, direction)]
                bars = gdpa.FRACTION_BARS.get((sweep, direction), {})
                if not points and not bars:
                    continue
                records = [provider_of(point, OURS.name) for point in points]
                fractions = [float("nan") if r is None else r["fraction"] for r in records]
                over, color = [p["problem"]["q_len"] for p in points], f"C{number}"
                axis.plot(over, fractions, marker="o", color=color, label=words)
                axis.plot([*bars], [*bars.values()], linestyle=":", color=color, alpha=0.6)
            axis.set_xscale("log", base=2)
            axis.set_xticks(gdpa.LENGTHS, [str(length) for length in gdpa.LENGTHS])
            axis.set_xlabel("greatest length")
            axis.set_title(f"{direction} pass")
        # Called after the last curve, since it turns autoscaling of the shared axis off.
        row[0].set_ylim(bottom=0)
        row[0].set_ylabel("fraction of the sustained matmul")
        plots.legend_below(figure, row[0], min(2, len(directions)))
        figure.suptitle(f"{results['environment']['device']}; dotted: target")
    return [path]
