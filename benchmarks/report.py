"""Makes the documentation's tables and plots from a results file.

    python -m benchmarks.report benchmarks/results/FILE.json

replaces the blocks between `<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` in
README.md, docs/performance.md and docs/training.md, and the plots in docs/images. With --check it
writes nothing and fails if the text would change. Blocks of other ops and blocks with unknown names
do not change; with `--only NAME ...`, these blocks alone do.
"""

import argparse
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

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


def draw(results: Record, root: pathlib.Path, only: Sequence[str] = ()) -> list[str]:
    """Draws plots that were measured, with `only` those of these blocks; returns their files."""
    names = sorted(PLOTS.keys() & blocks(results, "").keys())
    return [
        image_of(name)
        for name in names
        if (not only or f"{name}-plot" in only) and PLOTS[name][1](results, root / image_of(name))
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


def updated(root: pathlib.Path, bodies_of: Callable[[str], Mapping[str, str]]) -> dict[str, str]:
    """Finds the documents below `root` that change by the bodies of their blocks; their texts."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        if (root / document).exists():
            before = (root / document).read_text(encoding="utf-8")
            after = replace_blocks(before, bodies_of(document))
            found |= {document: after} if before != after else {}
    return found


def write(root: pathlib.Path, texts: Mapping[str, str], *, check: bool) -> int:
    """Writes documents; or with `check` returns 1 if there are any."""
    for document, text in texts.items():
        if not check:
            (root / document).write_text(text, encoding="utf-8")
        print(f"{'stale' if check else 'wrote'}: {document}")
    if check and not texts:
        print("documents agree with the results")
    return int(check and bool(texts))


def parser_of(module: str) -> argparse.ArgumentParser:
    """Makes a command line with the options of commands that write documents."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="root of the documents")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if --check found a document that differs."""
    parser = parser_of("report")
    words = "results file (JSON); several of the same kind of device are joined"
    parser.add_argument("results", type=pathlib.Path, nargs="+", help=words)
    words = "replace these blocks alone, by a file with some points of a table for instance"
    parser.add_argument("--only", nargs="+", metavar="NAME", default=(), help=words)
    args = parser.parse_args(argv)
    try:
        results = records.joined({str(x): timing.read_results(x) for x in args.results})
    except ValueError as error:
        parser.error(str(error))
    known = blocks(results, "")
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"the file makes no block {unknown[0]}; it makes {', '.join(sorted(known))}")

    def bodies_of(document: str) -> dict[str, str]:
        found = blocks(results, document)
        return {name: body for name, body in found.items() if not args.only or name in args.only}

    status = write(args.root, updated(args.root, bodies_of), check=args.check)
    for image in () if args.check else draw(results, args.root, args.only):
        print(f"wrote: {image}")
    return status


if __name__ == "__main__":
    sys.exit(main())
