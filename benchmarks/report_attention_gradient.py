"""Makes the documentation's table of attention's gradient; see `report`."""

from __future__ import annotations

from benchmarks import attention_gradient as benchmark
from benchmarks.records import OUR_NAME, Record, is_on_gpu, provider_of
from benchmarks.tables import Block, Table, name_of, number

#: Columns: provider, description.
OTHERS = (
    ("copies-cudnn", "cuDNN, keys and values copied"),
    ("grouped-cudnn", "cuDNN, queries grouped by hand"),
    ("xla", "ikbo-jax in XLA"),
)


def table(results: Record) -> Table:
    """Header and rows of the table of all points."""
    header = ("point", *(f"{words}, ms" for _, words in OTHERS), "ikbo-jax, ms", "fraction", "bar")
    rows = []
    for point in results["points"]:
        ours = provider_of(point, OUR_NAME)
        times = (number(provider_of(point, name), "median_ms") for name, _ in OTHERS)
        bar = benchmark.bars(point, ()) if is_on_gpu(results) else ""
        figures = (number(ours, "median_ms"), number(ours, "fraction", 3, "-"))
        rows.append((name_of(point), *times, *figures, bar))
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The table of all points."""
    words = (
        "Gradients of query, key and value for a given cotangent, without the forward pass; "
        '"given": forward and backward. 2,048 candidates, 64 of a user, T=64, N=K=2, H=128 and '
        "S=2048, unless the point says otherwise.\n\n"
    )
    return [("attention-gradient", words, table(results))]
