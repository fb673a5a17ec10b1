"""Benchmark of several devices: the ops, the ranking network and its training step on 1, 2, … GPUs.

    python -m benchmarks.scaling --out benchmarks/results/scaling-h200.json
    python -m benchmarks.scaling --processes 0 --out FILE.json

Every point runs the same program on one device and on several, interleaved in one process. Strong
scaling divides one request, weak scaling gives every device a request of that size. On more than
two devices the network also divides a large request. The ops run under plain `jit` with candidates
divided and users replicated, with Auto and with Explicit mesh axes. The network and its training
step run under `shard_map`, with users beside their candidates. The results of several devices are
compared with the result of one, and the compiled program is searched for collectives.

With `--processes`, the command starts processes on this machine, one for each GPU. They measure the
network and its training step on all devices. Every process times the program on its own device and,
in step with the others, the program on all devices. For one device the time of the fastest process
counts, for all devices that of the slowest. Without a GPU, two processes run small sizes, whose
times say nothing.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import children, harness
from benchmarks.harness import Point
from examples import several_processes
from ikbo_jax import place_users
from ikbo_jax._timing import interleaved_ms, time_launches
from ikbo_jax.cases import attention as attention_case
from ikbo_jax.cases import linear_compression as linear_compression_case
from ikbo_jax.models import ranking
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.linear_compression import linear_compression
from ikbo_jax.problems import AttentionProblem, LinearCompressionProblem

#: Candidates and users of a request; for the network on more than two devices also a large one.
REQUEST, LARGE_REQUEST = (2048, 32), (8192, 117)
SMALL_REQUEST, SMALL_LARGE_REQUEST = (64, 4), (128, 9)
#: Bars: the part of one device's time that two may take, the speed-up of eight for a large request,
#: and the weak scaling's efficiency on two and on eight.
STRONG_BARS = {"linear_compression": 0.54, "attention": 0.54, "network": 0.54, "training": 0.58}
LARGE_BARS = {"network": 6.8, "training": 6.0}
WEAK_BARS = {2: 0.95, 8: 0.93}
#: Largest difference of results on several devices, relative to the largest result: a few roundings
#: of bfloat16, since another configuration of a kernel has another order of sums.
TOLERANCE = 2.0**-6
LEARNING_RATE = 1e-4
#: Calls that are timed to find how many fill a window, in several processes; their time limit.
TRIAL_CALLS, TIME_LIMIT_S = 4, 3600.0


# Programs, laid out on a mesh. A request is (candidates, users). Every process may lay out the
# arrays of all devices.


class Program(NamedTuple):
    """A function and its arguments on a mesh; `compare` makes what is compared of its result."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    compare: Callable[[Any], np.ndarray]


def mesh_of(devices: int, kind: AxisType) -> Mesh:
    """Makes a mesh with one axis "x" of the first devices; one device is this process' own."""
    found = jax.local_devices() if devices == 1 else jax.devices()
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=found[:devices])


def _put(mesh: Mesh, x: Any, spec: P) -> jax.Array:
    """Lays out an array, which every process has whole, on the devices of all processes."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), host.__getitem__)


def _as_float(x: jax.Array) -> np.ndarray:
    is_here = x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(
        x if is_here else multihost_utils.process_allgather(x, tiled=True), np.float32
    )


def linear_compression_program(mesh: Mesh, request: tuple[int, int], *, small: bool) -> Program:
    """Makes linear compression at the default sizes; candidates divided, users replicated."""
    candidates, users = request
    m, k_user, k_cand, n = (16, 24, 16, 16) if small else (433, 1178, 866, 256)
    problem = LinearCompressionProblem((users, candidates), (k_user, k_cand), m, n, "bfloat16")
    specs = (P(), P(), P("x"), P(), P("x"))
    arrays = zip(linear_compression_case.Case(problem).inputs().arguments, specs, strict=True)
    args = tuple(_put(mesh, x, spec) for x, spec in arrays)
    return Program(linear_compression, args, _as_float)


def attention_program(mesh: Mesh, request: tuple[int, int], *, small: bool) -> Program:
    """Makes target attention; candidates divided, users replicated."""
    t, s, heads, width = (4, 32, 2, 16) if small else (64, 2048, 2, 128)
    problem = AttentionProblem(*request, t, s, heads, heads, width, "bfloat16")
    arrays = zip(attention_case.Case(problem).inputs()[:4], (P("x"), P(), P(), P("x")), strict=True)
    args = tuple(_put(mesh, x, spec) for x, spec in arrays)
    return Program(functools.partial(attention, indices_are_sorted=True), args, _as_float)


def network_program(
    mesh: Mesh, request: tuple[int, int], *, small: bool, training: bool = False
) -> Program:
    """Makes the ranking network, or a step of plain descent, with users beside their candidates."""
    candidates, users = request
    base = ranking.SMALL if small else ranking.Sizes()
    sizes = dataclasses.replace(base, candidates=candidates, users=users)
    index = np.asarray(ranking.user_index(sizes))
    drawn = ranking.Request._make((*map(np.asarray, ranking.draw_request(sizes, 0)), index))
    placement = place_users(index, users, mesh.size)
    of_users = map(placement.lay_out_users, drawn[:3])
    laid_out = (*of_users, placement.lay_out_candidates(drawn.cand_tokens), placement.index)
    parts = ranking.Request._make(_put(mesh, x, P("x")) for x in laid_out)
    params = jax.tree.map(lambda x: _put(mesh, x, P()), ranking.init(sizes))
    real = _put(mesh, placement.lay_out_candidates(np.ones(candidates, np.float32)), P("x"))
    specs: Any = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    forward = jax.shard_map(ranking.co_designed, mesh=mesh, **specs)
    if not training:
        return Program(forward, (params, parts), lambda x: placement.restore(_as_float(x)))

    def loss(params: Any, parts: Any, real: jax.Array) -> jax.Array:
        # The label of the first task is always 1, of the second always -1.
        logits = forward(params, parts) * jnp.asarray([-1.0, 1.0])[None]
        return jnp.sum(jax.nn.softplus(logits) * real[:, None]) / candidates

    def step(params: Any, parts: Any, real: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, parts, real)
        norms = [jnp.linalg.norm(g.astype(jnp.float32).ravel()) for g in jax.tree.leaves(gradients)]
        rate = LEARNING_RATE
        new = jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, gradients)
        return value, norms, new

    def compare(result: Any) -> np.ndarray:
        value, norms, _ = result
        return np.stack([*map(_as_float, (value, *norms))])

    return Program(step, (params, parts, real), compare)


PROGRAMS: dict[str, Callable[..., Program]] = {
    "linear_compression": linear_compression_program,
    "attention": attention_program,
    "network": network_program,
    "training": functools.partial(network_program, training=True),
}


# Points


class Scale(NamedTuple):
    """How a workload scales ("strong", "weak" or "large"), and on how many devices.

    "large" is strong scaling of a large request.
    """

    mode: str
    devices: int

    def requests(self, *, small: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns candidates and users on the one device compared with, and on all together."""
        normal = SMALL_REQUEST if small else REQUEST
        large = SMALL_LARGE_REQUEST if small else LARGE_REQUEST
        candidates, users = large if self.mode == "large" else normal
        requests = self.devices if self.mode == "weak" else 1
        return (candidates, users), (candidates * requests, users * requests)


def points(sweep: str, devices: int) -> list[Point]:
    """Lists a workload's points on 2, 4, … devices."""
    numbers = [2**n for n in range(1, devices.bit_length())]
    scales = [Scale(mode, number) for mode in ("strong", "weak") for number in numbers]
    if sweep in LARGE_BARS:
        scales += [Scale("large", number) for number in numbers if number > 2]
    return [Point(sweep, f"{x.mode} {x.devices}", x) for x in scales]


#: The provider that is compared with.
ONE = "one device"
KINDS = {"explicit": AxisType.Explicit}  # the others have Auto axes
#: Compiler options by provider. XLA sums gradients while kernels run: a kernel with a CTA on every
#: SM then waits for the SMs that NCCL holds, and NCCL for the slower device. XLA also copies the
#: gradients into one array before their sum; without that pass NCCL sums them where they are.
OPTIONS: dict[str, dict[str, Any]] = {
    "sums in turn": {"xla_gpu_disable_async_collectives": "ALLREDUCE"},
    "sums in turn, in place": {
        "xla_gpu_disable_async_collectives": "ALLREDUCE",
        "xla_disable_hlo_passes": "all-reduce-contiguous",
    },
}


#: Ways to run on several devices; `shard_map` is the same on all kinds of axes.
PROVIDERS = {
    "linear_compression": ("auto", "explicit"),
    "attention": ("auto", "explicit"),
    "network": ("auto",),
    "training": ("auto", *OPTIONS),
}


def _compiled(programs: Mapping[str, Program]) -> dict[str, Any]:
    """Compiles programs at once; each is lowered once, however many options it has."""
    lowered = {id(x): jax.jit(x.fn).lower(*x.args) for x in programs.values()}

    def compiled(name: str) -> Any:
        return lowered[id(programs[name])].compile(compiler_options=OPTIONS.get(name))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(compiled, programs), strict=True))


def measure(point: Point, run: harness.Run) -> dict[str, Any]:
    """Times one device and several, interleaved; returns the point's entry."""
    small = jax.default_backend() != "gpu"
    make, scale = PROGRAMS[point.sweep], point.case
    of_one, request = scale.requests(small=small)
    programs = {ONE: make(mesh_of(1, AxisType.Auto), of_one, small=small)}
    on_axes = functools.cache(lambda kind: make(mesh_of(scale.devices, kind), request, small=small))
    for name in PROVIDERS[point.sweep]:
        programs[name] = on_axes(KINDS.get(name, AxisType.Auto))
    whole: dict[str, Program] = {}
    if scale.mode == "weak" and point.sweep != "training":
        whole["whole"] = make(mesh_of(1, AxisType.Auto), request, small=small)
    compiled = _compiled(programs | whole)
    results = {
        name: program.compare(compiled[name](*program.args))
        for name, program in (whole | programs).items()
    }
    # A larger request's training step is not repeated on one device: its gradients differ only by
    # what the strong point compares.
    expected = results.get("whole", None if scale.mode == "weak" else results[ONE])
    thunks = {name: functools.partial(compiled[name], *p.args) for name, p in programs.items()}
    times = in_step_ms if _processes() else interleaved_ms
    samples = times(thunks, window_s=run.protocol.window_s, rounds=run.protocol.rounds)
    one = statistics.median(samples[ONE])
    providers = []
    for name, ms in samples.items():
        record: dict[str, Any] = {"name": name, "devices": 1 if name == ONE else scale.devices}
        if name != ONE and expected is not None:
            error = float(np.abs(results[name] - expected).max() / np.abs(expected).max())
            record |= {"error": error, "bound": TOLERANCE, "ok": error <= TOLERANCE}
        if name != ONE:
            record["collectives"] = several_processes.traffic(compiled[name].as_text() or "")
        median = statistics.median(ms)
        providers.append(record | {"ms": ms, "median_ms": median, "of_one": median / one})
    return {**scale._asdict(), "providers": providers, **_processes()}


def _processes() -> dict[str, int]:
    return {"processes": jax.process_count()} if jax.process_count() > 1 else {}


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
            counts = found.min() if name == ONE else found.max()
            samples.setdefault(name, []).append(float(counts))
    return samples


def moved_by(record: Mapping[str, Any]) -> str:
    """Formats the collectives of a provider, and the bytes that they move."""
    return ", ".join(
        f"{entry['count']} {name}, {entry['bytes'] / 2**20:.1f} MiB"
        for name, entry in record["collectives"].items()
    )


def bars(point: Mapping[str, Any], all_points: Any = (), name: str = ONE) -> str:
    """Formats a point's bar, and what collectives move on several devices."""
    moved = [moved_by(p) or "no collectives" for p in point["providers"][1:] if p["name"] == name]
    return "; ".join(filter(None, [*moved, bar(point) and f"bar {bar(point)}"]))


def bar(point: Mapping[str, Any]) -> str:
    """Formats the bar of a point; empty if it has none."""
    mode, sweep, devices = point["mode"], point["sweep"], point["devices"]
    if mode == "weak":
        return f"efficiency {WEAK_BARS[devices]}" if devices in WEAK_BARS else ""
    if mode == "large":
        return f"{LARGE_BARS[sweep]}×" if devices == 8 else ""
    return f"{STRONG_BARS[sweep]} of one" if devices == 2 else ""


def _points(options: argparse.Namespace) -> list[Point]:
    """Lists the points of a run; of several processes, the points on all devices."""
    devices = jax.device_count()
    if devices < 2:
        raise ValueError(f"benchmarks.scaling needs at least 2 devices, but there is {devices}")
    return [
        point
        for sweep in options.sweep
        for point in points(sweep, devices)
        if (sweep in LARGE_BARS or not _processes())
        and (not _processes() or point.case.devices == devices)
    ]


def _add_options(parser: argparse.ArgumentParser) -> None:
    words = "run the points of all devices in processes; 0: one for each GPU, or 2 on the CPU"
    parser.add_argument("--processes", type=int, help=words)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(devices=1)


BENCHMARK = harness.Benchmark(
    "scaling",
    _points,
    measure,
    bars,
    _add_options,
    lambda run: run.results.update({"devices": jax.device_count(), **_processes()}),
    sweeps=tuple(PROGRAMS),
    shrink=lambda point: point,
    times_matmul=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a result is wrong or a process fails."""
    options = BENCHMARK.parse(argv)
    if options.coordinator is not None:  # A process that this command started.
        several_processes.end_with_stdin()
        several_processes.join(options)
    elif options.processes is not None:
        processes = options.processes or several_processes.count_gpus() or 2
        if processes < 2:
            print(f"needs at least 2 processes, but there is {processes}", file=sys.stderr)
            return 1
        command = children.command("benchmarks.scaling", *options.argv)
        return several_processes.start_all(command, processes, TIME_LIMIT_S)
    if not options.process_id:
        return BENCHMARK.main(options.argv)
    # The first process alone prints and keeps its results.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w", encoding="utf-8") as null:
        options.out = pathlib.Path(folder) / "results.json"
        with contextlib.redirect_stdout(null):
            BENCHMARK.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
