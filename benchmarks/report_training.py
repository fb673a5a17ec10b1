"""Makes the documentation's tables and plot of training; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Iterator
from operator import itemgetter

from benchmarks import plots, ranking, report_ranking, tables, training
from benchmarks.records import Record, is_on_gpu, mib, points_of, provider_of
from benchmarks.tables import Block, Plot, Table, number

IMAGE = "docs/images/training.svg"
#: Versions of the network of generalised attention: name, description.
OF_GDPA = (
    ("xla", "products over padded sequences, XLA"),
    ("cudnn-softmax", "softmax attention in its place, cuDNN"),
    (training.OURS_GDPA.name, "this library's kernels"),
)


def _sizes(point: Record) -> str:
    p = point["problem"]
    return f"{p['candidates']} candidates of {p['users']} users, T={p['queries']}"


def _versions(point: Record, words: tuple[tuple[str, str], ...], baseline: str) -> Iterator[tuple]:
    """The rows of a point: name of the point, version, figures, speed-up and bars."""
    is_gdpa = point["sweep"] == "gdpa"
    ours = training.OURS_GDPA.name if is_gdpa else ranking.OURS.name
    base = provider_of(point, baseline)
    for name, description in words:
        if (record := provider_of(point, name)) is None:
            continue
        speedup = "-" if base is None else f"{base['median_ms'] / record['median_ms']:.2f}×"
        reached = training.bars(point, name) if name == ours else ""
        yield (
            point["label"] if is_gdpa else _sizes(point),
            description,
            number(record, "median_ms", 2),
            number(record, "samples_per_s", 0),
            mib(record, "peak_bytes", 0),
            speedup,
            reached or "-",
        )


def _table(
    points: list[Record], words: tuple[tuple[str, str], ...], baseline: str, samples: str
) -> Table:
    header = ("point", "version", "ms", samples, "memory, MiB", "speed-up", "bar")
    return header, [row for point in points for row in _versions(point, words, baseline)]


def ratio(results: Record) -> Table:
    """Header and rows of the table over candidates a user and queries."""
    words = report_ranking.SWEPT
    header = ("point", *(f"{description}, ms" for _, description in words), "of by hand")
    rows = []
    for point in _swept(results):
        times = (number(provider_of(point, name), "median_ms", 2) for name, _ in words)
        hand, ours = (provider_of(point, p.name) for p in (ranking.BY_HAND, ranking.OURS))
        share = "-"
        if hand is not None and ours is not None:
            share = f"{hand['median_ms'] / ours['median_ms']:.2f}×"
        rows.append((tables.name_of(point), *times, share))
    return header, rows


def _swept(results: Record) -> list[Record]:
    """The points of the sweep over ratios, in the order of the sizes."""

    def sizes(point: Record) -> tuple[int, int]:
        return -point["problem"]["users"], point["problem"]["queries"]

    return sorted(points_of(results, "ratio"), key=sizes)


def blocks(results: Record) -> list[Block]:
    """The tables of both networks and of the sweep over ratios."""
    chosen = [*points_of(results, "default"), *points_of(results, "users")]
    note = "" if is_on_gpu(results) else "Small sizes on a CPU.\n\n"
    return [
        (
            "training-table",
            note,
            _table(chosen, report_ranking.HEADLINE, ranking.COPIES.name, "candidates/s"),
        ),
        ("training-ratio", note, ratio(results)),
        (
            "training-gdpa",
            note,
            _table(points_of(results, "gdpa"), OF_GDPA, OF_GDPA[0][0], "sequences/s"),
        ),
    ]


def plots_of(results: Record) -> list[Plot]:
    """The plot of the sweep over ratios."""
    del results
    return [("training-ratio", IMAGE, "time and memory of a training step")]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] | None = None
) -> list[pathlib.Path]:
    """Plots time and memory over the sweep's points; returns the file."""
    points = _swept(results)
    if not points or (images is not None and IMAGE not in images):
        return []
    path = root / IMAGE
    with plots.saved(path, 2, size=(9, 4.4)) as (figure, panels):
        panels = list(panels)
        for name, words in report_ranking.SWEPT:
            records = [provider_of(point, name) for point in points]
            plots.curve(panels[0], records, itemgetter("median_ms"), label=words)
            plots.curve(panels[1], records, lambda r: r["peak_bytes"] / 2**20, label=words)
        for axis, unit in zip(panels, ("time of a step, ms", "memory, MiB"), strict=True):
            axis.set_xticks(range(len(points)), [p["label"] for p in points], rotation=40)
            axis.set_xlabel("candidates a user, queries a candidate")
            axis.set_ylabel(unit)
            plots.plain_log_scale(axis)
        plots.legend_below(figure, panels[0], 2)
        figure.suptitle(f"training the ranking network on {results['environment']['device']}")
    return [path]
