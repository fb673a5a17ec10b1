"""Compares this tree's library with an older commit, by turns in one process.

    python -m benchmarks.compare --before COMMIT --out FILE.json --jobs 12

The package of COMMIT is unpacked under another name, so that both versions run in one process, on
the same inputs, at the points of the other benchmarks (`--points`). Each point's results are
compared bit by bit, and the versions are timed by turns. Where the times differ by more than
`SAME`, they are measured again. Short launches are timed on the device.

`--before` may also be a folder that holds `ikbo_jax`, for a machine without the history:

    git archive COMMIT ikbo_jax | tar -x -C FOLDER
"""

import argparse
import dataclasses
import functools
import importlib
import io
import itertools
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ikbo_jax
from benchmarks import attention, children, gdpa, harness, linear_compression, ranking
from benchmarks.harness import Benchmark, Point
from benchmarks.records import Record, listed
from ikbo_jax._timing import device_time
from ikbo_jax.models.ranking import Sizes

#: The older package's name.
BEFORE = f"{ikbo_jax.__name__}_before"
#: Largest change of a time that is no difference, and further measurements of a larger one.
SAME, REPEATS = 0.01, 2


def unpack(before: str, folder: pathlib.Path) -> str:
    """Puts the package of a commit or folder into `folder`, under the name `BEFORE`.

    Returns the commit's hash, or the folder's name; raises ValueError if there is none.
    """
    source = pathlib.Path(before)
    if not (source / ikbo_jax.__name__).is_dir():
        git = ["git", "-C", str(children.ROOT)]
        done = subprocess.run([*git, "archive", before, ikbo_jax.__name__], capture_output=True)
        if done.returncode:
            raise ValueError(f"no commit or folder {before!r}: {done.stderr.decode().strip()}")
        source = folder / "commit"
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(source, filter="data")
        resolved = subprocess.run([*git, "rev-parse", before], capture_output=True, text=True)
        before = resolved.stdout.strip()
    for path in (source / ikbo_jax.__name__).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            if path.suffix == ".py":
                content = re.sub(rf"\b{ikbo_jax.__name__}\b".encode(), BEFORE.encode(), content)
            copy = folder / BEFORE / path.relative_to(source / ikbo_jax.__name__)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
    return before


def older_library(folder: pathlib.Path) -> ModuleType:
    """Imports the older version of the library, which was unpacked into `folder`."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(BEFORE)
    finally:
        sys.path.remove(str(folder))


# What is compared: functions of the library, a case and its inputs.


def _linear_compression(library: ModuleType, case: Any, inputs: Any) -> Any:
    return library.linear_compression(*inputs.arguments)


def _attention(library: ModuleType, case: Any, inputs: Any) -> Any:
    options = {"key_value_seq_lengths": inputs.lengths, "indices_are_sorted": case.is_sorted}
    return library.attention(*inputs[:4], **options)


def _gdpa(library: ModuleType, case: Any, inputs: Any) -> Any:
    implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else None
    options = case.settings.options | {"implementation": implementation}
    return library.gdpa(*inputs[:5], q_to_kv=inputs.q_to_kv, **options)


def _ranking(library: ModuleType, case: Any, inputs: Any, *, is_rewritten: bool = False) -> Any:
    model = importlib.import_module(f"{library.__name__}.models.ranking")
    return (library.rewrite(model.materialised) if is_rewritten else model.co_designed)(*inputs)


class Group(NamedTuple):
    """Points of a benchmark with `options`, and what is compared there.

    `gradients` is the number of inputs whose gradients are compared in place of the result; 0: the
    result is. XLA removes the result of the forward pass.
    """

    run: Callable[[ModuleType, Any, Any], Any]
    benchmark: Benchmark
    options: tuple[str, ...] = ()
    gradients: int = 0

    def points(self) -> Iterable[Point]:
        return self.benchmark.todo(self.benchmark.parse(["--out", os.devnull, *self.options]))

    def program(self, library: ModuleType, case: Any) -> Callable[[Any], list[jax.Array]]:
        """Makes a function of the inputs of `case`.

        Its results are flat: trees of two versions have two versions of this library's classes.
        """

        def run(inputs: Any) -> list[jax.Array]:
            if not self.gradients:
                return jax.tree.leaves(self.run(library, case, inputs))

            def of_some(*some: Any) -> Any:
                rest = inputs[self.gradients :]
                return self.run(library, case, type(inputs)(*some, *rest))

            out, pull = jax.vjp(of_some, *inputs[: self.gradients])
            return jax.tree.leaves(pull(jax.random.normal(jax.random.key(1), out.shape, out.dtype)))

        return run


FORWARD, BACKWARD = ("--direction", "forward"), ("--direction", "backward")
REWRITTEN = functools.partial(_ranking, is_rewritten=True)
#: Groups of points by name.
GROUPS = {
    "linear_compression": Group(_linear_compression, linear_compression.BENCHMARK),
    "attention": Group(_attention, attention.BENCHMARK),
    "gdpa": Group(_gdpa, gdpa.BENCHMARK, FORWARD),
    "gdpa_backward": Group(_gdpa, gdpa.BENCHMARK, BACKWARD, 3),
    "ranking": Group(_ranking, ranking.BENCHMARK),
    "ranking_rewritten": Group(REWRITTEN, ranking.BENCHMARK),
    "linear_compression_gradient": Group(
        _linear_compression, linear_compression.BENCHMARK, BACKWARD, 2
    ),
    "attention_gradient": Group(_attention, attention.BENCHMARK, gradients=3),
}


def group_of(point: Point) -> Group:
    """Finds the group that a point is of."""
    return GROUPS[point.sweep.split()[0]]


def points(options: argparse.Namespace) -> list[Point]:
    """Lists the points of all groups; their names begin with the group's."""
    return [
        dataclasses.replace(point, sweep=f"{name} {point.sweep}")
        for name, group in GROUPS.items()
        for point in group.points()
    ]


def in_turn(points: Sequence[Point]) -> list[Point]:
    """Lets the groups take turns, so that a run that is cut short has points of each.

    Equal sizes of one group occur once.
    """
    groups: dict[str, dict[Any, Point]] = {name: {} for name in GROUPS}
    for point in points:
        groups[point.sweep.split()[0]].setdefault(point.case, point)
    turns = itertools.zip_longest(*(found.values() for found in groups.values()))
    return [point for turn in turns for point in turn if point is not None]


# Measuring


def bits(x: jax.Array) -> jax.Array:
    """Casts numbers to their bits: NaN equals itself then."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x


@jax.jit
def _difference(a: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
    """Finds the elements that differ, the largest difference, and the largest value of `a`."""
    differs = (bits(a) != bits(b)).reshape(-1)
    distance = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).reshape(-1)
    return {
        "count": jnp.sum(differs, dtype=jnp.int32),
        "first": jnp.argmax(differs),
        "largest": jnp.max(jnp.where(differs, distance, jnp.float32(0)), initial=0.0),
        "of": jnp.max(jnp.abs(a.astype(jnp.float32)), initial=0.0),
    }


def differences(before: Sequence[jax.Array], after: Sequence[jax.Array]) -> list[dict[str, Any]]:
    """Lists results that differ; raises ValueError if their shapes do."""
    shapes, now = ([(x.shape, x.dtype.name) for x in results] for results in (before, after))
    if shapes != now:
        raise ValueError(f"the results' shapes differ: {shapes}, now {now}")
    found = [jax.device_get(_difference(a, b)) for a, b in zip(before, after, strict=True)]
    return [
        {"result": n, **{name: x.item() for name, x in d.items()}}
        for n, d in enumerate(found)
        if d["count"]
    ]


def times(contenders: Sequence[harness.Contender], protocol: harness.Protocol) -> dict[str, Any]:
    """Times both versions, again if the medians of all samples differ; adds their ratio."""
    samples: list[list[float]] = [[] for _ in contenders]
    for _ in range(1 + REPEATS):
        measured = harness.measure(contenders, protocol)
        for record, ms in zip(measured["providers"], samples, strict=True):
            ms += record["ms"]
            record |= {"ms": ms, "median_ms": statistics.median(ms)}
        before, after = map(statistics.median, samples)
        if abs(after / before - 1) <= SAME:
            break
    return {**measured, "ratio": after / before}


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Compares the results of both versions bit by bit, and times the versions by turns."""
    group, case = group_of(point), point.case
    # The case of the op itself, whose inputs are the op's.
    case = case.case if isinstance(case, gdpa.Sizes) else getattr(case, "forward", case)
    inputs = ranking.inputs_of(case) if isinstance(case, Sizes) else case.inputs()
    contenders, results = [], []
    for name, library in (("before", older_library(run.options.unpacked)), ("after", ikbo_jax)):
        compiled, _ = harness.compiled_of(jax.jit(group.program(library, case)), inputs)
        results.append(compiled(inputs))
        record = {"name": name, "stage": "", "error": 0.0, "bound": 1.0, "ok": True}
        thunk = functools.partial(compiled, inputs)
        contenders.append(harness.Contender(record, thunk, compiled, (inputs,)))
    found = {"differences": differences(*results)}
    del results
    protocol = dataclasses.replace(run.protocol, short_ms=device_time.SHORT_MS)
    return {**found, **(times(contenders, protocol) if protocol.rounds else {})}


def bars(point: Record, points: Sequence[Record], name: str) -> str:
    """Formats the ratio of the times, and where and by how much results differ."""
    if name != "after":
        return ""
    equality = "; ".join(
        f"result {d['result']}: {d['count']} elements from {d['first']} on, "
        f"by up to {d['largest']:.2g} of {d['of']:.2g}"
        for d in point["differences"]
    )
    slower = "SLOWER" if point["ratio"] > 1 + SAME else ""
    return listed(equality or "equal", slower)


def _add_options(parser: argparse.ArgumentParser) -> None:
    words = "a commit, or a folder that holds ikbo_jax"
    parser.add_argument("--before", required=True, help=words)
    parser.add_argument("--unpacked", type=pathlib.Path, help=argparse.SUPPRESS)


BENCHMARK = Benchmark(
    "compare",
    points,
    measure_point,
    bars,
    _add_options,
    lambda run: run.results.update(before=run.options.before),
    shrink=lambda point: group_of(point).benchmark.shrink(point),
    arrange=in_turn,
    times_matmul=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a point failed or was left out."""
    options = BENCHMARK.parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.unpacked is None:  # Other processes of this run get the folder.
            try:
                options.before = unpack(options.before, pathlib.Path(folder))
            except ValueError as error:
                print(error, file=sys.stderr)
                return 2
            options.argv += ["--before", options.before, "--unpacked", folder]
        return BENCHMARK.main(options.argv)


if __name__ == "__main__":
    sys.exit(main())
