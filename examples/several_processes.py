"""A ranking model on several processes: users beside their candidates, gradients the only traffic.

python examples/several_processes.py              one process for each GPU, or two on the CPU
python examples/several_processes.py --processes 2 --devices 4 --two-level

The command starts the processes on this machine. Each of them joins the others (`jax.distributed`),
lays out the users and candidates of its devices (`ikbo.place_users`) and runs the same program: the
forward pass, which needs no communication, and training steps that sum the parameters' gradients.
To run on several machines, start a process on each with `--coordinator` and `--process-id`.
"""

import argparse
import dataclasses
import functools
import hashlib
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ikbo_jax as ikbo
from ikbo_jax.models import ranking
from ikbo_jax.terminal import natural, positive

Parameters = dict[str, Any]
#: Prints a line, on the first process.
Report = Callable[[str], None]

#: Sizes of the network for a CPU; `sizes_for` adds users and candidates.
CPU_SIZES = ranking.Sizes(
    layers=1,
    width=32,
    user_dense=16,
    dense_tokens=2,
    user_tokens=6,
    pooled=8,
    cand_tokens=7,
    history=24,
    queries=2,
    head_dim=16,
    compressed=5,
    rank=4,
    hidden=16,
    dtype="float32",
)
#: Sizes for a GPU, which this library's kernels take.
GPU_SIZES = dataclasses.replace(ranking.SMALL, width=128, queries=16, head_dim=64, dtype="bfloat16")
#: Largest difference from the result of one device, as a fraction of the largest logit. Shapes
#: differ from device to device, so that sums may have another order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
LEARNING_RATE = 0.2

# The type of an asynchronous collective holds the tuple of its operands before its results.
_OPERANDS = r"\((?:[^()]|\([^()]*\))*\), "
_COLLECTIVE = re.compile(
    rf" = (?:\({_OPERANDS})?(?P<shapes>\(.*?\)|\S+) (?P<name>all-gather|all-reduce|all-to-all"
    r"|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter)(?:-start)?\("
)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--processes", type=positive, help="default: GPUs / devices, or 2 on the CPU"
    )
    parser.add_argument("--devices", type=positive, default=1, help="devices of a process (1)")
    parser.add_argument(
        "--two-level", action="store_true", help="a mesh of hosts and their devices"
    )
    parser.add_argument("--steps", type=natural, default=5, help="training steps (5)")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds (600)")
    parser.add_argument("--coordinator", help="host:port of process 0; starts one process alone")
    parser.add_argument("--process-id", type=natural, help="number of this process, from 0")
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (options.coordinator is None) != (options.process_id is None):
        parser.error("--coordinator and --process-id belong together")
    if options.coordinator and options.processes is None:
        parser.error("--coordinator needs --processes")
    return options


# The command: starts the processes, waits for them.


def run_together(commands: Sequence[Sequence[str]], time_limit: float) -> int:
    """Runs commands at the same time; 0 if all of them succeed.

    A process that fails, or the time limit, ends all others: they would wait for it.
    """
    end = time.monotonic() + time_limit
    # A process ends when its standard input does, so that none outlives this one.
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
    try:
        while any(process.poll() is None for process in processes):
            for number, process in enumerate(processes):
                if process.poll():
                    print(f"process {number} failed with status {process.returncode}", flush=True)
                    return 1
            if time.monotonic() > end:
                print(f"not finished after {time_limit:g} seconds", flush=True)
                return 1
            time.sleep(0.05)
        return int(any(process.returncode for process in processes))
    finally:
        for process in processes:
            if process.poll() is None:
                # JAX keeps SIGTERM for preemption notices.
                process.kill()
            process.communicate()


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def count_gpus() -> int:
    """The number of GPUs, asked by a process that ends: a process that sees GPUs holds memory."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    code = "import jax; print(sum(d.platform == 'gpu' for d in jax.local_devices()))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return int(done.stdout.splitlines()[-1])


def start(options: argparse.Namespace) -> int:
    """Starts all processes on this machine; the command's exit status."""
    processes = options.processes or count_gpus() // options.devices or 2
    command = [
        *(sys.executable, __file__, "--devices", str(options.devices)),
        *("--steps", str(options.steps), "--end-with-stdin"),
        *(["--two-level"] if options.two_level else []),
    ]
    return start_all(command, processes, options.time_limit)


def start_all(command: Sequence[str], processes: int, time_limit: float) -> int:
    """Runs a command in several processes, which can `join`; 0 if all of them succeed."""
    coordinator = f"127.0.0.1:{free_port()}"
    command = [*command, "--processes", str(processes), "--coordinator", coordinator]
    commands = [[*command, "--process-id", str(number)] for number in range(processes)]
    return run_together(commands, time_limit)


def end_with_stdin() -> None:
    """Ends this process when its standard input ends."""

    def wait() -> None:
        # `sys.stdin` would hold a lock that the interpreter takes when it ends.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# One process.


class Data(NamedTuple):
    """A request with labels, divided over the devices of a mesh.

    Attributes:
      request: every array in the devices' order.
      labels: [devices · cands_per_device, tasks] f32, 0 or 1.
      mask: [devices · cands_per_device] bool; False is padding.
    """

    request: ranking.Request
    labels: jax.Array
    mask: jax.Array


def join(options: argparse.Namespace) -> None:
    """Joins the other processes."""
    gpus = range(options.process_id * options.devices, (options.process_id + 1) * options.devices)
    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=options.coordinator,
        num_processes=options.processes,
        process_id=options.process_id,
        local_device_ids=list(gpus),
    )


def mesh_of_all(*, two_level: bool) -> Mesh:
    """A mesh of all devices, those of a process side by side."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if not two_level:
        return Mesh(np.array(devices), ("device",))
    return Mesh(np.array(devices).reshape(jax.process_count(), -1), ("host", "device"))


def over_all(mesh: Mesh) -> PartitionSpec:
    """An array's first axis divided over all axes of the mesh."""
    return PartitionSpec(mesh.axis_names)


def sizes_for(num_devices: int) -> ranking.Sizes:
    """Sizes of network and request: about six users for each device, 30 candidates a user."""
    users = 6 * num_devices + 1
    sizes = GPU_SIZES if jax.default_backend() == "gpu" else CPU_SIZES
    return dataclasses.replace(sizes, users=users, candidates=30 * users)


def lay_out(
    placement: ikbo.Placement, mesh: Mesh, request: ranking.Request, labels: np.ndarray
) -> Data:
    """The request on the mesh; every process lays out the part of its own devices."""
    positions = [
        position
        for position, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    mine = placement.on(positions)
    divided = functools.partial(
        jax.make_array_from_process_local_data, NamedSharding(mesh, over_all(mesh))
    )
    return Data(
        ranking.Request(
            user_dense=divided(mine.lay_out_users(request.user_dense)),
            user_tokens=divided(mine.lay_out_users(request.user_tokens)),
            history=divided(mine.lay_out_users(request.history)),
            cand_tokens=divided(mine.lay_out_candidates(request.cand_tokens)),
            cand_to_user=divided(mine.index),
        ),
        divided(mine.lay_out_candidates(labels)),
        divided(mine.mask),
    )


def loss_of(params: Parameters, data: Data) -> jax.Array:
    """The sum of the cross entropies of one device's candidates, without padding."""
    logits = ranking.co_designed(params, data.request)
    entropies = jnp.logaddexp(logits, 0.0) - logits * data.labels
    return jnp.sum(jnp.where(data.mask[:, None], entropies, 0.0))


def training_step(mesh: Mesh, num_candidates: int) -> Any:
    """The jitted step: (parameters, data) -> (parameters, loss of every device)."""

    def on_device(params: Parameters, data: Data) -> tuple[Parameters, jax.Array]:
        # Gradients of one device's loss, then their sum. Without the cast, `shard_map` sums by
        # itself, but for a product of two parameters (the projected seeds of PMA) it sums the
        # product's gradient, from which every device computes the parameters' gradients.
        own = jax.tree.map(lambda p: jax.lax.pcast(p, mesh.axis_names, to="varying"), params)
        loss, gradients = jax.value_and_grad(loss_of)(own, data)
        gradients = jax.lax.psum(gradients, mesh.axis_names)
        params = jax.tree.map(
            lambda p, g: p - (LEARNING_RATE / num_candidates * g).astype(p.dtype),
            params,
            gradients,
        )
        return params, loss[None]

    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), over_all(mesh)),
            out_specs=(PartitionSpec(), over_all(mesh)),
        )
    )


def traffic(program: str) -> dict[str, dict[str, int]]:
    """The collectives in a compiled program's text by name: number, arrays and bytes of results."""
    found: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(program):
        entry = found.setdefault(match["name"], {"count": 0, "arrays": 0, "bytes": 0})
        entry["count"] += 1
        for bits, dims in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", match["shapes"]):
            entry["arrays"] += 1
            size = math.prod(int(dim) for dim in dims.split(",") if dim)
            entry["bytes"] += size * max(1, int(bits) // 8)
    return found


def collectives(compiled: Any) -> str:
    """The collectives in a compiled program, with the arrays and bytes that they move."""
    found = traffic(compiled.as_text()).items()
    words = (f"{name} of {x['arrays']} arrays, {x['bytes']:,} bytes" for name, x in found)
    return ", ".join(words) or "none"


def everywhere(mesh: Mesh, array: jax.Array) -> np.ndarray:
    """A divided array, whole, on this process."""
    return np.asarray(
        jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
    )


def largest_difference(logits: np.ndarray, params: Parameters, request: ranking.Request) -> float:
    """Compares with the result of one device, which has the whole request.

    Returns:
      The largest difference as a fraction of the largest logit; one above `TOLERANCE` is an error.
    """
    expected = np.asarray(jax.jit(ranking.co_designed)(params, request))
    error = float(np.max(np.abs(logits - expected)) / np.max(np.abs(expected)))
    tolerance = TOLERANCE[request.history.dtype.name]
    if not error <= tolerance:
        raise SystemExit(f"one device's result differs by {error:.1e}, allowed is {tolerance:.1e}")
    return error


def score(mesh: Mesh, params: Parameters, data: Data, report: Report) -> jax.Array:
    """The forward pass: logits [devices · cands_per_device, tasks], in the devices' order."""
    forward = jax.jit(
        jax.shard_map(
            ranking.co_designed,
            mesh=mesh,
            in_specs=(PartitionSpec(), over_all(mesh)),
            out_specs=over_all(mesh),
        )
    )
    compiled = forward.lower(params, data.request).compile()
    report(f"collectives of the forward pass: {collectives(compiled)}")
    logits: jax.Array = compiled(params, data.request)
    return logits


def train(
    mesh: Mesh, params: Parameters, data: Data, candidates: int, steps: int, report: Report
) -> tuple[Parameters, list[float]]:
    """Training steps on one request: the parameters, and the loss before every step."""
    step = training_step(mesh, candidates).lower(params, data).compile()
    report(f"collectives of a training step: {collectives(step)}")
    losses = []
    for _ in range(steps):
        params, parts = step(params, data)
        losses.append(float(everywhere(mesh, parts).sum()) / candidates)
    return params, losses


def work(options: argparse.Namespace) -> None:
    """What every process does."""
    join(options)
    is_first = options.process_id == 0

    def say(text: str) -> None:
        # One write for each line: the processes share an output.
        sys.stdout.write(f"[{options.process_id}] {text}\n")
        sys.stdout.flush()

    def report(text: str) -> None:
        if is_first:
            say(text)

    mesh = mesh_of_all(two_level=options.two_level)
    sizes = sizes_for(mesh.size)
    request = jax.device_get(ranking.make_request(sizes))
    labels = np.random.default_rng(1).integers(0, 2, (sizes.candidates, sizes.tasks))
    initial = jax.device_get(jax.jit(ranking.init, static_argnums=0)(sizes))
    placement = ikbo.place_users(request.cand_to_user, sizes.users, mesh.size)
    devices = f"{mesh.size} {jax.default_backend()} devices, {jax.process_count()} processes"
    report(f"mesh: {dict(mesh.shape)} of {devices}")
    report(f"request: {sizes.users} users, {sizes.candidates} candidates")
    report(f"candidates of every device: {placement.shares.tolist()}")

    data = lay_out(placement, mesh, request, labels.astype(np.float32))
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(
        functools.partial(jax.make_array_from_process_local_data, replicated), initial
    )
    logits = placement.restore(everywhere(mesh, score(mesh, params, data, report)))
    if is_first:
        error = largest_difference(logits, initial, request)
        report(f"largest difference from one device's result: {error:.1e}")

    leaves = jax.tree.leaves(initial)
    report(f"parameters: {len(leaves)} arrays, {sum(x.nbytes for x in leaves):,} bytes")
    params, losses = train(mesh, params, data, sizes.candidates, options.steps, report)
    say("losses: " + " ".join(f"{loss:.6f}" for loss in losses))
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))
    say(f"digest of the trained parameters: {digest.hexdigest()[:16]}")
    if losses and not losses[-1] <= losses[0]:
        raise SystemExit(f"the loss does not fall: {losses[0]:.6f} first, {losses[-1]:.6f} last")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    options = parsed(arguments)
    if options.coordinator is None:
        return start(options)
    if options.end_with_stdin:
        end_with_stdin()
    work(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
