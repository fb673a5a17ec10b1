"""Benchmark of several processes: the network and its training step, a process for each GPU.

    python -m benchmarks.scaling_processes --out benchmarks/results/scaling-processes-h100.json

The command starts the processes on this machine. They measure those points of `benchmarks.scaling`
that use all devices. Every process times the program on its own device and, in step with the
others, the program on all devices. For one device the time of the fastest process counts, for all
devices that of the slowest. Without a GPU, two processes run small sizes, whose times say nothing.
"""

import argparse
import contextlib
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks import children, harness, records, scaling
from examples import several_processes
from ikbo_jax._timing import time_launches

SWEEPS = ("network", "training")
#: Calls that are timed to find how many fill a window.
TRIAL_CALLS = 4
TIME_LIMIT_S = 3600.0


def in_step_ms(
    thunks: Mapping[str, Callable[[], Any]], *, window_s: float, rounds: int
) -> dict[str, list[float]]:
    """Times thunks like `interleaved_ms` in several processes, which make equally many calls.

    A process that made fewer calls than another would leave it waiting in a collective. The fastest
    process' time of "one device" counts, and the slowest process' time of the others.
    """
    launches = {}
    for name, thunk in thunks.items():
        jax.block_until_ready(thunk())
        calls = math.ceil(window_s * TRIAL_CALLS / time_launches(thunk, (), TRIAL_CALLS))
        launches[name] = int(multihost_utils.broadcast_one_to_all(np.int32(calls)))
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, thunk in thunks.items():
            multihost_utils.sync_global_devices(name)
            time_launches(thunk, (), math.ceil(launches[name] / 2))  # warms the device up
            multihost_utils.sync_global_devices(name)
            ms = time_launches(thunk, (), launches[name]) * 1e3 / launches[name]
            found = multihost_utils.process_allgather(np.float32(ms))
            counts = found.min() if name == "one device" else found.max()
            samples.setdefault(name, []).append(float(counts))
    return samples


def work(args: argparse.Namespace) -> int:
    """Does a process' work; the exit status is 1 if a result is wrong."""
    several_processes.end_with_stdin()
    several_processes.join(args)
    args.times = in_step_ms
    if args.process_id == 0:
        return 0 if records.all_correct(scaling.BENCHMARK.run(args)) else 1
    # The first process alone prints and keeps its results.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w", encoding="utf-8") as null:
        args.out = pathlib.Path(folder) / "results.json"
        with contextlib.redirect_stdout(null):
            scaling.BENCHMARK.run(args)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a result is wrong or a process fails."""
    parser = harness.parser("scaling_processes", SWEEPS)
    scaling.add_options(parser)
    parser.add_argument("--processes", type=int, help="default: one for each GPU, or 2 on the CPU")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(devices=1)
    args = children.parsed(parser, argv)
    if args.coordinator is not None:
        return work(args)
    processes = args.processes or several_processes.count_gpus() or 2
    if processes < 2:
        print(f"needs at least 2 processes, but there is {processes}", file=sys.stderr)
        return 1
    command = children.command("benchmarks.scaling_processes", *args.argv)
    return several_processes.start_all(command, processes, TIME_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
