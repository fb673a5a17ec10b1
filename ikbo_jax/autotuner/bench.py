"""The work of the autotuner's worker: compiles contenders, checks them and times them interleaved.

JAX traces and lowers under Python's lock; XLA and ptxas compile without the lock. So several
processes without a device lower the contenders in parallel, and threads of the one process that
holds the device compile them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from ikbo_jax import _timing
from ikbo_jax._timing import device_time, programs
from ikbo_jax.cases import (
    attention,
    attention_backward,
    gdpa,
    gdpa_backward,
    linear_compression,
    linear_compression_backward,
)
from ikbo_jax.cases.case import Case
from ikbo_jax.ops import dispatch
from ikbo_jax.problems import Config, Problem
from ikbo_jax.tuning import table_rows

#: A configuration of the kernel, or None for the XLA path.
Contender = Config | None
#: Takes one event, the fields of a JSON object.
Emit = Callable[[dict[str, Any]], None]

#: Largest number of processes, and of threads; more do not speed up a hundred contenders.
MAX_WORKERS = 16


@dataclasses.dataclass(frozen=True)
class Task:
    """Contenders to check and to time interleaved, in `windows` windows of `window_s` seconds.

    `matmul_size` is n of the n^3 bf16 reference matmul.
    """

    problem: Problem
    contenders: tuple[Contender, ...]
    window_s: float = 0.2
    windows: int = 3
    matmul_size: int = 8192

    def to_json(self) -> str:
        fields = {"op": self.problem.op, **dataclasses.asdict(self)}
        fields["contenders"] = [
            {"implementation": "xla"} if config is None else dataclasses.asdict(config)
            for config in self.contenders
        ]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields = json.loads(text)
        op = fields.pop("op")
        return cls(
            table_rows.problem_from_json(fields.pop("problem"), op),
            tuple(table_rows.config_from_json(x, op) for x in fields.pop("contenders")),
            **fields,
        )


#: The case of a problem, by op.
CASES: dict[str, Callable[[Any], Case]] = {
    "linear_compression": linear_compression.Case,
    "linear_compression_backward": linear_compression_backward.Case,
    "attention": attention.Case,
    "attention_backward": attention_backward.Case,
    "gdpa": gdpa.Case,
    "gdpa_backward": gdpa_backward.Case,
}


def case_of(problem: Problem) -> Case:
    """Makes the case of a problem."""
    return CASES[problem.op](problem)


def brief(contender: Contender) -> str:
    """Describes a contender in a few words."""
    if contender is None:
        return "XLA"
    names = {"num_stages": "stages", "epilogue_rows": "epilogue"}
    fields = dataclasses.asdict(contender)
    return " ".join(f"{names.get(name, name)} {value}" for name, value in fields.items())


def first_line(error: BaseException) -> str:
    """Names the type of an exception and the first line of its message, 300 characters at most."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"


def lower(problem: Problem, config: Config, num_sms: int) -> jax.export.Exported | str:
    """Lowers the kernel for CUDA without a device; returns a text, which pickles, for an error."""
    case = case_of(problem)
    try:
        shapes = jax.eval_shape(case.inputs)
        runner = case.runner(config, num_sms)
        exported = jax.export.export(runner, platforms=("cuda",))(*shapes)
    except Exception as error:
        return first_line(error)
    # The gradient rule is a closure, which cannot be pickled.
    return dataclasses.replace(exported, _get_vjp=None)


def _see_no_gpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def _lowering_processes(number: int) -> concurrent.futures.Executor:
    """Makes processes that see no GPU."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(number, context, _see_no_gpu)


@functools.cache
def _matmul(size: int) -> tuple[Any, jax.Array]:
    """Compiles the reference matmul; returns it, and both its operands."""
    square = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    options = programs.NETWORK_ON_GPU if jax.default_backend() == "gpu" else {}
    return jax.jit(jnp.matmul).lower(square, square).compile(compiler_options=options), square


class Bench:
    """Compiles, checks and times the contenders of one problem in this process.

    Every event that is passed to `emit` has the key "event" and, except for "matmul", "contender",
    the index in `contenders`. "start" precedes an operation that may crash or hang; "compiled",
    "checked" or "sample" follows it, with "failure" if it failed. "sample" and "matmul" have "ms",
    the time per call in one window. After "lost" the process can no longer use the device.
    """

    def __init__(
        self, problem: Problem, contenders: Sequence[Contender], emit: Emit = lambda event: None
    ) -> None:
        self.problem, self.contenders, self._emit = problem, tuple(contenders), emit
        self._case = case_of(problem)
        self._programs: dict[Contender, Callable[..., jax.Array]] = {}
        self._checked: dict[Contender, dict[str, float]] = {}
        self._failures: dict[Contender, str] = {}
        self._is_short: bool | None = None

    @functools.cached_property
    def _inputs(self) -> Any:
        return self._case.inputs()

    @functools.cached_property
    def _shapes(self) -> Any:
        return jax.eval_shape(self._case.inputs)

    def prepare(self, alone: Collection[Contender] = ()) -> None:
        """Compiles all contenders in parallel, those in `alone` one at a time, and checks each one
        then.
        """
        # The import sets the path of a library that XLA links kernels with. Nothing else imports it
        # where other processes lower the kernels and XLA is no contender.
        import jax.experimental.mosaic.gpu  # noqa: F401

        workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        kernels = [config for config in self.contenders if config is not None]
        # Computed before threads read them, since cached properties have no lock.
        num_sms, _ = dispatch.num_sms(), self._shapes
        with contextlib.ExitStack() as stack:
            lowered: dict[Contender, concurrent.futures.Future[Any]] = {}
            if len(kernels) > 1:
                processes = stack.enter_context(_lowering_processes(min(workers, len(kernels))))
                for config in kernels:
                    lowered[config] = processes.submit(lower, self.problem, config, num_sms)
            with concurrent.futures.ThreadPoolExecutor(workers) as threads:
                # While XLA compiles the XLA path and the matmul, it times GEMM algorithms, and
                # nothing else may run on the device. Checks begin after that, while the kernels
                # still compile.
                tuned = threads.submit(self._compile_tuned, None not in alone)
                done = {
                    threads.submit(self._compile, config, lowered.get(config)): config
                    for config in kernels
                    if config not in alone
                }
                tuned.result()
                if None in self._programs:
                    self._check(None)
                for future in concurrent.futures.as_completed(done):
                    self._check(done[future])
            for contender in alone:
                self._compile(contender, lowered.get(contender))

    def measure(self, task: Task) -> dict[str, Any]:
        """Checks and times a task's contenders.

        If the first configuration takes less than `device_time.SHORT_MS` on the device, all later
        contenders are timed there: calls back to back would wait for Python.

        Returns:
          A dict that JSON can hold: "device", "compute_capability" and "jax"; "matmul_ms", a list
          of samples; "results", for every contender either "ms" (a list of samples), "error" and
          "bound", or "failure", a text.
        """
        for contender in task.contenders:
            if contender not in self._programs and contender not in self._failures:
                self._compile(contender, None)
            self._check(contender)
        samples: dict[Contender, list[float]] = {contender: [] for contender in task.contenders}
        matmul_ms: list[float] = []
        for _ in range(task.windows):
            matmul, square = _matmul(task.matmul_size)
            matmul_ms += _timing.sustained_ms(
                matmul, square, square, window_s=task.window_s, windows=1
            )
            self._emit({"event": "matmul", "ms": matmul_ms[-1]})
            for contender in task.contenders:
                if contender in self._failures:
                    continue
                with self._guarded("sample", contender) as fields:
                    fields["ms"] = self._sample_ms(contender, task.window_s)
                    samples[contender].append(fields["ms"])
        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "compute_capability": str(getattr(device, "compute_capability", "")),
            "jax": jax.__version__,
            "matmul_ms": matmul_ms,
            "results": [
                {"failure": self._failures[contender]}
                if contender in self._failures
                else {"ms": samples[contender], **self._checked[contender]}
                for contender in task.contenders
            ],
        }

    def _sample_ms(self, contender: Contender, window_s: float) -> float:
        """Times a call in milliseconds, on the device if calls are short."""
        program = self._programs[contender]
        if self._is_short:
            found = device_time.measure(program, *self._inputs)
            if found is None:
                raise RuntimeError("the profiler recorded nothing")
            return found.ms
        (ms,) = _timing.sustained_ms(program, *self._inputs, window_s=window_s, windows=1)
        if self._is_short is None:
            found = (
                device_time.measure(program, *self._inputs)
                if ms < device_time.MOST_CALL_MS
                else None
            )
            is_short = found is not None and found.ms < device_time.SHORT_MS
            if contender is not None:
                self._is_short = is_short
            if found is not None and is_short:
                return found.ms
        return ms

    def _compile_tuned(self, with_xla: bool) -> None:
        if with_xla and None in self.contenders:
            self._compile(None, None)
        _matmul(Task.matmul_size)

    def _compile(
        self, contender: Contender, lowered: concurrent.futures.Future[Any] | None
    ) -> None:
        try:
            exported = None if lowered is None else lowered.result()
        except Exception:
            exported = None  # The lowering process died: lower in this process.
        with self._guarded("compiled", contender):
            if isinstance(exported, str):
                raise RuntimeError(exported)
            program: Any = (
                self._case.runner(contender) if exported is None else jax.jit(exported.call)
            )
            self._programs[contender] = program.lower(*self._shapes).compile()

    def _check(self, contender: Contender) -> None:
        if contender in self._failures or contender in self._checked:
            return
        with self._guarded("checked", contender):
            actual = self._programs[contender](*self._inputs)
            found = self._case.check(actual, self._inputs)
            if found.ok:
                self._checked[contender] = found._asdict()
            else:
                text = f"wrong result: error {found.error:.3g}, bound {found.bound:.3g}"
                self._failures[contender] = text

    @contextlib.contextmanager
    def _guarded(self, event: str, contender: Contender) -> Iterator[dict[str, Any]]:
        """Emits "start", then `event` with the fields that the body sets; records an exception."""
        fields: dict[str, Any] = {}
        self._emit_about("start", contender)
        try:
            yield fields
        except Exception as error:
            # The tuner reports any exception as this contender's failure and continues.
            self._failures[contender] = first_line(error)
            if threading.current_thread() is threading.main_thread():
                self._check_device(contender)
        self._emit_about(event, contender, **fields)

    def _check_device(self, contender: Contender) -> None:
        """Emits "lost" and raises if this process can no longer use the device (a CUDA error)."""
        try:
            jax.block_until_ready(jnp.zeros((), jnp.float32) + jnp.float32(1))
        except Exception:
            self._emit_about("lost", contender)
            raise

    def _emit_about(self, event: str, contender: Contender, **fields: Any) -> None:
        if contender in self._failures:
            fields["failure"] = self._failures[contender]
        self._emit({"event": event, "contender": self.contenders.index(contender), **fields})
