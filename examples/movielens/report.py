"""Makes the documentation's tables and plot of a comparison of models, for `benchmarks.report`."""

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import plots
from benchmarks.records import Record, is_on_gpu, mib, points_of
from benchmarks.tables import block, number, versions

#: Models of MovieLens in the order of the table; the plain one is the baseline of speed-ups.
MOVIELENS = (
    ("popularity", "popularity"),
    ("factorisation", "matrix factorisation"),
    ("plain", "ranker, plain: every user copied to its candidates"),
    ("ikbo", "ranker, this library's ops"),
    ("rewrite", "ranker, `ikbo.rewrite` of the plain one"),
)
METRICS = (("auc", "AUC"), ("ndcg", "NDCG@10"))


def blocks(results: Record) -> dict[str, str]:
    """Makes the tables of quality and of a training step."""
    protocol, digits = results["protocol"], 2 if is_on_gpu(results) else 1
    training, requests = protocol["training"], protocol["requests"]
    runs = (
        f"{protocol['seeds']} seeds; {training['steps']} steps of {training['users']} requests; "
        f"{requests[0]:,} requests for training, {requests[2]:,} for the test:\n\n"
    )
    header = ["model"]
    for _, name in METRICS:
        header += [name, f"deviation of {name}", f"difference of {name}"]
    by_name = {record["name"]: record for record in results["quality"]}
    quality = [
        (words, *(cell for metric, _ in METRICS for cell in _quality(by_name[name][metric])))
        for name, words in MOVIELENS
        if name in by_name
    ]
    points = points_of(results, "default")
    steps = [
        (
            *(words, number(record, "median_ms", digits), number(record, "least_ms", digits)),
            *(speedup, mib(record, "peak_bytes", 1)),
        )
        for _, record, words, speedup in versions(points, MOVIELENS[2:], 2)
    ]
    label = points[0]["label"] if points else ""
    name = "movielens-steps-gpu" if is_on_gpu(results) else "movielens-steps"
    of_steps = ("version", "ms", "least ms", "speed-up", "memory, MiB")
    return {
        "movielens-quality": block(results, (header, quality), runs),
        name: block(results, (of_steps, steps), f"A training step, {label}:\n\n"),
    }


def _quality(found: Record) -> tuple[str, ...]:
    """Formats a metric: mean over users, deviation of the seeds, difference to the plain."""

    def interval(values: Sequence[Any], sign: str = "") -> str:
        mean, low, high = (f"{x:{sign}.4f}" for x in values)
        return f"{mean} ({low} to {high})"

    return (
        interval(found["over_users"]),
        number(found, "deviation") if "deviation" in found else "-",
        interval(found["difference"], "+") if "difference" in found else "-",
    )


def draw(results: Record, path: pathlib.Path) -> bool:
    """Plots means of the seeds' losses and AUCs, with their range; returns whether any exist."""
    steps = results["protocol"]["training"]["steps"]
    words = dict(MOVIELENS)
    with plots.saved(path, 2, size=(9, 4)) as (figure, panels):
        losses, metrics = panels
        for name, runs in results["curves"].items():
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
    return bool(results["curves"])


def _band(axis: Any, over: list[float], values: list[list[float]], label: str) -> None:
    columns = list(zip(*values, strict=True))
    mean = [sum(column) / len(column) for column in columns]
    (line,) = axis.plot(over, mean, label=label, linewidth=1)
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axis.fill_between(over, low, high, color=line.get_color(), alpha=0.15)
