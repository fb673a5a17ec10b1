"""Compares this tree's library with an older commit, by turns in one process.

    python -m benchmarks.compare --before COMMIT --out FILE.json --jobs 12

The package of COMMIT is unpacked under another name, so that both versions run in one process, on
the same inputs, at the points of the other benchmarks (`--points`). First all points compile, in
`--jobs` processes; then each point's results are compared bit by bit, and the versions are timed by
turns. Where they differ by more than `SAME`, they are timed again. Launches shorter than `SHORT_MS`
are also timed on the device.

`--before` may also be a folder that holds `ikbo_jax`, for a machine without the history:

    git archive COMMIT ikbo_jax | tar -x -C FOLDER
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import io
import os
import pathlib
import pickle
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import ikbo_jax
from benchmarks import children, harness
from benchmarks.compare_subjects import GROUPS, Subject, chosen
from benchmarks.records import Record
from ikbo_jax._timing import device_time, executables, interleaved_ms
from ikbo_jax._timing.programs import UNTIMED_ON_GPU

#: The older package's name.
BEFORE = f"{ikbo_jax.__name__}_before"
#: Largest change of a time that is no difference, and further measurements of a larger one.
SAME, REPEATS = 0.01, 2
#: Milliseconds under which a call is also timed on the device, since Python launches no faster.
SHORT_MS = 0.1


def unpack(before: str, folder: pathlib.Path) -> str:
    """Puts the package of a commit or folder into `folder`, under the name `BEFORE`.

    Returns the commit's hash, or the folder's name; raises ValueError if there is none.
    """
    source = pathlib.Path(before)
    if (source / ikbo_jax.__name__).is_dir():
        files = {
            path.relative_to(source).as_posix(): path.read_bytes()
            for path in (source / ikbo_jax.__name__).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    else:
        git = ["git", "-C", str(children.ROOT)]
        done = subprocess.run([*git, "archive", before, ikbo_jax.__name__], capture_output=True)
        if done.returncode:
            raise ValueError(f"no commit or folder {before!r}: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            opened = {m.name: archive.extractfile(m) for m in archive.getmembers() if m.isfile()}
            files = {name: file.read() for name, file in opened.items() if file is not None}
        resolved = subprocess.run([*git, "rev-parse", before], capture_output=True, text=True)
        before = resolved.stdout.strip()
    for name, content in files.items():
        if name.endswith(".py"):
            content = re.sub(rf"\b{ikbo_jax.__name__}\b".encode(), BEFORE.encode(), content)
        path = folder / BEFORE / pathlib.PurePosixPath(name).relative_to(ikbo_jax.__name__)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return before


def libraries(folder: pathlib.Path) -> dict[str, ModuleType]:
    """Imports both versions of the library; the older one was unpacked into `folder`."""
    sys.path.insert(0, str(folder))
    try:
        before = importlib.import_module(BEFORE)
    finally:
        sys.path.remove(str(folder))
    return {"before": before, "after": ikbo_jax}


# Programs. Their arguments and results are flat, since trees with this library's classes may not
# be the same in another process.


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x


def _difference(before: Sequence[jax.Array], after: Sequence[jax.Array]) -> list[dict[str, Any]]:
    """Finds for each array the elements that differ, and the largest difference and value."""
    found = []
    for a, b in zip(before, after, strict=True):
        differs = (_bits(a) != _bits(b)).reshape(-1)
        distance = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).reshape(-1)
        entry = {
            "count": jnp.sum(differs, dtype=jnp.int32),
            "first": jnp.argmax(differs),
            "largest": jnp.max(jnp.where(differs, distance, jnp.float32(0)), initial=0.0),
            "of": jnp.max(jnp.abs(a.astype(jnp.float32)), initial=0.0),
        }
        found.append(entry)
    return found


def _serialised(fn: Callable[..., Any], *args: Any, timed: bool = False) -> tuple[Any, Any]:
    """Compiles a program; returns its serialised form and its result's shapes."""
    untimed = None if timed or jax.default_backend() != "gpu" else UNTIMED_ON_GPU
    lowered = jax.jit(fn).lower(*args)
    return executables.to_entry(lowered.compile(untimed), lowered.out_info)[1], lowered.out_info


def _flat(fn: Callable[[Any], Any], tree: Any, *leaves: Any) -> list[Any]:
    return jax.tree.leaves(fn(jax.tree.unflatten(tree, leaves)))


def compiled(subject: Subject, versions: Mapping[str, ModuleType]) -> dict[str, Any]:
    """Compiles and serialises the programs "inputs", "difference" and one for each version.

    If they cannot be compiled, "failure" has the reason.
    """
    try:
        shapes, tree = jax.tree.flatten(jax.eval_shape(subject.inputs))
        make, _ = _serialised(lambda: jax.tree.leaves(subject.inputs()))
        found, results = {"inputs": make}, {}
        for name, library in versions.items():
            run = functools.partial(_flat, subject.call(library), tree)
            found[name], results[name] = _serialised(run, *shapes, timed=True)
        alike = [[(x.shape, x.dtype) for x in out] for out in results.values()]
        if alike[0] != alike[1]:
            return {"failure": f"the results' shapes differ: {alike[0]}, now {alike[1]}"}
        found["difference"], _ = _serialised(_difference, *results.values())
        return found
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error)[:300]}"}


def compile_all(
    subjects: Sequence[Subject],
    versions: Mapping[str, ModuleType],
    folder: pathlib.Path,
    until: float = float("inf"),
) -> None:
    """Compiles the subjects that no other process has claimed, into files in `folder`."""
    for n in children.claims(folder, len(subjects), until):
        partial = folder / f"{n}.tmp"
        partial.write_bytes(pickle.dumps(compiled(subjects[n], versions)))
        os.replace(partial, folder / f"{n}.pickle")


def loaded(path: pathlib.Path) -> dict[str, Any]:
    """Loads the programs of a file, or "failure" with the reason."""
    try:
        stored: dict[str, Any] = pickle.loads(path.read_bytes())
        if "failure" in stored:
            return stored
        return {name: executables.load(program) for name, program in stored.items()}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error)[:300]}"}


# Measuring


def _times(thunks: Mapping[str, Any], protocol: harness.Protocol) -> dict[str, list[float]]:
    """Times both versions, again if the medians differ."""
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(1 + REPEATS):
        more = interleaved_ms(thunks, window_s=protocol.window_s, rounds=protocol.rounds)
        samples = {name: [*samples[name], *more[name]] for name in thunks}
        before, after = map(statistics.median, samples.values())
        if abs(after / before - 1) <= SAME:
            break
    return samples


def measure_point(
    subject: Subject, programs: Mapping[str, Any], protocol: harness.Protocol
) -> dict[str, Any]:
    """Compares the results of both versions bit by bit, and times the versions by turns.

    `programs` are the subject's of `loaded`; raises RuntimeError if they could not be compiled.
    """
    if "failure" in programs:
        raise RuntimeError(programs["failure"])
    inputs = programs["inputs"]()
    results = {name: programs[name](*inputs) for name in ("before", "after")}
    found = jax.device_get(programs["difference"](*results.values()))
    del results
    thunks = {n: functools.partial(programs[n], *inputs) for n in ("before", "after")}
    samples = _times(thunks, protocol)
    differences = [
        {"result": n, "count": int(d["count"]), "first": int(d["first"])}
        | {"largest": float(d["largest"]), "of": float(d["of"])}
        for n, d in enumerate(found)
        if d["count"]
    ]
    times: dict[str, dict[str, Any]]
    times = {name: {"ms": ms, "median_ms": statistics.median(ms)} for name, ms in samples.items()}
    field = "median_ms"
    if max(entry["median_ms"] for entry in times.values()) < SHORT_MS:
        on_device = device_time.measure_all({name: (programs[name], inputs) for name in times})
        for name, measured in on_device.items():
            field = "device_ms"
            times[name][field] = measured.ms
    ratio = times["after"][field] / times["before"][field]
    point = {"sweep": subject.sweep, "label": subject.label, "problem": _plain(subject.sizes)}
    return point | {**times, "ratio": ratio, "ratio_of": field, "differences": differences}


def _plain(sizes: Any) -> Any:
    if isinstance(sizes, tuple):
        return list(map(_plain, sizes))
    return dataclasses.asdict(sizes) if dataclasses.is_dataclass(sizes) else sizes  # type: ignore[arg-type]


def _describe(point: Record) -> str:
    before, after = (point[version][point["ratio_of"]] for version in ("before", "after"))
    slower = ", SLOWER" if point["ratio"] > 1 + SAME else ""
    return f"{before:.4f} -> {after:.4f} ms, {point['ratio']:.3f}, {equality(point)}{slower}"


def equality(point: Record) -> str:
    """Says whether the results are equal, and where and by how much they differ."""
    if not point["differences"]:
        return "equal"
    return "; ".join(
        f"result {d['result']}: {d['count']} elements from {d['first']} on, "
        f"by up to {d['largest']:.2g} of {d['of']:.2g}"
        for d in point["differences"]
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compares points; raises ValueError if there is no such commit, folder or point."""
    bench = harness.Run("compare", args, times_matmul=False)
    until = time.time() + children.COMPILING * args.budget_s
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        commit = unpack(args.before, folder)
        if args.jobs > 1:
            # Before this process uses the device: it would leave no memory to the others.
            shared = [*args.argv, "--share", scratch, "--until", str(until)]
            children.wait(children.start("benchmarks.compare", [shared] * args.jobs))
        subjects, versions = chosen(args.points), libraries(folder)
        if args.jobs <= 1:
            compile_all(subjects, versions, folder, until)
        files = {s.name: folder / f"{n}.pickle" for n, s in enumerate(subjects)}
        ready = [subject for subject in subjects if files[subject.name].exists()]
        # A program of this library's kernels may compile them when it is loaded.
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            found = pool.map(loaded, [files[subject.name] for subject in ready])
            programs = dict(zip([subject.name for subject in ready], found, strict=True))
        print(f"compiled after {time.monotonic() - bench.start:.0f} s", flush=True)
        bench.results["before"] = commit
        bench.results["left_out"] += [s.name for s in subjects if s not in ready]

        def measure(subject: Subject) -> dict[str, Any]:
            # Popped: programs of all points on the device would leave less memory to the others.
            return measure_point(subject, programs.pop(subject.name), bench.protocol)

        return bench.measure(ready, measure, _describe)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a point failed or was left out."""
    parser = harness.parser("compare")
    words = "a commit, or a folder that holds ikbo_jax"
    parser.add_argument("--before", required=True, help=words)
    words = f'groups ({", ".join(GROUPS)}), or points of them, such as "attention s S=512"'
    parser.add_argument("--points", nargs="+", default=list(GROUPS), metavar="NAME", help=words)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once")
    parser.add_argument("--share", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = children.parsed(parser, argv)
    if args.share is not None:  # A process of `run`.
        compile_all(chosen(args.points), libraries(args.share), args.share, args.until)
        return 0
    try:
        results = run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    lines = (f"{p['sweep']} {p['label']}: {_describe(p)}" for p in results["points"])
    harness.print_results({**results, "points": []}, "\n".join(lines))
    return 1 if "failed" in results or results["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
