"""Makes the documentation's table of rewritten models; see `report`."""

from __future__ import annotations

from benchmarks import rewrite_models
from benchmarks.records import Record, provider_of
from benchmarks.tables import Block, Table, number

#: Names of the models in the table.
WORDS = {"dlrm_dcnv2": "DLRM-DCNv2", "din": "DIN", "transformer": "causal transformer"}


def table(results: Record) -> Table:
    """Header and rows of the table of all models."""
    header = ("point", "original, ms", "`ikbo.rewrite`, ms", "by hand, ms", "bar")
    rows: list[tuple[str, ...]] = []
    for point in results["points"]:
        records = (provider_of(point, name) for name in ("original", "rewritten", "by-hand"))
        times = (number(record, "median_ms", 3) for record in records)
        rows.append((WORDS[point["label"]], *times, rewrite_models.bars(point)))
    return header, rows


def blocks(results: Record) -> list[Block]:
    """The table of all models."""
    return [("rewrite-models", "", table(results))]
