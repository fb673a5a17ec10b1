"""Plots in files that change only if the plotted data changes."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import timing
from benchmarks.records import Record


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

    Args:
      path: the file, whose suffix determines the format; its folder is created if missing.
      columns: number of columns of panels.
      rows: number of rows of panels.
      size: size of the figure in inches, at most 9 wide: a page scales the figure to its width,
        and so makes the text of a wider figure too small.
      sharey: whether the panels share their vertical axis.
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
