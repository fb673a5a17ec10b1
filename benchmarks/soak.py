"""A soak of all kernels: launches of mixed sizes in random order, every result compared.

    python -m benchmarks.soak --launches 1000000 --budget-s 120 --out build/soak.json

Some thirty programs (`soak_programs`) are called in a seeded random order, back to back. A program
repeats its op `REPEATS` times in a loop, whose steps depend on each other, and counts on the device
the steps whose results differ in a bit from the program's first result. So NaN that was not there
is a difference, too. Launches are this library's kernels: their number in the compiled program, as
its text has them inside and outside the loop, times the program's calls. Without a GPU there are
none, and a step counts as one launch.

The exit status is 1 if a result differed, if the launches were not reached in time, or if a program
did not end: then a watchdog names it and ends the process.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import soak_programs, timing
from ikbo_jax import terminal
from ikbo_jax._timing.programs import UNTIMED_ON_GPU

#: Steps of a program's loop. A call from Python takes 20 to 50 µs, as long as a step of a small
#: program; more steps would put the same kernel after itself more often.
REPEATS = 4
#: Calls in flight, and seconds after which a call that has not ended is a hang.
QUEUE, HANG_S = 256, 60.0
#: Threads that compile.
WORKERS = 16
SEED = 0


class Soaked(NamedTuple):
    """A compiled program; `call` takes the number of differences so far and returns the new one.

    A call launches `launches` kernels.
    """

    name: str
    call: Callable[[jax.Array], jax.Array]
    launches: int


def repeated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Repeats `fn` in a program of the differences so far, the expected results and the arrays.

    The program returns the differences and the last results.
    """

    def run(differences: jax.Array, expected: Any, *arrays: jax.Array) -> tuple[jax.Array, Any]:
        def step(_: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            differences, _ = carry
            # Makes the arrays depend on the step before: no step is left out or moved.
            differences, held = jax.lax.optimization_barrier((differences, arrays))
            found = fn(*held)
            return differences + _differs(found, expected), found

        return jax.lax.fori_loop(0, REPEATS, step, (differences, expected))

    return run


def _differs(found: Any, expected: Any) -> jax.Array:
    """Returns 1 if any bit differs, else 0."""

    def any_bit(x: jax.Array, y: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=bits)
        return jnp.any(as_bits(x) != as_bits(y))

    differing = jax.tree.leaves(jax.tree.map(any_bit, found, expected))
    return jnp.any(jnp.stack(differing)).astype(jnp.int32)


def count_launches(text: str, target: str = "mosaic_gpu") -> int:
    """Counts a compiled program's calls of a target, by default kernels of Mosaic GPU, in its text.

    The text has a computation for each loop body, and the number of steps at the loop. A loop
    without a known number counts as one step, a conditional as its branch with the fewest calls.
    """
    bodies: dict[str, str] = {}
    entry = ""
    for found in re.finditer(r"^(ENTRY )?%?([\w.\-]+) .*\{\n((?:.+\n)*?)\}", text, re.MULTILINE):
        bodies[found[2]] = found[3]
        entry = found[2] if found[1] else entry

    @functools.cache
    def launches(name: str) -> int:
        total = 0
        for line in bodies.get(name, "").splitlines():
            total += f'custom_call_target="{target}' in line
            if body := re.search(r"\bbody=%?([\w.\-]+)", line):
                steps = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                total += launches(body[1]) * (int(steps[1]) if steps else 1)
            elif called := re.search(r"\b(?:to_apply|calls)=%?([\w.\-]+)", line):
                total += launches(called[1])
            elif branches := re.search(r"branch_computations=\{([^}]*)\}", line):
                names = (x.strip().lstrip("%") for x in branches[1].split(","))
                total += min(map(launches, names))
        return total

    return launches(entry)


def compile_all(log: Callable[[str], None], queue: Queue) -> list[Soaked]:
    """Compiles the programs and runs each once, for the results that all later ones must have."""
    options = UNTIMED_ON_GPU if _on_gpu() else None
    found = list(soak_programs.programs("mosaic_gpu" if _on_gpu() else None))
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        futures = []
        for program in found:
            expected = jax.eval_shape(program.fn, *program.arrays)
            # Python traces one program at a time; XLA compiles without Python's lock.
            lowered = jax.jit(repeated(program.fn)).lower(jnp.int32(0), expected, *program.arrays)
            futures.append(pool.submit(lowered.compile, options))
        soaked = []
        for program, compiled in zip(found, futures, strict=True):
            soaked.append(_first_run(program, compiled.result(), queue))
            log(f"{soaked[-1].launches} launches a call: {program.name}")
    return soaked


def _first_run(program: soak_programs.Program, compiled: Any, queue: Queue) -> Soaked:
    shapes = jax.eval_shape(program.fn, *program.arrays)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    differences, expected = compiled(jnp.int32(0), zeros, *program.arrays)
    queue.add(program.name, differences)
    queue.wait()
    launches = count_launches(compiled.as_text())
    return Soaked(
        program.name,
        lambda differences: compiled(differences, expected, *program.arrays)[0],
        launches or (0 if _on_gpu() else REPEATS),
    )


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


class Queue:
    """Calls that have not ended; `on_hang` gets a program's name if its call takes `hang_s`."""

    def __init__(self, hang_s: float, on_hang: Callable[[str], Any]) -> None:
        self._calls: collections.deque[tuple[str, Any]] = collections.deque()
        self._hang_s, self._on_hang = hang_s, on_hang

    def add(self, name: str, differences: jax.Array) -> None:
        """Adds a call; waits until at most `QUEUE` calls have not ended."""
        self._calls.append((name, differences))
        if len(self._calls) > QUEUE:
            self.wait(QUEUE // 2)

    def wait(self, most: int = 0) -> None:
        """Waits until at most `most` calls have not ended."""
        while len(self._calls) > most:
            name, differences = self._calls.popleft()
            if not differences.is_ready():
                watchdog = threading.Timer(self._hang_s, self._on_hang, [name])
                watchdog.start()
                differences.block_until_ready()
                watchdog.cancel()


def soak(
    programs: Sequence[Soaked], number: int, end: float, queue: Queue
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls programs in random order until `number` kernels are launched or the monotonic `end`.

    Returns each program's number of calls, and of steps with another result than the first.
    """
    rng, launches = np.random.default_rng(SEED), 0
    calls = dict.fromkeys((p.name for p in programs), 0)
    differences = [jnp.int32(0)] * len(programs)
    while launches < number and time.monotonic() < end:
        # Every program is called in every round, and any one may follow any other one.
        for n in rng.permutation(len(programs)):
            differences[n] = programs[n].call(differences[n])
            queue.add(programs[n].name, differences[n])
            calls[programs[n].name] += 1
            launches += programs[n].launches
            if launches >= number:
                break
    queue.wait()
    return calls, {p.name: int(x) for p, x in zip(programs, differences, strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the module's docstring has the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--launches", type=int, default=1_000_000, help="kernels to launch")
    words = "seconds of launches; the compilation before takes minutes"
    parser.add_argument("--budget-s", type=float, default=float("inf"), help=words)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results file (JSON)")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    results: dict[str, Any] = {"op": "soak", "environment": timing.environment()}
    timing.make_folder_of(args.out)

    def on_hang(name: str) -> None:
        message = f"did not end within {HANG_S:.0f} s: {name}"
        timing.write_results(args.out, results | {"failed": [message]})
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    queue = Queue(HANG_S, on_hang)
    with terminal.progress() as log:
        programs = compile_all(log, queue)
    compiled_s = time.monotonic() - begin
    end = time.monotonic() + args.budget_s
    calls, wrong = soak(programs, args.launches, end, queue)
    entries: list[dict[str, Any]] = [
        {"name": p.name, "launches_per_call": p.launches, "calls": calls[p.name]}
        | {"launches": calls[p.name] * p.launches, "wrong_steps": wrong[p.name]}
        for p in programs
    ]
    results |= {
        "launches": sum(entry["launches"] for entry in entries),
        "wanted": args.launches,
        "steps_per_call": REPEATS,
        "compiled_s": compiled_s,
        "soaked_s": time.monotonic() - begin - compiled_s,
        "programs": entries,
    }
    timing.write_results(args.out, results)
    return _report(results)


def _report(results: dict[str, Any]) -> int:
    """Prints the figures; returns the exit status."""
    wrong = [p for p in results["programs"] if p["wrong_steps"]]
    idle = [p["name"] for p in results["programs"] if not p["launches_per_call"]]
    print(
        f"{results['launches']} launches of {len(results['programs'])} programs in "
        f"{results['soaked_s']:.0f} s after {results['compiled_s']:.0f} s of compilation, "
        f"{sum(p['wrong_steps'] for p in wrong)} steps with another result than the first"
    )
    for program in wrong:
        print(f"DIFFERS in {program['wrong_steps']} steps: {program['name']}")
    for name in idle:
        print(f"launches no kernel: {name}")
    is_short = results["launches"] < results["wanted"]
    if is_short:
        print(f"{results['wanted']} launches were not reached in time", file=sys.stderr)
    return 1 if wrong or idle or is_short else 0


if __name__ == "__main__":
    sys.exit(main())
