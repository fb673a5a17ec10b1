"""The case of attention's gradient: inputs, XLA path, kernel and check."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ikbo_jax.cases import attention, case
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.problems import AttentionBackwardConfig, AttentionBackwardProblem, AttentionProblem
from ikbo_jax.reference import attention_grouped

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class Inputs(NamedTuple):
    """Holds the op's arrays, its results, and the cotangent of `out`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    lengths: jax.Array | None
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array


@dataclasses.dataclass(frozen=True)
class Case(case.Case):
    """Combines a problem with an index and lengths; see `cases.attention.Case`."""

    problem: AttentionBackwardProblem

    @property
    def forward(self) -> attention.Case:
        """The case of the op itself."""
        return attention.Case(AttentionProblem(**dataclasses.asdict(self.problem)))

    def inputs(self, seed: int = 0) -> Inputs:
        """Draws inputs and a cotangent; the XLA path computes the results."""
        arrays = self.forward.inputs(seed)
        out, lse = _results(arrays, self._scale)
        d_out = jax.random.normal(jax.random.key(seed + 1), out.shape, out.dtype)
        return Inputs(*arrays, out, lse, d_out)

    @property
    def _scale(self) -> float:
        return float(self.problem.head_dim**-0.5)

    def xla_path(self) -> Callable[..., Gradients]:
        return lambda *inputs: _by_xla(Inputs(*inputs), self._scale)

    def kernel(self, config: AttentionBackwardConfig, num_sms: int) -> Callable[..., Gradients]:
        from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel

        kernel: Any = attention_backward_kernel
        options = {"scale": self._scale, "indices_are_sorted": True}
        return lambda *inputs: kernel(*inputs, None, **options, config=config, num_sms=num_sms)

    def check(self, actual: Gradients, inputs: Inputs) -> Check:
        p = self.problem
        rounding = p.dtype, (p.kv_len, *2 * (p.batch * p.q_len,))
        return case.check_gradients(actual, _by_xla, inputs, (self._scale,), rounding)


@functools.partial(jax.jit, static_argnums=1)
def _results(arrays: attention.Inputs, scale: float) -> tuple[jax.Array, jax.Array]:
    return attention_grouped.decomposed(*arrays, scale=scale)


def _by_xla(inputs: Inputs, scale: float) -> Gradients:
    d_query, d_key, d_value = attention_grouped.decomposed_vjp(
        *inputs[:5], inputs.d_out, None, scale=scale
    )
    return d_query, d_key, d_value
