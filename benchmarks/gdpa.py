"""Benchmark of generalised dot-product attention, forward and backward, in sweeps over sizes.

    python -m benchmarks.gdpa --out benchmarks/results/gdpa-h200.json

Useful FLOPs count pairs of a query and a key of the same sequence; the backward pass counts 2.5
times the FLOPs of the forward pass. Where all lengths are equal, softmax attention by other
libraries (a *yardstick*) is timed for comparison: it is another function of the same sizes and has
a separate oracle. In the sweep "softmax", lengths differ at all points but the last, and cuDNN
attends over padded sequences; its time includes the padding.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from benchmarks import harness, production_providers
from benchmarks.harness import Benchmark, Point
from benchmarks.production import cotangent, measure_versions
from benchmarks.production_providers import Contender
from benchmarks.records import OUR_NAME, Record, faster, listed, of_ours, ours_at, provider_of
from ikbo_jax.cases import gdpa_backward
from ikbo_jax.cases.case import nearest
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.gdpa import Case, uniform_lengths
from ikbo_jax.cases.gdpa_backward import Inputs
from ikbo_jax.problems import GdpaBackwardProblem, GdpaProblem
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Arrays

BATCH = 1152
LENGTHS = (256, 512, 1024, 2048)
#: Sweeps over the largest length.
LENGTH_SWEEPS = ("full", "half", "kv256")
DIRECTIONS = ("forward", "backward", "both")
#: Keys of a sequence in "kv256".
SHORT_KV = 256
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
#: Largest number of query-key pairs per head for the XLA path: full sequences of 1024.
MAX_XLA_PAIRS = 1152 * 1024**2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A problem, as in results files.

    The longest sequence has `q_len` queries and `kv_len` keys. With `lengths` "full", so have all
    sequences; with "half", lengths are uniform in 1..kv_len, the same for queries and keys.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    activation: str = "gelu_tanh"
    approx: str | None = "tanh"
    lengths: str = "full"
    broadcast_q: bool = False

    @property
    def case(self) -> Case:
        q_rows, kv_rows = self.batch * self.q_len, self.batch * self.kv_len
        if self.lengths == "half":
            q_rows = kv_rows = int(uniform_lengths(self.batch, self.kv_len).sum())
        problem = GdpaProblem(
            *(self.batch, self.batch, q_rows, kv_rows, self.heads, self.heads, self.head_dim),
            *(self.dtype, (self.activation,), self.approx, self.broadcast_q),
            *(self.q_len, self.kv_len),
        )
        return Case(problem, "uniform" if self.lengths == "half" else "spread")

    def with_softmax(self) -> Self:
        return dataclasses.replace(self, activation=SOFTMAX, approx=None)


#: Activations, each with its approximation if it has one, in "activations".
ACTIVATIONS = (
    *("gelu_tanh tanh", "gelu_tanh tanh_bf16", "gelu_tanh", "gelu", "gelu polynomial"),
    *("silu tanh", "silu tanh_bf16", "silu", "relu", "leaky_relu", "relu_squared", "hardswish"),
    *("identity", SOFTMAX),
)


def _activated(name: str) -> tuple[str, Sizes]:
    activation, _, approx = name.partition(" ")
    return name, Sizes(BATCH, 1024, 1024, activation=activation, approx=approx or None)


def _over_lengths(lengths: str, kv_len: int | None = None) -> list[tuple[str, Sizes]]:
    return [
        (f"max={longest}", Sizes(BATCH, longest, kv_len or longest, lengths=lengths))
        for longest in LENGTHS
    ]


#: Names and sizes of the points by sweep.
SWEEPS: dict[str, Sequence[tuple[str, Sizes]]] = {
    "full": _over_lengths("full"),
    "half": _over_lengths("half"),
    "kv256": _over_lengths("full", SHORT_KV),
    "activations": list(map(_activated, ACTIVATIONS)),
    "pma": [
        (f"KV={length}", Sizes(BATCH, 32, length, broadcast_q=True))
        for length in (1024, 2048, 4096)
    ],
    "softmax": [
        *((f"{name} half softmax", x.with_softmax()) for name, x in _over_lengths("half")),
        ("max=1024 full softmax", Sizes(BATCH, 1024, 1024).with_softmax()),
    ],
    "other": [("B=2048 H=64 max=800 half", Sizes(2048, 800, 800, head_dim=64, lengths="half"))],
}


POINTS = [
    Point(sweep, f"{name} {direction}", sizes, direction)
    for direction in DIRECTIONS
    for sweep, every in SWEEPS.items()
    for name, sizes in every
]


def name_of(point: Point) -> str:
    """Removes the direction from a point's label."""
    return point.label.removesuffix(f" {point.direction}")


# Contenders


def contenders(point: Point, arrays: Arrays) -> list[Callable[[], Contender]]:
    """Returns makers of this library's op, the XLA path, and softmax attention by other ways.

    Those are timed in sweeps over lengths, and with softmax. A maker has the contender's name, with
    underscores, and raises NotImplementedError with the reason if its contender cannot run here.
    """
    sizes, case = point.case, point.case.case
    is_softmax, is_jagged = sizes.activation == SOFTMAX, sizes.lengths != "full"

    def made(name: str, stage: str, op: Callable[..., jax.Array], **options: Any) -> Contender:
        return Contender(name, stage, op, arrays[:3], arrays[3:], **options)

    def padded(name: str, stage: str, attend: Callable[..., jax.Array]) -> Contender:
        op = production_providers.padded(attend, sizes.q_len, sizes.kv_len)
        return made(name, stage, op, other="" if is_softmax else SOFTMAX)

    def ikbo() -> Contender:
        stage = "ikbo_jax.gdpa (implementation='mosaic_gpu')"
        return made(OUR_NAME, stage, production_providers.gdpa_of(case, "mosaic_gpu"))

    def xla() -> Contender:
        if case.pairs > MAX_XLA_PAIRS:
            raise NotImplementedError(
                f"too long: {case.pairs / 1e9:.2f}e9 pairs of a query and a key, more than "
                f"{MAX_XLA_PAIRS / 1e9:.2f}e9"
            )
        stage = "chunked, in XLA (implementation='xla')"
        op = production_providers.gdpa_of(case, "xla")
        return made("xla", stage, op, is_xla=True)

    def cudnn_softmax() -> Contender:
        stage = "softmax attention by cuDNN, sequences padded"
        return padded("cudnn-softmax", stage, production_providers.softmax())

    def ikbo_attention() -> Contender:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            index = jnp.arange(sizes.batch, dtype=jnp.int32)
            return production_providers.attend(query, key, value, index, indices_are_sorted=True)

        return padded("ikbo-attention", "ikbo_jax.attention, every candidate its own user", attend)

    if is_softmax:
        return [ikbo, xla, cudnn_softmax, *([] if is_jagged else [ikbo_attention])]
    if point.sweep == "activations":
        return [ikbo]
    return [ikbo, xla] if is_jagged else [ikbo, xla, cudnn_softmax]


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks the contenders at a point, and times them interleaved with the reference matmul."""
    case, arrays = point.case.case, point.case.case.inputs()
    makers, check = contenders(point, arrays), check_of(point, arrays)
    flops = harness.ATTENTION_WORK[point.direction] * case.useful_flops
    measured = measure_versions(makers, point, run, flops, compared=check)
    return {"name": name_of(point), "pairs": case.pairs, **measured}


def check_of(point: Point, arrays: Arrays) -> Callable[[Contender, Sequence[jax.Array]], Check]:
    """Makes the check by the case of what a contender computes: the point's, or with softmax."""
    p = point.case.case.problem
    inputs = Inputs(arrays, cotangent((p.q_rows, p.q_heads, p.head_dim), p.dtype))

    def check(contender: Contender, results: Sequence[jax.Array]) -> Check:
        """Compares out, then the gradients, with the XLA path."""
        forward = (point.case.with_softmax() if contender.other else point.case).case
        checks = []
        if point.direction != "backward":
            checks.append(forward.check(results[0], arrays))
        if point.direction != "forward":
            problem = GdpaBackwardProblem.of(forward.problem)
            d_query, d_key, d_value = results[-3:]
            backward = gdpa_backward.Case(problem, forward.lengths)
            checks.append(backward.check((d_query, d_key, d_value), inputs))
        return nearest(checks)

    return check


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figures of `ikbo` at a point, each next to its bar."""
    sweep, direction, problem, found = point["sweep"], point["direction"], point["problem"], []
    bar = FRACTION_BARS.get((sweep, direction), {}).get(problem["q_len"])
    if bar is not None and problem["dtype"] == "bfloat16":
        found.append(f"fraction {ours['fraction']:.3f}, bar {bar:.2f}")
    if sweep == "pma":
        found.append(faster(ours, provider_of(point, "xla"), "XLA", PMA_BAR))
    if sweep == "activations" and point["name"] in RELATIVE_BARS:
        baseline, bar = RELATIVE_BARS[point["name"]]
        wanted = ("activations", baseline, direction)
        same = (p for p in all_points if (p["sweep"], p["name"], p["direction"]) == wanted)
        if (other := ours_at(same)) is not None:
            relative = ours["fraction"] / other["fraction"]
            found.append(f"{relative:.3f} of {baseline}'s fraction, bar {bar}")
    attention = provider_of(point, "ikbo-attention")
    if attention is not None and direction in SOFTMAX_BARS:
        relative = attention["median_ms"] / ours["median_ms"]
        found.append(f"{relative:.3f} of attention's speed, bar {SOFTMAX_BARS[direction]}")
    return listed(*found)


BENCHMARK = Benchmark("gdpa", POINTS, measure_point, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
