"""Tables of the documentation, of networks and of drawn workloads; see `tables`."""

import statistics
from collections.abc import Sequence

from benchmarks import production as of_production
from benchmarks import rewrite_programs as of_rewrite_programs
from benchmarks import scaling as of_scaling
from benchmarks import training as of_training
from benchmarks.records import OUR_NAME, Record, is_on_gpu, mib, points_of, provider_of
from benchmarks.tables import Table, block, number, times, versions

#: Axis labels of the sweeps of the ranking network.
RANKING_AXES = {"ratio": "candidates a user", "candidates": "candidates"}
#: Versions of the ranking network in the tables of sizes: provider, description.
RANKING = (
    ("materialised", "materialised: every user copied to its candidates"),
    ("materialised-tuned", "materialised, K aligned, cuDNN"),
    ("hand-optimised", "optimised by hand for XLA, cuDNN"),
    ("co-designed", "this library's layers"),
    ("rewritten", "`ikbo.rewrite` of the materialised"),
    ("rewritten-tuned", "`ikbo.rewrite` of the materialised, K aligned, cuDNN"),
)
#: Versions in the tables and plots of sweeps; `SERVED` is a column where it was measured.
SWEPT = (
    ("materialised", "materialised (users copied)"),
    ("hand-optimised", "hand-optimised for XLA, cuDNN"),
    ("co-designed", "this library's layers"),
    ("rewritten", "ikbo.rewrite of the materialised"),
)
SERVED = ("served", "this library's layers, parameters prepared, concurrent graphs")
#: Versions of the network of generalised attention.
TRAINED_GDPA = (
    ("xla", "products over padded sequences, XLA"),
    ("cudnn-softmax", "softmax attention in its place, cuDNN"),
    (OUR_NAME, "this library's kernels"),
)
#: Names of the rewritten models.
MODELS = {"dlrm_dcnv2": "DLRM-DCNv2", "din": "DIN", "transformer": "causal transformer"}
#: Names of the workloads on several devices, and how a provider divides the work.
SCALED = {
    "linear_compression": "linear compression",
    "attention": "attention",
    "network": "ranking network",
    "training": "its training step",
}
MESH_AXES = {"auto": "jit, Auto axes", "explicit": "jit, Explicit axes"}


def ranking(results: Record) -> dict[str, str]:
    """Makes the table of the default point and the tables of the sweeps."""
    defaults = points_of(results, "default")[:1]
    rows = [
        (
            *(words, number(record, "median_ms", 3), speedup),
            mib(record, "peak_bytes" if record.get("peak_bytes") else "total_bytes", 0),
            number(record, "us_per_candidate", 2),
        )
        for _, record, words, speedup in versions(defaults, RANKING)
    ]
    header = ("version", "ms", "speed-up", "memory, MiB", "µs a candidate")
    found = {"ranking-table": block(results, (header, rows), _request(defaults))}
    for sweep in RANKING_AXES:
        points = points_of(results, sweep)
        served = [SERVED] if any(provider_of(point, SERVED[0]) for point in points) else []
        cell = lambda p: number(provider_of(p, "co-designed"), "us_per_candidate", 2, "-")  # noqa: E731
        table = times(points, [*SWEPT, *served], ("µs a candidate", cell), digits=3)
        found[f"ranking-{sweep}"] = block(results, table)
    return found


def _request(defaults: Sequence[Record]) -> str:
    if not defaults:
        return ""
    p, most = defaults[0]["problem"], defaults[0]["most"]
    return (
        f"{p['candidates']} candidates of {p['users']} users, at most {most} of one; "
        f"{p['layers']} layers, {p['dtype']}:\n\n"
    )


def training(results: Record) -> dict[str, str]:
    """Makes the tables of both networks and of the sweep over ratios."""

    def table(
        points: Sequence[Record], rows: Sequence[tuple[str, str]], samples: str, name: str
    ) -> Table:
        header = ("point", "version", "ms", samples, "memory, MiB", "speed-up", "bar")
        return header, [
            (
                *(_sizes(point), words, number(record, "median_ms", 2)),
                *(number(record, "samples_per_s", 0), mib(record, "peak_bytes", 0), speedup),
                (of_training.bars(point, (), name) if record["name"] == name else "") or "-",
            )
            for point, record, words, speedup in versions(points, rows, 2)
        ]

    def of_hand(point: Record) -> str:
        hand, ours = (provider_of(point, name) for name in ("hand-optimised", "co-designed"))
        if hand is None or ours is None:
            return "-"
        return f"{hand['median_ms'] / ours['median_ms']:.2f}×"

    default = [*points_of(results, "default"), *points_of(results, "users")]
    by_sizes = lambda p: (-p["problem"]["users"], p["problem"]["queries"])  # noqa: E731
    swept = sorted(points_of(results, "ratio"), key=by_sizes)
    note = "" if is_on_gpu(results) else "Small sizes on a CPU.\n\n"
    tables = {
        "training-table": table(default, RANKING, "candidates/s", "co-designed"),
        "training-ratio": times(swept, SWEPT, ("of by hand", of_hand), digits=2),
        "training-gdpa": table(points_of(results, "gdpa"), TRAINED_GDPA, "sequences/s", OUR_NAME),
    }
    return {name: block(results, found, note) for name, found in tables.items()}


def _sizes(point: Record) -> str:
    if point["sweep"] == "gdpa":
        return str(point["label"])
    p = point["problem"]
    return f"{p['candidates']} candidates of {p['users']} users, T={p['queries']}"


def rewrite_programs(results: Record) -> dict[str, str]:
    """Makes the table of the models that are also written by hand; older files have no others."""
    columns = (("original", "original"), ("rewritten", "`ikbo.rewrite`"), ("by-hand", "by hand"))
    first = "point", lambda p: MODELS[(p.get("problem") or {"model": p["label"]})["model"]]
    points = [point for point in results["points"] if provider_of(point, "by-hand")]
    bars = "bar", of_rewrite_programs.bars
    table = times(points, columns, bars, digits=3, first=first)
    return {"rewrite-models": block(results, table)}


def speedup(point: Record, record: Record) -> float:
    """Computes how many devices' work the devices do in the time of one."""
    requests = point["devices"] if point["mode"] == "weak" else 1
    return requests / float(record["of_one"])


def scaling(results: Record) -> dict[str, str]:
    """Makes the table of all points."""

    def row(point: Record, record: Record) -> tuple[str, ...]:
        name = str(record["name"])
        how = MESH_AXES.get(name, name)
        if point["sweep"] in ("network", "training"):
            beside = "shard_map, users beside candidates"
            how = beside + ("" if name in MESH_AXES else f", {name}")
        processes = f", {point['processes']} processes" if "processes" in point else ""
        return (
            f"{SCALED[point['sweep']]}, {point['label']}{processes}",
            how,
            number(point["providers"][0], "median_ms", 3),
            number(record, "median_ms", 3),
            f"{speedup(point, record):.2f}×",
            of_scaling.bar(point) or "-",
            of_scaling.moved_by(record) or "nothing",
        )

    words = (
        "Strong: one request on several devices; weak: one request for each device, of 2,048 "
        "candidates of 32 users. Large: one request of 8,192 candidates of 117 users. The speed-up "
        "is work per time, relative to one device.\n\n"
    )
    header = ("point", "stage", "one device, ms", "ms", "speed-up", "bar", "moved by collectives")
    rows = [row(point, record) for point in results["points"] for record in point["providers"][1:]]
    return {"scaling-table": block(results, (header, rows), words)}


def production(results: Record) -> dict[str, str]:
    """Makes the tables of means and of the slowest points."""
    means: list[tuple[str, ...]] = []
    for sweep in of_production.SWEEPS:
        found = of_production.compared(points_of(results, sweep))
        if not found:
            continue
        ours = [record for _, p in found if (record := provider_of(p, OUR_NAME)) is not None]
        fraction = statistics.geometric_mean(float(record["fraction"]) for record in ours)
        speedup = statistics.geometric_mean(ratio for ratio, _ in found)
        slower = sum(ratio < 1 / of_production.SLOWEST_BAR for ratio, _ in found)
        name = sweep.replace("_", " ").replace("both", "with gradients")
        bar, speed_bar = of_production.MEAN_BARS[sweep.split()[0]]
        figures = str(len(found)), f"{fraction:.2f}", f"{speedup:.2f}×", str(slower)
        means.append((name, *figures, f"{bar or '-'}, {speed_bar}×, none slower"))
    worst: list[tuple[str, ...]] = []
    for ratio, point in of_production.compared(results["points"])[: of_production.WORST]:
        other = of_production.alternative(point)
        name = f"{point['sweep'].replace('_', ' ')}, {point['label']}"
        both = (number(record, "median_ms") for record in (other, provider_of(point, OUR_NAME)))
        best = "-" if other is None else str(other["name"])
        worst.append((name, best, *both, f"{point['roofline_ms']:.4f}", f"{ratio:.2f}×"))
    words = (
        "Sizes drawn from stated distributions (`benchmarks/production_draws.py`), none of them "
        "tuned for. The speed-up is relative to the best alternative; both columns are geometric "
        "means.\n\n"
    )
    slowest = "The points where this library is slowest relative to the best alternative:\n\n"
    of_means = ("point", "points", "of the roofline", "speed-up", "slower", "bar")
    of_worst = ("point", "best alternative", "its ms", "ms", "roofline, ms", "speed-up")
    return {
        "production-table": block(results, (of_means, means), words),
        "production-worst": block(results, (of_worst, worst), slowest),
    }
