"""Programs that are to be timed: lowered in order, compiled side by side, run when none compiles.

A part of the demo makes one `Programs`. `side_by_side` runs several parts, each in a thread:

1. parts lower their programs in the order of the parts, so that the text of a program, which is
   the key of JAX's compilation cache, does not depend on which thread was faster;
2. every program compiles in a thread of its part's pool as soon as it is lowered;
3. no part runs or times anything before all parts have compiled, and then they run in order.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from ikbo_jax._timing import executables

Say = Callable[[str], None]
#: Programs of one part that compile at once. XLA's own threads compile each one's kernels.
WORKERS = 8
#: Seconds from which on the time of a compilation is worth a line.
LONG = 2.0
#: How the programs compile on a GPU that are run and not timed (inputs, oracles, comparisons): the
#: choice of GEMM algorithms, which is most of such a compilation, would win nothing, and no more
#: would GEMMs by Triton, each of which is a kernel to be compiled where cuBLAS has one ready.
UNTIMED_ON_GPU = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
#: How the networks compile on a GPU, all three alike. By default XLA generates and compiles dozens
#: of Triton kernels for each of the network's 20 kinds of GEMM before it times them: 48 s for the
#: materialised network on an H100, nearly all of it on the host. Here GEMMs are cuBLAS', whose
#: algorithms XLA still times one by one and of which it takes the fastest, at the same autotune
#: level as ever. So the baseline is tuned, and users commonly run with the same flag.
NETWORK_ON_GPU = {"xla_gpu_enable_triton_gemm": False}


class Stopped(Exception):
    """The demo ends: another part failed, or the user interrupted it."""


class _Part:
    """Where one part stands, for the parts beside it."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.lowered, self.compiled, self.finished = (threading.Event() for _ in range(3))
        self.stopped = False

    def _before(self) -> list[_Part]:
        return self.parts[: self.parts.index(self)]

    def wait_to_lower(self) -> None:
        """Waits until the parts before have lowered all that they lower."""
        for part in self._before():
            part.lowered.wait()
        self.check()

    def wait_to_run(self) -> None:
        """Waits until every part has compiled, and the parts before have run."""
        self.compiled.set()
        for part in self.parts:
            part.compiled.wait()
        for part in self._before():
            part.finished.wait()
        self.check()

    def finish(self) -> None:
        """Lets the others go on, whatever became of this part."""
        for event in (self.lowered, self.compiled, self.finished):
            event.set()

    def check(self) -> None:
        """Raises Stopped if the demo ends."""
        if self.stopped:
            raise Stopped


_current: contextvars.ContextVar[_Part | None] = contextvars.ContextVar("part", default=None)


def side_by_side(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs parts of the demo, each in a thread, as the module says; returns what they return.

    Raises what the first part in order raises, or KeyboardInterrupt; then the other parts stop
    before the next thing they would lower or run. What compiles at that moment cannot be stopped.
    """
    parts: list[_Part] = []
    parts += [_Part(parts) for _ in calls]
    futures: list[Future[Any]] = [Future() for _ in calls]

    def stop() -> None:
        for part in parts:
            part.stopped = True

    def body(part: _Part, call: Callable[[], Any], future: Future[Any]) -> None:
        _current.set(part)  # a thread begins with a context of its own
        try:
            part.wait_to_lower()
            future.set_result(call())
        except BaseException as error:
            stop()
            future.set_exception(error)
        finally:
            part.finish()

    for part, call, future in zip(parts, calls, futures, strict=True):
        arguments = (part, call, future)
        threading.Thread(target=body, args=arguments, name="demo part", daemon=True).start()
    try:
        return [future.result() for future in futures]
    except BaseException:
        stop()
        raise


class Programs:
    """The programs of one part.

    Args:
      say: is told what is being done.
      timed_on_gpu: compiler options of the programs that are timed, where the backend is a GPU.
      identity: with a program's name and the shapes of its arguments, and beside what
        `executables.surroundings` knows, all that decides what the part's programs compute: the
        part's own name, and the sizes that its functions close over. If empty, nothing is kept.
    """

    def __init__(
        self, say: Say, timed_on_gpu: Mapping[str, Any] | None = None, identity: str = ""
    ) -> None:
        on_gpu = jax.default_backend() == "gpu"
        self._options = {
            True: dict(timed_on_gpu or {}) if on_gpu else {},
            False: UNTIMED_ON_GPU if on_gpu else {},
        }
        self._say, self._identity = say, identity
        self._store = executables.current() if identity else None
        self._part = _current.get() or _alone()
        workers = min(WORKERS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._futures: dict[str, Future[jax.stages.Compiled]] = {}

    def add(self, name: str, fn: Callable[..., Any], *args: Any, timed: bool = True) -> Any:
        """Lowers `fn(*args)` here, and has it compiled beside; neither, if it has been kept.

        Args:
          name: of the program, one that the part has not used.
          fn: a traceable function.
          *args: arrays, or their shapes.
          timed: whether the program will be timed, rather than run once.

        Returns:
          The shapes of the result.

        Raises:
          Whatever tracing and lowering raise, NotImplementedError of a kernel among it.
        """
        self._part.check()
        options = self._options[timed]
        key, kept = "", None
        if self._store is not None:
            key = self._store.key(self._identity, name, args, sorted(options.items()))
            kept = self._store.get(key)
        if kept is not None:
            self._say(f"loading {' '.join(name.split())}")
            out, serialized = kept
            self._futures[name] = self._pool.submit(
                self._load, name, serialized, fn, args, options, key
            )
            return out
        self._say(f"compiling {' '.join(name.split())}")
        lowered = jax.jit(fn).lower(*args)
        self._futures[name] = self._pool.submit(self._compile, name, lowered, options, key)
        return lowered.out_info

    def text(self, name: str, make: Callable[[], str], args: Any = ()) -> str:
        """What `make` returns of functions with these arguments, now or when it was kept."""
        if self._store is None:
            return make()
        key = self._store.key(self._identity, f"text: {name}", args)
        kept = self._store.get(key)
        if not isinstance(kept, str):
            self._store.put(key, kept := make())
        return kept

    def _load(
        self,
        name: str,
        serialized: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        key: str,
    ) -> jax.stages.Compiled:
        try:
            return executables.load(serialized)
        except Exception:  # whatever the loader did not like, the compiler does
            return self._compile(name, jax.jit(fn).lower(*args), options, key)

    def _compile(
        self, name: str, lowered: jax.stages.Lowered, options: dict[str, Any], key: str
    ) -> jax.stages.Compiled:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=options)
        if (seconds := time.perf_counter() - start) >= LONG:
            self._say(f"compiled {' '.join(name.split())} in {seconds:.1f} s")
        if self._store is not None:
            with contextlib.suppress(Exception):  # not every backend serialises
                self._store.put(key, executables.to_entry(compiled, lowered.out_info))
        return compiled

    def all_added(self) -> None:
        """Says that the part lowers nothing more, so that the next part may begin."""
        self._part.lowered.set()

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """Waits for all of the part's programs and for its turn to run; programs by name."""
        self.all_added()
        try:
            found = {name: future.result() for name, future in self._futures.items()}
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._part.wait_to_run()
        return found


def _alone() -> _Part:
    parts: list[_Part] = []
    parts.append(_Part(parts))
    return parts[0]


@contextlib.contextmanager
def kept_compilations(
    folder: pathlib.Path, tables: Sequence[pathlib.Path] = ()
) -> Iterator[str | None]:
    """Keeps every compiled program in `folder`, for the next time.

    JAX keeps what it compiles, and `executables` keeps the programs of parts with an identity;
    `tables` are files on which these depend.

    A cache that the user chose (`JAX_COMPILATION_CACHE_DIR`, `jax.config`) is left as it is, and so
    is the choice of none. Afterwards the settings are as before.

    Yields:
      Why nothing is kept, or None.
    """
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
    from jax.experimental.compilation_cache import compilation_cache

    ours = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in ours}
    try:
        for name, value in ours.items():
            jax.config.update(name, value)
        # JAX looks at the settings once, when it compiles for the first time.
        compilation_cache.reset_cache()
        with executables.kept_in(folder / "executables", tables):
            yield None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
