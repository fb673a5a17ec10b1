"""Makes the documentation's table of linear compression's gradient; see `report`."""

from __future__ import annotations

from benchmarks import linear_compression_gradient as benchmark
from benchmarks.records import Record, is_on_gpu, provider_of
from benchmarks.tables import Block, Table, name_of, number


def table(results: Record) -> Table:
    """Header and rows of the table of all points."""
    header = ("point", "ikbo-jax in XLA, ms", "XLA by hand, ms", "ikbo-jax, ms", "fraction", "bar")
    rows = []
    for point in results["points"]:
        ours = provider_of(point, "ikbo")
        records = (provider_of(point, "xla"), benchmark.best_by_hand(point), ours)
        bar = benchmark.bar(point, ()) if is_on_gpu(results) else ""
        times = (number(record, "median_ms") for record in records)
        rows.append((name_of(point), *times, number(ours, "fraction", 3, "-"), bar))
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The table of all points."""
    words = (
        "All four gradients for a given cotangent, without the forward pass. By hand: the faster "
        "of two programs, which differ in the sum over a user's candidates.\n\n"
    )
    return [("linear-compression-gradient", words, table(results))]
