"""Makes the documentation's tables and plots from a results file.

    python -m benchmarks.report benchmarks/results/FILE.json

replaces the blocks between `<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` in
README.md, docs/performance.md and docs/training.md, and the plots in docs/images. With --check it
writes nothing and fails if the text would change. Blocks of other ops and blocks with unknown names
do not change.

If a table in a document is newer than the results file, or has points that the file lacks, the
command prints the reason, writes nothing, and returns 2. `--only NAME ...` limits the command to
these blocks; `--overwrite` replaces newer and larger tables, too.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Container, Mapping, Sequence
from operator import itemgetter
from typing import Any

from benchmarks import (
    linear_compression,
    plots,
    records,
    report_attention,
    report_attention_gradient,
    report_gdpa,
    report_linear_compression_gradient,
    report_movielens,
    report_production,
    report_ranking,
    report_rewrite_models,
    report_scaling,
    report_training,
    tables,
    timing,
)
from benchmarks.records import Record, is_on_gpu, mib, points_of, provider_of
from benchmarks.tables import name_of, number

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/performance.md", "docs/training.md")
IMAGES = "docs/images"
STAGES_IMAGE = f"{IMAGES}/linear_compression_stages.svg"
SWEEPS_IMAGE = f"{IMAGES}/linear_compression_sweeps.svg"
#: Rows of the short table and bars of the plot: provider, description.
HEADLINE = (
    ("materialised", "materialised: every user copied to its candidates"),
    ("materialised-aligned", "materialised, K aligned"),
    ("xla", "decomposed, in XLA"),
    ("fused", "fused: broadcast in the epilogue"),
    ("single-launch", "single launch"),
)
#: Panels of the plot over sizes: sweep, label of its horizontal axis.
PANELS = {
    "m": "compressed rows M",
    "k": "candidate rows K",
    "n": "embedding width N",
    "batch": "candidates B",
    "ratio": "candidates a user",
}
#: Headers of columns that hold text and are aligned to the left.
TEXT_COLUMNS = (
    *("stage", "name", "point", "table says", "bar", "version", "moved by collectives"),
    *("best alternative", "model"),
)
_BLOCK = re.compile(
    r"(?P<begin><!-- begin generated: (?P<name>[\w-]+) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end><!-- end generated: (?P=name) -->)",
    re.DOTALL,
)

#: By op: `blocks` yields a table's block, the words before it and the table; `plots_of` yields the
#: block beside which a plot stands, the plot's file and its description; `draw` draws the plots. A
#: module without plots has neither of the two.
MODULES: dict[str, Any] = {
    "attention": report_attention,
    "attention_gradient": report_attention_gradient,
    "gdpa": report_gdpa,
    "linear_compression_gradient": report_linear_compression_gradient,
    "movielens": report_movielens,
    "production": report_production,
    "ranking": report_ranking,
    "rewrite_models": report_rewrite_models,
    "scaling": report_scaling,
    "training": report_training,
}
#: The body of a block if the results file has no point for it.
NOT_MEASURED = "Not measured yet.\n"
#: The date in `provenance`; in older blocks it has no time of day.
_DATE = re.compile(r"commit `[^`]*`, (\d{4}-\d\d-\d\d(?: \d\d:\d\d)?)")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns except `TEXT_COLUMNS` are aligned to the right."""
    align = ["---" if name in TEXT_COLUMNS else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, align, *rows)) + "\n"


def measured_at(results: Record) -> str:
    """Date and time of the benchmark, e.g. "2026-01-31 23:59 UTC"."""
    date: str = results["environment"]["date"]
    return f"{date[:16].replace('T', ' ')} UTC"


def provenance(results: Record) -> str:
    """One sentence about device, versions, date and protocol of the results."""
    env, protocol = results["environment"], results["protocol"]
    driver = f", driver {env['driver']}" if env["driver"] else ""
    return (
        f"Measured on {env['device']}{driver}, jax {env['jax']}, {_commits(env['commit'])}, "
        f"{measured_at(results)}: median of {protocol['rounds']} windows of "
        f"{protocol['window_s']} s, launches back to back, competing versions by turns.\n"
    )


def _commits(joined: str) -> str:
    """The commits of results; `joined`: one, or several of 12 digits that commas separate."""
    commits = [f"`{commit[:12]}`" for commit in joined.split(", ")]
    return f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"


def headline(results: Record) -> str:
    """The table of the stages at the default point: time, speed-up, fraction of the matmul."""
    defaults = points_of(results, "default")
    if not defaults:
        return NOT_MEASURED
    timed = tables.headline(results, HEADLINE)
    rows = [(*cells, number(record, "fraction", 2)) for record, cells in timed]
    table = markdown_table(("stage", "ms", "speed-up", "of the matmul"), rows)
    return f"{sizes(defaults[0])}\n\n{table}\n{provenance(results)}"


def sizes(point: Record) -> str:
    """The sizes of a point as text."""
    problem = point["problem"]
    (users, candidates), (k_user, k_cand) = problem["batches"], problem["ks"]
    return (
        f"{candidates} candidates of {users} users, M={problem['m']}, N={problem['n']}, "
        f"K_cand={k_cand}, K_user={k_user}, {problem['dtype']}, {point['index']} index:"
    )


def stages(results: Record) -> str:
    """Tables of all providers at the default point, one for each dtype."""
    parts = []
    for point in points_of(results, "default"):
        rows = []
        for record in point["providers"]:
            if "median_ms" not in record:
                reason = record.get("failure") or record["skipped"]
                rows.append((record["name"], record["stage"], f"not run: {reason}", "", "", "", ""))
                continue
            rows.append(
                (
                    record["name"],
                    record["stage"],
                    number(record, "median_ms"),
                    number(record, "tflops", 0),
                    number(record, "fraction", 3),
                    mib(record, "temp_bytes", 1),
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
    return "\n".join([*parts, provenance(results)]) if parts else NOT_MEASURED


def sweeps(results: Record) -> str:
    """The table of all sweeps: our time, the time of the XLA path, our fraction, and the bars."""
    rows = []
    for sweep in linear_compression.SWEEPS:
        for point in points_of(results, sweep):
            ours, xla = provider_of(point, "ikbo"), provider_of(point, "xla")
            cells = ["not run", "", "", "", ""]
            if ours is not None:
                bar = linear_compression.bar(point, results["points"])
                cells = [
                    number(ours, "median_ms"),
                    number(xla, "median_ms", missing="-"),
                    number(ours, "fraction", 3),
                    "XLA" if point["table"]["config"] is None else "kernel",
                    bar if is_on_gpu(results) else "",
                ]
            rows.append((name_of(point), *cells))
    if not rows:
        return NOT_MEASURED
    table = markdown_table(("point", "ms", "XLA, ms", "fraction", "table says", "bar"), rows)
    left_out = results.get("left_out", [])
    missing = f"\nLeft out for time: {', '.join(left_out)}.\n" if left_out else ""
    return f"{table}{missing}\n{provenance(results)}"


def environment(results: Record) -> str:
    """Text about device, protocol and ceilings."""
    copy, matmuls = results["copy"], [point["matmul_tflops"] for point in results["points"]]
    matmul = f"{statistics.median(matmuls):.0f} TFLOP/s" if matmuls else "not measured"
    if len(matmuls) > 1:
        matmul += f" ({min(matmuls):.0f} to {max(matmuls):.0f} over the points)"
    size = results["protocol"]["matmul_size"]
    return (
        provenance(results) + f"\nCeilings in the same process: {size}³ bf16 matmul {matmul}, copy "
        f"from device memory to device memory {copy['tb_per_s']:.2f} TB/s (read and written).\n"
    )


def draw(
    results: Record, root: pathlib.Path, images: Container[str] = (STAGES_IMAGE, SWEEPS_IMAGE)
) -> list[pathlib.Path]:
    """Draws the plots whose files are in `images`; returns the files."""
    drawn = []
    for point in points_of(results, "default")[:1] if STAGES_IMAGE in images else ():
        timed = [(words, provider_of(point, name)) for name, words in HEADLINE]
        bars = [(words, record["median_ms"]) for words, record in timed if record is not None]
        drawn.append(root / STAGES_IMAGE)
        with plots.saved(drawn[-1], size=(9, 0.8 + 0.45 * len(bars))) as (_, (axes,)):
            drawn_bars = axes.barh(
                [words for words, _ in bars], [ms for _, ms in bars], color="#4c72b0"
            )
            axes.bar_label(drawn_bars, fmt="%.3f", padding=3)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel(f"ms on {results['environment']['device']}; less is better")
    names = [sweep for sweep in PANELS if points_of(results, sweep)]
    if names and SWEEPS_IMAGE in images:
        drawn.append(root / SWEEPS_IMAGE)
        _draw_sweeps(results, names, drawn[-1])
    return drawn


def _draw_sweeps(results: Record, names: Sequence[str], path: pathlib.Path) -> None:
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    size = (9, 0.6 + 2.9 * rows)
    with plots.saved(path, columns, rows=rows, size=size, sharey=True) as (figure, panels):
        panels = list(panels)
        for axis in panels[len(names) :]:
            axis.set_axis_off()
        for axis, sweep in zip(panels[: len(names)], names, strict=True):
            points = points_of(results, sweep)
            for name, words in (("ikbo", "ikbo-jax"), ("xla", "ikbo-jax in XLA (decomposed)")):
                records = [provider_of(point, name) for point in points]
                plots.curve(axis, records, itemgetter("fraction"), label=words)
            labels = [point["label"].split("=")[-1] for point in points]
            labels = [label.replace(" of one user", ":1") for label in labels]
            axis.set_xticks(range(len(points)), labels, rotation=30)
            axis.set_xlabel(PANELS[sweep])
        # Called after the last curve, since it turns autoscaling of the shared axis off.
        panels[0].set_ylim(bottom=0)
        figure.supylabel("fraction of the sustained matmul")
        figure.suptitle(f"linear compression on {results['environment']['device']}")
        plots.legend_below(figure, panels[0], 2)


def blocks(results: Record, document: str) -> dict[str, str]:
    """The generated blocks by name; links are relative to `document`, a path from the root."""

    def image(name: str, words: str) -> str:
        return f"![{words}]({os.path.relpath(name, os.path.dirname(document) or '.')})\n"

    if (module := MODULES.get(results["op"])) is not None:
        found = {}
        for name, words, (header, rows) in module.blocks(results):
            if rows:
                found[name] = f"{words}{markdown_table(header, rows)}\n{provenance(results)}"
        pictures = module.plots_of(results) if hasattr(module, "plots_of") else []
        for name, path, words in pictures:
            if name in found:
                found[f"{name}-plot"] = image(path, words)
        return found
    return {
        "linear-compression-table": headline(results),
        "linear-compression-environment": environment(results),
        "linear-compression-stages": stages(results),
        "linear-compression-sweeps": sweeps(results),
        "linear-compression-stages-plot": image(STAGES_IMAGE, "time of the stages"),
        "linear-compression-sweeps-plot": image(SWEEPS_IMAGE, "fraction of the matmul over sizes"),
    }


def replace_blocks(text: str, bodies: Mapping[str, str]) -> str:
    """Replaces the bodies of the named blocks; raises ValueError if a block is not closed."""
    opened, closed = text.count("<!-- begin generated:"), text.count("<!-- end generated:")
    if not len(_BLOCK.findall(text)) == opened == closed:
        raise ValueError(f"{opened} generated blocks begin and {closed} end, or names differ")

    def replaced(match: re.Match[str]) -> str:
        body = bodies.get(match["name"], match["body"])
        return match["begin"] + body + match["end"]

    return _BLOCK.sub(replaced, text)


def reason_to_keep(name: str, old: str, new: str) -> str | None:
    """Why the body `old` of the block `name` should not be replaced by `new`; None if it should."""
    rows, new_rows = _points_in(old), _points_in(new)
    if lost := [row for row in rows if row not in new_rows]:
        return f"{name} has {len(lost)} points that the file lacks, {lost[0]!r} first"
    dates = [_DATE.search(body) for body in (old, new)]
    if dates[0] is None or dates[1] is None:
        return None
    then, now = dates[0][1], dates[1][1]
    digits = min(len(then), len(now))
    return f"{name} was measured later, {then}" if then[:digits] > now[:digits] else None


def _points_in(body: str) -> list[str]:
    """The first column of a body's tables, which holds the names of the points."""
    cells = [
        line.split(" | ")[0].removeprefix("| ") for line in body.split("\n") if line[:2] == "| "
    ]
    heads = [index - 1 for index, cell in enumerate(cells) if cell.startswith("---")]
    return [c for i, c in enumerate(cells) if i not in heads and not c.startswith("---")]


def images_of(bodies: Mapping[str, str], document: str) -> set[str]:
    """The images that bodies link to, relative to the root; links are relative to `document`."""
    links = [re.search(r"\]\(([^)]+)\)", body) for n, body in bodies.items() if n.endswith("-plot")]
    folder = os.path.dirname(document)
    return {os.path.normpath(os.path.join(folder, link[1])) for link in links if link is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line.

    Returns:
      0 on success; 1 if --check found a document that differs from the results; 2 if nothing was
      written because a table is newer or larger than the results file.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    words = "results file (JSON); several of the same commit and kind of device are joined"
    parser.add_argument("results", type=pathlib.Path, nargs="+", help=words)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="root of the documents")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="replace these blocks alone")
    parser.add_argument(
        "--overwrite", "--force", action="store_true", help="replace newer and larger tables, too"
    )
    args = parser.parse_args(argv)
    try:
        results = records.joined({str(x): timing.read_results(x) for x in args.results})
    except ValueError as error:
        parser.error(str(error))
    known = blocks(results, "")
    if unknown := [name for name in args.only or () if name not in known]:
        parser.error(f"the file makes no block {unknown[0]}; it makes {', '.join(sorted(known))}")
    texts: dict[str, str] = {}
    kept: dict[str, Any] = {}
    images: set[Any] = set()
    for document in DOCUMENTS:
        path = args.root / document
        bodies = blocks(results, document)
        bodies = {n: body for n, body in bodies.items() if not args.only or n in args.only}
        images |= images_of(bodies, document)
        if not path.exists():
            continue
        before = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(before):
            if (name := match["name"]) in bodies:
                reason = reason_to_keep(name, match["body"], bodies[name])
                kept |= {} if reason is None else {reason: document}
        after = replace_blocks(before, bodies)
        if before != after:
            texts[document] = after
    if args.check:
        print("stale: " + ", ".join(texts) if texts else "documents agree with the results")
        return 1 if texts else 0
    if kept and not args.overwrite:
        for reason, document in kept.items():
            print(f"{document}: {reason}", file=sys.stderr)
        print(
            f"wrote nothing: {args.results[0]} is from {measured_at(results)}; --only NAME "
            "replaces single blocks, --overwrite these as well",
            file=sys.stderr,
        )
        return 2
    for document, after in texts.items():
        (args.root / document).write_text(after, encoding="utf-8")
    module = MODULES.get(results["op"])
    draw_plots = draw if module is None else getattr(module, "draw", lambda *_: [])
    drawn = draw_plots(results, args.root, images)
    for written in [*texts, *(path.relative_to(args.root) for path in drawn)]:
        print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
