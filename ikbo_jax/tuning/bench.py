"""What a process of the autotuner does: compiles contenders, checks them and times them by turns.

JAX traces and lowers under Python's lock, which takes about a second for a kernel; XLA and ptxas
compile without it, in two. So processes without a device lower the contenders side by side, and
threads of the one process that holds the device compile them.
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
from ikbo_jax.tuning import rules, table, trials, trials_gdpa
from ikbo_jax.tuning.rules import Config, Problem

#: A configuration of the kernel, or None for the XLA path.
Candidate = Config | None
#: Takes one event, the fields of a JSON object.
Say = Callable[[dict[str, Any]], None]

#: More processes or threads than this bring nothing beside a hundred contenders.
MOST_WORKERS = 16
#: How the matmul that normalises compiles on a GPU. XLA still times cuBLAS' algorithms; Triton's,
#: which it would compile by the dozen before any check may begin, do not win at this size.
MATMUL_ON_GPU = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Task:
    """Candidates to check and to time by turns.

    Attributes:
      problem: sizes of the inputs.
      candidates: what to run.
      window_s: seconds of one timing window.
      windows: windows of each candidate.
      matmul_size: n of the n^3 bf16 matmul that normalises.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    window_s: float = 0.2
    windows: int = 3
    matmul_size: int = 8192

    def to_json(self) -> str:
        fields = {"op": rules.of(self.problem).op, **dataclasses.asdict(self)}
        fields["candidates"] = [
            {"implementation": "xla"} if config is None else dataclasses.asdict(config)
            for config in self.candidates
        ]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields = json.loads(text)
        return cls(
            table.problem_from_json(fields["problem"], fields["op"]),
            tuple(table.config_from_json(entry, fields["op"]) for entry in fields["candidates"]),
            fields["window_s"],
            fields["windows"],
            fields["matmul_size"],
        )


@dataclasses.dataclass(frozen=True)
class Trials:
    """What the tuner asks about an op.

    Attributes:
      operands: random arguments on the device, of a problem.
      runner: the kernel with a configuration, or for None the XLA path, as a jitted function of
        them; the third argument is the device's number of SMs.
      check: of a problem, a result and the operands: its largest error, and the largest admitted.
      flops: useful FLOPs of the operands of a problem.
    """

    operands: Callable[[Any], Any]
    runner: Callable[[Any, Any, int | None], Any]
    check: Callable[[Any, jax.Array, Any], tuple[float, float]]
    flops: Callable[[Any], int]


TRIALS = {
    "linear_compression": Trials(
        trials.linear_compression_operands,
        trials.linear_compression_runner,
        lambda problem, actual, operands: trials.check_linear_compression(actual, operands),
        lambda problem: problem.useful_flops,
    ),
    "attention": Trials(
        trials.attention_operands,
        trials.attention_runner,
        lambda problem, actual, operands: trials.check_attention(actual, operands),
        lambda problem: problem.useful_flops,
    ),
    "gdpa": Trials(
        trials_gdpa.gdpa_operands,
        trials_gdpa.gdpa_runner,
        trials_gdpa.check_gdpa,
        trials_gdpa.gdpa_flops,
    ),
}


def trials_of(problem: Problem) -> Trials:
    """The trials of the op that `problem` belongs to."""
    return TRIALS[rules.of(problem).op]


def first_line(error: BaseException) -> str:
    """An exception in one line of at most 300 characters and its type."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"


def lower(problem: Problem, config: Config, num_sms: int) -> jax.export.Exported | str:
    """The kernel's program for CUDA, lowered without a device; a text if it cannot be lowered.

    An exception could not always be sent to another process.
    """
    op = trials_of(problem)
    try:
        shapes = jax.eval_shape(functools.partial(op.operands, problem))
        runner = op.runner(problem, config, num_sms)
        exported = jax.export.export(runner, platforms=("cuda",))(*shapes)
    except Exception as error:
        return first_line(error)
    # The rule of the gradient is a closure, which cannot be sent to another process.
    return dataclasses.replace(exported, _get_vjp=None)


@contextlib.contextmanager
def _lowering_processes(number: int) -> Iterator[concurrent.futures.Executor]:
    """Processes that see no device: JAX reads the variable when they import it."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(number, mp_context=context) as processes:
            yield processes
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


class Bench:
    """Contenders of one problem in this process: compiled, checked and timed.

    Every event that `say` is told has "event" and, but for "matmul", "contender", its position in
    `contenders`. "start" comes before something that may crash or hang, "compiled", "checked" or
    "sample" after it, with a "failure" if it failed. "sample" and "matmul" have the "ms" of a
    window. "lost" says that the contender left the device of no use to this process.
    """

    def __init__(
        self,
        problem: Problem,
        contenders: Sequence[Candidate],
        say: Say = lambda event: None,
    ) -> None:
        self.problem, self.contenders, self._say = problem, tuple(contenders), say
        self._op = trials_of(problem)
        self._programs: dict[Candidate, Callable[..., jax.Array]] = {}
        self._checked: dict[Candidate, dict[str, float]] = {}
        self._failures: dict[Candidate, str] = {}
        self._matmuls: dict[int, Any] = {}
        self._squares: dict[int, jax.Array] = {}

    @functools.cached_property
    def _operands(self) -> Any:
        return self._op.operands(self.problem)

    @functools.cached_property
    def _shapes(self) -> Any:
        return jax.eval_shape(functools.partial(self._op.operands, self.problem))

    def prepare(
        self, alone: Collection[Candidate] = (), matmul_size: int = Task.matmul_size
    ) -> None:
        """Compiles all contenders side by side, and checks them as they come.

        Those in `alone` are compiled one by one after the others.
        """
        workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        kernels = [config for config in self.contenders if config is not None]
        # Threads reach these: cached properties have no lock.
        num_sms, _ = trials.device_sms(), self._shapes
        with contextlib.ExitStack() as stack:
            lowered: dict[Candidate, concurrent.futures.Future[Any]] = {}
            if len(kernels) > 1:
                processes = stack.enter_context(_lowering_processes(min(workers, len(kernels))))
                for config in kernels:
                    lowered[config] = processes.submit(lower, self.problem, config, num_sms)
            with concurrent.futures.ThreadPoolExecutor(workers) as threads:
                # XLA times ways of multiplying while it compiles, beside which nothing else may run
                # on the device: checks begin afterwards, beside the compilation of the others.
                tuned = threads.submit(self._compile_tuned, None not in alone, matmul_size)
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
        """Checks and times a task's candidates.

        Returns:
          device, compute_capability and jax; matmul_ms, samples; results, one for every candidate:
          ms, samples, error and bound, or failure, a text, for one that was wrong.
        """
        for candidate in task.candidates:
            if candidate not in self._programs and candidate not in self._failures:
                self._compile(candidate, None)
            self._check(candidate)
        samples: dict[Candidate, list[float]] = {candidate: [] for candidate in task.candidates}
        matmul_ms: list[float] = []
        once = functools.partial(_timing.sustained_ms, window_s=task.window_s, windows=1)
        for _ in range(task.windows):
            matmul, square = self._matmul(task.matmul_size)
            matmul_ms += once(matmul, square, square)
            self._say({"event": "matmul", "ms": matmul_ms[-1]})
            for candidate in task.candidates:
                if candidate in self._failures:
                    continue
                with self._guarded("sample", candidate) as fields:
                    samples[candidate] += once(self._programs[candidate], *self._operands)
                    fields["ms"] = samples[candidate][-1]
        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "compute_capability": str(getattr(device, "compute_capability", "")),
            "jax": jax.__version__,
            "matmul_ms": matmul_ms,
            "results": [
                {"failure": self._failures[candidate]}
                if candidate in self._failures
                else {"ms": samples[candidate], **self._checked[candidate]}
                for candidate in task.candidates
            ],
        }

    def _compile_tuned(self, with_xla: bool, matmul_size: int) -> None:
        if with_xla and None in self.contenders:
            self._compile(None, None)
        self._compile_matmul(matmul_size)

    def _compile_matmul(self, size: int) -> None:
        square = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
        options = MATMUL_ON_GPU if jax.default_backend() == "gpu" else {}
        lowered = jax.jit(jnp.matmul).lower(square, square)
        self._matmuls[size] = lowered.compile(compiler_options=options)

    def _matmul(self, size: int) -> tuple[Any, jax.Array]:
        if size not in self._matmuls:
            self._compile_matmul(size)
        if size not in self._squares:
            self._squares[size] = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
        return self._matmuls[size], self._squares[size]

    def _compile(
        self, contender: Candidate, lowered: concurrent.futures.Future[Any] | None
    ) -> None:
        try:
            exported = None if lowered is None else lowered.result()
        except Exception:
            exported = None  # Its process died: this one lowers it, too.
        with self._guarded("compiled", contender):
            if isinstance(exported, str):
                raise RuntimeError(exported)
            program: Any = (
                self._op.runner(self.problem, contender, None)
                if exported is None
                else jax.jit(exported.call)
            )
            self._programs[contender] = program.lower(*self._shapes).compile()

    def _check(self, candidate: Candidate) -> None:
        if candidate in self._failures or candidate in self._checked:
            return
        with self._guarded("checked", candidate):
            actual = self._programs[candidate](*self._operands)
            error, bound = self._op.check(self.problem, actual, self._operands)
            if error <= bound:
                self._checked[candidate] = {"error": error, "bound": bound}
            else:
                self._failures[candidate] = f"wrong result: error {error:.3g}, bound {bound:.3g}"

    @contextlib.contextmanager
    def _guarded(self, event: str, contender: Candidate) -> Iterator[dict[str, Any]]:
        """Tells of a start and of an end, with the fields put in; an exception is a failure."""
        fields: dict[str, Any] = {}
        self._tell("start", contender)
        try:
            yield fields
        except Exception as error:
            # Whatever it is, the tuner reports it beside the contender and goes on to the next.
            self._failures[contender] = first_line(error)
            if threading.current_thread() is threading.main_thread():
                self._check_device(contender)
        self._tell(event, contender, **fields)

    def _check_device(self, contender: Candidate) -> None:
        """A CUDA error poisons its process: another one goes on with the other contenders."""
        try:
            jax.block_until_ready(jnp.zeros((), jnp.float32) + jnp.float32(1))
        except Exception:
            self._tell("lost", contender)
            raise

    def _tell(self, event: str, contender: Candidate, **fields: Any) -> None:
        if contender in self._failures:
            fields["failure"] = self._failures[contender]
        self._say({"event": event, "contender": self.contenders.index(contender), **fields})


def measure(task: Task) -> dict[str, Any]:
    """Compiles, checks and times a task's candidates in this process; see `Bench.measure`."""
    return Bench(task.problem, task.candidates).measure(task)
