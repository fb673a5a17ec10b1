"""Compiles and checks the contenders of a drawn workload, and leaves out what cannot be the best.

Most of the time of a point goes to GEMMs that XLA compiles and times for alternatives that are far
from the best. So the likely best come first, and another alternative is

- left out if the lower bound of its time exceeds `MARGIN` times the time of the fastest alternative
  so far (`production_bounds`);
- compiled with GEMMs that XLA does not tune, if it then takes more than `VERY_FAR` times as long as
  the fastest one; otherwise compiled again with the GEMMs of cuBLAS alone, whose algorithms XLA
  times, if it then takes more than `FAR` times as long; otherwise compiled with XLA's defaults,
  which include Triton's GEMMs.

Both are recorded with the figures. Other processes use the device meanwhile. That only makes the
fastest alternative's time too large, and a bound less likely to exceed it. Two programs are
compared by turns, so that both are slowed down.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import harness
from benchmarks.production_bounds import Peaks, least_ms
from benchmarks.production_draws import Shape
from benchmarks.production_providers import TOLERANCE, Contender, contenders
from benchmarks.records import OUR_NAME
from ikbo_jax._timing.programs import NETWORK_ON_GPU, UNTIMED_ON_GPU
from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import Check

#: An alternative is left out if its bound is this many times the fastest alternative's time.
MARGIN = 1.5
#: Beyond this ratio, Triton's GEMMs or a more exact timing would not make an alternative the best;
#: beyond the second one, tuned GEMMs would not.
FAR, VERY_FAR = 3.0, 8.0
#: Calls that take less time are always timed exactly: their time may be Python's.
FAST_MS = 1.0
#: Most calls of a rough timing, and seconds after which no further one is started.
CALLS, CALLS_S = 5, 0.3


#: Compiler options of a program whose GEMMs need not be the fastest. Without the files of XLA's
#: choices, which processes share: no other program may take these GEMMs for the fastest.
UNTIMED = {**UNTIMED_ON_GPU, "xla_gpu_per_fusion_autotune_cache_dir": ""}
_compare = jax.jit(error_rule.compare)


def in_direction(contender: Contender, direction: str) -> tuple[Callable[..., Any], tuple]:
    """A function that returns a tuple of results, and its arguments.

    "forward": the result of `contender`. "backward": its gradients for a given cotangent; what the
    forward pass leaves for them is among the arguments. "both": the result, then the gradients.
    """
    inputs = *contender.args, *contender.integers
    if direction == "forward":
        return lambda *inputs: (contender.fn(*inputs),), inputs
    out = jnp.zeros_like(jax.eval_shape(contender.fn, *inputs))
    # The same cotangent for all contenders, in the layout of each.
    finished, pull = jax.vjp(contender.finish, out)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    (d_out,) = pull(draw(jax.random.key(9), finished.shape, finished.dtype))
    number = len(contender.args)
    if direction == "both":
        return functools.partial(_with_gradients, contender.fn, number), (d_out, *inputs)
    gradient = jax.jit(lambda *inputs: _vjp(contender.fn, number, *inputs)[1])(*inputs)
    return lambda gradient, d_out: gradient(d_out), (gradient, d_out)


def _vjp(fn: Callable[..., Any], number: int, *inputs: Any) -> tuple[Any, Callable[..., Any]]:
    """`jax.vjp` with respect to the first `number` inputs."""
    integers = inputs[number:]
    return jax.vjp(lambda *args: fn(*args, *integers), *inputs[:number])


def _with_gradients(fn: Callable[..., Any], number: int, d_out: Any, *inputs: Any) -> Any:
    out, pull = _vjp(fn, number, *inputs)
    return (out, *pull(d_out))


def _as_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def exact_results(contender: Contender, direction: str) -> list[jax.Array]:
    """The results in float32, for the same inputs and the same cotangent, on the device."""
    # For "backward", the forward pass must run in float32, too.
    is_backward = direction == "backward"
    fn, args = in_direction(contender, "both" if is_backward else direction)
    options = UNTIMED if jax.default_backend() == "gpu" else None
    with jax.default_matmul_precision("highest"):
        found = jax.jit(fn, compiler_options=options)(*map(_as_float32, args))
    return list(found[is_backward:])


def compare(
    contender: Contender, direction: str, expected: Sequence[jax.Array], results: Sequence[Any]
) -> Check:
    """The error with the largest ratio to its bound, and that bound."""
    outputs, gradients = ([], results) if direction == "backward" else (results[:1], results[1:])
    found = [(contender.finish(out), TOLERANCE) for out in outputs]
    if gradients:
        finished = contender.finish_gradients(tuple(gradients))
        found += [(gradient, contender.gradient_tolerance) for gradient in finished]
    checks = []
    for (actual, tolerance), truth in zip(found, expected, strict=True):
        # On the device: NumPy takes seconds of processor time for a gradient of 100 million values.
        error, largest = map(float, _compare(actual, truth))
        checks.append(Check(error, tolerance * largest))
    return max(checks, key=ratio)


def ratio(check: Check) -> float:
    """The error relative to its bound; of 0 to 0 it is 0, of NaN infinite."""
    if math.isnan(check.error):
        return math.inf
    if not check.bound:  # zeros are expected
        return 0.0 if check.ok else math.inf
    return check.error / check.bound


class Program(NamedTuple):
    """A compiled and checked contender. Its arrays are made again for the timing.

    Attributes:
      number: the contender's position in `contenders`.
      compiled: None if it cannot run or was left out.
      record: its entry in the results file, with the error.
    """

    number: int
    compiled: Any
    record: dict[str, Any]


class Tuning(NamedTuple):
    """How an alternative's GEMMs are compiled at first.

    Attributes:
      name: for the results file.
      options: XLA's.
      far: if the alternative takes more than this many times as long as the fastest one, it is kept
        as it is.
    """

    name: str
    options: Mapping[str, Any]
    far: float

    def note(self, ms: float, name: str, other_ms: float) -> str:
        """The note of a program that is kept like this; empty if it is near the best."""
        if ms <= self.far * other_ms:
            return ""
        return f"{self.name}: {ms:.3g} ms beside {other_ms:.3g} ms of {name}"


TUNINGS = (
    Tuning("GEMMs not tuned", UNTIMED, VERY_FAR),
    Tuning("GEMMs by cuBLAS alone", NETWORK_ON_GPU, FAR),
)


class Rough(NamedTuple):
    """The fastest alternative so far; `ms` is an upper bound of its time."""

    name: str
    ms: float
    thunk: Callable[[], Any]


def compiled(shape: Shape, direction: str, rates: Peaks | None) -> list[Program]:
    """Compiles and checks the contenders of a point.

    Args:
      shape: the workload.
      direction: see `in_direction`.
      rates: of the device; None: nothing is left out.
    """
    makes = contenders(shape)
    exact = exact_results(makes[1](), direction)
    programs, fastest = [], None
    # The XLA path comes last: it is seldom the best, and its GEMMs are many.
    for number in (0, *range(2, len(makes)), 1):
        program, rough = _prepared(makes[number], number, direction, exact, rates, fastest)
        programs.append(program)
        if number and rough is not None and program.record["ok"]:
            fastest = rough if fastest is None or rough.ms < fastest.ms else fastest
    return programs


def _prepared(
    make: Callable[[], Contender],
    number: int,
    direction: str,
    exact: Sequence[jax.Array],
    rates: Peaks | None,
    fastest: Rough | None,
) -> tuple[Program, Rough | None]:
    """Compiles a contender, runs it and compares its results, unless it cannot be the best."""
    record: dict[str, Any] = {"name": make.__name__, "stage": "-"}
    try:
        contender = make()
        record = {"name": contender.name, "stage": contender.stage}
        if rates is not None and fastest is not None:
            least = least_ms(contender.work, direction, rates)
            if reason := why_not_best(least, fastest.name, fastest.ms):
                skipped = {"skipped": reason, "least_ms": least}
                return Program(number, None, record | skipped), None
        fn, args = in_direction(contender, direction)
        compile_and_check = functools.partial(_checked, contender, direction, exact, fn, args)
        for tuning in TUNINGS if contender.is_xla else ():
            if rates is None or fastest is None:
                break
            program, fields = compile_and_check(tuning.options)
            thunk = functools.partial(program, *args)
            ms, other_ms = by_turns_ms(thunk, fastest.thunk)
            if note := tuning.note(ms, fastest.name, other_ms):
                kept = Program(number, program, record | fields | {"note": note})
                return kept, Rough(contender.name, ms, thunk)
        program, fields = compile_and_check(None)
    except Exception as failure:
        return Program(number, None, not_run(record, failure)), None
    thunk = functools.partial(program, *args)
    (ms,) = by_turns_ms(thunk)
    return Program(number, program, record | fields), Rough(contender.name, ms, thunk)


def _checked(
    contender: Contender,
    direction: str,
    exact: Sequence[jax.Array],
    fn: Callable[..., Any],
    args: tuple,
    options: Mapping[str, Any] | None,
) -> tuple[Any, dict[str, Any]]:
    """A compiled contender, and what its entry says about its results and memory."""
    begin = time.perf_counter()
    program = jax.jit(fn).lower(*args).compile(None if options is None else dict(options))
    seconds = time.perf_counter() - begin
    results = jax.block_until_ready(program(*args))
    check, note = Check(0.0, 1.0), {}
    if contender.is_comparable:
        check = compare(contender, direction, exact, results)
    else:
        note = {"note": "another function: softmax"}
    memory = program.memory_analysis()
    return program, {
        **note,
        "compile_s": seconds,
        "temp_bytes": None if memory is None else int(memory.temp_size_in_bytes),
        **check._asdict(),
        "ok": check.ok,
    }


def why_not_best(least_ms: float, name: str, ms: float) -> str:
    """Why an alternative need not be compiled, given a faster one; empty if it must be.

    Args:
      least_ms: lower bound of the alternative's time.
      name: the fastest alternative so far.
      ms: upper bound of its time.
    """
    if least_ms <= MARGIN * ms:
        return ""
    return (
        f"cannot be the best: its copies, scores and FLOPs alone take {least_ms:.3g} ms, {name} "
        f"took {ms:.3g} ms"
    )


def by_turns_ms(*thunks: Callable[[], Any]) -> list[float]:
    """Milliseconds of the fastest of a few calls of each function; the functions take turns."""
    times: list[list[float]] = [[] for _ in thunks]
    begin = time.perf_counter()
    for turn in range(CALLS):
        if turn and time.perf_counter() - begin > CALLS_S:
            break
        for thunk, found in zip(thunks, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(thunk())
            found.append(1e3 * (time.perf_counter() - start))
    return [min(found) for found in times]


def not_run(record: dict[str, Any], failure: Exception) -> dict[str, Any]:
    """The entry of a contender that raised.

    It is no failure of an alternative: cuDNN refuses some sizes, and copies need more memory than
    there is.
    """
    word = "failure" if record["name"] == OUR_NAME else "skipped"
    return record | {word: f"{type(failure).__name__}: {failure!s:.200}"}


def ready(shape: Shape, direction: str, programs: Sequence[Program]) -> list[harness.Contender]:
    """The programs of a point with their arrays."""
    makes = contenders(shape)

    def of(program: Program) -> harness.Contender:
        if program.compiled is None:
            return harness.Contender(program.record)
        try:
            _, args = in_direction(makes[program.number](), direction)
        except Exception as failure:
            return harness.Contender(
                not_run({k: program.record[k] for k in ("name", "stage")}, failure)
            )
        thunk = functools.partial(program.compiled, *args)
        return harness.Contender(dict(program.record), thunk, program.compiled, args)

    return list(map(of, programs))


def leave_out_slow(found: Sequence[harness.Contender]) -> list[harness.Contender]:
    """The contenders to time exactly; records of the others get the figures of a few calls.

    To be called while no other process uses the device.
    """
    others = [c for c in found if c.compiled is not None and c.record["name"] != OUR_NAME]
    times = {id(c): by_turns_ms(c.thunk)[0] for c in others}
    best = min(others, key=lambda c: times[id(c)], default=None)
    kept = []
    for contender in found:
        ms = times.get(id(contender))
        if ms is None or best is None or ms <= max(FAR * times[id(best)], FAST_MS):
            kept.append(contender)
            continue
        contender.record |= {
            "rough_ms": ms,
            "skipped": (
                f"cannot be the best: a call takes {ms:.3g} ms, "
                f"{best.record['name']} {times[id(best)]:.3g} ms"
            ),
        }
    return kept
