"""Generalised dot-product attention, forward and backward: the XLA path, the kernels, yardsticks.

    python -m benchmarks.gdpa --out benchmarks/results/gdpa-h200.json

Useful FLOPs count pairs of a query and a key of its own sequence; the backward pass counts 2.5
times the forward's. Softmax attention by others stands beside it as a yardstick where all lengths
are equal: it is another function of the same sizes, and is held to an oracle of its own. Off a GPU
all sizes shrink, and the figures say no more than that the benchmark runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from benchmarks.gdpa_oracle import checked_rows, oracle, worst
from benchmarks.gdpa_providers import (
    ALL,
    ATTENTION,
    OURS,
    RESULTS,
    XLA,
    Provider,
    Sizes,
    make_inputs,
    pairs,
)
from benchmarks.harness import provider_of
from ikbo_jax.reference.activations import SOFTMAX

BATCH = 1152
LENGTHS = (256, 512, 1024, 2048)
#: Sweeps over the greatest length.
LENGTH_SWEEPS = ("full", "half", "kv256")
SWEEPS = (*LENGTH_SWEEPS, "activations", "pma", "other")
DIRECTIONS = tuple(RESULTS)
#: Keys of a sequence in "kv256".
SHORT_KV = 256
#: Seeds and keys of a sequence in "pma".
SEEDS, PMA_KEYS = 32, (1024, 2048, 4096)
#: Activations and approximations in "activations", at length 1024.
ACTIVATIONS = (
    ("gelu_tanh", "tanh"),
    ("gelu_tanh", "tanh_bf16"),
    ("gelu_tanh", None),
    ("gelu", None),
    ("gelu", "polynomial"),
    ("silu", "tanh"),
    ("silu", "tanh_bf16"),
    ("silu", None),
    ("relu", None),
    ("leaky_relu", None),
    ("relu_squared", None),
    ("hardswish", None),
    ("identity", None),
    (SOFTMAX, None),
)
#: FLOPs of a direction over the forward's.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
#: Bars: our fraction of the matmul by sweep, direction and length.
FRACTION_BARS = {
    ("full", "forward"): dict(zip(LENGTHS, (0.62, 0.74, 0.82, 0.86), strict=True)),
    ("half", "forward"): dict(zip(LENGTHS, (0.50, 0.62, 0.72, 0.80), strict=True)),
    ("kv256", "forward"): dict(zip(LENGTHS, (0.62, 0.70, 0.72, 0.74), strict=True)),
    ("full", "backward"): dict(zip(LENGTHS, (0.40, 0.55, 0.65, 0.70), strict=True)),
    ("kv256", "backward"): dict(zip(LENGTHS, (0.40, 0.50, 0.55, 0.58), strict=True)),
}
#: Bars of activations: our fraction over that of another one. Like stands beside like: exact
#: beside exact where both have a tanh.
RELATIVE_BARS = {
    "relu": ("gelu_tanh tanh", 1.0),
    "silu tanh": ("gelu_tanh tanh", 1.0),
    "silu": ("gelu_tanh", 1.0),
    "gelu": ("gelu_tanh tanh", 0.75),
}
#: Bars: our speed over that of the XLA path; a softmax's over that of `ikbo_jax.attention`.
PMA_BAR, SOFTMAX_BAR = 2.0, 0.97
#: Sequences whose results are compared with the oracle.
CHECKED = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes in one direction: which sweep it belongs to, and its name there.

    `name` is without the direction, which ends the label.
    """

    sweep: str
    name: str
    sizes: Sizes
    direction: str = "forward"

    @property
    def label(self) -> str:
        return f"{self.name} {self.direction}"


def points(sweep: str, direction: str = "forward", dtype: str = "bfloat16") -> Iterator[Point]:
    """The points of a sweep in one direction."""

    def at(name: str, q_len: int, kv_len: int, batch: int = BATCH, **rest: Any) -> Point:
        return Point(sweep, name, Sizes(batch, q_len, kv_len, dtype=dtype, **rest), direction)

    if sweep == "kv256":
        yield from (at(f"max={length}", length, SHORT_KV) for length in LENGTHS)
    elif sweep in LENGTH_SWEEPS:
        yield from (at(f"max={length}", length, length, lengths=sweep) for length in LENGTHS)
    elif sweep == "activations":
        for activation, approx in ACTIVATIONS:
            name = activation if approx is None else f"{activation} {approx}"
            yield at(name, 1024, 1024, activation=activation, approx=approx)
    elif sweep == "pma":
        yield from (at(f"KV={length}", SEEDS, length, broadcast_q=True) for length in PMA_KEYS)
    elif sweep == "other":
        yield at("B=2048 H=64 max=800 half", 800, 800, 2048, head_dim=64, lengths="half")
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point in a size that a CPU can take."""
    p = point.sizes
    small = dataclasses.replace(
        p,
        batch=p.batch // 128,
        q_len=max(2, p.q_len // 32),
        kv_len=p.kv_len // 32,
        heads=2,
        head_dim=p.head_dim // 8,
    )
    return dataclasses.replace(point, sizes=small)


def providers_of(point: Point, quick: bool) -> Sequence[Provider]:
    """Yardsticks where the sweep is about lengths or the function is theirs."""
    if quick:
        return (XLA, OURS)
    if point.sizes.activation == SOFTMAX:
        return (*ALL[:-1], ATTENTION, OURS) if point.direction == "forward" else ALL
    if point.sweep == "activations":
        return (OURS,)
    return ALL if point.sizes.lengths == "full" else (XLA, OURS)


def measure_point(
    point: Point, providers: Sequence[Provider], protocol: harness.Protocol
) -> dict[str, Any]:
    """Checks and times the providers at a point, by turns with the matmul that normalises."""
    sizes, direction, inputs = point.sizes, point.direction, make_inputs(point.sizes)
    drawn = np.random.default_rng(0).integers(0, sizes.batch, CHECKED - 2).tolist()
    sequences = sorted({0, sizes.batch - 1, *drawn})
    # Yardsticks have an oracle of their own, which is not made for nothing.
    oracles: dict[Sizes, tuple[np.ndarray, np.ndarray]] = {}

    def enter(provider: Provider) -> harness.Contender:
        computed = provider.sizes(sizes)

        def compare(result: Sequence[jax.Array]) -> tuple[float, float]:
            if computed not in oracles:
                oracles[computed] = oracle(computed, inputs, sequences, direction)
            found = checked_rows(result, inputs, sequences, direction)
            return worst(found, *oracles[computed])

        def prepare() -> tuple:
            return *provider.prepare(computed, inputs, direction), compare

        contender = harness.enter_compared(provider.name, provider.stage, prepare)
        if computed != sizes:
            contender.record["note"] = f"another function: {computed.activation}"
        return contender

    number = pairs(inputs)
    return {
        "sweep": point.sweep,
        "label": point.label,
        "name": point.name,
        "direction": direction,
        "problem": dataclasses.asdict(sizes),
        "pairs": number,
        **harness.measure(
            [enter(provider) for provider in providers],
            WORK[direction] * 4 * number * sizes.heads * sizes.head_dim,
            protocol,
        ),
    }


def bars(point: Mapping[str, Any], all_points: Sequence[Mapping[str, Any]]) -> str:
    """What `ikbo` reached at a point of a results file, beside the bars it is held to."""
    ours = provider_of(point, OURS.name)
    if ours is None:
        return ""
    sweep, problem, found = point["sweep"], point["problem"], []
    least = FRACTION_BARS.get((sweep, point["direction"]), {}).get(problem["q_len"])
    if least is not None and problem["dtype"] == "bfloat16":
        found.append(f"fraction {ours['fraction']:.3f}, bar {least:.2f}")
    xla, attention = (provider_of(point, p.name) for p in (XLA, ATTENTION))
    if sweep == "pma" and xla is not None:
        speedup = xla["median_ms"] / ours["median_ms"]
        found.append(f"{speedup:.2f} x XLA, bar {PMA_BAR}")
    if sweep == "activations" and point["name"] in RELATIVE_BARS:
        name, least = RELATIVE_BARS[point["name"]]
        other = _activation(name, point["direction"], all_points)
        if other is not None:
            relative = ours["fraction"] / other["fraction"]
            found.append(f"{relative:.3f} of {name}'s fraction, bar {least}")
    if attention is not None:
        relative = attention["median_ms"] / ours["median_ms"]
        found.append(f"{relative:.3f} of attention's speed, bar {SOFTMAX_BAR}")
    return "; ".join(found)


def _activation(
    name: str, direction: str, all_points: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Our figures with an activation in a direction, if they were measured."""
    wanted = ("activations", name, direction)
    same = (p for p in all_points if (p["sweep"], p["name"], p["direction"]) == wanted)
    found = (provider_of(point, OURS.name) for point in same)
    return next((record for record in found if record is not None), None)


def run(
    sweeps: Sequence[str],
    directions: Sequence[str] = DIRECTIONS,
    dtype: str = "bfloat16",
    *,
    out: pathlib.Path,
    quick: bool = False,
    cupti: bool = False,
    budget_s: float = float("inf"),
) -> dict[str, Any]:
    """Measures sweeps and writes the results file after every point.

    Args:
      sweeps: of `SWEEPS`.
      directions: of `DIRECTIONS`; all sweeps in the first one come first.
      dtype: of all arrays.
      out: the results file.
      quick: short windows and few providers: to see that it runs.
      cupti: times kernels alone as well.
      budget_s: starts no point after so many seconds; the file lists those left out.
    """
    start = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    protocol = harness.Protocol.here(quick=quick, cupti=cupti)
    results = harness.new_results("gdpa", protocol)

    def measure(point: Point) -> dict[str, Any]:
        return measure_point(point, providers_of(point, quick), protocol)

    every = [p for direction in directions for s in sweeps for p in points(s, direction, dtype)]
    todo = every if on_gpu else [shrink(point) for point in every]
    harness.run_points(results, todo, measure, out=out, start=start, budget_s=budget_s)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = harness.parser("gdpa", SWEEPS)
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=DIRECTIONS,
        default=DIRECTIONS,
        help="of the result, of the gradients with a given cotangent, of both (all of them)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args(argv)
    results = run(
        args.sweep,
        args.direction,
        args.dtype,
        out=args.out,
        quick=args.quick,
        cupti=args.cupti,
        budget_s=args.budget_s,
    )
    return harness.print_results(results, bars)


if __name__ == "__main__":
    sys.exit(main())
