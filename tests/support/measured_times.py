"""Times of the ops' kernels on a GPU, in us; see the `.jsonl` files.

- `attention_times.jsonl`, H100; the last size of "kernel" on an H200. None: not timed. "cut": the
  kernel for few queries, and the other one with tiles that span users, that `balance` cuts, and of
  one user; some have lengths, which the models do not know. "item": one configuration of the kernel
  for few queries, with a sorted index and with one that is not; `lists`: CTAs then list their
  candidates. "kernel": the best of the kernel for few queries, and of that whose tiles span users.
  "choice": some fields of the fastest configuration; `why` has the times.
- `attention_gradient_times.jsonl`, times of kernels by CUPTI, median of 10. "large", H100,
  2026-11-27: of each way, the fastest two configurations that were timed; heads of 192 and 256
  columns have the fastest two stored ones and the fastest launch, with all that the device did.
  "small", H200, 2026-11-26: with the kernels of the result.
- `gdpa_times.jsonl`, sums of kernels by CUPTI, medians of 12, the least of two rounds and of four
  H200s; 2026-11-26, jax 0.11.2. Both fastest configurations of every kind that was timed; "short":
  the kernel for short sequences.
- `compression_times.jsonl`, linear compression at 14 sizes: one H100 SXM, sums of kernels by CUPTI,
  commit beaeb97. `drawn_compression_times.jsonl` has times on the same card by the profiler, commit
  70873ea, of 81 sizes of `benchmarks.production_draws`. `large_compression_times.jsonl`, sizes of
  more compressed rows, commit 4ae70eb: of the first configuration of packed tiles, row tiles and
  resident weights, by the models.
- `segment_sum_times.jsonl`, H100, sums of kernels by CUPTI, medians of 10, the mean of two turns;
  2026-11-28, jax 0.11.2; problems that are timed hot as well: H200, 2026-11-29, medians of three
  turns. None is XLA's scatter in f32. In hot problems, a user has half of all candidates; no choice
  knows that, so `BOTH_SUMS` has geometric means of a problem's two times.
"""

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ikbo_jax.problems import (
    Config,
    FewQueriesConfig,
    GdpaConfig,
    GdpaProblem,
    LinearCompressionConfig,
    LinearCompressionProblem,
    PackedCompressionConfig,
    ResidentCompressionConfig,
    ShortGdpaConfig,
)
from ikbo_jax.problems.look_up import SegmentSumConfig, SegmentSumProblem

KINDS: dict[str, Any] = {"short": ShortGdpaConfig, "long": GdpaConfig}
SegmentSums = tuple[SegmentSumProblem, dict[SegmentSumConfig | None, float]]


def _lines(name: str) -> list[dict[str, Any]]:
    text = pathlib.Path(__file__).with_name(f"{name}_times.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def of_attention(kind: str) -> dict[tuple[int, ...], list[float | None]]:
    """Times by sizes."""
    return {tuple(x["sizes"]): x["us"] for x in _lines("attention") if x["kind"] == kind}


def items() -> list[tuple[tuple[int, ...], FewQueriesConfig, float | None, float | None, bool]]:
    """Sizes, configuration, times and `lists` of each item."""
    return [
        (tuple(x["sizes"]), FewQueriesConfig(**x["config"]), *x["us"], x["lists"])
        for x in _lines("attention")
        if x["kind"] == "item"
    ]


def choices() -> list[tuple[tuple[int, ...], bool, dict[str, Any]]]:
    """Sizes, whether the index is sorted, and fields of the configuration that was the fastest."""
    found = (x for x in _lines("attention") if x["kind"] == "choice")
    return [(tuple(x["sizes"]), x["is_sorted"], x["expected"]) for x in found]


def of_gradients(kind: str) -> dict[tuple[int, ...], dict[tuple, float]]:
    """By sizes, the times of configurations by their fields."""
    return {
        tuple(x["sizes"]): {tuple(fields): us for *fields, us in x["us"]}
        for x in _lines("attention_gradient")
        if x["kind"] == kind
    }


def _of_gdpa(problem: dict[str, Any], us: list[Any]) -> tuple[GdpaProblem, dict[Any, float]]:
    problem["activations"] = tuple(problem["activations"])
    return GdpaProblem(**problem), {KINDS[kind](**fields): time for time, kind, fields in us}


def _of_sums(us: list[Any], **found: Any) -> SegmentSums:
    times = {fields and SegmentSumConfig(*fields): time for time, fields in us}
    return SegmentSumProblem(**found["problem"]), times


class Compression(NamedTuple):
    """A size of linear compression and its times.

    Attributes:
      problem: the size.
      xla: of `implementation="xla"`.
      row: of the first configuration of row tiles.
      packed: of packed tiles by (block_n, block_m, num_stages, cluster).
      resident: of resident weights by the fields of `ResidentCompressionConfig`.
    """

    problem: LinearCompressionProblem
    xla: float
    row: float
    packed: dict[tuple, float]
    resident: dict[tuple, float]


def _compression(sizes: dict[str, Any]) -> LinearCompressionProblem:
    batches, ks = tuple(sizes.pop("batches")), tuple(sizes.pop("ks"))
    return LinearCompressionProblem(batches, ks, **sizes)


def _timed(xla: float, row: float, **found: Any) -> Compression:
    packed, resident = (
        {tuple(fields): us for *fields, us in found[kind]} for kind in ("packed", "resident")
    )
    return Compression(_compression(found["problem"]), xla, row, packed, resident)


def drawn_compressions() -> Iterator[tuple[LinearCompressionProblem, dict[Config, float]]]:
    """Problems, and the us of each configuration that took less than 1.5 of the fastest."""
    kinds: dict[str, type[Config]] = {
        "packed": PackedCompressionConfig,
        "rows": LinearCompressionConfig,
        "resident": ResidentCompressionConfig,
    }
    for found in _lines("drawn_compression"):
        times = {kinds[kind](*fields): us for kind in kinds for *fields, us in found[kind]}
        yield _compression(found["problem"]), times


#: By name. Of "Bs" the candidates are sorted by user, of "B" they are not.
COMPRESSIONS = {found.pop("name"): _timed(**found) for found in _lines("compression")}
LARGE_COMPRESSIONS = {
    _compression(found): us for found in _lines("large_compression") if (us := found.pop("us"))
}
#: Problems and the times of their configurations, by name.
GDPA = {found.pop("name"): _of_gdpa(**found) for found in _lines("gdpa")}
SUMS, HOT_SUMS = (
    {x["name"]: _of_sums(**x) for x in _lines("segment_sum") if x["is_hot"] == is_hot}
    for is_hot in (False, True)
)
BOTH_SUMS = SUMS | {
    name.removesuffix("_hot"): (problem, {x: math.sqrt(us * alike[x]) for x, us in hot.items()})
    for name, (problem, hot) in HOT_SUMS.items()
    for alike in [SUMS[name.removesuffix("_hot")][1]]
}
