"""Makes the tables and the plot of `docs/training.md`, from `examples.movielens`; see `report`."""

from __future__ import annotations

import pathlib
from collections.abc import Container
from typing import Any

from benchmarks import plots
from benchmarks.records import Record, is_on_gpu, mib, points_of, provider_of
from benchmarks.tables import Block, Plot, Table, number

IMAGE = "docs/images/movielens.svg"
#: Models in the order of the table: name, description.
MODELS = (
    ("popularity", "popularity"),
    ("factorisation", "matrix factorisation"),
    ("plain", "ranker, plain: every user copied to its candidates"),
    ("ikbo", "ranker, this library's ops"),
    ("rewrite", "ranker, `ikbo.rewrite` of the plain one"),
)
#: The version that the others are compared with.
BASELINE = "plain"
METRICS = (("auc", "AUC"), ("ndcg", "NDCG@10"))


def _interval(values: list[float], digits: int = 4, sign: str = "") -> str:
    mean, low, high = (f"{x:{sign}.{digits}f}" for x in values)
    return f"{mean} ({low} to {high})"


def quality(results: Record) -> Table:
    """Header and rows of the table of metrics."""
    header = ["model"]
    for _, name in METRICS:
        header += [name, f"deviation of {name}", f"difference of {name}"]
    rows = []
    for name, words in MODELS:
        record = next((r for r in results["quality"] if r["name"] == name), None)
        if record is None:
            continue
        row = [words]
        for metric, _ in METRICS:
            found = record[metric]
            row += [
                _interval(found["over_users"]),
                number(found, "deviation") if "deviation" in found else "-",
                _interval(found["difference"], sign="+") if "difference" in found else "-",
            ]
        rows.append(tuple(row))
    return tuple(header), rows


def steps(results: Record) -> Table:
    """Header and rows of the table of a training step's time and memory."""
    rows: list[tuple[str, ...]] = []
    for point in points_of(results, "default"):
        base = provider_of(point, BASELINE)
        for name, words in MODELS:
            record = provider_of(point, name)
            if record is None or base is None:
                continue
            rows.append(
                (
                    words,
                    number(record, "median_ms", 2 if is_on_gpu(results) else 1),
                    number(record, "least_ms", 2 if is_on_gpu(results) else 1),
                    f"{base['median_ms'] / record['median_ms']:.2f}×",
                    mib(record, "peak_bytes", 1),
                )
            )
    return ("version", "ms", "least ms", "speed-up", "memory, MiB"), rows


def blocks(results: Record) -> list[Block]:
    """The tables of quality and of a training step."""
    protocol = results["protocol"]
    training, requests = protocol["training"], protocol["requests"]
    runs = (
        f"{protocol['seeds']} seeds; {training['steps']} steps of {training['users']} requests; "
        f"{requests[0]:,} requests for training, {requests[2]:,} for the test:\n\n"
    )
    point = next(iter(points_of(results, "default")), {"label": ""})
    name = "movielens-steps-gpu" if is_on_gpu(results) else "movielens-steps"
    return [
        ("movielens-quality", runs, quality(results)),
        (name, f"A training step, {point['label']}:\n\n", steps(results)),
    ]


def plots_of(results: Record) -> list[Plot]:
    """The plot of loss and validation over steps."""
    del results
    return [("movielens-quality", IMAGE, "loss and AUC over steps")]


def draw(
    results: Record, root: pathlib.Path, images: Container[str] | None = None
) -> list[pathlib.Path]:
    """Plots the mean of the seeds' losses and AUCs, with the range of the seeds."""
    if (images is not None and IMAGE not in images) or not results["curves"]:
        return []
    path, every = root / IMAGE, results["curves"]
    steps = results["protocol"]["training"]["steps"]
    with plots.saved(path, 2, size=(9, 4)) as (figure, panels):
        losses, metrics = panels
        words = dict(MODELS)
        for name, runs in every.items():
            loss = [run["loss"] for run in runs]
            over = [steps * (i + 1) / len(loss[0]) for i in range(len(loss[0]))]
            _band(losses, over, loss, words[name])
            points = [run["validation"] for run in runs]
            over = [point[0] for point in points[0]]
            _band(metrics, over, [[p[1] for p in run] for run in points], words[name])
        losses.set_ylabel(f"log loss, mean over {steps // len(loss[0])} steps")
        metrics.set_ylabel("AUC on part of the validation requests")
        for panel in (losses, metrics):
            panel.set_xlabel("steps")
        plots.legend_below(figure, losses, 1)
        figure.suptitle("MovieLens-100k: mean of the seeds, and their range")
    return [path]


def _band(axis: Any, over: list[float], values: list[list[float]], label: str) -> None:
    columns = list(zip(*values, strict=True))
    mean = [sum(column) / len(column) for column in columns]
    (line,) = axis.plot(over, mean, label=label, linewidth=1)
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axis.fill_between(over, low, high, color=line.get_color(), alpha=0.15)
