"""The runner of every benchmark: its points, the check and timing of providers, its command line.

A results file is {"op", "environment", "protocol", "points", "left_out", ...}; "left_out" names
points for which no time was left, "failed" points that raised. A point has a list
"providers", each with "name" and "stage", and either error and times, or "skipped" or "failure"
with the reason. A "note" is printed next to the provider in tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax

from benchmarks import children, timing
from benchmarks.records import OUR_NAME, Bars, Record, format_point, wrong
from ikbo_jax._timing import device_time, interleaved_ms
from ikbo_jax.cases.error_rule import Check

#: Seconds of a window of a short point's calls, see `Protocol.short_ms`.
SHORT_WINDOW_S = 0.02
#: FLOPs of attention by direction, relative to the forward pass: gradients take five products for
#: the forward pass' two.
ATTENTION_WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}


@dataclasses.dataclass(frozen=True)
class Point:
    """One case of a sweep: its label, its sizes, and the direction that is timed."""

    sweep: str
    label: str
    case: Any
    direction: str = "forward"

    @property
    def problem(self) -> Any:
        return self.case.problem

    @property
    def name(self) -> str:
        return f"{self.sweep} {self.label}"

    def entry(self) -> dict[str, Any]:
        head = {"sweep": self.sweep, "label": self.label, "direction": self.direction}
        if not dataclasses.is_dataclass(self.case):
            return head
        case = dataclasses.asdict(self.case)  # type: ignore[arg-type]
        return head | (case if "problem" in case else {"problem": case})


#: Largest sizes on a CPU, by the names of fields; of tuples by their elements.
COUNTS: dict[str, Any] = {"batch": 12, "users": 5, "candidates": 3, "targets": 2, "layers": 1}
LENGTHS = {"q_len": 16, "kv_len": 16, "longest": 16, "shortest": 3, "history": (3, 9)}
WIDTHS = {"width": 16, "row_bytes": 32, "head_dim": 8, "heads": 2, "q_heads": 4, "kv_heads": 2}
OF_COMPRESSION = {"batches": (6, 24), "ks": (11, 10), "m": 9, "n": 8}
SMALL = COUNTS | LENGTHS | WIDTHS | OF_COMPRESSION


def shrink(point: Point) -> Point:
    """Makes the point's sizes small enough for a CPU."""
    return dataclasses.replace(point, case=_small(point.case))


def _small(case: Any) -> Any:
    def least(value: Any, most: Any) -> Any:
        return tuple(map(min, value, most)) if isinstance(value, tuple) else min(value, most)

    names = {field.name for field in dataclasses.fields(case)}
    sizes = {name: least(getattr(case, name), SMALL[name]) for name in names & SMALL.keys()}
    problem = {"problem": _small(case.problem)} if "problem" in names else {}
    return dataclasses.replace(case, **sizes, **problem)


@dataclasses.dataclass
class Contender:
    """A compiled provider and its entry in the results file, which has "error" if it ran."""

    record: dict[str, Any]
    thunk: timing.Thunk = lambda: None
    compiled: Any = None
    args: tuple = ()


def why_not_run(name: str, failure: Exception) -> dict[str, str]:
    """Makes the field "failure" of a provider that raised, or "skipped" if it cannot run here.

    The arrays of alternatives to this library may not fit into memory.
    """
    if isinstance(failure, NotImplementedError):
        return {"skipped": str(failure).splitlines()[0]}
    text = f"{type(failure).__name__}: {failure!s:.300}"
    is_large = "RESOURCE_EXHAUSTED" in text and not name.startswith(OUR_NAME)
    return {"skipped" if is_large else "failure": text}


def compiled_of(
    fn: Any, *args: Any, options: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Compiles a function of `jax.jit`; returns the program, and figures.

    The figures are seconds, and bytes of the program's scratch and of all its arrays.
    """
    start = time.monotonic()
    lowered = fn.lower(*args)
    traced = time.monotonic()
    compiled = lowered.compile(None if options is None else dict(options))
    seconds = {"trace_s": traced - start, "compile_s": time.monotonic() - traced}
    if (memory := compiled.memory_analysis()) is None:  # Some backends cannot tell.
        return compiled, seconds
    temp, held = int(memory.temp_size_in_bytes), int(memory.argument_size_in_bytes)
    result = int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes)
    return compiled, seconds | {"temp_bytes": temp, "total_bytes": temp + held + result}


def compile_and_check(
    name: str,
    stage: str,
    prepare: Callable[[], tuple[Callable[..., Any], tuple]],
    compare: Callable[[Any], Check],
    options: Mapping[str, Any] | None = None,
    why_not: Callable[[str, Exception], dict[str, str]] = why_not_run,
) -> Contender:
    """Compiles a provider and checks its result; a failure is recorded, not raised.

    `prepare` returns a function and its arguments, `compare` checks the function's result, and
    `why_not` makes the fields of a provider that raised; `options` are XLA's.
    """
    record: dict[str, Any] = {"name": name, "stage": stage}
    try:
        fn, args = prepare()
        compiled, figures = compiled_of(jax.jit(fn), *args, options=options)
        check = compare(compiled(*args))
    except Exception as failure:
        return Contender(record | why_not(name, failure))
    record |= {**figures, **check._asdict(), "ok": check.ok}
    return Contender(record, functools.partial(compiled, *args), compiled, args)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Parameters of the timing.

    Attributes:
      window_s: seconds of a window of launches back to back.
      rounds: number of windows of every provider; 0 to compile and check alone.
      matmul_size: size of the square bf16 reference matmul; 0 if none is timed.
      short_ms: a point whose fastest contender takes less time on the device is timed there, since
        Python launches no faster, and its calls in windows of `SHORT_WINDOW_S`. All contenders of a
        point are timed in the same way. 0: no point is.
    """

    window_s: float = 0.2
    rounds: int = 3
    matmul_size: int = timing.MATMUL_SIZE
    short_ms: float = 0.0

    @classmethod
    def for_device(cls, *, quick: bool) -> Self:
        """Makes the standard protocol; with `quick` short windows, on a CPU a small matmul."""
        size = timing.MATMUL_SIZE if jax.default_backend() == "gpu" else 256
        return cls(0.02, 1, size) if quick else cls(0.2, 3, size)


def measure(
    contenders: Sequence[Contender], protocol: Protocol, flops: float = 0.0
) -> dict[str, Any]:
    """Times contenders that ran and the reference matmul interleaved; adds times to their records.

    Returns fields of the point in the results file; `flops` are the point's useful FLOPs.
    """
    found: dict[str, Any] = {"providers": [contender.record for contender in contenders]}
    if not protocol.rounds:
        return found
    size = protocol.matmul_size
    runnable = {c.record["name"]: c for c in contenders if "error" in c.record}
    on_device: dict[str, device_time.DeviceTime] = {}
    if protocol.short_ms:
        programs = {name: (c.compiled, c.args) for name, c in runnable.items()}
        on_device = device_time.measure_all(programs)
    is_short = any(found.ms < protocol.short_ms for found in on_device.values())
    window_s = min(protocol.window_s, SHORT_WINDOW_S) if is_short else protocol.window_s
    thunks = {"matmul": timing.matmul_thunk(size)} if size else {}
    thunks |= {name: contender.thunk for name, contender in runnable.items()}
    samples = interleaved_ms(thunks, window_s=window_s, rounds=protocol.rounds)
    for name, contender in runnable.items():
        ms = samples[name]
        if name in on_device:
            contender.record["kernel_ms"] = statistics.median(on_device[name].kernel_ms)
            contender.record["device_ms"] = on_device[name].ms
        if is_short:
            contender.record["call_ms"] = statistics.median(ms)
            ms = on_device[name].busy_ms
        contender.record |= {"ms": ms, "median_ms": statistics.median(ms)}
    if not size:
        return found
    matmul_tflops = timing.matmul_tflops(statistics.median(samples["matmul"]), size)
    for contender in runnable.values():
        rate = timing.tflops(flops, contender.record["median_ms"])
        contender.record |= {"tflops": rate, "fraction": rate / matmul_tflops}
    of_matmul = {"matmul_ms": samples["matmul"], "matmul_tflops": matmul_tflops}
    return {"useful_flops": flops, **of_matmul, **found}


class Run:
    """One run of a benchmark. It does not use the device before its protocol or results are read.

    `options` are those of `Benchmark.parse`; `prepared` is what `Benchmark.prepare` returned.
    """

    def __init__(self, benchmark: Benchmark, options: argparse.Namespace) -> None:
        self.benchmark, self.options = benchmark, options
        self.start = time.monotonic()
        self.prepared: Any = None

    @functools.cached_property
    def protocol(self) -> Protocol:
        found = Protocol.for_device(quick=self.options.quick)
        rounds = 0 if self.options.shared else found.rounds
        size = found.matmul_size if self.benchmark.times_matmul else 0
        return dataclasses.replace(found, rounds=rounds, matmul_size=size)

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """Content of the results file."""
        names = ("window_s", "rounds", "matmul_size")[: 3 if self.benchmark.times_matmul else 2]
        lengths = {name: getattr(self.protocol, name) for name in names}
        head = {"op": self.benchmark.name, "environment": timing.environment()}
        return {**head, "protocol": lengths, "points": [], "left_out": []}

    @property
    def left_s(self) -> float:
        return float(self.options.budget_s) - (time.monotonic() - self.start)

    def measure_all(self) -> dict[str, Any]:
        """Measures points, prints progress, and writes the results file after every point."""
        todo = self.benchmark.todo(self.options)
        # A path that cannot be written raises before anything is measured.
        timing.make_folder_of(self.options.out)
        with children.programs(self.benchmark.name, self.options):
            if self.options.shared is not None:
                self._compile(todo)
                return self.results
            self.prepared = self.benchmark.prepare(self)
            for number, point in enumerate(todo, start=1):
                if self.left_s < 0:
                    self.results["left_out"].append(point.name)
                    continue
                self._measure_or_note(point)
                seconds = time.monotonic() - self.start
                print(f"[{number}/{len(todo)}] {seconds:.0f} s: {point.name}", flush=True)
                timing.write_results(self.options.out, self.results)
        timing.write_results(self.options.out, self.results)
        return self.results

    def _compile(self, todo: Sequence[Point]) -> None:
        """Compiles the points that no other process has claimed, in a part of the budget."""
        until = time.time() + children.COMPILING * self.left_s
        for n in children.claims(self.options.shared, len(todo), until):
            begin = time.monotonic()
            # A point that raises is left to the process that times, which reports it.
            with contextlib.suppress(Exception):
                self._measure(todo[n])
            print(f"compiled in {time.monotonic() - begin:.0f} s: {todo[n].name}", flush=True)

    def _measure(self, point: Point) -> dict[str, Any]:
        # Shrinking asks for the device, which this process may use only now.
        small = point if jax.default_backend() == "gpu" else self.benchmark.shrink(point)
        return {**small.entry(), **self.benchmark.measure(small, self)}

    def _measure_or_note(self, point: Point) -> None:
        """Measures a point and prints its figures, or notes that it failed."""
        try:
            measured = self._measure(point)
        except Exception as error:
            # A point costs minutes of compilation: the points after it are measured, too.
            traceback.print_exc()
            text = f"{point.name}: {type(error).__name__}: {str(error)[:300]}"
            self.results.setdefault("failed", []).append(text)
            return
        self.results["points"].append(measured)
        print(format_point(measured, self.benchmark.bars, self.results["points"]))


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What a benchmark measures and how it prints its results.

    `name` is the name of its module, and of the op in results files. `points` is the table of all
    points, or draws the points of a command line, which then has `sweeps`; `directions` are timed
    by default, all without any. `measure` checks and times a point, and returns its figures; `bars`
    formats what else a provider's times say, beside the bars. `prepare` is called before the first
    point is measured. `shrink` makes a point's sizes small enough for a CPU. `summary` formats what
    is said of all results, and `arrange` puts the points of a run into their order.
    """

    name: str
    points: Sequence[Point] | Callable[[argparse.Namespace], Iterable[Point]]
    measure: Callable[[Point, Run], dict[str, Any]]
    bars: Bars = lambda point, points, name: ""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    prepare: Callable[[Run], Any] = lambda run: None
    sweeps: Sequence[str] = ()
    directions: Sequence[str] = ()
    shrink: Callable[[Point], Point] = shrink
    summary: Callable[[Record], str] = lambda results: ""
    arrange: Callable[[list[Point]], list[Point]] = lambda points: points
    times_matmul: bool = True

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses a command line (None: this process's), which is also in the field "argv"."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}")
        parser.add_argument("--out", type=pathlib.Path, required=True, help="results file (JSON)")
        table = () if callable(self.points) else self.points
        if sweeps := [*dict.fromkeys(point.sweep for point in table)] or self.sweeps:
            about: Any = {"choices": sweeps, "default": sweeps}
            about["help"] = "sweeps to measure (default: all)"
            parser.add_argument("--sweep", nargs="+", **about)
        if len(known := [*dict.fromkeys(point.direction for point in table)]) > 1:
            about = {"choices": known, "default": self.directions or known}
            about["help"] = "the result, the gradients for a fixed cotangent, or both"
            parser.add_argument("--direction", nargs="+", **about)
        words = 'only points whose names begin so, such as "s S=512", or match, such as "* 1:1"'
        parser.add_argument("--points", nargs="+", default=(), metavar="NAME", help=words)
        parser.add_argument("--quick", action="store_true", help="short windows, three providers")
        words = "seconds after which no further point is started"
        parser.add_argument("--budget-s", type=float, default=float("inf"), help=words)
        children.add_options(parser)
        self.add_options(parser)
        given = sys.argv[1:] if argv is None else list(argv)
        return argparse.Namespace(**vars(parser.parse_args(given)), argv=given)

    def todo(self, options: argparse.Namespace) -> list[Point]:
        """Lists the points of a run; raises ValueError if the options name others."""
        if callable(self.points):
            points = [*self.points(options)]
        else:
            directions = getattr(options, "direction", [p.direction for p in self.points[:1]])
            wanted = set(itertools.product(options.sweep, directions))
            points = [p for p in self.points if (p.sweep, p.direction) in wanted]
        return self.arrange(named(points, options.points))

    def run(self, options: argparse.Namespace) -> dict[str, Any]:
        return Run(self, options).measure_all()

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs a command line; returns 1 if a provider failed or was wrong, or points are missing.

        Returns 2 if the command line names points that there are not.
        """
        options = self.parse(argv)
        try:
            results = self.run(options)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print_results(results, self.summary(results))
        return 1 if wrong(results) or results["left_out"] else 0


def named(points: Iterable[Point], names: Sequence[str]) -> list[Point]:
    """Selects the points that match a name, or all without names.

    A name is a pattern of the first words of points' names. Raises ValueError if it matches none.
    """
    every, found = list(points), dict[Point, None]()
    for name in names:
        of_name = [p for p in every if fnmatch.fnmatchcase(f"{p.name} ", f"{name} *")]
        if not of_name:
            raise ValueError(f"no point {name!r}")
        found |= dict.fromkeys(of_name)
    return list(found) if names else every


def print_results(results: Record, summary: str = "") -> None:
    """Prints the environment, what is said of all results, and what was not measured."""
    env = results["environment"]
    print(f"{env['device']}, driver {env['driver']}, jax {env['jax']}, commit {env['commit']}")
    matmuls = [p["matmul_tflops"] for p in results["points"] if "matmul_tflops" in p]
    if matmuls:
        copy = results.get("copy")
        ceiling = "" if copy is None else f", copy {copy['tb_per_s']:.2f} TB/s"
        print(f"matmul {statistics.median(matmuls):.1f} TFLOP/s{ceiling}")
    if summary:
        print(summary)
    for name in results["left_out"]:
        print(f"left out: {name}")
    for name in wrong(results):
        print(f"FAILED: {name}")
