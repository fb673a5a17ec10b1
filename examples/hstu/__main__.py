"""Trains both versions of HSTU on MovieLens-100k with several seeds, and compares them.

python -m examples.hstu [--seeds 5] [--size hopper] [--steps 1000] [--data FOLDER]
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from examples.hstu.model import Hstu, PlainHstu, Sizes, tokens_of
from examples.movielens import data, evaluate, train
from examples.movielens.impressions import Batch, Impressions
from examples.movielens.progress import Progress
from ikbo_jax.terminal import natural, positive, print_table

VERSIONS = {"ikbo": Hstu, "plain": PlainHstu}
#: Sizes and protocols by name: for a CPU; and for a Hopper GPU, whose kernels take heads of 64.
SIZES = {
    "small": (Sizes(), train.Protocol(steps=1600)),
    "hopper": (
        Sizes(history=512, layers=4, width=256, heads=4, head_dim=64),
        train.Protocol(2000, 32, learning_rate=2e-3, dtype="bfloat16"),
    ),
}


class Trainer:
    """Trains one version; its compiled programs serve several seeds."""

    def __init__(self, version: str, sizes: Sizes, protocol: train.Protocol):
        self.kind, self.sizes, self.protocol = VERSIONS[version], sizes, protocol
        self.version = version
        self.tokens = functools.partial(tokens_of, is_jagged=self.kind.is_jagged)
        graph, _ = nnx.split(self.kind(sizes, rngs=nnx.Rngs(0)))
        self.network: Any = train.Network(
            lambda params, tokens: nnx.merge(graph, params)(tokens),  # type: ignore[arg-type]
            lambda seed: nnx.state(self.kind(sizes, rngs=nnx.Rngs(seed)), nnx.Param),
        )
        self.step: Any = jax.jit(train.step_of(self.network, protocol), donate_argnums=0)
        self._logits: Any = jax.jit(train.rounded(self.network, protocol))

    def run(self, impressions: Impressions, seed: int) -> tuple[list[float], evaluate.Metrics]:
        """Trains with a seed; returns the loss of every step, and metrics of the test part."""
        state, loss = train.start(self.network, self.protocol, seed), []
        with Progress().bar(f"{self.version}, seed {seed}", 0, self.protocol.steps) as advance:
            for number in range(self.protocol.steps):
                batch = impressions.train_batch(self.protocol.users, seed, number)
                state, value = self.step(state, self.tokens(batch))
                loss.append(float(value))
                advance(loss=float(np.mean(loss[-50:])))

        def scorer(batch: Batch) -> np.ndarray:
            return np.asarray(self._logits(state.params, self.tokens(batch)))

        found = evaluate.evaluate(scorer, impressions, impressions.test, users=16)
        return loss, found

    def cost(self, impressions: Impressions) -> tuple[float, float]:
        """Measures the milliseconds of a step, over 50 steps, and the MiB of temporary arrays."""
        tokens = self.tokens(impressions.train_batch(self.protocol.users, 0, 0))
        state: Any = train.start(self.network, self.protocol, 0)
        compiled = self.step.lower(state, tokens).compile()
        state, value = compiled(state, tokens)
        value.block_until_ready()
        begin = time.perf_counter()
        for _ in range(50):
            state, value = compiled(state, tokens)
        value.block_until_ready()
        memory = compiled.memory_analysis()
        milliseconds = 1e3 * (time.perf_counter() - begin) / 50
        return milliseconds, memory.temp_size_in_bytes / 2**20 if memory else float("nan")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and compares; returns 0, or 2 if the data cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m examples.hstu", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, help="folder of MovieLens-100k")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--seeds", type=natural, default=5, help="0: time and memory of a step alone"
    )
    parser.add_argument("--steps", type=positive, help="number of training steps")
    args = parser.parse_args(argv)
    sizes, protocol = SIZES[args.size]
    protocol = dataclasses.replace(protocol, steps=args.steps or protocol.steps)
    try:
        found = data.load(args.data)
    except data.UNREADABLE as error:
        print(error, file=sys.stderr)
        return 2
    sizes = dataclasses.replace(sizes, movies=len(found.titles))
    impressions, rows = Impressions(found, sizes.history), []
    for version in VERSIONS:
        trainer = Trainer(version, sizes, protocol)
        milliseconds, mib = trainer.cost(impressions)
        print(f"{version}: {milliseconds:.2f} ms a step", file=sys.stderr, flush=True)
        metrics = [trainer.run(impressions, seed)[1] for seed in range(args.seeds)]
        quality = ["not trained"] * 2
        if metrics:
            values = [m.auc.mean() for m in metrics], [m.ndcg.mean() for m in metrics]
            intervals = map(evaluate.over_seeds, values)
            quality = [f"{mean:.4f} ({low:.4f} to {high:.4f})" for mean, low, high in intervals]
        rows.append((version, *quality, f"{milliseconds:.2f}", f"{mib:.0f}"))
    print_table(("version", "AUC", f"NDCG@{evaluate.TOP}", "ms a step", "MiB"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
