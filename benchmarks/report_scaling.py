"""Makes the documentation's table and plot of several devices; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Iterator

from benchmarks import plots, scaling
from benchmarks.records import Record
from benchmarks.tables import Block, Plot, Table, number

IMAGE = "docs/images/scaling.svg"
#: Names of the workloads in table and plot.
WORDS = {
    "linear_compression": "linear compression",
    "attention": "attention",
    "network": "ranking network",
    "training": "its training step",
}
#: What a panel of the plot shows.
MODES = {"strong": "strong", "weak": "weak", "large": "strong, large request"}
#: How a provider divides the work, in the table.
KINDS = {"auto": "jit, Auto axes", "explicit": "jit, Explicit axes"}


def _several(point: Record) -> Iterator[Record]:
    yield from point["providers"][1:]


def speedup(point: Record, record: Record) -> float:
    """How many devices' work the devices do in the time of one."""
    requests = point["devices"] if point["mode"] == "weak" else 1
    return requests / float(record["of_one"])


def table(results: Record) -> Table:
    """Header and rows of the table of all points."""
    header = ("point", "stage", "one device, ms", "ms", "speed-up", "bar", "moved by collectives")
    rows: list[tuple[str, ...]] = []
    for point in results["points"]:
        one = point["providers"][0]
        for record in _several(point):
            name = str(record["name"])
            how: str = KINDS.get(name, name)
            if point["sweep"] in ("network", "training"):
                beside = "shard_map, users beside candidates"
                how = beside + ("" if name in KINDS else f", {name}")
            processes = f", {point['processes']} processes" if "processes" in point else ""
            moved = ", ".join(
                f"{entry['count']} {name}, {entry['bytes'] / 2**20:.1f} MiB"
                for name, entry in record["collectives"].items()
            )
            rows.append(
                (
                    f"{WORDS[point['sweep']]}, {point['label']}{processes}",
                    how,
                    number(one, "median_ms", 3),
                    number(record, "median_ms", 3),
                    f"{speedup(point, record):.2f}×",
                    scaling.bar(point) or "-",
                    moved or "nothing",
                )
            )
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The table of all points."""
    words = (
        "Strong: one request on several devices; weak: one request for each device, of 2,048 "
        "candidates of 32 users. Large: one request of 8,192 candidates of 117 users. The speed-up "
        "is work per time, relative to one device.\n\n"
    )
    return [("scaling-table", words, table(results))]


def plots_of(results: Record) -> list[Plot]:
    """The plot of all points."""
    del results
    return [("scaling-table", IMAGE, "speed-up over devices")]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] | None = None
) -> list[pathlib.Path]:
    """Plots the speed-up over the number of devices; returns the file."""
    if images is not None and IMAGE not in images:
        return []
    path = root / IMAGE
    in_one_process = [point for point in results["points"] if "processes" not in point]
    modes = dict.fromkeys(point["mode"] for point in in_one_process)
    with plots.saved(path, len(modes), size=(9, 4.2), sharey=True) as (figure, panels):
        for axis, mode in zip(panels, modes, strict=True):
            found = [point for point in in_one_process if point["mode"] == mode]
            devices = sorted({point["devices"] for point in found})
            for colour, (sweep, words) in enumerate(WORDS.items()):
                points = [point for point in found if point["sweep"] == sweep]
                if not points:
                    continue
                over = [1, *(point["devices"] for point in points)]
                values = [1.0, *(max(speedup(p, r) for r in _several(p)) for p in points)]
                axis.plot(over, values, marker="o", label=words, color=f"C{colour}")
            axis.plot([1, *devices], [1, *devices], color="0.7", linestyle=":", label="ideal")
            axis.set_xticks([1, *devices])
            axis.set_xlabel(f"devices, {MODES[mode]}")
        panels[0].set_ylabel("speed-up")
        plots.legend_below(figure, panels[0], 5)
        figure.suptitle(f"several devices: {results['environment']['device']}")
    return [path]
