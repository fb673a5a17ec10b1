"""Reads results files: figures of providers, and all of them as text."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

#: A results file, or one of its points or providers.
Record = Mapping[str, Any]
#: Name of this library's provider in every benchmark.
OUR_NAME = "ikbo"


def provider_of(point: Record, name: str) -> Record | None:
    """Finds the figures of a provider at a point of a results file; None if it was not timed."""
    found = (p for p in point["providers"] if p["name"] == name and "median_ms" in p)
    return next(found, None)


def ours_at(points: Iterable[Record]) -> Record | None:
    """Finds this library's figures at the first point where it was timed; None if at none."""
    found = (provider_of(point, OUR_NAME) for point in points)
    return next((record for record in found if record is not None), None)


def is_forward(point: Record) -> bool:
    """Returns whether a point is of the forward pass alone; points of older files do not say so."""
    return bool(point.get("direction", "forward") == "forward")


def forward(results: Record) -> Record:
    """Selects the points of the forward pass."""
    return {**results, "points": [*filter(is_forward, results["points"])]}


def points_of(results: Record, sweep: str) -> list[Record]:
    """Selects the points of one sweep."""
    return [point for point in results["points"] if point["sweep"] == sweep]


def joined(files: Mapping[str, Record]) -> Record:
    """Joins results files, given by their names; the date is the first file's.

    The files may be of several commits: all of them are named. Raises ValueError if two files
    differ in benchmark, protocol or other parts of the environment, or hold the same point.
    """
    (first, results), *others = files.items()
    if not others:
        return results

    def origin(file: Record) -> dict[str, Any]:
        environment = file["environment"] | {"commit": None, "date": None}
        return {name: file[name] for name in ("op", "protocol")} | environment

    for name, other in others:
        if (ours := origin(results)) != (theirs := origin(other)):
            raise ValueError(f"{first} has {ours}, but {name} has {theirs}")
    points = [point for file in files.values() for point in file["points"]]
    labels = [(point["sweep"], point["label"], point.get("processes", "")) for point in points]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(
            f"{' and '.join(files)} have the point {' '.join(map(str, twice[0])).strip()} twice"
        )
    commits = dict.fromkeys(file["environment"]["commit"][:12] for file in files.values())
    environment = results["environment"] | {"commit": ", ".join(commits)}
    return {**results, "points": points, "environment": environment}


def wrong(results: Record) -> list[str]:
    """Names the points that failed, and the providers that failed or were wrong."""
    found = [
        f"{point['sweep']} {point['label']}, {p['name']}"
        for point in results["points"]
        for p in point["providers"]
        if "failure" in p or not p.get("ok", True)
    ]
    return [*results.get("failed", ()), *found]


def faster(ours: Record, other: Record | None, words: str, bar: float | None = None) -> str:
    """Formats the speed of `ours` relative to another provider; empty if that was not timed."""
    if other is None:
        return ""
    found = f"{other['median_ms'] / ours['median_ms']:.2f} x {words}"
    return found if bar is None else f"{found}, bar {bar}"


def of_fraction(ours: Record, bar: float | None) -> str:
    """Formats the fraction of the matmul beside its bar; empty without a bar."""
    return "" if bar is None else f"fraction {ours['fraction']:.3f}, bar {bar}"


def listed(*found: str) -> str:
    """Joins the bars of a point that are not empty."""
    return "; ".join(filter(None, found))


def fastest(providers: Iterable[Record]) -> Record | None:
    """Finds the fastest of the providers that were timed; None if none was."""
    timed = (p for p in providers if "median_ms" in p)
    return min(timed, key=lambda p: float(p["median_ms"]), default=None)


#: Formats the bars of a provider: takes a point, all points, and the provider's name.
Bars = Callable[..., str]


def of_ours(figures: Callable[[Record, Record, Sequence[Record]], str]) -> Bars:
    """Makes bars of a function of a point, our figures there, and all points; others have none."""

    @functools.wraps(figures)
    def bars(point: Record, all_points: Sequence[Record] = (), name: str = OUR_NAME) -> str:
        ours = provider_of(point, OUR_NAME)
        return "" if ours is None or name != OUR_NAME else figures(point, ours, all_points)

    return bars


#: Figures of a provider in text: field, unit, digits, divisor.
FIGURES = (
    *(("median_ms", "ms", 4, 1), ("tflops", "TFLOP/s", 1, 1), ("fraction", "of the matmul", 3, 1)),
    *(("us_per_candidate", "us a candidate", 3, 1), ("samples_per_s", "samples/s", 0, 1)),
    *(("temp_bytes", "MiB scratch", 1, 2**20), ("peak_bytes", "MiB peak", 1, 2**20)),
)


def format_point(point: Record, bars: Bars, points: Sequence[Record] = ()) -> str:
    """Formats a point, one of `points`, with a line for every provider."""
    lines = [] if point["providers"] else [f"nothing is timed: {point.get('reason')}"]
    first: Record = next((p for p in point["providers"] if "median_ms" in p), {})
    for p in point["providers"]:
        figures = [
            f"{p[field] / divisor:.{digits}f} {unit}"
            for field, unit, digits, divisor in FIGURES
            if p.get(field) is not None
        ]
        if "median_ms" not in p:
            figures = [f"{p.get('failure') or 'skipped: ' + p.get('skipped', ''):.90}"]
        elif p is not first:
            figures.append(f"{p['median_ms'] / first['median_ms']:.3f} of {first['name']}'s time")
        if "error" in p:
            figures.append(f"error/bound {p['error'] / max(p['bound'], 1e-30):.2f}")
        figures += [bars(point, points, p["name"]), p.get("note", "")]
        figures.append("" if p.get("ok", True) else "WRONG RESULT")
        lines.append(f"{p['name']}: {', '.join(filter(None, figures))}")
    return "\n".join(f"{point['sweep']} {point['label']}, {line}" for line in lines)


def is_on_gpu(results: Record) -> bool:
    """Returns whether the results were measured on a GPU; the bars are for Hopper."""
    return bool(results["environment"]["platform"] == "gpu")


def mib(record: Record, field: str, digits: int) -> str:
    """Formats a field in bytes as MiB; "-" if it is missing or None."""
    return "-" if record.get(field) is None else f"{record[field] / 2**20:.{digits}f}"
