"""The case of linear compression's gradient: inputs, contenders and checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.cases import error_rule, linear_compression
from ikbo_jax.cases.error_rule import UNTUNED, Check
from ikbo_jax.ops import dispatch
from ikbo_jax.ops.linear_compression_backward import Gradients, kernel_vjp
from ikbo_jax.problems import (
    LinearCompressionBackwardProblem,
    LinearCompressionBackwardTuning,
    LinearCompressionProblem,
)
from ikbo_jax.reference import linear_compression as reference


class Inputs(NamedTuple):
    """The arrays of a gradient, coarsest level first, and the result's cotangent."""

    weights: tuple[jax.Array, ...]
    embeddings: tuple[jax.Array, ...]
    parents: tuple[jax.Array | None, ...]
    cotangent: jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and its index, see `cases.linear_compression.Case`."""

    problem: LinearCompressionBackwardProblem
    index: str = "ragged"

    @property
    def forward(self) -> linear_compression.Case:
        """The case of the op itself."""
        p = self.problem
        problem = LinearCompressionProblem(p.batches, p.ks, p.m, p.n, p.dtype)
        return linear_compression.Case(problem, self.index)

    def inputs(self, seed: int = 0) -> Inputs:
        """Random inputs on the device."""
        p = self.problem
        shape, key = (p.batches[-1], p.m, p.n), jax.random.key(seed + 1)
        cotangent = jax.random.normal(key, shape, jnp.dtype(p.dtype))
        return Inputs(*self.forward.inputs(seed), cotangent)

    @property
    def useful_flops(self) -> int:
        """Useful FLOPs of the inputs."""
        return self.problem.useful_flops

    def runner(
        self, config: LinearCompressionBackwardTuning | None, num_sms: int | None = None
    ) -> Callable[..., Gradients]:
        """The kernels with `config`, or the XLA path for None, for a device with `num_sms` SMs.

        Unlike the op, the kernels can be lowered on a machine without a device.
        """
        if config is None:
            return jax.jit(reference.decomposed_vjp)
        num_sms = dispatch.num_sms() if num_sms is None else num_sms
        run = functools.partial(kernel_vjp, config=config.kernels(self.problem), num_sms=num_sms)

        def gradients(*inputs: Any) -> Gradients:
            d_weights, d_embeddings = run(*inputs)
            return tuple(x[0] for x in d_weights), d_embeddings

        return jax.jit(gradients)

    def check(self, actual: Gradients, inputs: Inputs) -> Check:
        """Compares gradients with the XLA path; returns the one nearest its bound.

        The error of the XLA path is its difference to the XLA path in f32.
        """
        p = self.problem
        plain, (errors, largest) = _truth(inputs)
        candidates = [-(-p.batches[-1] // max(batch, 1)) for batch in p.batches]
        terms = [p.batches[-1] * p.n] * len(p.ks) + [p.m * number for number in candidates]
        checks = [
            Check(
                float(error_rule.largest_difference(x, xla)),
                error_rule.bound_to_plain(float(e), float(most), p.dtype, count),
            )
            for x, xla, e, most, count in zip(
                jax.tree.leaves(actual), plain, errors, largest, terms, strict=True
            )
        ]
        wrong = [check for check in checks if not check.ok]
        return max(wrong or checks, key=lambda check: check.error / max(check.bound, 1e-30))


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _truth(inputs: Inputs) -> Any:
    """Gradients by XLA; and of each, the largest difference to f32 and the largest value."""
    plain = jax.tree.leaves(reference.decomposed_vjp(*inputs))
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs
    )
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(reference.decomposed_vjp(*wide))
    compared = [error_rule.compare(x, want) for x, want in zip(plain, exact, strict=True)]
    return plain, tuple(zip(*compared, strict=True))
