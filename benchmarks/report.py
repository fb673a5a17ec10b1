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

import argparse
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from benchmarks import plots, records, tables, timing
from benchmarks import tables_networks as networks
from benchmarks.records import Record
from examples.movielens import report as movielens

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/performance.md", "docs/training.md")
_BLOCK = re.compile(
    r"(?P<begin><!-- begin generated: (?P<name>[\w-]+) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end><!-- end generated: (?P=name) -->)",
    re.DOTALL,
)
#: The date in `provenance`; in older blocks it has no time of day.
_DATE = re.compile(r"commit `[^`]*`, (\d{4}-\d\d-\d\d(?: \d\d:\d\d)?)")

#: Makes a benchmark's blocks by name; a block without points is empty. Others make none.
TABLES: Mapping[str, Callable[[Record], dict[str, str]]] = {
    make.__name__: make
    for make in (
        *(tables.attention, tables.gdpa, tables.look_up),
        *(tables.linear_compression, tables.linear_compression_gradient),
        *(networks.production, networks.ranking, networks.rewrite_programs),
        *(networks.scaling, networks.training),
    )
} | {
    "movielens": movielens.blocks,
    # Names of benchmarks in older files.
    "attention_gradient": tables.attention,
    "rewrite_models": networks.rewrite_programs,
}


OF_MATMUL = "fraction of the matmul over"
#: Plots beside the blocks of results: descriptions, and functions that draw and return whether the
#: points were measured. Their files are named like the blocks.
PLOTS: Mapping[str, tuple[str, Callable[[Record, pathlib.Path], bool]]] = {
    "attention-lengths": (f"{OF_MATMUL} the keys of a user", plots.attention),
    "gdpa-lengths": (f"{OF_MATMUL} the greatest length", plots.gdpa),
    "gdpa-backward-lengths": (f"{OF_MATMUL} the greatest length", plots.gdpa),
    "linear-compression-stages": ("time of the stages", plots.linear_compression_stages),
    "linear-compression-sweeps": (f"{OF_MATMUL} sizes", plots.linear_compression_sweeps),
    **{
        f"ranking-{sweep}": (
            f"latency and memory of the ranking network over {x}",
            functools.partial(plots.ranking, sweep=sweep),
        )
        for sweep, x in networks.RANKING_AXES.items()
    },
    "movielens-quality": ("loss and AUC over steps", movielens.draw),
    "look-up": ("bandwidth over the size of a row", plots.look_up),
    "scaling-table": ("speed-up over devices", plots.scaling),
    "production-table": (
        "drawn workloads: fraction of the roofline and speed-up, one dot each",
        plots.production,
    ),
}
IMAGES = {"movielens-quality": "movielens", "scaling-table": "scaling"}
IMAGES |= {"production-table": "production"}


def image_of(block: str) -> str:
    """Names the file of a block's plot, relative to the root."""
    return f"docs/images/{IMAGES.get(block, block.replace('-', '_'))}.svg"


def blocks(results: Record, document: str) -> dict[str, str]:
    """Makes the generated blocks by name; their links are relative to `document`."""
    bodies = TABLES[results["op"]](results) if results["op"] in TABLES else {}
    found = {name: body for name, body in bodies.items() if body}
    for name in PLOTS.keys() & found.keys():
        link = os.path.relpath(image_of(name), os.path.dirname(document) or ".")
        found[f"{name}-plot"] = f"![{PLOTS[name][0]}]({link})\n"
    return found


def draw(results: Record, root: pathlib.Path, images: Container[str] | None = None) -> list[str]:
    """Draws plots that were measured, of `images` alone if given; returns their files."""
    found = {image_of(name): PLOTS[name][1] for name in PLOTS.keys() & blocks(results, "").keys()}
    return [
        image
        for image, draw_it in sorted(found.items())
        if (images is None or image in images) and draw_it(results, root / image)
    ]


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
    """Explains why `new` should not replace the body `old` of a block; None if it should."""
    rows, new_rows = points_in(old), points_in(new)
    if lost := [row for row in rows if row not in new_rows]:
        return f"{name} has {len(lost)} points that the file lacks, {lost[0]!r} first"
    dates = [_DATE.search(body) for body in (old, new)]
    if dates[0] is None or dates[1] is None:
        return None
    then, now = dates[0][1], dates[1][1]
    digits = min(len(then), len(now))
    return f"{name} was measured later, {then}" if then[:digits] > now[:digits] else None


def points_in(body: str) -> list[str]:
    """Reads the first column of a body's tables, which holds the names of the points."""
    cells = [
        line.split(" | ")[0].removeprefix("| ") for line in body.split("\n") if line[:2] == "| "
    ]
    heads = [index - 1 for index, cell in enumerate(cells) if cell.startswith("---")]
    return [c for i, c in enumerate(cells) if i not in heads and not c.startswith("---")]


def images_of(bodies: Mapping[str, str], document: str) -> set[str]:
    """Finds the images that the bodies of `document` link to, relative to the root."""
    links = [re.search(r"\]\(([^)]+)\)", body) for n, body in bodies.items() if n.endswith("-plot")]
    folder = os.path.dirname(document)
    return {os.path.normpath(os.path.join(folder, link[1])) for link in links if link is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns 1 if --check found a document that differs from the results, and 2 if nothing was
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
            f"wrote nothing: {args.results[0]} is from {tables.measured_at(results)}; --only NAME "
            "replaces single blocks, --overwrite these as well",
            file=sys.stderr,
        )
        return 2
    for document, after in texts.items():
        (args.root / document).write_text(after, encoding="utf-8")
    for written in [*texts, *draw(results, args.root, images)]:
        print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
