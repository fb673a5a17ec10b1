"""Draws the masks of `gdpa` for docs/gdpa.md: `python -m tools.draw_masks` from the root.

A panel has a row for each query and a column for each key of one sequence.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import to_rgb

from benchmarks import plots
from ikbo_jax import masks

PAGE_IMAGE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "masks.svg"
#: Keys of the drawn sequence, and how many of them are contextual tokens and targets.
LENGTH, CONTEXTUAL, TARGETS = 16, 3, 4
COLOURS = {"contextual token": "C2", "history": "C0", "target": "C1"}


class Panel(NamedTuple):
    """A mask with its title, and the numbers of its sequence."""

    title: str
    mask: masks.Mask
    contextual: int = 0
    targets: int = 0
    queries: int = LENGTH


def panels() -> list[Panel]:
    """Lists the panels of the picture."""
    targets = np.asarray([TARGETS], np.int32)
    ends = np.asarray([3, 3, 5, 6, 6, 6, 8, 9, 11, 11, 12, 12, 13, 14, 16, 16], np.int32)[:, None]
    with_targets = {"targets": TARGETS}
    return [
        Panel("causal()", masks.causal()),
        Panel("causal(4)", masks.causal(4)),
        Panel("causal(), 6 queries", masks.causal(), queries=6),
        Panel("intervals(begin, end)", masks.intervals(np.maximum(ends - 6, 0), ends)),
        Panel("hstu(num_targets)", masks.hstu(targets), **with_targets),
        Panel(
            f"hstu(…, contextual={CONTEXTUAL})",
            masks.hstu(targets, contextual=CONTEXTUAL),
            CONTEXTUAL,
            TARGETS,
        ),
        Panel(
            "hstu(…, window=3, full_tail=2)",
            masks.hstu(targets, window=3, full_tail=2),
            **with_targets,
        ),
        Panel(
            "hstu(…, target_group_size=2)",
            masks.hstu(targets, target_group_size=2),
            **with_targets,
        ),
        Panel("hstu(…, causal=False)", masks.hstu(targets, causal=False), **with_targets),
    ]


def visible(panel: Panel) -> np.ndarray:
    """Computes which keys the queries of a panel see: [queries, LENGTH] bool."""
    position = np.arange(LENGTH - panel.queries, LENGTH, dtype=np.int32)
    rows = masks.Rows(position, np.full_like(position, LENGTH), np.zeros_like(position))  # type: ignore[arg-type]
    ends, key = np.asarray(panel.mask.intervals(rows)).reshape(-1, 2, 2, 1), np.arange(LENGTH)
    found: np.ndarray = np.any((key >= ends[:, :, 0]) & (key < ends[:, :, 1]), axis=1)
    return found


def draw(path: pathlib.Path) -> None:
    """Writes the picture of all panels to `path`."""
    with plots.saved(path, 5, rows=2, size=(9, 4.1)) as (figure, axes):
        for panel, axis in zip(panels(), axes, strict=False):
            _draw_panel(axis, panel)
        legend = axes[-1]
        legend.axis("off")
        for kind, colour in COLOURS.items():
            legend.bar(0, 0, color=colour, label=kind)
        legend.legend(loc="center", frameon=False, title="a key that the row sees:")
        figure.supxlabel("keys of the sequence", fontsize=8)
        figure.supylabel("queries", fontsize=8)


def _draw_panel(axis: Any, panel: Panel) -> None:
    kind = np.ones(LENGTH, int)
    kind[: panel.contextual], kind[LENGTH - panel.targets :] = 0, 2
    seen, first = visible(panel), LENGTH - panel.queries
    colours = np.asarray([to_rgb(colour) for colour in COLOURS.values()])
    cells = np.where(seen[..., None], colours[kind], 1.0)
    # Pixels of the file are cells: "none" keeps the array as it is.
    axis.imshow(cells, extent=(0, LENGTH, LENGTH, first), interpolation="none")
    lines: Any = {"color": "white", "linewidth": 0.5}
    axis.hlines(range(first + 1, LENGTH), 0, LENGTH, **lines)
    axis.vlines(range(1, LENGTH), first, LENGTH, **lines)
    axis.set(xticks=[], yticks=[])
    axis.set_title(panel.title, fontsize=6, family="monospace")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the picture; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=PAGE_IMAGE)
    draw(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
