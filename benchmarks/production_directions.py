"""Contenders of `production_providers` as functions of a direction, and the check of results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.production_providers import TOLERANCE, Contender
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import Check

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
