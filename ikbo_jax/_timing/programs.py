"""Compiles the programs of the demo in parallel, and runs them when none compiles.

The demo has several parts, and each part creates one `Programs`. `run_parts` has the parts

1. lower their programs in order; every program compiles in a thread of its part's pool as soon as
   it is lowered, and its Mosaic GPU kernels in threads beside it;
2. run and time their programs, in order, when all have compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jaxlib.mlir import ir

from ikbo_jax._timing import executables

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
        self._store = executables.current_store() if identity else None
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
                    return executables.load(serialized)
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
                self._store.put(key, executables.to_entry(compiled, lowered.out_info))
        return compiled

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """Waits for the programs; returns them by name."""
        return {name: future.result() for name, future in self._futures.items()}

    def stop(self) -> None:
        """Compiles no program that has not begun to compile."""
        self._pool.shutdown(wait=False, cancel_futures=True)
