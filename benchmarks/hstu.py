"""Benchmark of HSTU's and Phoenix' layers over jagged histories, and of masked attention alone.

    python -m benchmarks.hstu --out benchmarks/results/hstu/h100.json

HSTU's layers are Meta's: [u, a, u · norm(a)] is projected, u alone has a SiLU before. Phoenix' are
the attention layers of xAI's ranker, without feed-forward nets. Other libraries' attention pads the
sequences, inside the timing. cuDNN has neither SiLU nor cap: it computes another function. Every
version is compared with the XLA path in float32. Useful FLOPs of attention count the keys that each
query sees. The times of masked attention are those on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.jagged import Attend, Hstu, Masked, Phoenix
from benchmarks.production import measure_versions
from benchmarks.production_providers import Contender, cudnn
from benchmarks.records import OUR_NAME

LENGTHS = (1024, 2048, 4096, 8192)


def contenders(shape: Hstu | Phoenix | Masked, direction: str) -> list[Callable[[], Contender]]:
    """Returns makers of this library, which is first, the XLA path, and the others."""
    is_softmax, is_phoenix = shape.activation == "softmax", isinstance(shape, Phoenix)
    is_exact = is_softmax or isinstance(shape, Masked) and direction != "forward"
    cap: dict[str, Any] = {"logit_cap": shape.logit_cap} if isinstance(shape, Phoenix) else {}
    jagged = functools.partial(shape.jagged, approx=None if is_exact else "tanh")

    def made(name: str, stage: str, attend: Attend, **options: Any) -> Contender:
        return shape.contender(name, stage, shape.network(attend), **options)

    def gdpa() -> Contender:
        return made(OUR_NAME, "gdpa", jagged(**cap))

    def xla() -> Contender:
        return made("xla", "gdpa by implementation='xla'", jagged("xla", **cap), is_xla=True)

    def masked() -> Contender:
        attend = shape.by_scores(direction, **cap)
        return made("masked", "masked scores, padded, in XLA", attend)

    def cudnn_softmax() -> Contender:
        other = "no cap" if is_phoenix else "" if is_softmax else "a softmax"
        name = "cudnn-no-cap" if is_phoenix else "cudnn-softmax"
        attend = functools.partial(cudnn(), is_causal=shape.is_causal)
        return made(name, "cuDNN, padded", shape.padded(attend), other=other)

    def no_cap() -> Contender:
        return made(f"{OUR_NAME}-no-cap", "gdpa", jagged(), other="no cap")

    if isinstance(shape, Masked):
        return [gdpa, xla, masked, cudnn_softmax]
    if isinstance(shape, Phoenix):
        return [gdpa, xla, masked, no_cap, cudnn_softmax]
    every = ("norm", "projection")
    found = [
        lambda: shape.contender(OUR_NAME, "hstu_layer", shape.fused(())),
        *(xla, masked, lambda: made("ikbo-gdpa", "gdpa, and XLA around it", jagged())),
        cudnn_softmax,
        lambda: shape.contender("ikbo-recompute", f"recompute={every}", shape.fused(every)),
    ]
    return found if direction == "both" else found[:-1]


def _drawn(number: int) -> Iterator[Masked]:
    """Draws jagged shapes of up to 65,536 rows, half of them with targets."""
    rng = np.random.default_rng(7)
    for i in range(number):
        longest = int(np.exp(rng.uniform(np.log(64), np.log(8192))))
        shape = Masked(
            max(1, 65_536 // longest),
            longest,
            str(rng.choice(["equal", "uniform", "log-normal"])),
            int(rng.choice([2, 4, 8])),
            int(rng.choice([64, 128])),
            ("silu", "softmax")[i % 2],
        )
        if i % 4 >= 2:
            shape = dataclasses.replace(
                shape,
                targets=min(64, longest // 2),
                contextual=int(rng.integers(0, 5)),
                window=256 if i % 8 >= 6 else None,
            )
        yield shape


def _causal(activation: str) -> list[Masked]:
    return [Masked(65_536 // s, s, activation=activation) for s in LENGTHS]


#: The bars' shapes of layers and of attention, and drawn shapes of attention.
SWEEPS: dict[str, Sequence[Hstu | Phoenix | Masked]] = {
    "default": [Hstu()],
    "phoenix": [Phoenix(batch=32, layers=1), Phoenix()],
    "causal": _causal("silu"),
    "softmax": _causal("softmax"),
    "drawn": list(_drawn(40)),
}


POINTS = [
    Point(sweep, f"{shape.label}, {direction}", shape, direction)
    for sweep, shapes in SWEEPS.items()
    for shape in shapes
    for direction in shape.directions
]


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks all versions at a point, and times them interleaved."""
    makers, flops = contenders(point.case, point.direction), point.case.flops(point.direction)
    short_ms = math.inf if isinstance(point.case, Masked) else 0.0
    return measure_versions(makers, point, run, flops, short_ms=short_ms)


BENCHMARK = Benchmark("hstu", POINTS, measure_point)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
