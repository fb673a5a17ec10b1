"""Benchmark of attention's gradient, beside cuDNN's on queries grouped by hand, copies and XLA.

    python -m benchmarks.attention_gradient --out benchmarks/results/attention_gradient-h200.json

Times the gradients of query, key and value for a given cotangent; what the forward pass leaves for
them is computed before. Useful FLOPs count five products. The sweep "given" times forward and
backward together, on sizes with few queries or few keys. Every version is compared with the XLA
path in float32. Without a GPU all sizes shrink, and the figures only show that the benchmark runs.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import compiling, harness
from benchmarks.production_directions import compare, exact_results, in_direction
from benchmarks.production_draws import AttentionShape, shrink
from benchmarks.production_providers import Contender, contenders
from benchmarks.production_summary import alternative
from benchmarks.records import OUR_NAME, Record, provider_of

SWEEPS = ("s", "h", "index", "given")
DEFAULT = AttentionShape(2048, 32, 64, 2048, 2, 2, 128, "bfloat16", "even", has_lengths=False)
#: Bars of our fraction of the matmul, by S.
FRACTION_BARS = {512: 0.45, 1024: 0.55, 2048: 0.62, 4096: 0.66, 8192: 0.68}
#: Bars of our speed relative to cuDNN's on grouped queries: in "s", and in "given" relative to the
#: best alternative.
CUDNN_BAR, GIVEN_BAR = 1.15, 1.0
#: B, U, T, heads, S and H of "given".
GIVEN = (
    (1024, 15, 32, 2, 1024, 128),
    (2048, 2048, 8, 4, 256, 64),
    (4096, 512, 1, 4, 512, 64),
    (10_000, 1, 1, 8, 1024, 64),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes in one direction, "backward" or "both"."""

    sweep: str
    label: str
    shape: AttentionShape
    direction: str = "backward"


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""

    def at(label: str, **sizes: Any) -> Point:
        return Point(sweep, label, dataclasses.replace(DEFAULT, **sizes))

    if sweep == "s":
        yield from (at(f"S={s}", kv_len=s) for s in FRACTION_BARS)
    elif sweep == "h":
        yield from (at(f"H={h}", head_dim=h) for h in (64, 96, 192, 256))
    elif sweep == "index":
        yield at("float16", dtype="float16")
        yield at("odd counts", index="ragged")
        yield at("unsorted", index="unsorted")
        yield at("lengths 1..S", has_lengths=True)
        yield at("8:2 heads", batch=512, users=8, q_heads=8)
        yield at("1:1", batch=256, users=256)
    elif sweep == "given":
        for batch, users, queries, heads, keys, width in GIVEN:
            shape = AttentionShape(
                batch, users, queries, keys, heads, heads, width, "bfloat16", "even", False
            )
            yield Point(sweep, shape.label, shape, "both")
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def small(point: Point) -> Point:
    """The point with sizes small enough for a CPU."""
    shape = shrink(point.shape)
    assert isinstance(shape, AttentionShape)
    return dataclasses.replace(point, shape=shape)


def measure_point(
    point: Point, protocol: harness.Protocol, *, quick: bool = False
) -> dict[str, Any]:
    """Checks all versions at a point, and times them interleaved with the reference matmul."""
    makers = list(contenders(point.shape))
    exact = exact_results(makers[1](), point.direction)

    def compiled(make: Callable[[], Contender]) -> harness.Contender:
        try:
            contender = make()
        except NotImplementedError as unable:
            return harness.Contender({"name": make.__name__, "stage": "-", "skipped": str(unable)})
        return harness.compile_and_check(
            contender.name,
            contender.stage,
            lambda: in_direction(contender, point.direction),
            functools.partial(compare, contender, point.direction, exact),
        )

    flops = harness.ATTENTION_WORK[point.direction] * point.shape.flops
    return {
        "sweep": point.sweep,
        "label": point.label,
        "direction": point.direction,
        "problem": dataclasses.asdict(point.shape),
        **harness.measure([compiled(m) for m in makers[: 2 if quick else None]], flops, protocol),
    }


def bars(point: Record, all_points: Sequence[Record]) -> str:
    """Text with the figures of this library at a point, each next to its bar."""
    del all_points
    ours = provider_of(point, OUR_NAME)
    if ours is None:
        return ""
    sweep, found = point["sweep"], []
    if sweep == "s" and (bar := FRACTION_BARS.get(point["problem"]["kv_len"])) is not None:
        found.append(f"fraction {ours['fraction']:.3f}, bar {bar}")
    best = alternative(point) if sweep == "given" else provider_of(point, "grouped-cudnn")
    if best is not None:
        bar = GIVEN_BAR if sweep == "given" else CUDNN_BAR if sweep == "s" else None
        words = "" if bar is None else f", bar {bar}"
        found.append(f"{best['median_ms'] / ours['median_ms']:.2f} x {best['name']}{words}")
    return "; ".join(found)


def run(sweeps: Sequence[str], *, out: pathlib.Path, **options: Any) -> dict[str, Any]:
    """Measures sweeps, as `attention.run` does; with `quick`, this library and XLA alone."""
    bench = harness.Run("attention_gradient", out, **options)

    def measure(point: Point) -> dict[str, Any]:
        return measure_point(point, bench.protocol, quick=bench.quick)

    return bench.measure([p for sweep in sweeps for p in points(sweep)], measure, small)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a version failed or was wrong."""
    parser = harness.parser("attention_gradient", SWEEPS)
    compiling.add_options(parser)
    args = parser.parse_args(argv)
    return harness.print_results(run(args.sweep, **harness.options(args, argv)), bars)


if __name__ == "__main__":
    sys.exit(main())
