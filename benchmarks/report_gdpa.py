"""Makes the documentation's tables and plots of generalised dot-product attention; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container
from operator import itemgetter

from benchmarks import gdpa, plots
from benchmarks.gdpa_providers import CUDNN, OURS, PADDED, TOKAMAX, XLA
from benchmarks.records import Record, is_on_gpu, provider_of
from benchmarks.tables import Block, Plot, Table, figures, name_of

IMAGE = "docs/images/{}_lengths.svg"
#: Columns of the tables: provider, description; a yardstick only if it was timed.
COLUMNS = (
    (XLA.name, "ikbo-jax in XLA"),
    (CUDNN.name, "cuDNN softmax (another function)"),
    (TOKAMAX.name, "tokamax softmax (another function)"),
    (PADDED.name, "cuDNN softmax, padded"),
    (OURS.name, "ikbo-jax"),
)
#: Labels of the curves, by sweep.
CURVES = {
    "full": "self-attention, equal lengths",
    "half": "self-attention, lengths uniform in 1..max",
    "kv256": f"{gdpa.SHORT_KV} keys, many queries",
}


def prefix(results: Record) -> str:
    """Prefix of the names of blocks and plot; results of backward passes only have another one."""
    directions = {p["direction"] for p in results["points"]}
    return "gdpa-backward" if directions == {"backward"} else "gdpa"


def image(results: Record) -> str:
    """The file of the plot."""
    return IMAGE.format(prefix(results).replace("-", "_"))


def _points(results: Record, over_lengths: bool) -> list[Record]:
    every = results["points"]
    return [p for p in every if (p["sweep"] in gdpa.LENGTH_SWEEPS) == over_lengths]


def _table(results: Record, over_lengths: bool) -> Table:
    """Header and rows of a table: times, our fraction, the bars."""
    points = _points(results, over_lengths)
    columns = [
        (name, words)
        for name, words in COLUMNS
        if name in (XLA.name, OURS.name) or any(provider_of(p, name) for p in points)
    ]
    header = ("point", *(f"{words}, ms" for _, words in columns), "fraction", "bar")
    rows = []
    for point in points:
        bar = gdpa.bars(point, results["points"]) if is_on_gpu(results) else ""
        rows.append((name_of(point), *figures(point, [name for name, _ in columns]), bar))
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The tables over the largest length and of the other sweeps."""
    return [
        (f"{prefix(results)}-lengths", "", _table(results, over_lengths=True)),
        (f"{prefix(results)}-sweeps", "", _table(results, over_lengths=False)),
    ]


def plots_of(results: Record) -> list[Plot]:
    """The plot over the largest length."""
    words = "fraction of the matmul over the greatest length"
    return [(f"{prefix(results)}-lengths", image(results), words)]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] | None = None
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
                over, color = [p["problem"]["q_len"] for p in points], f"C{number}"
                fraction = itemgetter("fraction")
                plots.curve(axis, records, fraction, over=over, color=color, label=words)
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
