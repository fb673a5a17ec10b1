"""Shared by the benchmarks: checks of providers, timing of a point, results files, options.

A results file is {"op", "environment", "protocol", "points", "left_out", ...}; "left_out" names
points for which no time was left, "failed" points that raised. A point has a list
"providers", each with "name" and "stage", and either error and times, or "skipped" or "failure"
with the reason. A "note" is printed next to the provider in tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import compiling, timing
from benchmarks.records import OUR_NAME, Record, all_correct, format_table
from ikbo_jax._timing import device_time, interleaved_ms
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.tuning import table

#: Seconds of a window of a short point's calls, see `Protocol.short_ms`.
SHORT_WINDOW_S = 0.02
#: FLOPs of attention by direction, relative to the forward pass: gradients take five products for
#: the forward pass' two.
ATTENTION_WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}


@dataclasses.dataclass(frozen=True)
class Point:
    """One case.

    Attributes:
      sweep: name of a sweep.
      label: name of the point in its sweep.
      case: the sizes, and how the inputs are drawn.
    """

    sweep: str
    label: str
    case: Any

    @property
    def problem(self) -> Any:
        return self.case.problem

    def resized(self, **sizes: Any) -> Point:
        """The point with other sizes."""
        case = dataclasses.replace(self.case, problem=dataclasses.replace(self.problem, **sizes))
        return dataclasses.replace(self, case=case)

    def entry(self) -> dict[str, Any]:
        """Its entry in a results file, with the choice of the dispatch table, without figures."""
        choice = table.lookup(self.problem)
        config = None if choice.config is None else dataclasses.asdict(choice.config)
        return {
            "sweep": self.sweep,
            "label": self.label,
            **dataclasses.asdict(self.case),
            "table": {"config": config, "note": choice.reason},
        }


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      prepare: takes the case and its inputs; returns a function and its arguments, before the
        timing. Raises NotImplementedError with the reason if the provider cannot run here.
      finish: converts the function's result to the shape of the op's result, after the timing.
    """

    name: str
    stage: str
    prepare: Callable[[Any, Any], tuple[Callable[..., jax.Array], tuple]]
    finish: Callable[[jax.Array, Any], jax.Array] = lambda out, inputs: out

    @classmethod
    def of_case(cls, name: str, stage: str, *contender: Any) -> Provider:
        """A contender of the case; `contender` are the arguments of `Case.contender`."""
        return cls(name, stage, lambda case, inputs: (case.contender(*contender), inputs))


@dataclasses.dataclass
class Contender:
    """A compiled provider and its entry in the results file, which has "error" if it ran."""

    record: dict[str, Any]
    thunk: timing.Thunk = lambda: None
    compiled: Any = None
    args: tuple = ()


def sample(batch: int, number: int) -> list[int]:
    """At most `number` positions in [0, batch), sorted: the first, the last and random ones."""
    return sorted({0, batch - 1, *np.random.default_rng(0).integers(0, batch, number - 2).tolist()})


def contenders_of(
    providers: Sequence[Provider],
    case: Any,
    inputs: Any,
    rows: Sequence[int],
    exact: np.ndarray,
    bound: float,
) -> list[Contender]:
    """Compiles providers and compares `rows` of their results with the expected values `exact`."""

    def compiled(provider: Provider) -> Contender:
        def compare(result: Any) -> Check:
            out = provider.finish(result, inputs)
            found = np.stack([np.asarray(out[b]) for b in rows]).astype(np.float64)
            return Check(float(np.abs(found - exact).max()), bound)

        name, stage = provider.name, provider.stage
        return compile_and_check(name, stage, lambda: provider.prepare(case, inputs), compare)

    return list(map(compiled, providers))


def compile_and_check(
    name: str,
    stage: str,
    prepare: Callable[[], tuple[Callable[..., Any], tuple]],
    compare: Callable[[Any], Check],
) -> Contender:
    """Compiles a provider and checks its result; a failure is recorded, not raised.

    Args:
      name: the provider's name.
      stage: the provider's description.
      prepare: returns a function and its arguments on the device.
      compare: checks the function's result.
    """
    record: dict[str, Any] = {"name": name, "stage": stage}
    try:
        fn, args = prepare()
        compiled = jax.jit(fn).lower(*args).compile()
        check = compare(compiled(*args))
    except NotImplementedError as unable:
        return Contender(record | {"skipped": str(unable).splitlines()[0]})
    except Exception as failure:
        return Contender(record | {"failure": f"{type(failure).__name__}: {str(failure)[:300]}"})
    memory = compiled.memory_analysis()
    record |= {
        "temp_bytes": None if memory is None else int(memory.temp_size_in_bytes),
        **check._asdict(),
        "ok": check.ok,
    }
    return Contender(record, lambda: compiled(*args), compiled, args)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Parameters of the timing.

    Attributes:
      window_s: seconds of a window of launches back to back.
      rounds: number of windows of every provider; 0 to compile and check alone.
      matmul_size: size of the square bf16 reference matmul.
      cupti: whether to time every contender on the device, too.
      short_ms: a point whose fastest contender takes less time on the device is timed there, since
        Python launches no faster, and its calls in windows of `SHORT_WINDOW_S`. All contenders of a
        point are timed in the same way. 0: no point is.
    """

    window_s: float = 0.2
    rounds: int = 3
    matmul_size: int = timing.MATMUL_SIZE
    cupti: bool = False
    short_ms: float = 0.0

    @staticmethod
    def for_device(*, quick: bool, cupti: bool = False) -> Protocol:
        """The standard protocol; with `quick` short windows, on a CPU a small matmul."""
        size = timing.MATMUL_SIZE if jax.default_backend() == "gpu" else 256
        return Protocol(0.02, 1, size, cupti) if quick else Protocol(0.2, 3, size, cupti)


def measure(contenders: Sequence[Contender], flops: float, protocol: Protocol) -> dict[str, Any]:
    """Times contenders and the reference matmul interleaved; adds the times to their records.

    Args:
      contenders: contenders that did not run are not changed.
      flops: useful FLOPs of the point.
      protocol: parameters of the timing.

    Returns:
      Fields of the point in the results file.
    """
    if not protocol.rounds:
        return {"providers": [contender.record for contender in contenders]}
    size = protocol.matmul_size
    runnable = {c.record["name"]: c for c in contenders if "error" in c.record}
    on_device: dict[str, device_time.DeviceTime] = {}
    if protocol.cupti or protocol.short_ms:
        programs = {name: (c.compiled, c.args) for name, c in runnable.items()}
        on_device = device_time.measure_all(programs)
    is_short = any(found.ms < protocol.short_ms for found in on_device.values())
    window_s = min(protocol.window_s, SHORT_WINDOW_S) if is_short else protocol.window_s
    thunks = {"matmul": timing.matmul_thunk(size)}
    thunks |= {name: contender.thunk for name, contender in runnable.items()}
    samples = interleaved_ms(thunks, window_s=window_s, rounds=protocol.rounds)
    matmul_tflops = timing.matmul_tflops(statistics.median(samples["matmul"]), size)
    for name, contender in runnable.items():
        ms = samples[name]
        if name in on_device:
            contender.record["kernel_ms"] = statistics.median(on_device[name].kernel_ms)
            contender.record["device_ms"] = on_device[name].ms
        if is_short:
            contender.record["call_ms"] = statistics.median(ms)
            ms = on_device[name].busy_ms
        median = statistics.median(ms)
        rate = timing.tflops(flops, median)
        contender.record |= {"ms": ms, "median_ms": median, "tflops": rate}
        contender.record["fraction"] = rate / matmul_tflops
    return {
        "useful_flops": flops,
        "matmul_ms": samples["matmul"],
        "matmul_tflops": matmul_tflops,
        "providers": [contender.record for contender in contenders],
    }


@dataclasses.dataclass
class Run:
    """One run of a benchmark. It does not use the device before its protocol or results are read.

    Attributes:
      op: the name of the benchmark in the results file.
      out: the results file.
      quick: short windows and few providers, to see that the benchmark runs.
      cupti: whether to time every contender on the device, too.
      budget_s: seconds after which no further point is started; the file lists the rest.
      jobs: the processes that compile points before the first is timed.
      start: `time.monotonic()` at the start of the run.
    """

    op: str
    out: pathlib.Path
    quick: bool = False
    cupti: bool = False
    budget_s: float = float("inf")
    jobs: compiling.Jobs = compiling.Jobs()
    start: float = dataclasses.field(default_factory=time.monotonic)

    @functools.cached_property
    def protocol(self) -> Protocol:
        """Parameters of the timing."""
        found = Protocol.for_device(quick=self.quick, cupti=self.cupti)
        return dataclasses.replace(found, rounds=0) if self.jobs.shared else found

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """The content of the results file."""
        lengths = {k: getattr(self.protocol, k) for k in ("window_s", "rounds", "matmul_size")}
        head = {"op": self.op, "environment": timing.environment(), "protocol": lengths}
        return {**head, "points": [], "left_out": []}

    def measure(
        self,
        todo: Sequence[Any],
        measure_point: Callable[[Any], dict[str, Any]],
        shrink: Callable[[Any], Any],
        describe: Callable[[Record], str] | None = None,
    ) -> dict[str, Any]:
        """Measures points, prints progress, and writes the results file after every point.

        Args:
          todo: points; each has a `sweep` and a `label`.
          measure_point: measures a point; returns its entry.
          shrink: makes the sizes of a point small enough for a CPU.
          describe: formats a point's figures as short text; by default the figures of this library.

        Returns:
          The content of the results file.
        """
        # A path that cannot be written raises before anything is measured.
        timing.make_folder_of(self.out)
        with self.jobs.programs(self.op):
            if jax.default_backend() != "gpu":
                todo = [shrink(point) for point in todo]
            if self.jobs.shared:
                left_s = self.budget_s - (time.monotonic() - self.start)
                self.jobs.compile(todo, measure_point, time.time() + left_s)
            else:
                self._measure(todo, measure_point, describe or _describe_ours)
        return self.results

    def _measure(
        self,
        todo: Sequence[Any],
        measure_point: Callable[[Any], dict[str, Any]],
        describe: Callable[[Record], str],
    ) -> None:
        results, out = self.results, self.out
        for number, point in enumerate(todo, start=1):
            if time.monotonic() - self.start > self.budget_s:
                results["left_out"].append(f"{point.sweep} {point.label}")
                continue
            try:
                measured = measure_point(point)
            except Exception as error:
                # A point costs minutes of compilation: the points after it are measured, too.
                traceback.print_exc()
                text = f"{point.sweep} {point.label}: {type(error).__name__}: {str(error)[:300]}"
                results.setdefault("failed", []).append(text)
                timing.write_results(out, results)
                continue
            results["points"].append(measured)
            timing.write_results(out, results)
            head = f"[{number}/{len(todo)}] {time.monotonic() - self.start:.0f} s"
            print(f"{head} {point.sweep} {point.label}: {describe(measured)}", flush=True)
        timing.write_results(out, results)


def _describe_ours(point: Record) -> str:
    ours: Record = next((p for p in point["providers"] if p["name"] == OUR_NAME), {})
    if "median_ms" not in ours:
        return f"skipped: {ours['skipped']}" if "skipped" in ours else "failed"
    return f"{ours['median_ms']:.4f} ms {ours['fraction']:.3f}"


def parser(name: str, sweeps: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    found.add_argument("--out", type=pathlib.Path, required=True, help="results file (JSON)")
    found.add_argument(
        "--sweep",
        nargs="+",
        choices=sweeps,
        default=sweeps,
        help="sweeps to measure (default: all)",
    )
    found.add_argument("--quick", action="store_true", help="short windows, few providers")
    found.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        help="seconds after which no further point is started",
    )
    return found


def op_parser(name: str, sweeps: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the options of the benchmark of an op."""
    found = parser(name, sweeps)
    found.add_argument(
        "--cupti", action="store_true", help="also time calls on the device, by CUPTI"
    )
    return found


def options(args: argparse.Namespace, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The fields of `Run` among parsed arguments.

    Args:
      args: the parsed arguments.
      argv: what was parsed, None for the command line; counts for parsers with the options of
        `compiling`.
    """
    names = [field.name for field in dataclasses.fields(Run) if field.name != "jobs"]
    found = {name: getattr(args, name) for name in names if name in args}
    return found | ({"jobs": compiling.Jobs.of(args, argv)} if "shared" in args else {})


def print_results(results: Record, bars: Callable[[Record, Sequence[Record]], str]) -> int:
    """Prints environment and results; returns the exit status: 1 if a result is wrong."""
    return print_lines(results, format_table(results, bars))


def print_lines(results: Record, lines: str) -> int:
    """`print_results` for results whose table is `lines`."""
    env = results["environment"]
    print(f"{env['device']}, driver {env['driver']}, jax {env['jax']}, commit {env['commit']}")
    matmuls = [p["matmul_tflops"] for p in results["points"] if "matmul_tflops" in p]
    if matmuls:
        copy = results.get("copy")
        ceiling = "" if copy is None else f", copy {copy['tb_per_s']:.2f} TB/s"
        print(f"matmul {statistics.median(matmuls):.1f} TFLOP/s{ceiling}")
    print(lines)
    for kind, words in (("left_out", "left out"), ("failed", "FAILED")):
        for name in results.get(kind, ()):
            print(f"{words}: {name}")
    return 0 if all_correct(results) else 1
