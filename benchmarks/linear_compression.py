"""Linear compression: every stage, the baselines and the sweeps over sizes.

    python -m benchmarks.linear_compression --out benchmarks/results/linear_compression-h200.json

Every figure counts useful FLOPs only: no padding, no copies. Off a GPU all sizes shrink, and the
figures say no more than that the benchmark runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import timing, torch_baseline
from benchmarks.linear_compression_providers import (
    ALIGNED_K,
    OURS,
    XLA,
    Inputs,
    Provider,
    all_providers,
    oracle,
)
from ikbo_jax.tuning import autotune, table
from ikbo_jax.tuning.configs import LinearCompressionProblem

DEFAULT = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
SWEEPS = ("default", "m", "k", "n", "batch", "ratio", "index")
#: Bars: the default's fraction; a sweep's fraction over the default's; ours over XLA's time.
DEFAULT_BAR, SWEEP_BAR, SMALL_BATCH_BAR, NO_CLIFF_BAR = 0.82, 0.92, 0.85, 1.02
#: Candidates whose output is compared with the oracle.
CHECKED = 8


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes: which sweep it belongs to, its label there, and how the index looks.

    `index` is "ragged" (sorted, random counts per user) or "unsorted" (the same, shuffled).
    """

    sweep: str
    label: str
    problem: LinearCompressionProblem
    index: str = "ragged"


def points(sweep: str, dtype: str = "bfloat16") -> Iterator[Point]:
    """The points of a sweep; the default's neighbours differ from it in one size each."""
    base = dataclasses.replace(DEFAULT, dtype=dtype)
    k_user, k_cand = base.ks
    candidates = base.batches[-1]

    def at(label: str, index: str = "ragged", **sizes: Any) -> Point:
        return Point(sweep, label, dataclasses.replace(base, **sizes), index)

    if sweep == "default":
        yield at(dtype)
    elif sweep == "m":
        yield from (at(f"M={m}", m=m) for m in (128, 256, 512, 1024))
    elif sweep == "k":
        yield from (at(f"K_cand={k}", ks=(k_user, k)) for k in (256, 1024, 2048))
    elif sweep == "n":
        yield from (at(f"N={n}", n=n) for n in (128, 256, 512))
    elif sweep == "batch":
        for b in (256, 512, 1024, 2048, 4096):
            yield at(f"B={b}", batches=(-(-b // 70), b))
    elif sweep == "ratio":
        for ratio in (1, 2, 10, 70, 1000):
            yield at(f"{ratio}:1", batches=(-(-candidates // ratio), candidates))
        yield at("10000 of one user", batches=(1, 10_000))
    elif sweep == "index":
        yield at("unsorted", index="unsorted")
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point in a size that a CPU can take."""
    p = point.problem
    small = LinearCompressionProblem(
        tuple(max(1, b // 16) for b in p.batches),
        tuple(k // 16 for k in p.ks),
        p.m // 8,
        p.n // 8,
        p.dtype,
    )
    return dataclasses.replace(point, problem=small)


def make_inputs(point: Point, seed: int = 0) -> Inputs:
    """Random inputs, made on the device."""
    weights, embeddings, parents = autotune.random_operands(point.problem, seed)
    index = parents[1]
    assert index is not None
    if point.index == "unsorted":
        index = jax.random.permutation(jax.random.key(seed), index)
    return Inputs(weights[1], weights[0], embeddings[1], embeddings[0], index)


@dataclasses.dataclass
class _Contender:
    """A provider that compiled and gave the right result."""

    record: dict[str, Any]
    thunk: timing.Thunk
    compiled: Any = None
    args: tuple = ()


def _enter(
    provider: Provider, inputs: Inputs, rows: Sequence[int], exact: np.ndarray, bound: float
) -> _Contender:
    """Compiles a provider and checks its result; a failure is recorded, not raised."""
    record: dict[str, Any] = {"name": provider.name, "stage": provider.stage}
    try:
        args = provider.prepare(inputs)
        compiled = jax.jit(provider.fn).lower(*args).compile()
        out = compiled(*args)
        found = np.stack([np.asarray(out[b]) for b in rows]).astype(np.float64)
    except NotImplementedError as error:
        return _Contender(record | {"skipped": str(error).splitlines()[0]}, lambda: None)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:300]}"
        return _Contender(record | {"failure": text}, lambda: None)
    largest = float(np.abs(found - exact).max())
    memory = compiled.memory_analysis()
    record |= {
        "temp_bytes": None if memory is None else int(memory.temp_size_in_bytes),
        "error": largest,
        "bound": bound,
        "ok": largest <= bound,
    }
    return _Contender(record, lambda: compiled(*args), compiled, args)


def measure_point(
    point: Point,
    providers: Sequence[Provider],
    *,
    window_s: float,
    rounds: int,
    matmul_size: int,
    cupti: bool = False,
    torch: bool = False,
) -> dict[str, Any]:
    """Checks and times the providers at a point, by turns with the matmul that normalises."""
    problem, inputs = point.problem, make_inputs(point)
    batch = problem.batches[-1]
    rows = sorted(
        {0, batch - 1, *np.random.default_rng(0).integers(0, batch, CHECKED - 2).tolist()}
    )
    exact, bound = oracle(inputs, rows)
    contenders = [_enter(provider, inputs, rows, exact, bound) for provider in providers]
    if torch:
        for record, thunk in torch_baseline.contenders(inputs, rows, exact, bound, ALIGNED_K):
            contenders.append(_Contender(record, thunk))
    runnable = {c.record["name"]: c for c in contenders if "error" in c.record}
    thunks = {"matmul": timing.matmul_thunk(matmul_size)}
    thunks |= {name: contender.thunk for name, contender in runnable.items()}
    samples = timing.compare(thunks, window_s=window_s, rounds=rounds)
    matmul_tflops = timing.matmul_tflops(statistics.median(samples["matmul"]), matmul_size)
    for name, contender in runnable.items():
        median = statistics.median(samples[name])
        rate = timing.tflops(problem.useful_flops, median)
        contender.record |= {"ms": samples[name], "median_ms": median, "tflops": rate}
        contender.record["fraction"] = rate / matmul_tflops
        if cupti and contender.compiled is not None:
            contender.record["kernel_ms"] = timing.kernel_ms(contender.compiled, *contender.args)
    choice = table.lookup(problem)
    itemsize = inputs.w_cand.dtype.itemsize
    return {
        "sweep": point.sweep,
        "label": point.label,
        "index": point.index,
        "problem": dataclasses.asdict(problem),
        "useful_flops": problem.useful_flops,
        "user_result_bytes": problem.batches[0] * problem.m * problem.n * itemsize,
        "table": {
            "config": None if choice.config is None else dataclasses.asdict(choice.config),
            "note": choice.note,
        },
        "matmul_ms": samples["matmul"],
        "matmul_tflops": matmul_tflops,
        "providers": [contender.record for contender in contenders],
    }


def provider_of(point: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The figures of a provider at a point of a results file, if it was timed there."""
    found = (p for p in point["providers"] if p["name"] == name and "median_ms" in p)
    return next(found, None)


def bar(point: Mapping[str, Any], all_points: Sequence[Mapping[str, Any]]) -> str:
    """What `ikbo` reached at a point of a results file, beside the bar it is held to."""
    ours, xla = provider_of(point, "ikbo"), provider_of(point, "xla")
    if ours is None:
        return ""
    if point["sweep"] == "default":
        return f"fraction {ours['fraction']:.3f}, bar {DEFAULT_BAR}"
    if point["sweep"] in ("m", "k", "n"):
        if xla is None:
            return ""
        return f"{ours['median_ms'] / xla['median_ms']:.3f} of XLA's time, bar {NO_CLIFF_BAR}"
    dtype = point["problem"]["dtype"]
    defaults = [
        provider_of(p, "ikbo")
        for p in all_points
        if p["sweep"] == "default" and p["problem"]["dtype"] == dtype
    ]
    if not defaults or defaults[0] is None:
        return f"fraction {ours['fraction']:.3f}"
    relative = ours["fraction"] / defaults[0]["fraction"]
    least = SMALL_BATCH_BAR if point["label"] == "B=256" else SWEEP_BAR
    return f"{relative:.3f} of the default's fraction, bar {least}"


def format_table(results: Mapping[str, Any]) -> str:
    """The results as plain text."""
    lines = [
        f"{'point':<26}{'provider':<28}{'ms':>9}{'TFLOP/s':>9}{'fraction':>9}{'temp MiB':>10}"
        f"{'error/bound':>12}  bar"
    ]
    on_gpu = results["environment"]["platform"] == "gpu"  # The bars are Hopper's.
    for point in results["points"]:
        label = f"{point['sweep']} {point['label']}"
        for p in point["providers"]:
            head = f"{label:<26}{p['name']:<28}"
            if "median_ms" not in p:
                lines.append(head + f"  {p.get('failure') or 'skipped: ' + p['skipped']:.90}")
                continue
            temp = "-" if p.get("temp_bytes") is None else f"{p['temp_bytes'] / 2**20:.2f}"
            lines.append(
                head + f"{p['median_ms']:>9.4f}{p['tflops']:>9.1f}{p['fraction']:>9.3f}{temp:>10}"
                f"{p['error'] / p['bound']:>12.2f}  "
                + (bar(point, results["points"]) if p["name"] == "ikbo" and on_gpu else "")
                + ("" if p["ok"] else "  WRONG RESULT")
            )
    return "\n".join(lines)


def run(
    sweeps: Sequence[str],
    dtypes: Sequence[str],
    *,
    out: pathlib.Path,
    quick: bool = False,
    cupti: bool = False,
    budget_s: float = float("inf"),
) -> dict[str, Any]:
    """Measures sweeps and writes the results file after every point.

    Args:
      sweeps: of `SWEEPS`. The default runs in every dtype (every formulation in the first), the
        others in the first, beside XLA only. Sizes that two sweeps share are timed once.
      dtypes: names of dtypes.
      out: the results file.
      quick: short windows and few providers: to see that it runs.
      cupti: times kernels alone as well.
      budget_s: starts no point after so many seconds; the file lists those left out.
    """
    start = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    window_s, rounds = (0.02, 1) if quick else (0.2, 3)
    matmul_size = timing.MATMUL_SIZE if on_gpu else 256
    copy_bytes = timing.COPY_BYTES if on_gpu else 2**22
    copy = timing.copy_ceiling(copy_bytes, window_s=window_s, rounds=rounds)
    results: dict[str, Any] = {
        "op": "linear_compression",
        "environment": timing.environment(),
        "protocol": {"window_s": window_s, "rounds": rounds, "matmul_size": matmul_size},
        "copy": copy,
        "points": [],
        "left_out": [],
    }
    todo = [
        point
        for sweep in sweeps
        for dtype in (dtypes if sweep == "default" else dtypes[:1])
        for point in points(sweep, dtype)
    ]
    known: dict[tuple[LinearCompressionProblem, str], dict[str, Any]] = {}
    for number, full_point in enumerate(todo, start=1):
        point = full_point if on_gpu else shrink(full_point)
        if time.monotonic() - start > budget_s:
            results["left_out"].append(f"{point.sweep} {point.label}")
            continue
        key = (point.problem, point.index)
        if key in known:
            measured = _as_in_sweep(known[key], point)
        else:
            is_full = point.sweep == "default" and not quick
            providers = [XLA, OURS]
            if is_full:
                providers = all_providers(point.problem, point.problem.dtype == dtypes[0])
            measured = known[key] = measure_point(
                point,
                providers,
                window_s=window_s,
                rounds=rounds,
                matmul_size=matmul_size,
                cupti=cupti,
                torch=is_full and on_gpu,
            )
        results["points"].append(measured)
        timing.write_results(out, results)
        ours = provider_of(measured, "ikbo")
        text = "failed" if ours is None else f"{ours['median_ms']:.4f} ms {ours['fraction']:.3f}"
        seconds = time.monotonic() - start
        print(
            f"[{number}/{len(todo)}] {seconds:.0f} s {point.sweep} {point.label}: {text}",
            flush=True,
        )
    timing.write_results(out, results)
    return results


def _as_in_sweep(measured: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """The figures of the same sizes, measured before, as a point of another sweep."""
    providers = [p for p in measured["providers"] if p["name"] in (XLA.name, OURS.name)]
    return {**measured, "sweep": point.sweep, "label": point.label, "providers": providers}


def is_sound(results: Mapping[str, Any]) -> bool:
    """Whether every provider that could run here gave a right result."""
    records = [p for point in results["points"] for p in point["providers"]]
    return all("failure" not in p and p.get("ok", True) for p in records)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_compression")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results file (JSON)")
    parser.add_argument("--sweep", choices=(*SWEEPS, "all"), default="all")
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quick", action="store_true", help="short windows, few providers")
    parser.add_argument("--cupti", action="store_true", help="also time kernels alone")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds in all")
    args = parser.parse_args(argv)
    results = run(
        SWEEPS if args.sweep == "all" else (args.sweep,),
        args.dtype or ("bfloat16", "float16"),
        out=args.out,
        quick=args.quick,
        cupti=args.cupti,
        budget_s=args.budget_s,
    )
    env, copy = results["environment"], results["copy"]
    print(f"{env['device']}, driver {env['driver']}, jax {env['jax']}, commit {env['commit']}")
    matmuls = [point["matmul_tflops"] for point in results["points"]]
    if matmuls:
        print(f"matmul {statistics.median(matmuls):.1f} TFLOP/s, copy {copy['tb_per_s']:.2f} TB/s")
    print(format_table(results))
    return 0 if is_sound(results) else 1


if __name__ == "__main__":
    sys.exit(main())
