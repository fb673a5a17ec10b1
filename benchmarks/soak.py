"""A soak of all kernels: launches of mixed sizes in random order, every result compared.

    python -m benchmarks.soak --launches 1000000 --budget-s 120 --out build/soak.json

Some forty programs are called in a seeded random order, back to back. A program repeats its op
`REPEATS` times in a loop, whose steps depend on each other, and counts on the device the steps
whose results differ in a bit from the program's first result, so that a new NaN counts, too.
Launches are this library's kernels in the compiled program, inside and outside the loop, times the
program's calls. Without a GPU there are none, and a step counts as one launch.

The exit status is 1 if a result differed, if the launches were not reached in time, or if a program
did not end: then a watchdog names it and ends the process.
"""

import argparse
import functools
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from benchmarks import timing
from benchmarks.compare import bits
from benchmarks.production import in_direction
from benchmarks.production_draws import AttentionShape, normal
from benchmarks.production_providers import Contender, attend
from ikbo_jax import terminal
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.cases import linear_compression
from ikbo_jax.cases.gdpa import offsets_of
from ikbo_jax.ops.linear_compression import Term
from ikbo_jax.problems import LinearCompressionProblem

#: Steps of a program's loop. A call from Python takes 20 to 50 µs, as long as a step of a small
#: program; more steps would put the same kernel after itself more often.
REPEATS = 4
#: Seconds after which a round of calls that has not ended is a hang.
HANG_S = 60.0
#: Threads that compile, and the seed of the order.
WORKERS, SEED = 16, 0


# Programs: an op, a direction, and sizes. A function makes a contender of them.


class RaggedShape(AttentionShape):
    """Attention with an unsorted index, users without candidates, and lengths from 0 to S."""

    @property
    def cand_to_user(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        some = rng.choice(self.users, max(1, self.users // 2), replace=False)
        return rng.choice(some, self.batch).astype(np.int32)

    @property
    def lengths(self) -> np.ndarray:
        drawn = np.random.default_rng(1).integers(0, self.kv_len + 1, self.users)
        drawn[:: max(1, self.users // 3)] = 0
        return drawn.astype(np.int32)


def attention_shape(
    *sizes: int, is_ragged: bool = False, dtype: str = "bfloat16"
) -> AttentionShape:
    """Makes the shape of sizes B, U, T, S, N, K, H."""
    kind: Any = RaggedShape if is_ragged else AttentionShape
    shape: AttentionShape = kind(*sizes, dtype, "unsorted" if is_ragged else "even", is_ragged)
    return shape


def _attention(implementation: str | None, *sizes: int, **options: Any) -> Contender:
    shape = attention_shape(*sizes, **options)
    query, key, value, *integers = shape.inputs()
    fn = functools.partial(
        attend, indices_are_sorted=shape.is_sorted, implementation=implementation
    )
    return Contender("", "", fn, (query, key, value), tuple(integers))


def _compression(
    implementation: str | None, *sizes: Any, index: str = "ragged", dtype: str = "bfloat16"
) -> Contender:
    """Makes a compression of batches and rows K of all levels, the coarsest first, M and N."""
    batches, ks, m, n = sizes
    problem = LinearCompressionProblem(batches, ks, m, n, dtype)
    case = linear_compression.Case(problem, index)
    weights, embeddings, parents = case.inputs()

    def fn(*arrays: Any) -> jax.Array:
        n = len(weights)
        terms = map(Term, arrays[:n], arrays[n : 2 * n], arrays[2 * n :])
        return ikbo_jax.multilevel_linear_compression([*terms], implementation=implementation)

    return Contender("", "", fn, (*weights, *embeddings), parents)


def _gdpa(
    implementation: str | None,
    queries: tuple[int, ...] | int,
    keys: tuple[int, ...],
    *sizes: int,
    activation: str,
    q_to_kv: tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
) -> Contender:
    """Makes a call of lengths and sizes N, K, H; one number of queries: broadcast queries."""
    q_heads, kv_heads, head_dim = sizes
    is_broadcast = isinstance(queries, int)
    q_rows = queries if isinstance(queries, int) else sum(queries)
    shapes = (q_rows, q_heads, head_dim), *2 * ((sum(keys), kv_heads, head_dim),)
    args = tuple(normal(n, shape, dtype) for n, shape in enumerate(shapes))
    cu_q = None if isinstance(queries, int) else jnp.asarray(offsets_of(np.asarray(queries)))
    index = None if q_to_kv is None else jnp.asarray(q_to_kv, jnp.int32)

    def fn(query: Any, key: Any, value: Any, cu_q: Any, cu_kv: Any, index: Any) -> jax.Array:
        return ikbo_jax.gdpa(
            *(query, key, value, cu_q, cu_kv),
            activation=activation,
            scale=head_dim**-0.5,
            output_scale=1.0 if activation == "softmax" else 1 / max(keys),
            q_to_kv=index,
            broadcast_q=is_broadcast,
            implementation=implementation,
        )

    return Contender("", "", fn, args, (cu_q, jnp.asarray(offsets_of(np.asarray(keys))), index))


def _own_tokens(implementation: str | None, *sizes: int, **options: Any) -> Contender:
    """Makes attention in which every candidate sees its own tokens, too."""
    without = _attention(implementation, *sizes, **options)
    query, key, value = without.args
    own = [normal(n, (*query.shape[:2], *x.shape[2:]), x.dtype) for n, x in enumerate((key, value))]

    def fn(*arrays: Any) -> jax.Array:
        *args, self_key, self_value, index, lengths = arrays
        return without.fn(*args, index, lengths, self_key=self_key, self_value=self_value)

    return Contender("", "", fn, (*without.args, *own), without.integers)


def _sums(
    implementation: str | None, batch: int, users: int, width: int, *, order: str, dtype: str
) -> Contender:
    """Makes lookups of sums: one user has half of the candidates, or the index is sorted."""
    index = np.random.default_rng(0).integers(0, users, batch)
    index = np.sort(index) if order == "sorted" else np.where(index % 2, users // 2, index)
    options: dict[str, Any] = {
        "indices_are_sorted": order == "sorted",
        "implementation": implementation,
    }

    def fn(values: Any, index: Any) -> jax.Array:
        sums = ikbo_jax.segment_sum(values, index, users, **options)
        return ikbo_jax.look_up(sums, index, **options)

    return Contender("", "", fn, (normal(0, (batch, width), dtype),), (jnp.asarray(index),))


def _hstu_layer(implementation: str | None, lengths: tuple[int, ...], *sizes: int) -> Contender:
    """Makes what an HSTU layer does with rows; sizes: features, heads, their width."""
    features, heads, width = sizes
    offsets, rows = jnp.asarray(offsets_of(np.asarray(lengths))), sum(lengths)
    mask = ikbo_jax.masks.hstu(jnp.asarray(lengths) // 4, contextual=2, window=100)
    groups, columns = 4, heads * width
    shapes = (rows, features), *groups * ((features, heads, width),), (3 * columns, features)

    def fn(x: Any, *weights: Any) -> jax.Array:
        options: Any = {"implementation": implementation}
        silu = ("silu",) * groups
        u, query, key, value = ikbo_jax.norm_linear(
            x, weights[:groups], activations=silu, **options
        )
        a = ikbo_jax.gdpa(
            query, key, value, offsets, offsets, activation="silu", mask=mask, **options
        )
        return ikbo_jax.gated_linear(u, a, weights[groups], x, concat=True, **options)

    args = (normal(n, shape, "bfloat16") for n, shape in enumerate(shapes))
    scales = (1.0, *groups * (features**-0.5,), (3 * columns) ** -0.5)
    return Contender("", "", fn, tuple(x * s for x, s in zip(args, scales, strict=True)))


MAKERS: dict[str, Callable[..., Contender]] = {
    "attention": _attention,
    "few queries": _attention,
    "own tokens": _own_tokens,
    "linear compression": _compression,
    "gdpa": _gdpa,
    "sums": _sums,
    "hstu layer": _hstu_layer,
}
FORWARD, BOTH, MIXED = "forward", "both", (130, 0, 600, 64, 1)
RAGGED: dict[str, Any] = {"is_ragged": True}
HALF: dict[str, Any] = {"dtype": "float16"}
UNSORTED: dict[str, Any] = {"index": "unsorted"}
SHARED: dict[str, Any] = {"activation": "softmax", "q_to_kv": (2, 0, 1, 2)}
#: Each op has sizes with several waves of tiles, with one tile, and with an unsorted index, users
#: without candidates, and lengths of 0. "both": the result with all gradients.
PROGRAMS: tuple[tuple[str, str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("attention", FORWARD, (1024, 16, 16, 512, 4, 4, 128), {}),
    ("attention", FORWARD, (4, 2, 24, 40, 1, 1, 64), {}),
    ("attention", FORWARD, (200, 40, 33, 77, 4, 2, 96), RAGGED | HALF),
    ("attention", FORWARD, (64, 90, 40, 300, 2, 2, 256), RAGGED),
    ("attention", BOTH, (512, 16, 24, 384, 4, 4, 64), {}),
    ("attention", BOTH, (3, 2, 24, 40, 1, 1, 128), {}),
    ("attention", BOTH, (150, 40, 33, 130, 4, 2, 128), RAGGED),
    ("attention", BOTH, (64, 90, 40, 300, 2, 1, 192), RAGGED | HALF),
    ("attention", BOTH, (64, 2, 64, 129, 2, 2, 256), {}),
    ("few queries", FORWARD, (2048, 32, 1, 1024, 2, 2, 128), {}),
    ("few queries", FORWARD, (1, 1, 1, 5, 1, 1, 64), {}),
    ("few queries", FORWARD, (300, 90, 1, 333, 4, 4, 64), RAGGED | HALF),
    ("few queries", FORWARD, (8, 1, 2, 8192, 2, 2, 128), {}),
    ("few queries", BOTH, (700, 90, 1, 200, 2, 2, 128), RAGGED),
    ("few queries", BOTH, (64, 1, 2, 1000, 1, 1, 64), {}),
    ("own tokens", FORWARD, (1024, 16, 16, 512, 4, 4, 128), {}),
    ("own tokens", FORWARD, (300, 90, 1, 333, 4, 4, 64), RAGGED | HALF),
    ("own tokens", BOTH, (150, 40, 8, 130, 4, 2, 128), RAGGED),
    ("own tokens", BOTH, (512, 16, 1, 384, 4, 4, 64), {}),
    ("linear compression", FORWARD, ((9, 512), (300, 200), 130, 256), {}),
    ("linear compression", FORWARD, ((1, 1), (16, 24), 8, 64), {}),
    ("linear compression", FORWARD, ((70, 90), (65, 33), 433, 40), UNSORTED | HALF),
    ("linear compression", FORWARD, ((3, 20, 150), (64, 40, 70), 64, 128), UNSORTED),
    ("linear compression", BOTH, ((9, 512), (300, 200), 130, 256), {}),
    ("linear compression", BOTH, ((1, 1), (16, 24), 8, 64), {}),
    ("linear compression", BOTH, ((70, 90), (65, 33), 433, 40), UNSORTED),
    ("linear compression", BOTH, ((3, 20, 150), (64, 40, 70), 64, 128), UNSORTED),
    ("gdpa", FORWARD, (MIXED * 16, MIXED * 16, 4, 4, 128), {"activation": "gelu"}),
    ("gdpa", FORWARD, ((5,), (9,), 1, 1, 64), {"activation": "silu"}),
    ("gdpa", FORWARD, ((70, 0, 5, 130), (40, 0, 129), 2, 1, 96), SHARED),
    ("gdpa", FORWARD, (16, (300, 0, 7, 129) * 8, 2, 2, 128), {"activation": "gelu_tanh"} | HALF),
    ("gdpa", BOTH, (MIXED * 8, MIXED * 8, 4, 4, 128), {"activation": "gelu"}),
    ("gdpa", BOTH, ((5,), (9,), 1, 1, 64), {"activation": "silu"}),
    ("gdpa", BOTH, ((70, 0, 5, 130), (40, 0, 129), 2, 1, 64), SHARED),
    ("gdpa", BOTH, (16, (300, 0, 7, 129) * 4, 2, 2, 128), {"activation": "relu"}),
    ("gdpa", BOTH, ((200, 65), (64, 64), 2, 2, 96), {"activation": "gelu_tanh"} | HALF),
    ("sums", FORWARD, (8192, 256, 384), {"order": "hot", "dtype": "bfloat16"}),
    ("sums", FORWARD, (5000, 4999, 24), {"order": "sorted", "dtype": "float32"}),
    ("sums", FORWARD, (40_000, 2000, 512), {"order": "hot", "dtype": "float16"}),
    ("sums", BOTH, (40, 3000, 64), {"order": "hot", "dtype": "bfloat16"}),
    ("sums", BOTH, (16, 3, 100_000), {"order": "sorted", "dtype": "bfloat16"}),
    ("hstu layer", FORWARD, ((900, 0, 70, 3000) * 10, 256, 4, 64), {}),
    ("hstu layer", FORWARD, ((7, 1), 128, 1, 128), {}),
    ("hstu layer", BOTH, ((300, 0, 70, 129) * 4, 256, 2, 128), {}),
)


def name_of(op: str, direction: str, sizes: Sequence[Any], options: dict[str, Any]) -> str:
    """Names a program by its sizes, long ones shortened."""
    words = [str(x) for x in (*sizes, *options.values())]
    return " ".join([op, direction, *(x if len(x) < 30 else f"{x[:26]}...)" for x in words)])


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
            pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
            differing = jnp.stack([jnp.any(bits(x) != bits(y)) for x, y in pairs])
            return differences + jnp.any(differing).astype(jnp.int32), found

        return jax.lax.fori_loop(0, REPEATS, step, (differences, expected))

    return run


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


def wait(calls: Mapping[str, Any], hang_s: float, on_hang: Callable[[str], Any]) -> None:
    """Waits for calls by program, in their order; `on_hang` gets the first that does not end."""

    def name_it() -> None:
        on_hang(next((name for name, x in calls.items() if not x.is_ready()), "none"))

    watchdog = threading.Timer(hang_s, name_it)
    watchdog.start()
    jax.block_until_ready([*calls.values()])
    watchdog.cancel()


def compile_all(log: Callable[[str], None], on_hang: Callable[[str], Any]) -> list[Soaked]:
    """Compiles the programs and runs each once, for the results that all later ones must have."""
    options, implementation = (UNTIMED_ON_GPU, "mosaic_gpu") if _on_gpu() else (None, None)
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        futures = []
        for op, direction, sizes, more in PROGRAMS:
            contender = MAKERS[op](implementation, *sizes, **more)
            fn, arrays = in_direction(contender, direction)
            expected = jax.eval_shape(fn, *arrays)
            # Python traces one program at a time; XLA compiles without Python's lock.
            lowered = jax.jit(repeated(fn)).lower(jnp.int32(0), expected, *arrays)
            futures.append((arrays, expected, pool.submit(lowered.compile, options)))
        soaked = []
        for program, (arrays, shapes, compiled) in zip(PROGRAMS, futures, strict=True):
            found = _first_run(name_of(*program), compiled.result(), shapes, arrays, on_hang)
            log(f"{found.launches} launches a call: {found.name}")
            soaked.append(found)
    return soaked


def _first_run(
    name: str, compiled: Any, shapes: Any, arrays: tuple, on_hang: Callable[[str], Any]
) -> Soaked:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    differences, expected = compiled(jnp.int32(0), zeros, *arrays)
    wait({name: differences}, HANG_S, on_hang)
    launches = count_launches(compiled.as_text()) or (0 if _on_gpu() else REPEATS)
    return Soaked(name, lambda counted: compiled(counted, expected, *arrays)[0], launches)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def soak(
    programs: Sequence[Soaked], number: int, end: float, on_hang: Callable[[str], Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls programs in random order until `number` kernels are launched or the monotonic `end`.

    Returns each program's number of calls, and of steps with another result than the first.
    """
    rng, launches = np.random.default_rng(SEED), 0
    calls = dict.fromkeys((p.name for p in programs), 0)
    differences = {p.name: jnp.int32(0) for p in programs}
    while launches < number and time.monotonic() < end:
        # Every program is called in every round, and any one may follow any other one.
        for n in rng.permutation(len(programs)):
            name = programs[n].name
            # Deleted first, so that the last entry is of the last call.
            differences[name] = programs[n].call(differences.pop(name))
            calls[name] += 1
            launches += programs[n].launches
            if launches >= number:
                break
        wait(differences, HANG_S, on_hang)
    return calls, {name: int(x) for name, x in differences.items()}


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

    with terminal.progress() as log:
        programs = compile_all(log, on_hang)
    compiled_s = time.monotonic() - begin
    end = time.monotonic() + args.budget_s
    calls, wrong_steps = soak(programs, args.launches, end, on_hang)
    entries: list[dict[str, Any]] = [
        {"name": p.name, "launches_per_call": p.launches, "calls": calls[p.name]}
        | {"launches": calls[p.name] * p.launches, "wrong_steps": wrong_steps[p.name]}
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
    wrong = [p for p in entries if p["wrong_steps"]]
    idle = [f"launches no kernel: {p['name']}" for p in entries if not p["launches_per_call"]]
    print(
        f"{results['launches']} launches of {len(programs)} programs in {results['soaked_s']:.0f} s"
        f" after {compiled_s:.0f} s of compilation, "
        f"{sum(wrong_steps.values())} steps with another result than the first"
    )
    print(*(f"DIFFERS in {p['wrong_steps']} steps: {p['name']}" for p in wrong), *idle, sep="\n")
    if is_short := results["launches"] < args.launches:
        print(f"{args.launches} launches were not reached in time", file=sys.stderr)
    return 1 if wrong or idle or is_short else 0


if __name__ == "__main__":
    sys.exit(main())
