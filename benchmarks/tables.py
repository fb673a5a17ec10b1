"""Tables of the documentation, of the benchmarks of ops; see `report`.

A benchmark's function takes the content of its results file, and returns the bodies of its blocks
by name.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks import attention as of_attention
from benchmarks import gdpa as of_gdpa
from benchmarks import linear_compression as of_linear_compression
from benchmarks import look_up as of_look_up
from benchmarks.records import (
    OUR_NAME,
    Bars,
    Record,
    forward,
    is_forward,
    is_on_gpu,
    mib,
    points_of,
    provider_of,
)

#: Header and rows.
Table = tuple[Sequence[str], Sequence[tuple[str, ...]]]
#: A further column: its header, and its cell at a point.
Cell = tuple[str, Callable[[Record], str]]
#: Providers, by name or as functions of a point, and their descriptions.
Columns = Sequence[tuple[str | Callable[[Record], Record | None], str]]
#: Headers of columns that hold text and are aligned to the left.
TEXT_COLUMNS = (
    *("stage", "name", "point", "table says", "bar", "version", "moved by collectives"),
    *("best alternative", "model", "what", "sizes", "commit"),
)
#: The body of a block if the results file has no point for it.
NOT_MEASURED = "Not measured yet.\n"
#: Names of the providers of attention in plots and tables.
ATTENTION = {
    "copies-cudnn": "cuDNN, keys and values copied",
    "grouped-cudnn": "cuDNN, queries grouped by hand",
    "xla": "ikbo-jax in XLA",
    OUR_NAME: "ikbo-jax",
}
#: Columns of the tables of gdpa; a yardstick only if it was timed.
GDPA = (
    ("xla", "ikbo-jax in XLA"),
    ("cudnn-softmax", "cuDNN softmax (another function)"),
    (OUR_NAME, "ikbo-jax"),
)
#: Rows of the short table of linear compression, and bars of its plot: provider, description.
STAGES = (
    ("materialised", "materialised: every user copied to its candidates"),
    ("materialised-aligned", "materialised, K aligned"),
    ("xla", "decomposed, in XLA"),
    ("fused", "fused: broadcast in the epilogue"),
    ("single-launch", "single launch"),
)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a Markdown table; columns except `TEXT_COLUMNS` are aligned to the right."""
    align = ["---" if name in TEXT_COLUMNS else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, align, *rows)) + "\n"


def provenance(results: Record) -> str:
    """Writes one sentence about device, versions, date and protocol of the results."""
    env, protocol = results["environment"], results["protocol"]
    date = env["date"][:16].replace("T", " ")
    driver = f", driver {env['driver']}" if env["driver"] else ""
    commits = [f"`{commit[:12]}`" for commit in env["commit"].split(", ")]
    return (
        f"Measured on {env['device']}{driver}, jax {env['jax']}, "
        f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}, "
        f"{date} UTC: median of {protocol['rounds']} windows of "
        f"{protocol['window_s']} s, launches back to back, competing versions by turns.\n"
    )


def block(results: Record, table: Table, words: str = "") -> str:
    """Makes the body of a block: words, a table and its provenance; empty without rows."""
    header, rows = table
    if not rows:
        return ""
    return f"{words}{markdown_table(header, rows)}\n{provenance(results)}"


# Cells


def name_of(point: Record) -> str:
    """Names a point in a table of several sweeps."""
    return f"{point['sweep']}: {point['label']}"


def number(record: Record | None, field: str, digits: int = 4, missing: str = "not run") -> str:
    """Formats a number of a provider's figures; `missing` if the provider was not timed."""
    return missing if record is None else f"{record[field]:.{digits}f}"


#: A column with this library's fraction of the matmul.
FRACTION: Cell = "fraction", lambda p: number(provider_of(p, OUR_NAME), "fraction", 3, "-")


def bars_of(results: Record, bars: Bars) -> Cell:
    """Makes a column with the bars of this library; empty if the results are not from a GPU."""
    on_gpu, points = is_on_gpu(results), results["points"]
    return "bar", lambda p: bars(p, points, OUR_NAME) if on_gpu else ""


def times(
    points: Sequence[Record],
    columns: Columns,
    *cells: Cell,
    digits: int = 4,
    first: Cell = ("point", name_of),
) -> Table:
    """Makes a table with a row for every point: times of providers, and further cells."""

    def row(point: Record) -> tuple[str, ...]:
        records = (
            provider_of(point, provider) if isinstance(provider, str) else provider(point)
            for provider, _ in columns
        )
        found = (number(record, "median_ms", digits) for record in records)
        return (first[1](point), *found, *(cell(point) for _, cell in cells))

    words = (f"{words}, ms" if words else "ms" for _, words in columns)
    header = (first[0], *words, *(header for header, _ in cells))
    return header, [row(point) for point in points]


def versions(
    points: Sequence[Record], rows: Sequence[tuple[str, str]], digits: int = 1
) -> Iterator[tuple[Record, Record, str, str]]:
    """Yields a point, the figures of a timed provider, its description and its speed-up.

    `rows` are providers and their descriptions; the first one is the baseline of speed-ups.
    """
    for point in points:
        base = provider_of(point, rows[0][0])
        for name, words in rows:
            if (record := provider_of(point, name)) is not None:
                speedup = "-"
                if base is not None:
                    speedup = f"{base['median_ms'] / record['median_ms']:.{digits}f}×"
                yield point, record, words, speedup


# Blocks


def _op_table(
    results: Record,
    points: Sequence[Record],
    columns: Columns,
    bars: Bars,
    words: str = "",
    **first: Cell,
) -> str:
    """Makes the body of a block with times, this library's fraction and its bars."""
    found = times(points, columns, FRACTION, bars_of(results, bars), **first)  # type: ignore[arg-type]
    return block(results, found, words)


def attention(results: Record) -> dict[str, str]:
    """Makes the tables over S and of the other sweeps, and the gradient's table."""
    bars, every = of_attention.bars, [*ATTENTION.items()]
    points = forward(results)["points"]
    over_s, others = ([p for p in points if (p["sweep"] == "s") == x] for x in (True, False))
    of_others = [(OUR_NAME, ""), ("grouped-cudnn", ATTENTION["grouped-cudnn"])]
    first = "S", lambda p: str(p["problem"]["kv_len"])
    words = (
        "Gradients of query, key and value for a given cotangent, without the forward pass. 2,048 "
        "candidates, 64 of a user, T=64, N=K=2, H=128 and S=2048, unless the point says "
        "otherwise.\n\n"
    )
    gradients = [point for point in results["points"] if not is_forward(point)]
    return {
        "attention-lengths": _op_table(results, over_s, every, bars, first=first),
        "attention-sweeps": _op_table(results, others, of_others, bars),
        "attention-gradient": _op_table(results, gradients, every, bars, words),
    }


def gdpa(results: Record) -> dict[str, str]:
    """Makes the tables over the largest length and of the other sweeps."""

    def table(over_lengths: bool) -> str:
        sweeps, every = of_gdpa.LENGTH_SWEEPS, results["points"]
        points = [point for point in every if (point["sweep"] in sweeps) == over_lengths]
        columns = [
            (name, words)
            for name, words in GDPA
            if name in ("xla", OUR_NAME) or any(provider_of(p, name) for p in points)
        ]
        return _op_table(results, points, columns, of_gdpa.bars)

    # Results of backward passes only have blocks of their own.
    directions = {p["direction"] for p in results["points"]}
    prefix = "gdpa-backward" if directions == {"backward"} else "gdpa"
    return {f"{prefix}-lengths": table(True), f"{prefix}-sweeps": table(False)}


def linear_compression_gradient(results: Record) -> dict[str, str]:
    """Makes the table of all points, whose direction older files do not name."""
    words = (
        "All four gradients for a given cotangent, without the forward pass. By hand: the faster "
        "of two programs, which differ in the sum over a user's candidates.\n\n"
    )
    by_hand = of_linear_compression.best_by_hand
    columns = (("xla", "ikbo-jax in XLA"), (by_hand, "XLA by hand"), (OUR_NAME, "ikbo-jax"))
    bars, points = of_linear_compression.gradient_bars, results["points"]
    return {"linear-compression-gradient": _op_table(results, points, columns, bars, words)}


def linear_compression(results: Record) -> dict[str, str]:
    """Makes the tables of stages, of all providers, of sweeps and of gradients; the ceilings."""
    gradients = [point for point in results["points"] if not is_forward(point)]
    gradient = linear_compression_gradient({**results, "points": gradients})
    results = forward(results)
    if gradients and not results["points"]:
        return gradient
    found = {
        "linear-compression-table": _headline(results),
        "linear-compression-environment": _ceilings(results),
        "linear-compression-stages": _stages(results),
        "linear-compression-sweeps": linear_compression_sweeps(results),
    }
    return {name: body or NOT_MEASURED for name, body in found.items()} | gradient


def _headline(results: Record) -> str:
    defaults = points_of(results, "default")[:1]
    rows = [
        (words, number(record, "median_ms", 3), speedup, number(record, "fraction", 2))
        for _, record, words, speedup in versions(defaults, STAGES)
    ]
    header = ("stage", "ms", "speed-up", "of the matmul")
    return block(results, (header, rows), f"{_sizes(defaults[0])}\n\n" if defaults else "")


def _sizes(point: Record) -> str:
    problem = point["problem"]
    (users, candidates), (k_user, k_cand) = problem["batches"], problem["ks"]
    return (
        f"{candidates} candidates of {users} users, M={problem['m']}, N={problem['n']}, "
        f"K_cand={k_cand}, K_user={k_user}, {problem['dtype']}, {point['index']} index:"
    )


def _stages(results: Record) -> str:
    def row(record: Record) -> tuple[str, ...]:
        if "median_ms" not in record:
            reason = record.get("failure") or record["skipped"]
            return (record["name"], record["stage"], f"not run: {reason}", "", "", "", "")
        error = f"{record['error'] / record['bound']:.2f}" + ("" if record["ok"] else " (wrong)")
        figures = (("median_ms", 4), ("tflops", 0), ("fraction", 3))
        numbers = (number(record, field, digits) for field, digits in figures)
        return (record["name"], record["stage"], *numbers, mib(record, "temp_bytes", 1), error)

    header = ("name", "stage", "ms", "TFLOP/s", "fraction", "scratch, MiB", "error / bound")
    parts = [
        f"{_sizes(point)}\n\n{markdown_table(header, list(map(row, point['providers'])))}\n"
        f"The user result alone takes {point['user_result_bytes'] / 2**20:.1f} MiB of the "
        "scratch.\n"
        for point in points_of(results, "default")
    ]
    return "\n".join([*parts, provenance(results)]) if parts else ""


def linear_compression_sweeps(results: Record) -> str:
    """Makes the table of all sweeps: our time, the XLA path's, our fraction, and the bars."""
    points = [p for sweep in of_linear_compression.SWEEPS for p in points_of(results, sweep)]
    says = "table says", lambda p: "XLA" if p["table"]["config"] is None else "kernel"
    xla = "XLA, ms", lambda p: number(provider_of(p, "xla"), "median_ms", missing="-")
    bars = bars_of(results, of_linear_compression.bars)
    table = times(points, [(OUR_NAME, "")], xla, FRACTION, says, bars)
    left_out = results.get("left_out", [])
    missing = f"\nLeft out for time: {', '.join(left_out)}.\n" if left_out else ""
    if not points:
        return ""
    return f"{markdown_table(*table)}{missing}\n{provenance(results)}"


def look_up(results: Record) -> dict[str, str]:
    """Makes the table of all points."""
    names = ("gather", of_look_up.LOOK_UP, "jax.ops.segment_sum in f32", of_look_up.SEGMENT_SUM)
    columns = [(name, name) for name in names]
    return {"look-up": markdown_table(*times(results["points"], columns))}


def _ceilings(results: Record) -> str:
    copy, matmuls = results["copy"], [point["matmul_tflops"] for point in results["points"]]
    matmul = f"{statistics.median(matmuls):.0f} TFLOP/s" if matmuls else "not measured"
    if len(matmuls) > 1:
        matmul += f" ({min(matmuls):.0f} to {max(matmuls):.0f} over the points)"
    size = results["protocol"]["matmul_size"]
    return (
        provenance(results) + f"\nCeilings in the same process: {size}³ bf16 matmul {matmul}, copy "
        f"from device memory to device memory {copy['tb_per_s']:.2f} TB/s (read and written).\n"
    )
