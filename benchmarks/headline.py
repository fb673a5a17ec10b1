"""Makes the table of the first page: this library beside the best alternative.

    python -m benchmarks.headline

replaces the block `headline` of README.md and docs/performance.md by a table of the files in
benchmarks/results. With --check it writes nothing and returns 1 if a document would change.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import report, tables
from benchmarks.production import SLOWEST_BAR
from benchmarks.records import OUR_NAME, Record

RESULTS = report.ROOT / "benchmarks/results"
#: The card whose name the rows leave out.
CARD = "NVIDIA H100 80GB HBM3"
GPU = "NVIDIA "


class Row(NamedTuple):
    """A row: the files of results without their ending, and the times that it compares.

    `points` is a sweep, of whose points the row has geometric means, or a sweep and a label.
    `theirs` are alternatives: at every point the fastest counts.
    """

    what: str
    sizes: str
    best: str
    files: tuple[str, ...]
    points: str
    theirs: tuple[str, ...]
    ours: str = OUR_NAME


DRAWN, REQUEST = "drawn", "1,024 candidates of 15 users"
LOOK_UP = ("look_up/h100",)
SUMS = ("scatter", "jax.ops.segment_sum in f32", "one-hot product", "cumulative sums")
PADDED = ("xla", "xla-padded", "xla-by-hand", "copies")
BY_HAND = ("xla", "by-hand", "by-hand-one-hot")
GROUPED = "cuDNN, queries grouped by hand"
CUDNN = ("grouped-cudnn", "grouped-cudnn-even", "copies-cudnn", "xla")
SOFTMAX, SOFTMAXES = "cuDNN's softmax, another function", ("cudnn-softmax",)
GDPA_FILES = ("production-gdpa-h100", "production-gdpa-rest-h100")
TOKENS, HSTU_FILES = "100,072 tokens, 512 wide, causal", ("hstu/h200",)
OF_XLA = "by hand for XLA, cuDNN"
NETWORKS = (("materialised", "materialised-tuned", "hand-optimised"), "co-designed")
ROWS = (
    Row("`look_up`", DRAWN, "XLA's gather", LOOK_UP, "drawn", ("gather",), "ikbo.look_up"),
    Row(
        *("its gradient, `segment_sum`", DRAWN, "XLA's fastest of four sums", LOOK_UP, "drawn"),
        theirs=SUMS,
        ours="ikbo.segment_sum",
    ),
    Row(
        *("linear compression", DRAWN, "XLA, the fastest of four ways"),
        *(("production-linear-compression-h100",), "linear_compression forward", PADDED),
    ),
    Row(
        *("its gradient", REQUEST, "XLA, by hand"),
        *(("linear_compression-gradient-h100",), "ratio 70:1", BY_HAND),
    ),
    Row(
        *("attention", DRAWN, GROUPED),
        *(("production-attention-h100",), "attention forward", CUDNN),
    ),
    Row(
        *("its gradient", "2,048 keys a user", GROUPED),
        *(("attention-gradient-h100",), "s S=2048", CUDNN),
    ),
    Row("gdpa", DRAWN, SOFTMAX, GDPA_FILES, "gdpa forward", ("cudnn-softmax", "xla")),
    Row(
        *("its gradient", "1,152 sequences of 512", SOFTMAX),
        *(("gdpa-backward-h100",), "full max=512 backward", SOFTMAXES),
    ),
    Row(
        *("8 attention layers of Phoenix", "8 users of 64 candidates, no cap", "cuDNN, padded"),
        *(("phoenix/h100",), "one forward", ("cudnn-no-cap",)),
        ours="ikbo-no-cap",
    ),
    Row(
        *("5 HSTU layers", TOKENS, SOFTMAX, HSTU_FILES),
        *("default 512 wide, 100k tokens, forward", SOFTMAXES),
    ),
    Row(
        *("their training step", "the same", SOFTMAX, HSTU_FILES),
        *("default 512 wide, 100k tokens, both", SOFTMAXES),
    ),
    Row("ranking network", REQUEST, OF_XLA, ("ranking-h200",), "default", *NETWORKS),
    Row("its training step", REQUEST, OF_XLA, ("training-steps-h200",), "default", *NETWORKS),
)
WORDS = (
    "Drawn sizes: geometric means, and the number of sizes at which this library takes more than "
    f"{SLOWEST_BAR} of the alternative's time. Measured on an {CARD} where a row names no other "
    "card, sustained and by turns ([how](docs/performance.md#how-it-is-measured)); `look_up` and "
    "`segment_sum` by the time on the device.\n"
)


def _points(row: Row, results: Record) -> list[Record]:
    return [
        p for p in results["points"] if row.points in (p["sweep"], f"{p['sweep']} {p['label']}")
    ]


def _duration(ms: float) -> str:
    """Formats a time with three digits; the space does not break."""
    number, unit = (ms, "ms") if ms >= 1 else (ms * 1e3, "µs")
    return f"{number:#.3g}".removesuffix(".") + f"\u00a0{unit}"


def cells(row: Row, files: Sequence[Record]) -> tuple[str, ...]:
    """Formats a row of the table; raises ValueError if the files hold none of its times."""
    times = [
        {p["name"]: p["median_ms"] for p in point["providers"] if "median_ms" in p}
        for results in files
        for point in _points(row, results)
    ]
    pairs = [
        (min(t[n] for n in row.theirs if n in t), t[row.ours])
        for t in times
        if row.ours in t and any(n in t for n in row.theirs)
    ]
    if not pairs:
        raise ValueError(f"{' and '.join(row.files)} have no times of {row.what}, {row.sizes}")
    theirs, ours = (statistics.geometric_mean(column) for column in zip(*pairs, strict=True))
    slower = sum(other * SLOWEST_BAR < mine for other, mine in pairs)
    drawn = f"{len(pairs)} drawn, {slower} slower"
    commits = dict.fromkeys(r["environment"]["commit"][:7] for r in files)
    device = files[0]["environment"]["device"]
    measured = ["" if device == CARD else device.removeprefix(GPU), *map("`{}`".format, commits)]
    return (
        *(row.what, drawn if row.sizes == DRAWN else row.sizes, row.best),
        *(_duration(theirs), _duration(ours), f"{theirs / ours:.2f}×"),
        ", ".join(filter(None, measured)),
    )


def body(document: str) -> str:
    """Makes the body of the block; its link is relative to `document`."""
    read: dict[str, Any] = {
        name: json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        for row in ROWS
        for name in row.files
    }
    header = ("what", "sizes", "best alternative", "its time", "ikbo-jax", "speed-up", "commit")
    rows = [cells(row, [read[name] for name in row.files]) for row in ROWS]
    words = WORDS if document == "README.md" else WORDS.replace("docs/performance.md", "")
    return f"{tables.markdown_table(header, rows)}\n{words}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if --check found a document that differs."""
    args = report.parser_of("headline").parse_args(argv)
    texts = report.updated(args.root, lambda document: {"headline": body(document)})
    return report.write(args.root, texts, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
