"""Compiles the programs of the demo in parallel, keeps them in files, and runs them.

The demo has several parts, and each part creates one `Programs`. `run_parts` has the parts

1. lower their programs in order; every program compiles in a thread of its part's pool as soon as
   it is lowered, and its Mosaic GPU kernels in threads beside it;
2. run and time their programs, in order, when all have compiled.

A program that `Store` holds needs no tracing, lowering or compiling. Its key is everything that
determines the lowered text: all files of this library, the user's tuning cache, the versions of JAX
and the driver, the device, JAX's settings, and the sizes. A program that cannot be read or loaded
is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import pathlib
import pickle
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable
from jaxlib.mlir import ir

#: Reports a line of text about progress.
Log = Callable[[str], None]
#: Number of programs of one part that compile in parallel.
WORKERS = 8
#: Compilations that take at least this many seconds are logged with their time.
SLOW_COMPILATION_S = 2.0
#: Compiler options on a GPU for programs that run but are not timed (inputs, oracles, comparisons).
#: Their speed does not matter, so XLA neither tunes GEMM algorithms, which takes most of the
#: compilation time, nor compiles Triton kernels.
UNTIMED_ON_GPU = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
#: Compiler options of all three networks on a GPU. By default XLA generates and compiles dozens of
#: Triton kernels for each of the network's 20 kinds of GEMM before it times them: 48 s for the
#: materialised network on an H100, nearly all of it on the host. With this option XLA times the
#: algorithms of cuBLAS and takes the fastest: the baseline is tuned, and users commonly set it.
NETWORK_ON_GPU = {"xla_gpu_enable_triton_gemm": False}
#: Largest number of files in the folder, and of bytes in all; the least recently used are deleted.
MAX_FILES, MAX_BYTES = 128, 1 << 30
#: Prefixes of environment variables that affect compiled programs.
VARIABLES = ("XLA_", "JAX_", "CUDA_", "NVIDIA_", "MOSAIC_", "IKBO_", "TF_")


#: A part of the demo: it lowers programs, yields them, takes them compiled, and returns its result.
type Part[Result] = Generator[Programs, dict[str, jax.stages.Compiled], Result]


def run_parts[Result](parts: Sequence[Part[Result]]) -> list[Result]:
    """Runs parts as the module's docstring says; returns their results.

    When a part fails, no other one continues; compilations in progress do.
    """
    added: list[Programs] = []
    try:
        for part in parts:
            added.append(next(part))
        compiled = [programs.compiled() for programs in added]
        return [_result(part, found) for part, found in zip(parts, compiled, strict=True)]
    finally:
        for programs in added:
            programs.stop()


def _result[Result](part: Part[Result], compiled: dict[str, jax.stages.Compiled]) -> Result:
    """Runs a part that has lowered its programs."""
    try:
        part.send(compiled)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise RuntimeError("a part yields its programs once")


def kernels_of(lowered: jax.stages.Lowered) -> list[jax.stages.Traced]:
    """Makes a program of each Mosaic GPU kernel that a program calls.

    XLA compiles the kernels of a program one after another, and keeps them in the process by the
    hash of their module. If they compile by themselves in threads, XLA finds them there: beside an
    H200, the 13 kernels of the ranking network took 8.9 s and the network 18.8 instead of 32.4 s.
    """
    found: dict[bytes, jax.stages.Traced] = {}

    def shape(value: Any) -> jax.ShapeDtypeStruct:
        tensor = ir.RankedTensorType(value.type)
        kind, bits = re.findall(r"\D+|\d+", str(tensor.element_type))
        names = {"bf": "bfloat", "f": "float", "i": "int", "ui": "uint"}
        return jax.ShapeDtypeStruct(tensor.shape, names[kind] + bits)

    def visit(op: Any) -> ir.WalkResult:
        if str(op.attributes.get("call_target_name")) == '"mosaic_gpu_v2"':
            named = {x.name: x.attr for x in op.attributes["mhlo.backend_config"]}
            attributes = {
                name: x.value_bytes if isinstance(x, ir.StringAttr) else x.value
                for name, x in named.items()
            }
            call = jax.ffi.ffi_call("mosaic_gpu_v2", list(map(shape, op.results)))
            kernel = jax.jit(functools.partial(call, **attributes))
            found[attributes["kernel_hash"]] = kernel.trace(*map(shape, op.operands))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    return list(found.values())


class Programs:
    """Compiles the programs of one part.

    Args:
      log: called with a description of each step.
      timed_on_gpu: compiler options of timed programs on a GPU.
      identity: the key under which programs are stored: the part's name, and the sizes that its
        functions close over; empty: none is stored.
    """

    def __init__(
        self, log: Log, timed_on_gpu: Mapping[str, Any] | None = None, identity: str = ""
    ) -> None:
        on_gpu = jax.default_backend() == "gpu"
        self._options = {
            True: dict(timed_on_gpu or {}) if on_gpu else {},
            False: UNTIMED_ON_GPU if on_gpu else {},
        }
        self._log, self._identity = log, identity
        self._store = current_store() if identity else None
        workers = min(WORKERS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._futures: dict[str, Future[jax.stages.Compiled]] = {}

    def add(self, name: str, fn: Callable[..., Any], *args: Any, timed: bool = True) -> Any:
        """Lowers `fn(*args)` here and compiles it in another thread, or loads it from the store.

        Args are arrays, or their shapes; `timed`: the program will not only run once. Returns the
        shapes of the result.
        """
        options = self._options[timed]
        key, stored = "", None
        if self._store is not None:
            key = self._store.key(self._identity, name, args, sorted(options.items()))
            stored = self._store.get(key)
        if stored is not None:
            self._log(f"loading {' '.join(name.split())}")
            out, serialized = stored

            def load() -> jax.stages.Compiled:
                try:
                    return from_entry(serialized)
                except Exception:  # a program that cannot be loaded is compiled
                    return self._compile(name, jax.jit(fn).lower(*args), options, key)

            self._futures[name] = self._pool.submit(load)
            return out
        self._log(f"compiling {' '.join(name.split())}")
        lowered = jax.jit(fn).lower(*args)
        self._futures[name] = self._pool.submit(self._compile, name, lowered, options, key)
        return lowered.out_info

    def _compile(
        self, name: str, lowered: jax.stages.Lowered, options: dict[str, Any], key: str
    ) -> jax.stages.Compiled:
        start = time.perf_counter()
        kernels = kernels_of(lowered)
        with ThreadPoolExecutor(1 + len(kernels), thread_name_prefix="kernel") as threads:
            for kernel in kernels:  # Their errors are the program's, too.
                threads.submit(lambda kernel: kernel.lower().compile(UNTIMED_ON_GPU), kernel)
            compiled = lowered.compile(compiler_options=options)
        if (seconds := time.perf_counter() - start) >= SLOW_COMPILATION_S:
            self._log(f"compiled {' '.join(name.split())} in {seconds:.1f} s")
        if self._store is not None:
            with contextlib.suppress(Exception):  # not every backend can serialise programs
                self._store.put(key, to_entry(compiled, lowered.out_info))
        return compiled

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """Waits for the programs; returns them by name."""
        return {name: future.result() for name, future in self._futures.items()}

    def stop(self) -> None:
        """Compiles no program that has not begun to compile."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def environment_digest(tables: Sequence[pathlib.Path] = ()) -> bytes:
    """Hashes everything outside a program that affects how it compiles, also the files `tables`."""
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).resolve().parents[1]
    sources = sorted(p for p in package.rglob("*") if p.suffix in (".py", ".json"))
    for path in (*sources, *tables, pathlib.Path("/proc/driver/nvidia/version")):
        content = path.read_bytes() if path.is_file() else b"none"
        digest.update(f"{path} {len(content)}\n".encode() + content)
    device = jax.devices()[0]
    facts = (
        *(sys.version, platform.platform(), _cpu_features()),
        *(jax.__version__, jaxlib.__version__, np.__version__),
        *(device.device_kind, device.client.platform_version, jax.device_count()),
        getattr(device, "core_count", None),
        sorted((name, str(value)) for name, value in jax.config.values.items()),
        sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)),
    )
    digest.update(repr(facts).encode())
    return digest.digest()


def _cpu_features() -> str:
    """Reads the CPU's instruction set extensions from /proc/cpuinfo; "" without this file."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


class Store:
    """Keeps pickled entries in a folder, each in a file named after its key and `environment`.

    Reading an entry can run code, so only the user may have write permission for the folder.
    """

    def __init__(self, folder: pathlib.Path, environment: bytes) -> None:
        self._folder, self._environment = folder, environment

    def key(self, identity: str, name: str, args: Any = (), options: Any = ()) -> str:
        """Hashes a program's owner, name, shapes of arguments and compiler options to its key."""
        leaves, tree = jax.tree.flatten(args)
        avals = [(np.shape(x), str(x.dtype), getattr(x, "weak_type", False)) for x in leaves]
        facts = repr((identity, name, avals, str(tree), options)).encode()
        return hashlib.sha256(self._environment + facts).hexdigest()

    def get(self, key: str) -> Any:
        """Reads an entry; None if there is none or it cannot be read."""
        path = self._folder / key
        try:
            entry = pickle.loads(path.read_bytes())
            os.utime(path)
        except Exception:
            return None
        return entry

    def put(self, key: str, entry: Any) -> None:
        """Writes an entry atomically; if that fails, there is no entry and no error."""
        with contextlib.suppress(Exception):
            body = pickle.dumps(entry)
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete_on_close=False) as file:
                file.write(body)
                file.close()
                os.replace(file.name, self._folder / key)
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        files = [(path, path.stat()) for path in self._folder.iterdir()]
        total = 0
        newest_first = sorted(files, key=lambda found: -found[1].st_mtime)
        for position, (path, stat) in enumerate(newest_first):
            total += stat.st_size
            if position >= MAX_FILES or total > MAX_BYTES:
                path.unlink(missing_ok=True)


def to_entry(compiled: jax.stages.Compiled, out: Any) -> tuple[Any, Any]:
    """Makes the entry of a compiled program: the shapes of its result, and the program."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)
    return shapes, serialize_executable.serialize(compiled)


def from_entry(serialized: Any) -> jax.stages.Compiled:
    """Loads the second element of an entry of `to_entry`; raises the errors of XLA's loader."""
    # XLA links the host's part of a kernel with a library that this module registers. Without it,
    # the program failed: "Failed to materialize symbols".
    importlib.import_module("jax.experimental.mosaic.gpu")
    payload, in_tree, out_tree = serialized
    return serialize_executable.deserialize_and_load(
        payload,
        in_tree,
        out_tree,
        # By default the loader uses all devices; the programs here use one.
        execution_devices=[jax.config.jax_default_device or jax.devices()[0]],
    )


_current: Store | None = None


def current_store() -> Store | None:
    """Returns the store that `use_store` set, shared by all threads; None outside `use_store`."""
    return _current


@contextlib.contextmanager
def use_store(folder: pathlib.Path, tables: Sequence[pathlib.Path]) -> Iterator[str | None]:
    """Sets `current_store()` to a store in `folder`; `tables` as in `environment_digest`.

    Yields:
      None, or why nothing is stored. If the user has configured or disabled JAX's compilation cache
      (`JAX_COMPILATION_CACHE_DIR`, `jax.config`), JAX alone stores programs, and None is yielded:
      a program that JAX's cache has loaded cannot be stored again, since on a CPU it fails when it
      is loaded for the second time (jaxlib 0.11.2: "Function … not found").
    """
    global _current
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        yield f"compiled programs are not kept for the next time: {error}"
        return
    before = _current
    _current = Store(folder, environment_digest(tables))
    try:
        yield None
    finally:
        _current = before
