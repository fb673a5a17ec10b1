"""Compiles and checks the contenders of a workload.

Most of the time of a drawn point goes to GEMMs that XLA compiles and times for alternatives that
are far from the best. So the likely best come first, and another alternative is compiled with GEMMs
that XLA does not tune; if it then takes many times as long as the fastest one, it is kept so, and
its note says so. Two programs are compared by turns: other processes may use the device meanwhile.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import harness
from benchmarks.production_draws import normal
from benchmarks.production_providers import TOLERANCE, Contender
from benchmarks.records import OUR_NAME
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import Check

#: Beyond this ratio, tuned GEMMs would not make an alternative the best.
FAR = 8.0
#: Most calls of a rough timing, and seconds after which no further one is started.
CALLS, CALLS_S = 5, 0.3
#: Compiler options of a program whose GEMMs need not be the fastest. Without the files of XLA's
#: choices, which processes share: no other program may take these GEMMs for the fastest.
UNTIMED = {**UNTIMED_ON_GPU, "xla_gpu_per_fusion_autotune_cache_dir": ""}
_compare = jax.jit(error_rule.compare)


def in_direction(
    contender: Contender, direction: str, d_out: jax.Array | None = None
) -> tuple[Callable[..., Any], tuple]:
    """Returns a function that computes a tuple of results, and its arguments.

    "forward": the result of `contender`. "backward": its gradients for a given cotangent; what the
    forward pass leaves for them is among the arguments. "both": the result, then the gradients.
    """
    inputs = *contender.args, *contender.integers
    if direction == "forward":
        return lambda *inputs: (contender.fn(*inputs),), inputs
    if d_out is None:
        out = jnp.zeros_like(jax.eval_shape(contender.fn, *inputs))
        # The same cotangent for all contenders, in the layout of each.
        finished, pull = jax.vjp(contender.finish, out)
        (d_out,) = pull(normal(9, finished.shape, finished.dtype))
    number = len(contender.args)
    if direction == "both":
        return functools.partial(_with_gradients, contender.fn, number), (d_out, *inputs)
    gradient = jax.jit(lambda *inputs: _vjp(contender.fn, number, *inputs)[1])(*inputs)
    # What the forward pass leaves contains copies of the inputs, which would not fit in memory for
    # all contenders: replace them by the inputs.
    gradient = jax.tree.map(functools.partial(_equal_array, jax.tree.leaves(inputs)), gradient)
    return lambda gradient, d_out: gradient(d_out), (gradient, d_out)


def _equal_array(arrays: Sequence[jax.Array], array: jax.Array) -> jax.Array:
    """Returns the first of `arrays` that equals `array`; `array` if none does."""
    alike = (x for x in arrays if (x.shape, x.dtype) == (array.shape, array.dtype))
    return next((x for x in alike if bool(jnp.array_equal(x, array))), array)


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
    if not contender.is_comparable:
        return Check(0.0, 1.0)
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


def checked(
    makers: Sequence[Callable[[], Contender]], direction: str, far: float = math.inf
) -> list[harness.Contender]:
    """Compiles contenders, and compares their results with the second one's in float32.

    The second maker of `contenders` makes the XLA path. An alternative whose GEMMs are not tuned is
    kept if it takes more than `far` times as long as the fastest one; infinity: all are tuned.
    """
    check = functools.partial(_checked, direction, exact_results(makers[1](), direction))
    found, fastest = {}, None
    # The XLA path comes last: it is seldom the best, and its GEMMs are many.
    for number in (0, *range(2, len(makers)), 1):
        try:
            contender = makers[number]()
        except Exception as failure:
            record = {"name": makers[number].__name__, "stage": "-"}
            found[number] = harness.Contender(record | why_not_run(failure))
            continue
        if far < math.inf and contender.is_xla and fastest is not None:
            found[number] = check(contender, UNTIMED)
            if _is_far(found[number], fastest, far):
                continue
        found[number] = check(contender)
        if number and found[number].record.get("ok"):
            rivals = [found[number]] if fastest is None else [fastest, found[number]]
            times = by_turns_ms(*(rival.thunk for rival in rivals))
            fastest = rivals[times.index(min(times))]
    return [found[number] for number in range(len(makers))]


def _checked(
    direction: str,
    exact: Sequence[jax.Array],
    contender: Contender,
    options: Mapping[str, Any] | None = None,
) -> harness.Contender:
    """Compiles a contender with XLA's `options`, and compares its results with `exact`."""
    found = harness.compile_and_check(
        contender.name,
        contender.stage,
        lambda: in_direction(contender, direction),
        functools.partial(compare, contender, direction, exact),
        options,
        harness.why_not_run if contender.name == OUR_NAME else why_not_run,
    )
    if not contender.is_comparable:
        found.record["note"] = "another function: softmax"
    return found


def _is_far(contender: harness.Contender, fastest: harness.Contender, far: float) -> bool:
    """Whether a contender without tuned GEMMs is far from the best; adds the note that says so."""
    if "error" not in contender.record:
        return False
    ms, other_ms = by_turns_ms(contender.thunk, fastest.thunk)
    if ms > far * other_ms:
        other = fastest.record["name"]
        contender.record["note"] = (
            f"GEMMs not tuned: {ms:.3g} ms beside {other_ms:.3g} ms of {other}"
        )
    return ms > far * other_ms


def why_not_run(failure: Exception) -> dict[str, str]:
    """Explains why an alternative did not run: cuDNN refuses some sizes, copies may not fit."""
    return {"skipped": f"{type(failure).__name__}: {failure!s:.200}"}


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
