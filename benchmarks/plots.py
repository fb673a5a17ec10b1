"""Files of plots that change only with what they show."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def saved(
    path: pathlib.Path, columns: int = 1, *, size: tuple[float, float], sharey: bool = False
) -> Iterator[tuple[Any, Any]]:
    """A figure, and its panels [columns] side by side, which is written to `path` at the end.

    Args:
      path: of the file, whose suffix says in which format; its folder is made.
      columns: panels.
      size: of the figure, inches.
      sharey: whether the panels share their vertical axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and ids do not change from run to run, so that diffs show what changed.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ikbo-jax"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, columns, figsize=size, sharey=sharey, squeeze=False)
    yield figure, panels[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
