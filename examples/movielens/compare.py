"""Compares the versions of the ranker: quality over seeds, time of a step, memory."""

import concurrent.futures
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from examples.movielens import baselines, evaluate, train
from examples.movielens.impressions import IMPRESSIONS, TRAIN, VALIDATION, WATCHED, Impressions
from examples.movielens.model import Sizes
from examples.movielens.progress import Progress
from ikbo_jax._timing import interleaved_ms

#: The version that the others are compared with.
BASELINE = "plain"
#: Points of a curve of the loss; each is the mean over as many steps.
POINTS = 44


def compare(
    data: Impressions,
    sizes: Sizes,
    protocol: train.Protocol,
    *,
    seeds: int,
    folder: pathlib.Path,
    factorisation: baselines.Factorisation,
    progress: Progress,
    window_s: float = 2.0,
    rounds: int = 5,
) -> dict[str, Any]:
    """Trains every version with every seed, times their steps, and trains what they compare with.

    Runs are kept in `folder`, so that an interrupted comparison goes on where it was. With no
    seeds, steps are timed and nothing is trained.

    Returns:
      The content of a results file.
    """
    results: dict[str, Any] = {
        "op": "movielens",
        "environment": timing.environment(),
        "protocol": {
            "rounds": rounds,
            "window_s": window_s,
            "seeds": seeds,
            "sizes": dataclasses.asdict(sizes),
            "training": dataclasses.asdict(protocol),
            "factorisation": dataclasses.asdict(factorisation),
            "impressions": IMPRESSIONS,
            "watched": WATCHED,
            "parts": [TRAIN, VALIDATION],
            "requests": [len(part.user) for part in (data.train, data.validation, data.test)],
        },
    }
    trainers = {name: train.Trainer(name, sizes, data, protocol) for name in train.VERSIONS}
    progress.note("timing the steps of all versions by turns")
    results["points"] = [measure(trainers, window_s=window_s, rounds=rounds)]
    results |= {"quality": [], "curves": {}}
    if not seeds:
        return results
    found = {"popularity": [baselines.popularity(data)]}
    curves = {}
    progress.note("training the matrix factorisations")
    found["factorisation"] = [
        factorisation.evaluate(data, factorisation.train(data, seed), data.test)
        for seed in range(seeds)
    ]
    for name, trainer in trainers.items():
        runs = [trainer.run(seed, folder / f"{name}-{seed}", progress) for seed in range(seeds)]
        found[name] = [run.test for run in runs]
        curves[name] = [_curve(run) for run in runs]
    results["quality"] = [_quality(name, found) for name in found]
    results["curves"] = curves
    return results


def measure(trainers: dict[str, train.Trainer], *, window_s: float, rounds: int) -> dict[str, Any]:
    """Times a step of every version by turns, on one batch.

    Returns:
      A point of a results file. A version's "peak_bytes" are what the compiled program needs, with
      arguments and results.
    """
    first = next(iter(trainers.values()))
    batch = first.data.train_batch(first.protocol.users, 0, 0)
    steps: dict[str, Callable[[], Any]] = {}
    providers = []
    lowered = [trainer.lower_step(batch) for trainer in trainers.values()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda step: step.compile(), lowered))
    for (name, trainer), compiled in zip(trainers.items(), programs, strict=True):
        memory = compiled.memory_analysis()
        record: dict[str, Any] = {"name": name, "stage": train.VERSIONS[name]}
        if memory is not None:
            temp, held = int(memory.temp_size_in_bytes), int(memory.argument_size_in_bytes)
            result = int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes)
            record |= {"temp_bytes": temp, "peak_bytes": temp + held + result}
        providers.append(record)
        steps[name] = _stepping(compiled, trainer, jax.device_put(batch))
    samples = interleaved_ms(steps, window_s=window_s, rounds=rounds)
    for record in providers:
        ms = samples[record["name"]]
        record |= {"ms": ms, "median_ms": statistics.median(ms), "least_ms": min(ms)}
    label = f"B={len(batch.label)} U={len(batch.user)}"
    return {"sweep": "default", "label": label, "providers": providers}


def _stepping(compiled: Any, trainer: train.Trainer, batch: Any) -> Callable[[], Any]:
    state = train.start(trainer.network, trainer.protocol, 0)

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    return step


def _quality(name: str, found: dict[str, list[evaluate.Metrics]]) -> dict[str, Any]:
    """Metrics by seed, intervals over users and seeds, and the difference from the baseline."""
    record: dict[str, Any] = {"name": name}
    for metric in ("auc", "ndcg"):
        by_seed = _by_seed(found[name], metric)
        every = np.mean([getattr(run, metric) for run in found[name]], axis=0)
        record[metric] = {
            "by_seed": by_seed,
            "over_users": list(evaluate.over_users(every, found[name][0].user)),
        }
        if len(by_seed) > 1:
            record[metric]["deviation"] = float(np.std(by_seed, ddof=1))
            if name in train.VERSIONS and name != BASELINE:
                # By seed: the same initial parameters and the same batches.
                pairs = zip(by_seed, _by_seed(found[BASELINE], metric), strict=True)
                differences = [ours - plain for ours, plain in pairs]
                record[metric]["difference"] = list(evaluate.over_seeds(differences))
    return record


def _by_seed(runs: Sequence[evaluate.Metrics], metric: str) -> list[float]:
    return [float(getattr(run, metric).mean()) for run in runs]


def _curve(run: train.Run) -> dict[str, Any]:
    """The run's loss, averaged over equal parts, and its validation metrics."""
    parts = np.array_split(run.loss, min(POINTS, len(run.loss)))
    return {"loss": [round(float(x.mean()), 5) for x in parts], "validation": run.validation}
