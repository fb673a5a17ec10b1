"""Measurements for users: `tune` finds configurations for a function, `benchmark` times it."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ikbo_jax.integers import integer
from ikbo_jax.ops import arguments, dispatch
from ikbo_jax.ops.explain import Explanation, explain, split
from ikbo_jax.problems import PROBLEMS, Problem
from ikbo_jax.tuning import table, table_rows


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What `tune` did; `str` formats it as a line for each problem.

    Attributes:
      outcomes: pairs of a problem in words and what came of it.
      rows: the measured rows, in the form of the tuning cache.
      nothing: why there was nothing to tune; empty if there was.
    """

    outcomes: tuple[tuple[str, str], ...]
    rows: tuple[dict[str, Any], ...] = ()
    nothing: str = ""

    def __str__(self) -> str:
        lines = [f"{problem}: {outcome}" for problem, outcome in self.outcomes]
        return "\n".join([*lines, *([f"nothing to tune: {self.nothing}"] if self.nothing else [])])


def tune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> TuningReport:
    """Finds the fastest configuration of every op that `fn(*args, **kwargs)` calls, on this GPU.

    Traces `fn` as `ikbo_jax.explain` does, so it also finds the ops of rewritten functions, and
    the gradients that `fn` computes. Problems that were measured on a card of this model are not
    tuned again. Each other one takes up to two minutes, in another process, which needs free memory
    of the device: set XLA_PYTHON_CLIENT_PREALLOCATE=false before large models. Prints progress. A
    configuration that is faster than the current choice by more than the noise is written to the
    tuning cache, or to the file that `ikbo_jax.tuned` names. Call `tune` before the first call of a
    jitted function: a function that is already traced keeps its configurations.

    Args:
      fn: any function that JAX can trace.
      *args: arguments of `fn`, as in `ikbo_jax.explain`.
      **kwargs: keyword arguments of `fn`, likewise.

    Returns:
      A `TuningReport`; print it. Without a Hopper GPU it says that there is nothing to tune.

    Raises:
      TypeError: `fn` is no function.
      OSError: the tuning cache cannot be written.
      KeyboardInterrupt: Ctrl-C; the text says what was measured and whether it was written.
      Exception: whatever `fn` raises while it is traced.
    """
    arguments.check_function("tune", fn)
    explanation = explain(fn, *args, **kwargs)
    if reason := dispatch.hopper_unavailable_reason():
        return TuningReport((), nothing=reason)
    found = dict.fromkeys(_problems(explanation))
    outcomes, rows, pending = [], [], []
    for problem in found:
        if (outcome := _not_tuned(problem)) is None:
            pending.append(problem)
        else:
            outcomes.append((f"{problem.op}: {problem.describe()}", outcome))
    for number, problem in enumerate(pending, start=1):
        row, outcome = _tuned(problem, f"{number} of {len(pending)}, {problem.op}")
        rows += [] if row is None else [row]
        outcomes.append((f"{problem.op}: {problem.describe()}", outcome))
    nothing = "" if pending else "every op was measured or has no tuner"
    if not explanation.plans:
        nothing = "no op of this library is called"
    return TuningReport(tuple(outcomes), tuple(rows), nothing)


def _problems(explanation: Explanation) -> Iterator[Any]:
    """Yields the problems of the calls, and of the gradients that are computed."""
    for plan in explanation.plans:
        yield plan.problem
        backward: Any = PROBLEMS.get(f"{plan.problem.op}_backward")
        if backward is not None and plan.op in explanation.differentiated:
            yield backward.of(plan.problem)


def _in_rows(problem: Any) -> Problem:
    """Returns the problem that a row of the table would hold."""
    fields = dataclasses.fields(problem)
    changes = {x.name: x.default for x in fields if x.name in table_rows.NOT_IN_ROWS}
    plain: Problem = dataclasses.replace(problem, **changes)
    return plain


def _not_tuned(problem: Any) -> str | None:
    """Says why a problem is not tuned; None if it is to be tuned."""
    if problem.op not in PROBLEMS:
        return "this op has no tuner"
    if _in_rows(problem).distance(problem):
        return "calls with a mask, ranges, a cap or pages have no measured rows"
    choice = table.lookup(problem, device=dispatch.default_device().device_kind)
    if choice.source == "none":
        return choice.reason
    return f"measured already: {choice.reason}" if choice.exact else None


def _tuned(problem: Any, title: str) -> tuple[dict[str, Any] | None, str]:
    """Tunes a problem with progress on the console; returns the row, and what came of it."""
    from ikbo_jax.autotuner import autotune  # Imported here because it imports the models.

    last = ""
    with autotune.console_progress(title) as show:

        def progress(done: int, total: int, text: str) -> None:
            nonlocal last
            last = text
            show(done, total, text)

        try:
            return autotune.tune(_in_rows(problem), progress=progress), last
        except (RuntimeError, ValueError) as error:
            return None, f"not tuned: {error}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Holds the times of a function.

    Attributes:
      samples_ms: milliseconds of a call: one sample for each window, or each call on the device.
      on_device: whether only the device's time counts, since calls are short beside their launch.
    """

    samples_ms: tuple[float, ...]
    on_device: bool

    @property
    def ms(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_ms)

    def __str__(self) -> str:
        least, most = min(self.samples_ms), max(self.samples_ms)
        where = ", on the device" if self.on_device else ""
        return f"{self.ms:.4g} ms ({least:.4g} to {most:.4g}{where})"


def benchmark(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *args: Any,
    window_s: float = 0.2,
    rounds: int = 3,
) -> Any:
    """Times `jax.jit(fn)(*args)` at the device's steady clock; several functions by turns.

    Large GPUs throttle by power within a fraction of a second, so that short bursts measure times
    up to a fifth too small. Here every sample is the mean over a window of launches back to back,
    after a warm-up, and windows of several functions alternate, A B A B. Where a call takes less
    than 0.3 ms on the device, calls back to back would wait for Python: then all functions are
    timed on the device, by JAX's profiler.

    Args:
      fn: a function that JAX can trace, or several by name.
      *args: arguments of every function: pytrees of arrays; other values are passed unchanged,
        as in `ikbo_jax.explain`.
      window_s: least seconds of a window, above 0.
      rounds: number of windows of each function, at least 1.

    Returns:
      A `Timing`, or one for each name; print it, or take its `ms`.

    Raises:
      TypeError: `fn` is neither a function nor functions by name.
      ValueError: `window_s` or `rounds` is too small; an argument is traced, or a shape.
      Exception: whatever the functions raise.
    """
    from ikbo_jax import _timing
    from ikbo_jax._timing import device_time

    functions = fn if isinstance(fn, Mapping) else {"": fn}
    for function in functions.values() or (fn,):
        arguments.check_function("benchmark", function)
    arguments.check_runnable("benchmark", args)
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"benchmark takes arrays with values, but one is traced, {arguments.describe(leaf)}"
            )
    if arguments.finite_number("window_s", window_s) <= 0:
        raise ValueError(f"window_s must be above 0, but is {window_s}")
    rounds = integer("rounds", rounds, 1)
    arrays, merged = split(args)

    def jitted_call(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda arrays: function(*merged(arrays)))

    jitted = {name: jitted_call(function) for name, function in functions.items()}
    thunks = {name: functools.partial(function, arrays) for name, function in jitted.items()}
    samples = _timing.interleaved_ms(thunks, window_s=window_s, rounds=rounds)
    timings = {name: Timing(tuple(ms), False) for name, ms in samples.items()}
    if min(timing.ms for timing in timings.values()) < device_time.MOST_CALL_MS:
        times = device_time.measure_all({name: (x, (arrays,)) for name, x in jitted.items()})
        if any(found.ms < device_time.SHORT_MS for found in times.values()):
            timings = {name: Timing(tuple(times[name].busy_ms), True) for name in timings}
    return timings if isinstance(fn, Mapping) else timings[""]
