"""Makes the documentation's tables and plots from a results file.

    python -m benchmarks.report benchmarks/results/FILE.json

replaces what stands between `<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` in
README.md and docs/performance.md, and draws docs/images. With --check it writes nothing and fails
if the text would change. Blocks of other ops, and those whose names it does not know, are left
alone.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import (
    linear_compression,
    plots,
    report_attention,
    report_gdpa,
    report_ranking,
    timing,
)
from benchmarks.harness import provider_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/performance.md")
IMAGES = "docs/images"
STAGES_IMAGE = f"{IMAGES}/linear_compression_stages.svg"
SWEEPS_IMAGE = f"{IMAGES}/linear_compression_sweeps.svg"
#: The stages of the short table and the plot: provider, words.
HEADLINE = (
    ("materialised", "materialised: every user copied to its candidates"),
    ("materialised-aligned", "materialised, K aligned"),
    ("xla", "decomposed, in XLA"),
    ("fused", "fused: broadcast in the epilogue"),
    ("single-launch", "single launch"),
)
#: Columns that hold words.
TEXT_COLUMNS = ("stage", "name", "point", "table says", "bar", "version")
_BLOCK = re.compile(
    r"(?P<begin><!-- begin generated: (?P<name>[\w-]+) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end><!-- end generated: (?P=name) -->)",
    re.DOTALL,
)

Results = Mapping[str, Any]
Record = Mapping[str, Any]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of figures are aligned to the right."""
    align = ["---" if name in TEXT_COLUMNS else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, align, *rows)) + "\n"


def points_of(results: Results, sweep: str) -> list[Record]:
    """The points of one sweep."""
    return [point for point in results["points"] if point["sweep"] == sweep]


def provenance(results: Results) -> str:
    """Where the figures come from, in one sentence."""
    env, protocol = results["environment"], results["protocol"]
    driver = f", driver {env['driver']}" if env["driver"] else ""
    return (
        f"Measured on {env['device']}{driver}, jax {env['jax']}, commit `{env['commit'][:12]}`, "
        f"{env['date'][:10]}: median of {protocol['rounds']} windows of {protocol['window_s']} s, "
        "launches back to back, competing versions by turns.\n"
    )


def headline(results: Results) -> str:
    """The stages at the default shape: time, speed-up, fraction of the matmul."""
    defaults = points_of(results, "default")
    if not defaults:
        return "Not measured yet.\n"
    point = defaults[0]
    baseline = provider_of(point, HEADLINE[0][0])
    rows = []
    for name, words in HEADLINE:
        record = provider_of(point, name)
        if record is None:
            continue
        speedup = "-"
        if baseline is not None:
            speedup = f"{baseline['median_ms'] / record['median_ms']:.1f}×"
        rows.append((words, f"{record['median_ms']:.3f}", speedup, f"{record['fraction']:.2f}"))
    table = markdown_table(("stage", "ms", "speed-up", "of the matmul"), rows)
    return f"{sizes(point)}\n\n{table}\n{provenance(results)}"


def sizes(point: Record) -> str:
    """The sizes of a point, in words."""
    problem = point["problem"]
    (users, candidates), (k_user, k_cand) = problem["batches"], problem["ks"]
    return (
        f"{candidates} candidates of {users} users, M={problem['m']}, N={problem['n']}, "
        f"K_cand={k_cand}, K_user={k_user}, {problem['dtype']}, {point['index']} index:"
    )


def stages(results: Results) -> str:
    """Every provider at the default shape, one table for each dtype."""
    parts = []
    for point in points_of(results, "default"):
        rows = []
        for record in point["providers"]:
            if "median_ms" not in record:
                reason = record.get("failure") or record["skipped"]
                rows.append((record["name"], record["stage"], f"not run: {reason}", "", "", "", ""))
                continue
            temp = record.get("temp_bytes")
            rows.append(
                (
                    record["name"],
                    record["stage"],
                    f"{record['median_ms']:.4f}",
                    f"{record['tflops']:.0f}",
                    f"{record['fraction']:.3f}",
                    "-" if temp is None else f"{temp / 2**20:.1f}",
                    f"{record['error'] / record['bound']:.2f}"
                    + ("" if record["ok"] else " (wrong)"),
                )
            )
        header = ("name", "stage", "ms", "TFLOP/s", "fraction", "scratch, MiB", "error / bound")
        user_mib = point["user_result_bytes"] / 2**20
        parts.append(
            f"{sizes(point)}\n\n{markdown_table(header, rows)}\n"
            f"The user result alone takes {user_mib:.1f} MiB of the scratch.\n"
        )
    return "\n".join(parts) or "Not measured yet.\n"


def sweeps(results: Results) -> str:
    """Ours beside XLA in every sweep, with the bars."""
    rows = []
    on_gpu = results["environment"]["platform"] == "gpu"  # The bars are Hopper's.
    for sweep in linear_compression.SWEEPS:
        for point in points_of(results, sweep):
            ours, xla = provider_of(point, "ikbo"), provider_of(point, "xla")
            if ours is None:
                rows.append((f"{sweep}: {point['label']}", "not run", "", "", "", ""))
                continue
            path = "XLA" if point["table"]["config"] is None else "kernel"
            rows.append(
                (
                    f"{sweep}: {point['label']}",
                    f"{ours['median_ms']:.4f}",
                    "-" if xla is None else f"{xla['median_ms']:.4f}",
                    f"{ours['fraction']:.3f}",
                    path,
                    linear_compression.bar(point, results["points"]) if on_gpu else "",
                )
            )
    if not rows:
        return "Not measured yet.\n"
    table = markdown_table(("point", "ms", "XLA, ms", "fraction", "table says", "bar"), rows)
    left_out = results.get("left_out", [])
    return table + (f"\nLeft out for time: {', '.join(left_out)}.\n" if left_out else "")


def environment(results: Results) -> str:
    """Device, protocol and ceilings."""
    copy, matmuls = results["copy"], [point["matmul_tflops"] for point in results["points"]]
    matmul = f"{statistics.median(matmuls):.0f} TFLOP/s" if matmuls else "not measured"
    if len(matmuls) > 1:
        matmul += f" ({min(matmuls):.0f} to {max(matmuls):.0f} over the points)"
    size = results["protocol"]["matmul_size"]
    return (
        provenance(results) + f"\nCeilings in the same process: {size}³ bf16 matmul {matmul}, copy "
        f"from device memory to device memory {copy['tb_per_s']:.2f} TB/s (read and written).\n"
    )


def draw(results: Results, root: pathlib.Path) -> list[pathlib.Path]:
    """Draws the plots; returns their files."""
    drawn = []
    for point in points_of(results, "default")[:1]:
        timed = [(words, provider_of(point, name)) for name, words in HEADLINE]
        bars = [(words, record["median_ms"]) for words, record in timed if record is not None]
        drawn.append(root / STAGES_IMAGE)
        with plots.saved(drawn[-1], size=(7, 0.5 + 0.4 * len(bars))) as (_, (axes,)):
            drawn_bars = axes.barh(
                [words for words, _ in bars], [ms for _, ms in bars], color="#4c72b0"
            )
            axes.bar_label(drawn_bars, fmt="%.3f", padding=3)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel(f"ms on {results['environment']['device']}; less is better")
    names = [sweep for sweep in linear_compression.SWEEPS[1:-1] if points_of(results, sweep)]
    if names:
        drawn.append(root / SWEEPS_IMAGE)
        size = (3 * len(names), 2.8)
        with plots.saved(drawn[-1], len(names), size=size, sharey=True) as (_, row):
            for axis, sweep in zip(row, names, strict=True):
                points = points_of(results, sweep)
                for name, words in (("ikbo", "ikbo-jax"), ("xla", "XLA, decomposed")):
                    records = [provider_of(point, name) for point in points]
                    fractions = [float("nan") if r is None else r["fraction"] for r in records]
                    axis.plot(range(len(points)), fractions, marker="o", label=words)
                labels = [point["label"].split("=")[-1] for point in points]
                axis.set_xticks(range(len(points)), labels, rotation=30, fontsize=8)
                axis.set_title(sweep)
            # After the last curve, since it ends the scaling of the axis that all share.
            row[0].set_ylim(bottom=0)
            row[0].set_ylabel("fraction of the sustained matmul")
            row[0].legend(fontsize=8)
    return drawn


def blocks(results: Results, document: str) -> dict[str, str]:
    """The generated blocks by name, with links that hold from `document` (relative to the root)."""

    def image(name: str, words: str) -> str:
        return f"![{words}]({os.path.relpath(name, os.path.dirname(document) or '.')})\n"

    if results["op"] in ("attention", "gdpa"):
        return _over_lengths(results, image)
    if results["op"] == "ranking":
        found = {}
        for name, (header, rows), words in (
            ("table", report_ranking.headline(results), report_ranking.sizes(results)),
            *((name, report_ranking.sweep(results, name), "") for name in report_ranking.WORDS),
        ):
            if rows:
                table = markdown_table(header, rows)
                before = f"{words}\n\n" if words else ""
                found[f"ranking-{name}"] = f"{before}{table}\n{provenance(results)}"
        for name, axis in report_ranking.WORDS.items():
            if f"ranking-{name}" in found:
                words = f"latency and memory of the ranking network over {axis}"
                found[f"ranking-{name}-plot"] = image(report_ranking.IMAGE.format(name), words)
        return found
    return {
        "linear-compression-table": headline(results),
        "linear-compression-environment": environment(results),
        "linear-compression-stages": stages(results),
        "linear-compression-sweeps": sweeps(results),
        "linear-compression-stages-plot": image(STAGES_IMAGE, "time of the stages"),
        "linear-compression-sweeps-plot": image(SWEEPS_IMAGE, "fraction of the matmul over sizes"),
    }


def _over_lengths(results: Results, image: Callable[[str, str], str]) -> dict[str, str]:
    """The blocks of an op whose first sweep is over lengths; `image` makes a link."""
    if results["op"] == "attention":
        module, prefix, path = report_attention, "attention", report_attention.IMAGE
        words = "fraction of the matmul over the keys of a user"
    else:
        module, prefix, path = report_gdpa, report_gdpa.prefix(results), report_gdpa.image(results)
        words = "fraction of the matmul over the greatest length"
    found = {}
    for name, (header, rows) in (
        ("lengths", module.lengths(results)),
        ("sweeps", module.sweeps(results)),
    ):
        if rows:
            found[f"{prefix}-{name}"] = f"{markdown_table(header, rows)}\n{provenance(results)}"
    if f"{prefix}-lengths" in found:
        found[f"{prefix}-lengths-plot"] = image(path, words)
    return found


def replace_blocks(text: str, bodies: Mapping[str, str]) -> str:
    """Puts bodies into the blocks of those names; raises ValueError if a block is left open."""
    opened, closed = text.count("<!-- begin generated:"), text.count("<!-- end generated:")
    if not len(_BLOCK.findall(text)) == opened == closed:
        raise ValueError(f"{opened} generated blocks begin and {closed} end, or names differ")

    def replaced(match: re.Match[str]) -> str:
        body = bodies.get(match["name"], match["body"])
        return match["begin"] + body + match["end"]

    return _BLOCK.sub(replaced, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; with --check returns 1 if a document is not what the results make of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("results", type=pathlib.Path, help="results file (JSON)")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="root of the documents")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    args = parser.parse_args(argv)
    results = timing.read_results(args.results)
    stale = []
    for document in DOCUMENTS:
        path = args.root / document
        if not path.exists():
            continue
        before = path.read_text(encoding="utf-8")
        after = replace_blocks(before, blocks(results, document))
        if before != after:
            stale.append(document)
            if not args.check:
                path.write_text(after, encoding="utf-8")
    if args.check:
        print("stale: " + ", ".join(stale) if stale else "documents agree with the results")
        return 1 if stale else 0
    drawings = {
        "attention": report_attention.draw,
        "gdpa": report_gdpa.draw,
        "ranking": report_ranking.draw,
    }
    drawing = drawings.get(results["op"], draw)
    for written in [*stale, *(path.relative_to(args.root) for path in drawing(results, args.root))]:
        print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
