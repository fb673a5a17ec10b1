"""Benchmark of training: steps of the ranking network and of a network of generalised attention.

    python -m benchmarks.training --out benchmarks/results/training-h200.json

A step computes the loss, the gradients of all parameters and an update by Adam, with donated
buffers; parameters are float32 and rounded to bfloat16 in every step. The versions of the ranking
network are the versions that `benchmarks.ranking` compares. The first step of every version is
checked: the loss against a float32 oracle, the norm of the gradient against the first version's.
`--profile NAME` prints the time of each kernel in a version's step. Without a GPU all sizes shrink,
and the figures only show that the benchmark runs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import harness, profiles, ranking, training_gdpa, training_task
from benchmarks.records import Record, mib, provider_of, text_table
from ikbo_jax._timing import interleaved_ms
from ikbo_jax.models import ranking as model

#: In this order, since a point takes most of a minute: compiling a version's step, 5 to 25 s.
SWEEPS = ("default", "users", "gdpa", "ratio")
#: Candidates of a user, and queries of a candidate, in "ratio", the most telling first.
RATIOS, QUERIES = (8, 1, 70), (16, 1, 64)
#: Bars: milliseconds of the step at the default point, and speed-ups over XLA by hand and over the
#: copies there; over XLA by hand in "users"; over the better of the other two versions in "gdpa".
MS_BAR, BY_HAND_BAR, COPIES_BAR, USERS_BAR, GDPA_BAR = 13.5, 2.0, 5.0, 1.6, 1.3
#: Largest relative error of the first loss, and largest relative difference of gradient norms.
LOSS_TOLERANCE, NORM_TOLERANCE = 0.01, 0.05


class Version(NamedTuple):
    """One version of a network.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      make: takes a point's sizes; returns a function of parameters and inputs. Raises
        NotImplementedError with the reason if the version cannot run here.
      is_other: whether it is another function, so that its results are not checked.
    """

    name: str
    stage: str
    make: Callable[[Any], training_task.Network]
    is_other: bool = False


def _of_ranking(provider: ranking.Provider) -> Version:
    def make(sizes: model.Sizes) -> training_task.Network:
        return provider.make(ranking.max_candidates_per_user(sizes))

    return Version(provider.name, provider.stage, make)


def _of_gdpa(name: str, stage: str, attentions: Any, *, is_other: bool = False) -> Version:
    def make(sizes: training_gdpa.Sizes) -> training_task.Network:
        return functools.partial(training_gdpa.network, attentions, sizes)

    return Version(name, stage, make, is_other)


OF_RANKING = tuple(map(_of_ranking, reversed(ranking.ALL)))
OURS_GDPA = _of_gdpa("ikbo", "ikbo_jax.gdpa on jagged rows", training_gdpa.ours)
OF_GDPA = (
    _of_gdpa("xla", "products over padded sequences, in XLA", training_gdpa.xla),
    OURS_GDPA,
    _of_gdpa(
        "cudnn-softmax",
        "softmax attention by cuDNN over padded sequences",
        training_gdpa.softmax,
        is_other=True,
    ),
)

NAMES = tuple(version.name for version in (*OF_RANKING, *OF_GDPA))


@dataclasses.dataclass(frozen=True)
class Point:
    """One network: the sweep it belongs to, its label there, and its sizes."""

    sweep: str
    label: str
    sizes: model.Sizes | training_gdpa.Sizes

    @property
    def versions(self) -> Sequence[Version]:
        return OF_GDPA if isinstance(self.sizes, training_gdpa.Sizes) else OF_RANKING

    @property
    def samples(self) -> int:
        """Candidates, or sequences, of a step."""
        sizes = self.sizes
        return sizes.batch if isinstance(sizes, training_gdpa.Sizes) else sizes.candidates


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    default = ranking.DEFAULT

    def at(label: str, candidates: int, users: int, queries: int) -> Point:
        sizes = dataclasses.replace(default, candidates=candidates, users=users, queries=queries)
        return Point(sweep, label, sizes)

    if sweep == "default":
        yield Point(sweep, f"B={default.candidates}", default)
    elif sweep == "users":
        yield at("B=2048 U=256 T=16", 2048, 256, 16)
    elif sweep == "ratio":
        for queries in QUERIES:
            for ratio in RATIOS:
                users = max(1, round(default.candidates / ratio))
                if (users, queries) != (default.users, default.queries):
                    yield at(f"{ratio}:1 T={queries}", default.candidates, users, queries)
    elif sweep == "gdpa":
        for longest in (256, 512):
            yield Point(sweep, f"B=1152 max={longest}", training_gdpa.Sizes(max_length=longest))
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point with sizes small enough for a CPU."""
    if isinstance(point.sizes, training_gdpa.Sizes):
        small: Any = training_gdpa.Sizes(12, 24, 32, 2, 16, 4, 1, "float32")
    else:
        queries = max(1, point.sizes.queries // 16)
        shrunk = ranking.shrink(ranking.Point(point.sweep, point.label, point.sizes)).sizes
        small = dataclasses.replace(shrunk, queries=queries)
    return dataclasses.replace(point, sizes=small)


class Trained(NamedTuple):
    """A version's entry in the results file, its compiled step, and the step to profile."""

    record: dict[str, Any]
    compiled: Any = None
    to_profile: Any = None


def _compile(
    version: Version, sizes: Any, task: training_task.Task, profiled: Sequence[str]
) -> Trained:
    """Compiles a version's step; records a failure instead of raising it."""
    record: dict[str, Any] = {"name": version.name, "stage": version.stage}
    try:
        start = time.monotonic()
        step = training_task.step_of(version.make(sizes), sizes.dtype)
        shapes = jax.eval_shape(training_task.start, task.params)
        # The gradient of attention in `jax.nn`, and optax' count of steps, mix dtypes.
        with jax.numpy_dtype_promotion("standard"):
            lowered = jax.jit(step, donate_argnums=0).lower(shapes, task.inputs, task.labels)
        traced = time.monotonic()
        compiled = to_profile = lowered.compile()
        record |= {"trace_s": traced - start, "compile_s": time.monotonic() - traced}
        if version.name in profiled and jax.default_backend() == "gpu":
            to_profile = lowered.compile(profiles.WITHOUT_GRAPHS)
    except NotImplementedError as unable:
        return Trained(record | {"skipped": str(unable).splitlines()[0]})
    except Exception as error:
        return Trained(record | _failure(error))
    memory = compiled.memory_analysis()
    if memory is not None:
        temp, held = int(memory.temp_size_in_bytes), int(memory.argument_size_in_bytes)
        result = int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes)
        record |= {"temp_bytes": temp, "peak_bytes": temp + held + result}
    return Trained(record, compiled, to_profile)


def _failure(error: Exception) -> dict[str, str]:
    text = f"{type(error).__name__}: {str(error)[:300]}"
    # Running out of memory is a valid result: copies for many candidates may not fit.
    return {"skipped" if "RESOURCE_EXHAUSTED" in text else "failure": text}


def _first_step(trained: Trained, task: training_task.Task) -> Callable[[], Any] | None:
    """Records the first loss and gradient norm; returns a function that runs the next step."""
    state = training_task.start(task.params)
    try:
        state, (loss, norm) = trained.compiled(state, task.inputs, task.labels)
        trained.record.update(loss=float(loss), norm=float(norm))
    except Exception as error:
        trained.record.update(_failure(error))
        return None

    def step() -> Any:
        nonlocal state
        state, out = trained.compiled(state, task.inputs, task.labels)
        return out

    return step


def _check(versions: Sequence[Version], found: Sequence[Trained], task: training_task.Task) -> None:
    """Records the larger error of loss and gradient norm, relative to its bound.

    Norms are compared with the norm of the first version that ran.
    """
    same = [t.record for v, t in zip(versions, found, strict=True) if not v.is_other]
    norms = [record["norm"] for record in same if "norm" in record]
    for version, trained in zip(versions, found, strict=True):
        record = trained.record
        if "loss" not in record:
            continue
        if version.is_other:
            record |= {"error": 0.0, "bound": 1.0, "ok": math.isfinite(record["loss"])}
            record["note"] = "another function: softmax"
            continue
        error = max(
            abs(record["loss"] / task.expected - 1) / LOSS_TOLERANCE,
            abs(record["norm"] / norms[0] - 1) / NORM_TOLERANCE,
        )
        # Written so that NaN is wrong, too.
        record |= {"error": error, "bound": 1.0, "ok": bool(error <= 1.0)}


def _profile(trained: Trained, task: training_task.Task) -> profiles.Shares:
    step = _first_step(trained._replace(record={}, compiled=trained.to_profile), task)
    assert step is not None
    return profiles.shares(step, trained.to_profile.as_text() or "")


def measure_point(
    point: Point,
    versions: Sequence[Version],
    *,
    window_s: float,
    rounds: int,
    profiled: Sequence[str] = (),
) -> dict[str, Any]:
    """Checks the first step of every version, and times further ones interleaved.

    Args:
      point: the network.
      versions: its versions.
      window_s: seconds of a window of steps back to back.
      rounds: number of windows of every version.
      profiled: names of versions to profile, too.
    """
    task = training_task.task_of(point.sizes)
    compile_one = functools.partial(_compile, sizes=point.sizes, task=task, profiled=profiled)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(compile_one, versions))
    firsts = {t.record["name"]: _first_step(t, task) for t in found if t.compiled is not None}
    steps = {name: step for name, step in firsts.items() if step is not None}
    _check(versions, found, task)
    samples = interleaved_ms(steps, window_s=window_s, rounds=rounds)
    for trained in found:
        if (ms := samples.get(trained.record["name"])) is not None:
            median = statistics.median(ms)
            rate = point.samples * 1e3 / median
            trained.record.update(ms=ms, median_ms=median, samples_per_s=rate)
    for trained in found:
        if (name := trained.record["name"]) in steps and name in profiled:
            shares = _profile(trained, task)
            trained.record["ms_by_part"] = shares.by_part
            print(f"{point.sweep} {point.label}, {name}:\n{shares}")
    return {
        "sweep": point.sweep,
        "label": point.label,
        "problem": dataclasses.asdict(point.sizes),
        "samples": point.samples,
        "expected_loss": task.expected,
        "providers": [trained.record for trained in found],
    }


def bars(point: Record, name: str) -> str:
    """Text with the figures of this library's version at a point, each next to its bar."""
    ours = provider_of(point, name)
    is_gdpa = point["sweep"] == "gdpa"
    if ours is None or name != (OURS_GDPA.name if is_gdpa else ranking.OURS.name):
        return ""
    if is_gdpa:
        others = [p["median_ms"] for p in point["providers"] if "median_ms" in p and p != ours]
        faster = min(others, default=math.nan) / ours["median_ms"]
        return f"{faster:.2f} x the better of the others, bar {GDPA_BAR}"
    found = []
    hand, copies = (provider_of(point, p.name) for p in (ranking.BY_HAND, ranking.COPIES))
    if point["sweep"] == "default":
        found.append(f"{ours['median_ms']:.2f} ms, bar {MS_BAR}")
    hand_bar = {"default": BY_HAND_BAR, "users": USERS_BAR}.get(point["sweep"])
    if hand is not None and hand_bar is not None:
        found.append(f"{hand['median_ms'] / ours['median_ms']:.2f} x XLA by hand, bar {hand_bar}")
        share = ours.get("peak_bytes", math.nan) / hand.get("peak_bytes", math.nan)
        found.append(f"{share:.2f} of its memory, bar 1")
    if copies is not None and point["sweep"] == "default":
        faster = copies["median_ms"] / ours["median_ms"]
        found.append(f"{faster:.2f} x the copies, bar {COPIES_BAR}")
    return "; ".join(found)


def format_table(results: Record) -> str:
    """The results as plain text."""

    def figures(p: Record) -> str:
        return f"{p['median_ms']:>9.3f}{p['samples_per_s']:>12.0f}{mib(p, 'peak_bytes', 0):>10}"

    header = f"{'ms':>9}{'samples/s':>12}{'peak MiB':>10}"
    return text_table(results, (28, 20), header, figures, bars)


def run(
    sweeps: Sequence[str],
    *,
    out: pathlib.Path,
    versions: Sequence[str] = NAMES,
    profiled: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Measures sweeps, as `attention.run` does.

    Args (the others are as for `attention.run`):
      sweeps: names from `SWEEPS`.
      versions: names of the versions to measure.
      profiled: names of the versions to profile: the time of each kernel is printed and recorded.
    """
    bench = harness.Run("training", out, **options)
    window_s, rounds = bench.protocol.window_s, bench.protocol.rounds
    del bench.results["protocol"]["matmul_size"]  # This benchmark times no matmul.

    def measure(point: Point) -> dict[str, Any]:
        # Sweeps omit the tuned copies, which take longer to compile than to time.
        chosen = [
            version
            for version in point.versions
            if version.name in versions
            and (point.sweep == "default" or version.name != ranking.TUNED.name)
        ]
        return measure_point(point, chosen, window_s=window_s, rounds=rounds, profiled=profiled)

    def describe(point: Record) -> str:
        times = (f"{p['name']} {p.get('median_ms', math.nan):.3f}" for p in point["providers"])
        return ", ".join(times) + " ms"

    todo = [point for sweep in sweeps for point in points(sweep)]
    return bench.measure(todo, measure, shrink, describe)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a version failed or was wrong."""
    parser = harness.parser("training", SWEEPS)
    for option, default, words in (
        ("--version", NAMES, "versions to measure (default: all)"),
        ("--profile", (), "versions to profile; prints the time of each kernel"),
    ):
        parser.add_argument(
            option, nargs="+", choices=NAMES, metavar="NAME", default=default, help=words
        )
    args = parser.parse_args(argv)
    results = run(args.sweep, versions=args.version, profiled=args.profile, **harness.options(args))
    return harness.print_lines(results, format_table(results))


if __name__ == "__main__":
    sys.exit(main())
