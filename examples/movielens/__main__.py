"""Trains the ranker on MovieLens-100k, or compares its versions.

python -m examples.movielens [train] [--data FOLDER] [--version plain] ...
python -m examples.movielens compare [--seeds 5] [--size hopper] [--results FILE] ...
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from benchmarks import timing
from examples.movielens import baselines, compare, data, evaluate, plot, train
from examples.movielens.impressions import Impressions
from examples.movielens.model import HOPPER, Sizes
from examples.movielens.progress import Progress
from ikbo_jax.terminal import natural, positive, print_table

#: Sizes by name: for a CPU, and for a Hopper GPU.
SIZES = {
    "small": (Sizes(layers=1), train.Protocol()),
    "hopper": (
        HOPPER,
        train.Protocol(steps=2750, users=16, dtype="bfloat16", learning_rate=3e-3),
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.movielens")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="train one version, compare it with simpler models")
    one.add_argument("--version", choices=train.VERSIONS, default="ikbo")
    one.add_argument("--seed", type=natural, default=0)
    every = commands.add_parser("compare", help="train every version with several seeds")
    words = "0 times the steps alone"
    every.add_argument("--seeds", type=natural, default=5, help=words)
    every.add_argument("--results", type=pathlib.Path, help="results file (JSON) to write")
    for command in (one, every):
        command.add_argument(
            "--data", type=pathlib.Path, help="folder of MovieLens-100k (GroupLens or RecBole)"
        )
        command.add_argument("--size", choices=SIZES, default="small")
        command.add_argument("--steps", type=positive, help="number of training steps")
        command.add_argument(
            "--factor-steps", type=positive, help="steps of the matrix factorisation"
        )
        command.add_argument(
            "--out",
            type=pathlib.Path,
            default=pathlib.Path("build/movielens"),
            help="folder of checkpoints and plots; runs in it are resumed",
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, "train" if none is named; returns 0, or 2 if the data cannot be read."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["train", *words]
    args = _parser().parse_args(words)
    sizes, protocol = SIZES[args.size]
    if args.steps is not None:
        protocol = dataclasses.replace(protocol, steps=args.steps)
    factorisation = baselines.Factorisation()
    if args.factor_steps is not None:
        factorisation = dataclasses.replace(factorisation, steps=args.factor_steps)
    try:
        found = data.load(args.data)
    except data.UNREADABLE as error:
        print(error, file=sys.stderr)
        return 2
    sizes = dataclasses.replace(sizes, movies=len(found.titles))
    impressions, progress = Impressions(found, sizes.history), Progress()
    if args.command == "train":
        return _train(args, impressions, sizes, protocol, factorisation, progress)
    results = compare.compare(
        impressions,
        sizes,
        protocol,
        seeds=args.seeds,
        folder=args.out / args.size,
        factorisation=factorisation,
        progress=progress,
    )
    path = args.results or args.out / f"{args.size}.json"
    timing.write_results(path, results)
    print(f"wrote {path}; python -m benchmarks.report {path} makes the documentation's tables")
    return 0


def _train(
    args: argparse.Namespace,
    impressions: Impressions,
    sizes: Sizes,
    protocol: train.Protocol,
    factorisation: baselines.Factorisation,
    progress: Progress,
) -> int:
    trainer = train.Trainer(args.version, sizes, impressions, protocol)
    folder = args.out / args.size / f"{args.version}-{args.seed}"
    run = trainer.run(args.seed, folder, progress)
    progress.note("training the matrix factorisation")
    factors = factorisation.train(impressions, args.seed)
    rows = []
    for name, metrics in (
        ("popularity", baselines.popularity(impressions)),
        ("matrix factorisation", factorisation.evaluate(impressions, factors, impressions.test)),
        (f"ranker, {train.VERSIONS[args.version]}", run.test),
    ):
        intervals = (evaluate.over_users(x, metrics.user) for x in (metrics.auc, metrics.ndcg))
        rows.append((name, *(f"{i.mean:.4f} ({i.low:.4f} to {i.high:.4f})" for i in intervals)))
    print_table(("model", "AUC", f"NDCG@{evaluate.TOP}"), rows)
    path = plot.draw_run(run, args.out / f"{args.size}-{args.version}-{args.seed}.svg")
    print(f"checkpoints: {folder}\nplot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
