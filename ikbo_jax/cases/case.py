"""What the cases of all ops share: how a kernel is run, and the checks of results."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import UNTUNED, Check
from ikbo_jax.ops import dispatch

#: Arguments `implementation` of the contenders that call the op.
IMPLEMENTATIONS = {"decomposed": "xla", "fused": "mosaic_gpu", "automatic": None}
#: Number of candidates whose results are compared with the oracle, in total and at once.
SAMPLED, SAMPLED_AT_ONCE = 32, 4


class Case(abc.ABC):
    """Combines a problem with its integer inputs; subclasses are frozen dataclasses."""

    problem: Any

    @property
    def useful_flops(self) -> int:
        """Useful FLOPs of the inputs; lengths count as full."""
        return self.problem.useful_flops

    @abc.abstractmethod
    def inputs(self, seed: int = 0) -> Any:
        """Draws random inputs on the device."""

    @abc.abstractmethod
    def check(self, actual: Any, inputs: Any) -> Check:
        """Compares a result with the oracle or with the XLA path."""

    def runner(self, config: Any, num_sms: int | None = None) -> Any:
        """Jits the kernel with `config`, or the XLA path for None, for a device with `num_sms` SMs.

        Unlike the op, the kernel can be lowered on a machine without a device.
        """
        if config is None:
            return jax.jit(self.xla_path())
        return jax.jit(self.kernel(config, dispatch.num_sms() if num_sms is None else num_sms))

    @abc.abstractmethod
    def xla_path(self) -> Callable[..., Any]:
        """Returns the XLA path, a function of the fields of the inputs."""

    @abc.abstractmethod
    def kernel(self, config: Any, num_sms: int) -> Callable[..., Any]:
        """Returns the kernel, a function of the inputs' fields; importing it takes 0.3 s."""


def check_candidates(
    actual: jax.Array,
    by_xla: Callable[..., jax.Array],
    oracle: Callable[[Any, jax.Array], jax.Array],
    inputs: Any,
    rounding: tuple[str, float],
) -> Check:
    """Compares a result with the oracle for some candidates, and with the XLA path for all.

    Returns the check nearest its bound.

    Args:
      by_xla: computes the result from the fields of `inputs`.
      oracle: computes the results of some candidates in f32, from `inputs` and their numbers.
      rounding: the last arguments of `error_rule.bound`.
    """
    xla = _run_untuned(by_xla, inputs)
    sample = np.linspace(0, actual.shape[0] - 1, SAMPLED).astype(np.int32)
    found = [
        jax.device_get(_sampled_errors(oracle, xla, actual, inputs, jnp.asarray(rows)))
        for rows in np.split(sample, SAMPLED // SAMPLED_AT_ONCE)
    ]
    xla_error, error, largest = map(float, np.max(np.asarray(found), axis=0))
    errors = error, float(error_rule.largest_difference(actual, xla)), xla_error
    return nearest(error_rule.checks(errors, largest, *rounding))


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _run_untuned(run: Callable[..., jax.Array], inputs: Any) -> jax.Array:
    return run(*inputs)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _sampled_errors(
    oracle: Callable[[Any, jax.Array], jax.Array],
    xla: jax.Array,
    actual: jax.Array,
    inputs: Any,
    rows: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the largest errors of both results in `rows`, and the oracle's largest value."""
    exact = oracle(inputs, rows)
    errors = [error_rule.largest_difference(x[rows], exact) for x in (xla, actual)]
    return *errors, jnp.max(jnp.abs(exact))


def check_gradients(
    actual: Any,
    by_xla: Callable[..., Any],
    inputs: Any,
    options: tuple[Any, ...],
    rounding: tuple[str, Sequence[float]],
    relative: Sequence[float] | None = None,
    sampled: Sequence[float] | None = None,
) -> Check:
    """Compares gradients with the XLA path; returns the check nearest its bound.

    The error of the XLA path is its difference to the XLA path in f32.

    Args:
      by_xla: computes the gradients of `inputs`; takes them and `options`, which are hashable.
      rounding: the last arguments of `error_rule.bound`; one number of terms for each gradient.
      relative: an error to add to each bound, relative to the gradient's largest value.
      sampled: the largest error of each gradient's rows that an oracle was computed for.
    """
    plain, compared = _gradients_by_xla(by_xla, options, inputs)
    dtype, terms = rounding
    checks: list[Check] = []
    none = [0.0] * len(plain)
    leaves, more_of, errors = jax.tree.leaves(actual), relative or none, sampled or none
    for x, xla, (error, largest), count, more, of_rows in zip(
        leaves, plain, compared, terms, more_of, errors, strict=True
    ):
        difference = float(error_rule.largest_difference(x, xla))
        of_xla = of_rows, difference, float(error)
        scale = float(largest)
        checks += error_rule.checks(of_xla, scale, dtype, count, more * scale)
    return nearest(checks)


def nearest(checks: Sequence[Check]) -> Check:
    """Returns the check nearest its bound, or farthest beyond it; NaN counts as beyond."""
    wrong = [check for check in checks if not check.ok]
    return max(wrong or checks, key=lambda check: check.error / max(check.bound, 1e-30))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=UNTUNED)
def _gradients_by_xla(by_xla: Callable[..., Any], options: tuple[Any, ...], inputs: Any) -> Any:
    """Computes gradients by XLA; and of each, the largest difference to f32 and largest value."""
    plain = jax.tree.leaves(by_xla(inputs, *options))
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(by_xla(widened(inputs), *options))
    return plain, [error_rule.compare(x, want) for x, want in zip(plain, exact, strict=True)]


def widened[Tree](tree: Tree) -> Tree:
    """Casts the floating-point arrays of a tree to f32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
