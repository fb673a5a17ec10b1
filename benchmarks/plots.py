"""Plots of the documentation, in files that change only if the plotted data changes.

A function that draws takes the content of a results file and the plot's path; see `report`.
"""

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from benchmarks import gdpa as of_gdpa
from benchmarks import look_up as of_look_up
from benchmarks import production as of_production
from benchmarks import tables, timing
from benchmarks import tables_networks as networks
from benchmarks.production_draws import KINDS
from benchmarks.records import OUR_NAME, Record, forward, points_of, provider_of

#: Panels of linear compression's plot over sizes: sweep, label of its horizontal axis.
PANELS = {
    "m": "compressed rows M",
    "k": "candidate rows K",
    "n": "embedding width N",
    "batch": "candidates B",
    "ratio": "candidates a user",
}
#: Labels of gdpa's curves, by sweep.
GDPA_CURVES = {
    "full": "self-attention, equal lengths",
    "half": "self-attention, lengths uniform in 1..max",
    "kv256": f"{of_gdpa.SHORT_KV} keys, many queries",
}
#: What a panel of the plot of several devices shows.
MODES = {"strong": "strong", "weak": "weak", "large": "strong, large request"}


@contextlib.contextmanager
def saved(
    path: pathlib.Path,
    columns: int = 1,
    *,
    rows: int = 1,
    size: tuple[float, float],
    sharey: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its panels [rows * columns], row by row; then writes it to `path`.

    The size is in inches, at most 9 wide: a page scales a wider figure down, and its text, too.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text and ids are deterministic, so that diffs show only what changed.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ikbo-jax"})
    from matplotlib import pyplot

    # The constrained layout keeps labels from overlapping neighbouring panels.
    figure, panels = pyplot.subplots(
        rows, columns, figsize=size, sharey=sharey, squeeze=False, layout="constrained"
    )
    yield figure, panels.flat
    timing.make_folder_of(path)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def curve(
    axis: Any, records: Sequence[Record | None], value: Callable[[Record], float], **style: Any
) -> None:
    """Draws `value` of every record over 0, 1, ..., with a gap where a record is None."""
    values = [float("nan") if record is None else value(record) for record in records]
    axis.plot(style.pop("over", range(len(values))), values, marker="o", **style)


def legend_below(figure: Any, axis: Any, columns: int) -> None:
    """Draws the legend of an axis' curves below all panels, where it covers no data."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def plain_log_scale(axis: Any) -> None:
    """Makes the vertical axis logarithmic, with round limits and plain tick labels such as 20.

    Must be called after all curves are drawn.
    """
    from matplotlib import ticker

    low, high = axis.dataLim.intervaly
    axis.set_yscale("log")
    axis.set_ylim(_round(low, up=False), _round(high, up=True))
    axis.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5), numticks=20))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def _round(value: float, *, up: bool) -> float:
    """Rounds up or down to the nearest of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [power * step for step in (1, 2, 5, 10)]
    return min(x for x in steps if x >= value) if up else max(x for x in steps if x <= value)


def curves(
    axis: Any,
    points: Sequence[Record],
    providers: Sequence[tuple[str, str]],
    value: Callable[[Record], float],
) -> None:
    """Draws a curve of `value` over points for every provider; `providers` have descriptions."""
    for name, words in providers:
        curve(axis, [provider_of(point, name) for point in points], value, label=words)


def attention(results: Record, path: pathlib.Path) -> bool:
    """Plots the fraction of the matmul over S, with a curve for every provider."""
    points = points_of(forward(results), "s")
    if not points:
        return False
    with saved(path, size=(8, 4.5)) as (figure, (axis,)):
        timed = [
            (name, words)
            for name, words in reversed(tables.ATTENTION.items())
            if any(provider_of(point, name) is not None for point in points)
        ]
        curves(axis, points, timed, itemgetter("fraction"))
        axis.set_xticks(range(len(points)), [point["problem"]["kv_len"] for point in points])
        axis.set_xlabel(f"S, keys of a user; {results['environment']['device']}")
        axis.set_ylabel("fraction of the sustained matmul")
        axis.set_ylim(bottom=0)
        legend_below(figure, axis, 2)
    return True


def linear_compression_stages(results: Record, path: pathlib.Path) -> bool:
    """Draws a bar for the time of every stage at the default point."""
    points = points_of(forward(results), "default")
    if not points:
        return False
    timed = [(words, provider_of(points[0], name)) for name, words in tables.STAGES]
    bars = [(words, record["median_ms"]) for words, record in timed if record is not None]
    with saved(path, size=(9, 0.8 + 0.45 * len(bars))) as (_, (axes,)):
        drawn = axes.barh([words for words, _ in bars], [ms for _, ms in bars], color="#4c72b0")
        axes.bar_label(drawn, fmt="%.3f", padding=3)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(f"ms on {results['environment']['device']}; less is better")
    return True


def linear_compression_sweeps(results: Record, path: pathlib.Path) -> bool:
    """Plots the fraction of the matmul over sizes, with a panel for every measured sweep."""
    results = forward(results)
    names = [sweep for sweep in PANELS if points_of(results, sweep)]
    if not names:
        return False
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    providers = ((OUR_NAME, "ikbo-jax"), ("xla", "ikbo-jax in XLA (decomposed)"))
    size = (9, 0.6 + 2.9 * rows)
    with saved(path, columns, rows=rows, size=size, sharey=True) as (figure, panels):
        panels = list(panels)
        for axis in panels[len(names) :]:
            axis.set_axis_off()
        for axis, sweep in zip(panels[: len(names)], names, strict=True):
            points = points_of(results, sweep)
            curves(axis, points, providers, itemgetter("fraction"))
            labels = [point["label"].split("=")[-1] for point in points]
            labels = [label.replace(" of one user", ":1") for label in labels]
            axis.set_xticks(range(len(points)), labels, rotation=30)
            axis.set_xlabel(PANELS[sweep])
        # Called after the last curve, since it turns autoscaling of the shared axis off.
        panels[0].set_ylim(bottom=0)
        figure.supylabel("fraction of the sustained matmul")
        figure.suptitle(f"linear compression on {results['environment']['device']}")
        legend_below(figure, panels[0], 2)
    return True


def gdpa(results: Record, path: pathlib.Path) -> bool:
    """Plots our fraction over the largest length, a panel a direction; bars are dotted."""
    every, sweeps = results["points"], of_gdpa.LENGTH_SWEEPS
    points = [p for p in every if p["sweep"] in sweeps and p["direction"] != "both"]
    if not points:
        return False
    directions = [d for d in of_gdpa.DIRECTIONS if any(p["direction"] == d for p in points)]
    size = (4.5 * len(directions) if len(directions) > 1 else 7, 4.5)
    with saved(path, len(directions), size=size, sharey=True) as (figure, row):
        for axis, direction in zip(row, directions, strict=True):
            for number, (sweep, words) in enumerate(GDPA_CURVES.items()):
                found = [p for p in points if (p["sweep"], p["direction"]) == (sweep, direction)]
                bars = of_gdpa.FRACTION_BARS.get((sweep, direction), {})
                if not found and not bars:
                    continue
                records = [provider_of(point, OUR_NAME) for point in found]
                over, color = [p["problem"]["q_len"] for p in found], f"C{number}"
                fraction = itemgetter("fraction")
                curve(axis, records, fraction, over=over, color=color, label=words)
                axis.plot([*bars], [*bars.values()], linestyle=":", color=color, alpha=0.6)
            axis.set_xscale("log", base=2)
            axis.set_xticks(of_gdpa.LENGTHS, [str(length) for length in of_gdpa.LENGTHS])
            axis.set_xlabel("greatest length")
            axis.set_title(f"{direction} pass")
        # Called after the last curve, since it turns autoscaling of the shared axis off.
        row[0].set_ylim(bottom=0)
        row[0].set_ylabel("fraction of the sustained matmul")
        legend_below(figure, row[0], min(2, len(directions)))
        figure.suptitle(f"{results['environment']['device']}; dotted: target")
    return True


def ranking(results: Record, path: pathlib.Path, sweep: str) -> bool:
    """Plots latency and memory of the versions of the ranking network over a sweep."""
    points = points_of(results, sweep)
    if not points:
        return False
    with saved(path, 2, size=(9, 4.2)) as (figure, panels):
        panels = list(panels)
        curves(panels[0], points, networks.SWEPT, itemgetter("median_ms"))
        memory = lambda record: (record.get("total_bytes") or 0) / 2**20  # noqa: E731
        curves(panels[1], points, networks.SWEPT, memory)
        ticks = [point["label"].removeprefix("B=") for point in points]
        for axis, unit in zip(panels, ("time, ms", "memory, MiB"), strict=True):
            axis.set_xticks(range(len(points)), ticks)
            axis.set_xlabel(networks.RANKING_AXES[sweep])
            axis.set_ylabel(unit)
            plain_log_scale(axis)
        legend_below(figure, panels[0], 2)
        figure.suptitle(f"ranking network on {results['environment']['device']}")
    return True


def scaling(results: Record, path: pathlib.Path) -> bool:
    """Plots the speed-up over the number of devices."""
    every = [point for point in results["points"] if "processes" not in point]
    modes = dict.fromkeys(point["mode"] for point in every)
    if not modes:
        return False
    with saved(path, len(modes), size=(9, 4.2), sharey=True) as (figure, panels):
        for axis, mode in zip(panels, modes, strict=True):
            found = [point for point in every if point["mode"] == mode]
            devices = sorted({point["devices"] for point in found})
            for colour, (sweep, words) in enumerate(networks.SCALED.items()):
                points = [point for point in found if point["sweep"] == sweep]
                if not points:
                    continue
                best = [
                    max(networks.speedup(point, record) for record in point["providers"][1:])
                    for point in points
                ]
                over = [1, *(point["devices"] for point in points)]
                axis.plot(over, [1.0, *best], marker="o", label=words, color=f"C{colour}")
            axis.plot([1, *devices], [1, *devices], color="0.7", linestyle=":", label="ideal")
            axis.set_xticks([1, *devices])
            axis.set_xlabel(f"devices, {MODES[mode]}")
        panels[0].set_ylabel("speed-up")
        legend_below(figure, panels[0], 5)
        figure.suptitle(f"several devices: {results['environment']['device']}")
    return True


def production(results: Record, path: pathlib.Path) -> bool:
    """Plots fraction and speed-up of every drawn point over its roofline."""
    compared = of_production.compared(results["points"])
    if not compared:
        return False
    with saved(path, 2, size=(9, 4.2)) as (figure, panels):
        by_fraction, by_speedup = panels
        for op in KINDS:
            found = [(ratio, p) for ratio, p in compared if p["sweep"].startswith(op)]
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
        by_speedup.axhline(1 / of_production.SLOWEST_BAR, color="0.7", linestyle=":")
        by_speedup.set_yscale("log")
        by_speedup.set_ylabel("speed-up over the best alternative")
        for axis in (by_fraction, by_speedup):
            axis.set_xscale("log")
            axis.set_xlabel("roofline, ms")
        legend_below(figure, by_fraction, len(KINDS))
        figure.suptitle(f"drawn workloads: {results['environment']['device']}")
    return True


def look_up(results: Record, path: pathlib.Path) -> bool:
    """Plots bandwidth over a row's bytes, beside XLA's, without hot users."""
    points = [point for point in results["points"] if not point["problem"]["is_hot"]]
    panels = {
        "look_up": {of_look_up.LOOK_UP: of_look_up.LOOK_UP, "gather": "XLA's gather"},
        "segment_sum": {
            of_look_up.SEGMENT_SUM: of_look_up.SEGMENT_SUM,
            "jax.ops.segment_sum in f32": "jax.ops.segment_sum in f32",
            "scatter": "scatter in the rows' dtype",
        },
    }
    with saved(path, 2, size=(9, 3.6), sharey=True) as (_, axes):
        axes = list(axes)
        for axis, (title, names) in zip(axes, panels.items(), strict=True):
            for name, label in names.items():
                pairs = [(of_look_up.Sizes(**p["problem"]), provider_of(p, name)) for p in points]
                timed = [(sizes, p["median_ms"]) for sizes, p in pairs if p is not None]
                rates = [sizes.moved / ms / 1e9 for sizes, ms in timed]
                axis.scatter([sizes.row_bytes for sizes, _ in timed], rates, s=14, label=label)
            axis.set(title=title, xlabel="bytes of a row", xscale="log", yscale="log")
            axis.legend(fontsize="small")
        axes[0].set_ylabel("TB/s, read and written")
    return True
