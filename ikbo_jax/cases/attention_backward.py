"""The case of broadcast attention's gradient: inputs, contenders and checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.cases import attention, error_rule
from ikbo_jax.cases.error_rule import UNTUNED, Check
from ikbo_jax.ops import dispatch
from ikbo_jax.problems import (
    AttentionBackwardConfig,
    AttentionBackwardProblem,
    AttentionProblem,
)
from ikbo_jax.reference import attention_grouped

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class Inputs(NamedTuple):
    """The arrays of a gradient: of the op, of its result, and the result's cotangent."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    lengths: jax.Array | None
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its index and its lengths, see `cases.attention.Case`."""

    problem: AttentionBackwardProblem
    index: str = "ragged"
    lengths: str = "full"

    @property
    def forward(self) -> attention.Case:
        """The case of the op itself."""
        problem = AttentionProblem(**dataclasses.asdict(self.problem))
        return attention.Case(problem, self.index, self.lengths)

    def inputs(self, seed: int = 0) -> Inputs:
        """Random inputs on the device, and what the XLA path makes of them."""
        arrays = self.forward.inputs(seed)
        out, lse = _results(arrays, self._scale)
        d_out = jax.random.normal(jax.random.key(seed + 1), out.shape, out.dtype)
        return Inputs(*arrays, out, lse, d_out)

    @property
    def useful_flops(self) -> int:
        """Useful FLOPs of full lengths."""
        return self.problem.useful_flops

    @property
    def _scale(self) -> float:
        return float(self.problem.head_dim**-0.5)

    def runner(
        self, config: AttentionBackwardConfig | None, num_sms: int | None = None
    ) -> Callable[..., Gradients]:
        """The kernel with `config`, or the XLA path for None, for a device with `num_sms` SMs.

        Unlike the op, the kernel can be lowered on a machine without a device.
        """
        if config is None:
            return jax.jit(lambda *inputs: _by_xla(Inputs(*inputs), self._scale))
        # Imported here because Mosaic GPU takes 0.3 s to import.
        from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel

        kernel: Any = functools.partial(
            attention_backward_kernel,
            scale=self._scale,
            indices_are_sorted=self.index != "unsorted",
            config=config,
            num_sms=dispatch.num_sms() if num_sms is None else num_sms,
        )
        return jax.jit(lambda *inputs: kernel(*inputs, None))

    def check(self, actual: Gradients, inputs: Inputs) -> Check:
        """Compares gradients with the XLA path; of the three, returns the one nearest its bound.

        The error of the XLA path is its difference to the XLA path in f32.
        """
        plain, (errors, largest) = _truth(inputs, self._scale)
        terms = (self.problem.kv_len, *2 * (self.problem.batch * self.problem.q_len,))
        checks = [
            Check(
                float(error_rule.largest_difference(x, xla)),
                error_rule.bound_to_plain(float(e), float(most), self.problem.dtype, count),
            )
            for x, xla, e, most, count in zip(actual, plain, errors, largest, terms, strict=True)
        ]
        wrong = [check for check in checks if not check.ok]
        return max(wrong or checks, key=lambda check: check.error / max(check.bound, 1e-30))


@functools.partial(jax.jit, static_argnums=1)
def _results(arrays: attention.Inputs, scale: float) -> tuple[jax.Array, jax.Array]:
    return attention_grouped.decomposed(*arrays, scale=scale)


@functools.partial(jax.jit, static_argnums=1, compiler_options=UNTUNED)
def _truth(inputs: Inputs, scale: float) -> Any:
    """Gradients by XLA; and of each, the largest difference to f32 and the largest value."""
    plain = _by_xla(inputs, scale)
    query, key, value, d_out = (x.astype(jnp.float32) for x in (*inputs[:3], inputs.d_out))
    wide = inputs._replace(query=query, key=key, value=value, d_out=d_out)
    with jax.default_matmul_precision("highest"):
        exact = _by_xla(wide, scale)
    compared = [error_rule.compare(x, want) for x, want in zip(plain, exact, strict=True)]
    return plain, tuple(zip(*compared, strict=True))


def _by_xla(inputs: Inputs, scale: float) -> Gradients:
    return attention_grouped.decomposed_vjp(*inputs[:5], inputs.d_out, None, scale=scale)
