"""The case of linear compression's gradient: inputs, XLA path, kernels and check."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.cases import case, linear_compression
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.ops.linear_compression_backward import Gradients, kernel_vjp
from ikbo_jax.problems import LinearCompressionBackwardProblem, LinearCompressionProblem
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig
from ikbo_jax.reference import linear_compression as reference


class Inputs(NamedTuple):
    """Holds the op's arrays, coarsest level first, and the result's cotangent."""

    weights: tuple[jax.Array, ...]
    embeddings: tuple[jax.Array, ...]
    parents: tuple[jax.Array | None, ...]
    cotangent: jax.Array


@dataclasses.dataclass(frozen=True)
class Case(case.Case):
    """Combines a problem with an index; see `cases.linear_compression.Case`."""

    problem: LinearCompressionBackwardProblem
    index: str = "ragged"

    @property
    def forward(self) -> linear_compression.Case:
        """The case of the op itself."""
        p = self.problem
        problem = LinearCompressionProblem(p.batches, p.ks, p.m, p.n, p.dtype)
        return linear_compression.Case(problem, self.index)

    def inputs(self, seed: int = 0) -> Inputs:
        p = self.problem
        shape, key = (p.batches[-1], p.m, p.n), jax.random.key(seed + 1)
        cotangent = jax.random.normal(key, shape, jnp.dtype(p.dtype))
        return Inputs(*self.forward.inputs(seed), cotangent)

    def xla_path(self) -> Callable[..., Gradients]:
        return reference.decomposed_vjp

    def kernel(self, config: WeightGradientConfig, num_sms: int) -> Callable[..., Gradients]:
        run = functools.partial(kernel_vjp, config=config, num_sms=num_sms)

        def gradients(*inputs: Any) -> Gradients:
            d_weights, d_embeddings = run(*inputs)
            return tuple(x[0] for x in d_weights), d_embeddings

        return gradients

    def check(self, actual: Gradients, inputs: Inputs) -> Check:
        p = self.problem
        candidates = [-(-p.batches[-1] // max(batch, 1)) for batch in p.batches]
        terms = [p.batches[-1] * p.n] * len(p.ks) + [p.m * number for number in candidates]
        return case.check_gradients(actual, _by_xla, inputs, (), (p.dtype, terms))


def _by_xla(inputs: Inputs) -> Gradients:
    return reference.decomposed_vjp(*inputs)
