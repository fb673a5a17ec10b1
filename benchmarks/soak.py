"""A soak of all kernels: launches of mixed sizes in random order, every result compared.

    python -m benchmarks.soak --launches 1000000 --budget-s 120 --out build/soak.json

Some thirty programs are called in a seeded random order, back to back. A program repeats its op
`REPEATS` times in a loop, whose steps depend on each other, and counts on the device the steps
whose results differ in a bit from the program's first result, so that a new NaN counts, too.
Launches are this library's kernels in the compiled program, inside and outside the loop, times the
program's calls. Without a GPU there are none, and a step counts as one launch.

The exit status is 1 if a result differed, if the launches were not reached in time, or if a program
did not end: then a watchdog names it and ends the process.
"""

import argparse
import collections
import functools
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from benchmarks import timing
from benchmarks.production_providers import attend
from ikbo_jax import terminal
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.ops.linear_compression import Term
from ikbo_jax.problems import AttentionProblem

#: Steps of a program's loop. A call from Python takes 20 to 50 µs, as long as a step of a small
#: program; more steps would put the same kernel after itself more often.
REPEATS = 4
#: Calls in flight, and seconds after which a call that has not ended is a hang.
QUEUE, HANG_S = 256, 60.0
#: Threads that compile, and the seed of the order.
WORKERS, SEED = 16, 0


# Programs


class Program(NamedTuple):
    """A function of arrays: the op's result, with "gradient" also all gradients."""

    name: str
    fn: Callable[..., Any]
    arrays: tuple[jax.Array, ...]


class AttentionSizes(NamedTuple):
    """Sizes (B, U, T, S, N, K, H); `is_ragged`: an unsorted index, and lengths from 0 to S."""

    sizes: tuple[int, int, int, int, int, int, int]
    is_ragged: bool = False
    dtype: str = "bfloat16"

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(*self.sizes, self.dtype)


class CompressionSizes(NamedTuple):
    """Sizes of a linear compression, coarsest level first."""

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    m: int
    n: int
    is_ragged: bool = False
    dtype: str = "bfloat16"


class GdpaSizes(NamedTuple):
    """Lengths of the sequences of `ikbo_jax.gdpa`; one number of queries: broadcast queries."""

    queries: tuple[int, ...] | int
    keys: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    activation: str
    q_to_kv: tuple[int, ...] | None = None
    dtype: str = "bfloat16"


Sizes = AttentionSizes | CompressionSizes | GdpaSizes

#: Op, direction and sizes. Each op has sizes with several waves of tiles, with one tile, and with
#: an unsorted index, users without candidates, and lengths of 0.
FORWARD, GRADIENT, MIXED = "forward", "gradient", (130, 0, 600, 64, 1)
PROGRAMS: tuple[tuple[str, str, Sizes], ...] = (
    ("attention", FORWARD, AttentionSizes((1024, 16, 16, 512, 4, 4, 128))),
    ("attention", FORWARD, AttentionSizes((4, 2, 24, 40, 1, 1, 64))),
    ("attention", FORWARD, AttentionSizes((200, 40, 33, 77, 4, 2, 96), True, "float16")),
    ("attention", FORWARD, AttentionSizes((64, 90, 40, 300, 2, 2, 256), True)),
    ("attention", GRADIENT, AttentionSizes((512, 16, 24, 384, 4, 4, 64))),
    ("attention", GRADIENT, AttentionSizes((3, 2, 24, 40, 1, 1, 128))),
    ("attention", GRADIENT, AttentionSizes((150, 40, 33, 130, 4, 2, 128), True)),
    ("attention", GRADIENT, AttentionSizes((64, 90, 40, 300, 2, 1, 192), True, "float16")),
    ("attention", GRADIENT, AttentionSizes((64, 2, 64, 129, 2, 2, 256))),
    ("few queries", FORWARD, AttentionSizes((2048, 32, 1, 1024, 2, 2, 128))),
    ("few queries", FORWARD, AttentionSizes((1, 1, 1, 5, 1, 1, 64))),
    ("few queries", FORWARD, AttentionSizes((300, 90, 1, 333, 4, 4, 64), True, "float16")),
    ("few queries", FORWARD, AttentionSizes((8, 1, 2, 8192, 2, 2, 128))),
    ("few queries", GRADIENT, AttentionSizes((700, 90, 1, 200, 2, 2, 128), True)),
    ("few queries", GRADIENT, AttentionSizes((64, 1, 2, 1000, 1, 1, 64))),
    ("linear compression", FORWARD, CompressionSizes((9, 512), (300, 200), 130, 256)),
    ("linear compression", FORWARD, CompressionSizes((1, 1), (16, 24), 8, 64)),
    ("linear compression", FORWARD, CompressionSizes((70, 90), (65, 33), 433, 40, True, "float16")),
    ("linear compression", FORWARD, CompressionSizes((3, 20, 150), (64, 40, 70), 64, 128, True)),
    ("linear compression", GRADIENT, CompressionSizes((9, 512), (300, 200), 130, 256)),
    ("linear compression", GRADIENT, CompressionSizes((1, 1), (16, 24), 8, 64)),
    ("linear compression", GRADIENT, CompressionSizes((70, 90), (65, 33), 433, 40, True)),
    ("linear compression", GRADIENT, CompressionSizes((3, 20, 150), (64, 40, 70), 64, 128, True)),
    ("gdpa", FORWARD, GdpaSizes(MIXED * 16, MIXED * 16, 4, 4, 128, "gelu")),
    ("gdpa", FORWARD, GdpaSizes((5,), (9,), 1, 1, 64, "silu")),
    ("gdpa", FORWARD, GdpaSizes((70, 0, 5, 130), (40, 0, 129), 2, 1, 96, "softmax", (2, 0, 1, 2))),
    ("gdpa", FORWARD, GdpaSizes(16, (300, 0, 7, 129) * 8, 2, 2, 128, "gelu_tanh", dtype="float16")),
    ("gdpa", GRADIENT, GdpaSizes(MIXED * 8, MIXED * 8, 4, 4, 128, "gelu")),
    ("gdpa", GRADIENT, GdpaSizes((5,), (9,), 1, 1, 64, "silu")),
    ("gdpa", GRADIENT, GdpaSizes((70, 0, 5, 130), (40, 0, 129), 2, 1, 64, "softmax", (2, 0, 1, 2))),
    ("gdpa", GRADIENT, GdpaSizes(16, (300, 0, 7, 129) * 4, 2, 2, 128, "relu")),
    ("gdpa", GRADIENT, GdpaSizes((200, 65), (64, 64), 2, 2, 96, "gelu_tanh", dtype="float16")),
)


def programs(implementation: str | None) -> Iterator[Program]:
    """Yields the programs, each with seeded arrays on the device."""
    for number, (op, direction, sizes) in enumerate(PROGRAMS):
        rng = np.random.default_rng(number)
        if isinstance(sizes, AttentionSizes):
            fn, shapes = _attention(sizes, rng)
        elif isinstance(sizes, CompressionSizes):
            fn, shapes = _compression(sizes, rng)
        else:
            fn, shapes = _gdpa(sizes)
        fn = functools.partial(fn, implementation=implementation)
        arrays = tuple(_normal(rng, shape, sizes.dtype) for shape in shapes)
        if isinstance(sizes, CompressionSizes):
            scales = [jnp.dtype(sizes.dtype).type(k**-0.5) for k in sizes.ks]
            weights = [x * scale for x, scale in zip(arrays, scales, strict=False)]
            arrays = (*weights, *arrays[len(weights) :])
        if direction == GRADIENT:
            out = jax.eval_shape(fn, *arrays)
            arrays = (_normal(rng, out.shape, str(out.dtype)), *arrays)
            fn = functools.partial(_with_gradients, fn)
        text = " ".join(x if len(x) < 30 else f"{x[:26]}...)" for x in map(str, sizes))
        yield Program(f"{op} {direction} {text}", fn, arrays)


def _with_gradients(fn: Callable[..., jax.Array], d_out: jax.Array, *arrays: jax.Array) -> Any:
    out, pull_back = jax.vjp(fn, *arrays)
    return out, pull_back(d_out)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.device_put(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


def _index(rng: np.random.Generator, size: int, values: int, is_ragged: bool) -> jax.Array:
    """Draws [size] int32 below `values`: sorted; or unsorted, with values that do not occur."""
    if not is_ragged:
        return jax.device_put((np.arange(size) * values // size).astype(np.int32))
    chosen = rng.choice(values, max(1, values // 2), replace=False)
    return jax.device_put(rng.choice(chosen, size).astype(np.int32))


#: A function of arrays and `implementation`, and the shapes of the arrays.
Made = tuple[Callable[..., jax.Array], tuple[tuple[int, ...], ...]]


def _attention(sizes: AttentionSizes, rng: np.random.Generator) -> Made:
    s = sizes.problem
    index, lengths = _index(rng, s.batch, s.users, sizes.is_ragged), None
    if sizes.is_ragged:
        drawn = rng.integers(0, s.kv_len + 1, s.users)
        drawn[:: max(1, s.users // 3)] = 0
        lengths = jax.device_put(drawn.astype(np.int32))
    fn = functools.partial(
        attend, index=index, lengths=lengths, indices_are_sorted=not sizes.is_ragged
    )
    keys = (s.users, s.kv_len, s.kv_heads, s.head_dim)
    return fn, ((s.batch, s.q_len, s.q_heads, s.head_dim), keys, keys)


def _compression(sizes: CompressionSizes, rng: np.random.Generator) -> Made:
    s, levels = sizes, len(sizes.ks)
    parents: list[jax.Array | None] = [None]
    for coarse, batch in zip(s.batches[:-1], s.batches[1:], strict=True):
        parents.append(_index(rng, batch, coarse, s.is_ragged))

    def fn(*arrays: jax.Array, implementation: str | None) -> jax.Array:
        terms = map(Term, arrays[:levels], arrays[levels:], parents)
        return ikbo_jax.multilevel_linear_compression([*terms], implementation=implementation)

    embeddings = ((batch, k, s.n) for batch, k in zip(s.batches, s.ks, strict=True))
    return fn, (*((s.m, k) for k in s.ks), *embeddings)


def _gdpa(sizes: GdpaSizes) -> Made:
    s = sizes

    def offsets(lengths: tuple[int, ...]) -> jax.Array:
        return jax.device_put(np.cumsum((0, *lengths)).astype(np.int32))

    cu_q, rows = (
        (None, s.queries) if isinstance(s.queries, int) else (offsets(s.queries), sum(s.queries))
    )
    cu_kv = offsets(s.keys)
    index = None if s.q_to_kv is None else jax.device_put(np.asarray(s.q_to_kv, np.int32))

    def fn(query: Any, key: Any, value: Any, *, implementation: str | None) -> jax.Array:
        return ikbo_jax.gdpa(
            *(query, key, value, cu_q, cu_kv),
            activation=s.activation,
            scale=s.head_dim**-0.5,
            output_scale=1.0 if s.activation == "softmax" else 1 / max(s.keys),
            q_to_kv=index,
            broadcast_q=cu_q is None,
            implementation=implementation,
        )

    keys = (sum(s.keys), s.kv_heads, s.head_dim)
    return fn, ((rows, s.q_heads, s.head_dim), keys, keys)


# Soaking


class Soaked(NamedTuple):
    """A compiled program; `call` maps the number of differences so far to the new one."""

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
    def any_bit(x: jax.Array, y: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=bits)
        return jnp.any(as_bits(x) != as_bits(y))

    differing = jax.tree.leaves(jax.tree.map(any_bit, found, expected))
    return jnp.any(jnp.stack(differing)).astype(jnp.int32)


def count_launches(text: str, target: str = "mosaic_gpu") -> int:
    """Counts a compiled program's calls of a target, by default kernels of Mosaic GPU, in its text.

    A loop without a known number of steps counts as one step, a conditional as its branch with the
    fewest calls.
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


def compile_all(log: Callable[[str], None], queue: Queue) -> list[Soaked]:
    """Compiles the programs and runs each once, for the results that all later ones must have."""
    options = UNTIMED_ON_GPU if _on_gpu() else None
    found = list(programs("mosaic_gpu" if _on_gpu() else None))
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


def _first_run(program: Program, compiled: Any, queue: Queue) -> Soaked:
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
    programs, is_short = results["programs"], results["launches"] < results["wanted"]
    wrong = [p for p in programs if p["wrong_steps"]]
    idle = [f"launches no kernel: {p['name']}" for p in programs if not p["launches_per_call"]]
    print(
        f"{results['launches']} launches of {len(programs)} programs in {results['soaked_s']:.0f} s"
        f" after {results['compiled_s']:.0f} s of compilation, "
        f"{sum(p['wrong_steps'] for p in wrong)} steps with another result than the first"
    )
    print(*(f"DIFFERS in {p['wrong_steps']} steps: {p['name']}" for p in wrong), *idle, sep="\n")
    if is_short:
        print(f"{results['wanted']} launches were not reached in time", file=sys.stderr)
    return 1 if wrong or idle or is_short else 0


if __name__ == "__main__":
    sys.exit(main())
