"""Benchmark of generalised dot-product attention, forward and backward, in sweeps over sizes.

    python -m benchmarks.gdpa --out benchmarks/results/gdpa-h200.json

Useful FLOPs count pairs of a query and a key of the same sequence; the backward pass counts 2.5
times the FLOPs of the forward pass. Where all lengths are equal, softmax attention by other
libraries (a *yardstick*) is timed for comparison: it is another function of the same sizes and has
a separate oracle. In the sweep "softmax", lengths differ at all points but the last, and cuDNN
attends over padded sequences; its time includes the padding. Without a GPU all sizes shrink, and
the figures only show that the benchmark runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import compiling, harness
from benchmarks.gdpa_providers import (
    ALL,
    ATTENTION,
    OURS,
    PADDED,
    XLA,
    Provider,
    Sizes,
)
from benchmarks.records import Record, ours_at, provider_of
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.gdpa_oracle import RESULTS, Inputs, checked_rows, expected, worst_error
from ikbo_jax.reference.activations import SOFTMAX

BATCH = 1152
LENGTHS = (256, 512, 1024, 2048)
#: Sweeps over the largest length.
LENGTH_SWEEPS = ("full", "half", "kv256")
SWEEPS = (*LENGTH_SWEEPS, "activations", "pma", "softmax", "other")
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
#: Bars of our fraction of the matmul, by sweep, direction and length.
FRACTION_BARS = {
    ("full", "forward"): dict(zip(LENGTHS, (0.62, 0.74, 0.82, 0.86), strict=True)),
    ("half", "forward"): dict(zip(LENGTHS, (0.50, 0.62, 0.72, 0.80), strict=True)),
    ("kv256", "forward"): dict(zip(LENGTHS, (0.62, 0.70, 0.72, 0.74), strict=True)),
    ("full", "backward"): dict(zip(LENGTHS, (0.40, 0.55, 0.65, 0.70), strict=True)),
    ("kv256", "backward"): dict(zip(LENGTHS, (0.40, 0.50, 0.55, 0.58), strict=True)),
}
#: Bars of our fraction with an activation, relative to our fraction with another activation. If
#: both have a tanh, exact is compared with exact and approximate with approximate.
RELATIVE_BARS = {
    "relu": ("gelu_tanh tanh", 1.0),
    "silu tanh": ("gelu_tanh tanh", 1.0),
    "silu": ("gelu_tanh", 1.0),
    "gelu": ("gelu_tanh tanh", 0.75),
}
#: Bars of our speed-up over the XLA path in "pma", and over `ikbo_jax.attention` with softmax, by
#: direction.
PMA_BAR = 2.0
SOFTMAX_BARS = {"forward": 0.97, "backward": 0.90}
#: Number of sequences whose results are compared with the oracle.
NUM_CHECKED = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes in one direction.

    Attributes:
      sweep: one of `SWEEPS`.
      name: name of the sizes in the sweep; the label appends the direction.
      sizes: the sizes.
      direction: one of `DIRECTIONS`.
    """

    sweep: str
    name: str
    sizes: Sizes
    direction: str = "forward"

    @property
    def label(self) -> str:
        return f"{self.name} {self.direction}"


def points(sweep: str, direction: str = "forward", dtype: str = "bfloat16") -> Iterator[Point]:
    """Yields the points of a sweep in one direction."""

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
    elif sweep == "softmax":
        for length in LENGTHS:
            point = at(f"max={length} half softmax", length, length, lengths="half")
            yield dataclasses.replace(point, sizes=point.sizes.with_softmax())
        full = at("max=1024 full softmax", 1024, 1024)
        yield dataclasses.replace(full, sizes=full.sizes.with_softmax())
    elif sweep == "other":
        yield at("B=2048 H=64 max=800 half", 800, 800, 2048, head_dim=64, lengths="half")
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point with sizes small enough for a CPU."""
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
    """Providers of a point; yardsticks only in sweeps over lengths and with softmax."""
    if quick:
        return (XLA, OURS)
    if point.sizes.activation == SOFTMAX:
        is_jagged = point.sizes.lengths != "full"
        return (PADDED, XLA, OURS) if is_jagged else (*ALL[:-1], ATTENTION, OURS)
    if point.sweep == "activations":
        return (OURS,)
    return ALL if point.sizes.lengths == "full" else (XLA, OURS)


def measure_point(
    point: Point, providers: Sequence[Provider], protocol: harness.Protocol
) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved with the reference matmul."""
    sizes, direction, case = point.sizes, point.direction, point.sizes.case
    inputs = Inputs(case.inputs(), case.cotangent())
    sequences = harness.sample(sizes.batch, NUM_CHECKED)
    # Yardsticks need another oracle, so oracles are computed on demand.
    oracles: dict[Sizes, tuple[np.ndarray, np.ndarray]] = {}

    def compiled(provider: Provider) -> harness.Contender:
        computed = provider.sizes(sizes)

        def compare(result: Sequence[jax.Array]) -> Check:
            if computed not in oracles:
                oracles[computed] = expected(computed.case, inputs, sequences, direction)
            found = checked_rows(case, result, sequences, direction)
            return worst_error(found, *oracles[computed])

        contender = harness.compile_and_check(
            provider.name,
            provider.stage,
            lambda: provider.prepare(computed, inputs, direction),
            compare,
        )
        if computed != sizes:
            contender.record["note"] = f"another function: {computed.activation}"
        return contender

    return {
        "sweep": point.sweep,
        "label": point.label,
        "name": point.name,
        "direction": direction,
        "problem": dataclasses.asdict(sizes),
        "pairs": case.pairs,
        **harness.measure(
            [compiled(provider) for provider in providers],
            harness.ATTENTION_WORK[direction] * case.useful_flops,
            protocol,
        ),
    }


def bars(point: Record, all_points: Sequence[Record]) -> str:
    """Text with the figures of `ikbo` at a point of a results file, each next to its bar."""
    ours = provider_of(point, OURS.name)
    if ours is None:
        return ""
    sweep, problem, found = point["sweep"], point["problem"], []
    bar = FRACTION_BARS.get((sweep, point["direction"]), {}).get(problem["q_len"])
    if bar is not None and problem["dtype"] == "bfloat16":
        found.append(f"fraction {ours['fraction']:.3f}, bar {bar:.2f}")
    xla, attention = (provider_of(point, p.name) for p in (XLA, ATTENTION))
    if sweep == "pma" and xla is not None:
        speedup = xla["median_ms"] / ours["median_ms"]
        found.append(f"{speedup:.2f} x XLA, bar {PMA_BAR}")
    if sweep == "activations" and point["name"] in RELATIVE_BARS:
        name, bar = RELATIVE_BARS[point["name"]]
        wanted = ("activations", name, point["direction"])
        same = (p for p in all_points if (p["sweep"], p["name"], p["direction"]) == wanted)
        other = ours_at(same)
        if other is not None:
            relative = ours["fraction"] / other["fraction"]
            found.append(f"{relative:.3f} of {name}'s fraction, bar {bar}")
    softmax_bar = SOFTMAX_BARS.get(point["direction"])
    if attention is not None and softmax_bar is not None:
        relative = attention["median_ms"] / ours["median_ms"]
        found.append(f"{relative:.3f} of attention's speed, bar {softmax_bar}")
    return "; ".join(found)


def run(
    sweeps: Sequence[str],
    directions: Sequence[str] = DIRECTIONS,
    dtype: str = "bfloat16",
    without: Collection[str] = (),
    *,
    out: pathlib.Path,
    **options: Any,
) -> dict[str, Any]:
    """Measures sweeps, as `attention.run` does.

    Args (the others are as for `attention.run`):
      sweeps: names from `SWEEPS`.
      directions: names from `DIRECTIONS`; all sweeps are measured in the first direction first.
      dtype: dtype of all arrays.
      without: names of providers to leave out.
    """
    bench = harness.Run("gdpa", out, **options)

    def measure(point: Point) -> dict[str, Any]:
        providers = [p for p in providers_of(point, bench.quick) if p.name not in without]
        return measure_point(point, providers, bench.protocol)

    todo = [p for direction in directions for s in sweeps for p in points(s, direction, dtype)]
    return bench.measure(todo, measure, shrink)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = harness.op_parser("gdpa", SWEEPS)
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=DIRECTIONS,
        default=DIRECTIONS,
        help="what to time: the result, the gradients for a fixed cotangent, or both "
        "(default: all three)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--without",
        nargs="+",
        choices=[p.name for p in (*ALL, PADDED, ATTENTION) if p != OURS],
        default=(),
        metavar="NAME",
        help="providers to leave out, such as xla, whose gradients take most of a run's time",
    )
    compiling.add_options(parser)
    args = parser.parse_args(argv)
    options = harness.options(args, argv)
    results = run(args.sweep, args.direction, args.dtype, args.without, **options)
    return harness.print_results(results, bars)


if __name__ == "__main__":
    sys.exit(main())
