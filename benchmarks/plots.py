"""Files of plots that change only with what they show."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import timing


@contextlib.contextmanager
def saved(
    path: pathlib.Path,
    columns: int = 1,
    *,
    rows: int = 1,
    size: tuple[float, float],
    sharey: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """A figure, and its panels [rows * columns] row by row, which is written to `path` at the end.

    Args:
      path: of the file, whose suffix says in which format; a folder that is missing is made.
      columns: panels side by side.
      rows: of panels.
      size: of the figure, inches: at most 9 wide, since a page scales it to its own width and type
        with it.
      sharey: whether the panels share their vertical axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and ids do not change from run to run, so that diffs show what changed.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ikbo-jax"})
    from matplotlib import pyplot

    # Laid out anew when it is drawn, so that no label runs into the panel beside it.
    figure, panels = pyplot.subplots(
        rows, columns, figsize=size, sharey=sharey, squeeze=False, layout="constrained"
    )
    yield figure, panels.flat
    timing.make_folder_of(path)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def legend_below(figure: Any, axis: Any, columns: int) -> None:
    """The legend of an axis' curves, below all panels, where it lies over no data."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def plain_log_scale(axis: Any) -> None:
    """A vertical logarithmic axis from a round number to a round one, with numbers such as 20.

    It is for an axis whose curves are all there already.
    """
    from matplotlib import ticker

    low, high = axis.dataLim.intervaly
    axis.set_yscale("log")
    axis.set_ylim(_round(low, up=False), _round(high, up=True))
    axis.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5), numticks=20))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def _round(value: float, *, up: bool) -> float:
    """The nearest of 1, 2 and 5 times a power of ten that is not below `value`, or not above."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [power * step for step in (1, 2, 5, 10)]
    return min(x for x in steps if x >= value) if up else max(x for x in steps if x <= value)
