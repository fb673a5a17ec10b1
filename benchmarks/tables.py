"""Cells of the documentation's tables; see `report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.records import Record, points_of, provider_of

#: Header and rows.
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def name_of(point: Record) -> str:
    """The name of a point in a table of several sweeps."""
    return f"{point['sweep']}: {point['label']}"


def number(record: Record | None, field: str, digits: int = 4, missing: str = "not run") -> str:
    """A number of a provider's figures; `missing` if the provider was not timed."""
    return missing if record is None else f"{record[field]:.{digits}f}"


def figures(point: Record, names: Sequence[str]) -> list[str]:
    """The times of providers in milliseconds, and the fraction of the last of them."""
    records = [provider_of(point, name) for name in names]
    times = [number(record, "median_ms") for record in records]
    return [*times, number(records[-1], "fraction", 3, "-")]


def headline(
    results: Record, rows: Sequence[tuple[str, str]]
) -> Iterator[tuple[Record, tuple[str, str, str]]]:
    """The figures of providers at the default point, if they were timed, and their first cells.

    Args:
      results: the content of a results file.
      rows: provider and description; the first provider is the baseline of speed-ups.

    Yields:
      The figures of a provider; its description, milliseconds and speed-up.
    """
    for point in points_of(results, "default")[:1]:
        baseline = provider_of(point, rows[0][0])
        for name, words in rows:
            if (record := provider_of(point, name)) is None:
                continue
            speedup = "-"
            if baseline is not None:
                speedup = f"{baseline['median_ms'] / record['median_ms']:.1f}×"
            yield record, (words, number(record, "median_ms", 3), speedup)


#: The name of a block, the words before its table, and the table.
Block = tuple[str, str, Table]
#: The name of the block beside which a plot stands, the plot's file and its description.
Plot = tuple[str, str, str]
