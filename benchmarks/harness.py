"""Shared by the benchmarks: checks of providers, timing of a point, results files, tables.

A results file is {"op", "environment", "protocol", "points", "left_out", ...}. A point has a list
"providers", each with "name" and "stage", and either error and times, or "skipped" or "failure"
with the reason. A "note" is printed next to the provider in tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from ikbo_jax._timing import interleaved_ms
from ikbo_jax.cases.error_rule import Check

Record = Mapping[str, Any]
#: Name of this library's provider in every benchmark.
OUR_NAME = "ikbo"


@dataclasses.dataclass
class Contender:
    """A compiled provider and its entry in the results file, which has "error" if it ran."""

    record: dict[str, Any]
    thunk: timing.Thunk = lambda: None
    compiled: Any = None
    args: tuple = ()


def compile_and_check(
    name: str,
    stage: str,
    prepare: Callable[[], tuple[Callable[..., Any], tuple, Callable[[Any], Any]]],
    rows: Sequence[int],
    exact: np.ndarray,
    bound: float,
) -> Contender:
    """Compiles a provider and checks its result; a failure is recorded, not raised.

    Args:
      name: the provider's name.
      stage: the provider's description.
      prepare: returns a function, its arguments on the device, and a function that converts its
        result to the shape of the op's result.
      rows: rows of the op's result to check.
      exact: expected values of the rows.
      bound: the largest allowed error.
    """

    def prepare_and_compare() -> tuple:
        fn, args, finish = prepare()

        def compare(result: Any) -> Check:
            out = finish(result)
            found = np.stack([np.asarray(out[b]) for b in rows]).astype(np.float64)
            return Check(float(np.abs(found - exact).max()), bound)

        return fn, args, compare

    return compile_and_compare(name, stage, prepare_and_compare)


def compile_and_compare(
    name: str,
    stage: str,
    prepare: Callable[[], tuple[Callable[..., Any], tuple, Callable[[Any], Check]]],
) -> Contender:
    """`compile_and_check` with another comparison.

    Args:
      name: the provider's name.
      stage: the provider's description.
      prepare: returns a function, its arguments on the device, and a function that takes its
        result and checks it.
    """
    record: dict[str, Any] = {"name": name, "stage": stage}
    try:
        fn, args, compare = prepare()
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
      rounds: number of windows of every provider.
      matmul_size: size of the square bf16 reference matmul.
      cupti: whether to time kernels without launch overhead, too.
    """

    window_s: float = 0.2
    rounds: int = 3
    matmul_size: int = timing.MATMUL_SIZE
    cupti: bool = False

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
    size = protocol.matmul_size
    runnable = {c.record["name"]: c for c in contenders if "error" in c.record}
    thunks = {"matmul": timing.matmul_thunk(size)}
    thunks |= {name: contender.thunk for name, contender in runnable.items()}
    samples = interleaved_ms(thunks, window_s=protocol.window_s, rounds=protocol.rounds)
    matmul_tflops = timing.matmul_tflops(statistics.median(samples["matmul"]), size)
    for name, contender in runnable.items():
        median = statistics.median(samples[name])
        rate = timing.tflops(flops, median)
        contender.record |= {"ms": samples[name], "median_ms": median, "tflops": rate}
        contender.record["fraction"] = rate / matmul_tflops
        if protocol.cupti and contender.compiled is not None:
            contender.record["kernel_ms"] = timing.kernel_ms(contender.compiled, *contender.args)
    return {
        "useful_flops": flops,
        "matmul_ms": samples["matmul"],
        "matmul_tflops": matmul_tflops,
        "providers": [contender.record for contender in contenders],
    }


def new_results(op: str, protocol: Protocol, **more: Any) -> dict[str, Any]:
    """A results file without points; `more` are further fields."""
    lengths = {k: getattr(protocol, k) for k in ("window_s", "rounds", "matmul_size")}
    head = {"op": op, "environment": timing.environment(), "protocol": lengths}
    return {**head, **more, "points": [], "left_out": []}


def run_points(
    results: dict[str, Any],
    todo: Sequence[Any],
    measure_point: Callable[[Any], dict[str, Any]],
    *,
    out: pathlib.Path,
    start: float,
    budget_s: float,
    describe: Callable[[Record], str] | None = None,
) -> None:
    """Measures points, prints progress, and writes the results file after every point.

    Args:
      results: result of `new_results`; points are added to it.
      todo: points; each has a `sweep` and a `label`.
      measure_point: measures a point; returns its entry.
      out: the results file.
      start: `time.monotonic()` at the start of the program.
      budget_s: seconds after which no further point is started; "left_out" lists the rest.
      describe: formats a point's figures as short text; by default the figures of this library.
    """
    describe = describe or _describe_ours
    timing.make_folder_of(out)  # A path that cannot be written raises before anything is measured.
    for number, point in enumerate(todo, start=1):
        if time.monotonic() - start > budget_s:
            results["left_out"].append(f"{point.sweep} {point.label}")
            continue
        measured = measure_point(point)
        results["points"].append(measured)
        timing.write_results(out, results)
        head = f"[{number}/{len(todo)}] {time.monotonic() - start:.0f} s"
        print(f"{head} {point.sweep} {point.label}: {describe(measured)}", flush=True)
    timing.write_results(out, results)


def _describe_ours(point: Record) -> str:
    ours: Record = next((p for p in point["providers"] if p["name"] == OUR_NAME), {})
    if "median_ms" not in ours:
        return f"skipped: {ours['skipped']}" if "skipped" in ours else "failed"
    return f"{ours['median_ms']:.4f} ms {ours['fraction']:.3f}"


def provider_of(point: Record, name: str) -> Record | None:
    """The figures of a provider at a point of a results file; None if it was not timed."""
    found = (p for p in point["providers"] if p["name"] == name and "median_ms" in p)
    return next(found, None)


def all_correct(results: Record) -> bool:
    """Whether every provider that could run returned a correct result."""
    records = [p for point in results["points"] for p in point["providers"]]
    return all("failure" not in p and p.get("ok", True) for p in records)


def format_table(results: Record, bars: Callable[[Record, Sequence[Record]], str]) -> str:
    """The results as plain text; `bars` formats the bars of a point, given all points."""
    points = results["points"]
    labels = [f"{point['sweep']} {point['label']}" for point in points]
    names = [p["name"] for point in points for p in point["providers"]]
    wide, wider = (max(map(len, column), default=0) + 2 for column in (labels, names))
    lines = [
        f"{'point':<{wide}}{'provider':<{wider}}{'ms':>10}{'TFLOP/s':>9}{'fraction':>9}"
        f"{'temp MiB':>10}{'error/bound':>12}  bars"
    ]
    on_gpu = results["environment"]["platform"] == "gpu"  # The bars are for Hopper.
    for point, label in zip(points, labels, strict=True):
        for p in point["providers"]:
            head = f"{label:<{wide}}{p['name']:<{wider}}"
            if "median_ms" not in p:
                lines.append(head + f"  {p.get('failure') or 'skipped: ' + p['skipped']:.90}")
                continue
            temp = "-" if p.get("temp_bytes") is None else f"{p['temp_bytes'] / 2**20:.2f}"
            lines.append(
                head + f"{p['median_ms']:>10.4f}{p['tflops']:>9.1f}{p['fraction']:>9.3f}{temp:>10}"
                f"{p['error'] / p['bound']:>12.2f}  "
                + (bars(point, points) if p["name"] == OUR_NAME and on_gpu else "")
                + p.get("note", "")
                + ("" if p["ok"] else "  WRONG RESULT")
            )
    return "\n".join(lines)


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
        "--cupti", action="store_true", help="also time kernels without launch overhead"
    )
    found.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        help="seconds after which no further point is started",
    )
    return found


def print_results(results: Record, bars: Callable[[Record, Sequence[Record]], str]) -> int:
    """Prints environment and results; returns the exit status: 1 if a result is wrong."""
    env = results["environment"]
    print(f"{env['device']}, driver {env['driver']}, jax {env['jax']}, commit {env['commit']}")
    matmuls = [point["matmul_tflops"] for point in results["points"]]
    if matmuls:
        copy = results.get("copy")
        ceiling = "" if copy is None else f", copy {copy['tb_per_s']:.2f} TB/s"
        print(f"matmul {statistics.median(matmuls):.1f} TFLOP/s{ceiling}")
    print(format_table(results, bars))
    return 0 if all_correct(results) else 1
