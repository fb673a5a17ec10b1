"""Plots of a run: loss, and metrics on the validation part."""

import pathlib

import numpy as np

from benchmarks import plots
from examples.movielens.evaluate import TOP
from examples.movielens.train import Run

#: Steps of the running mean of the loss.
AVERAGED = 25


def draw_run(run: Run, path: pathlib.Path) -> pathlib.Path:
    """Draws a run's loss and its metrics on the validation part over steps; returns `path`."""
    with plots.saved(path, 2, size=(9, 3.6)) as (_, panels):
        loss, metrics = panels
        width = min(AVERAGED, len(run.loss))
        mean = np.convolve(run.loss, np.full(width, 1 / width), mode="valid")
        loss.plot(range(1, len(run.loss) + 1), run.loss, alpha=0.25, color="C0")
        loss.plot(range(width, len(run.loss) + 1), mean, color="C0")
        loss.set_ylabel(f"log loss, and its mean over {width} steps")
        steps, auc, ndcg = zip(*run.validation, strict=True)
        metrics.plot(steps, auc, marker="o", label="AUC")
        metrics.plot(steps, ndcg, marker="o", label=f"NDCG@{TOP}")
        metrics.set_ylabel("on the validation part")
        metrics.legend()
        for panel in (loss, metrics):
            panel.set_xlabel("steps")
    return path
