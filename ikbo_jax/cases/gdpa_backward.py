"""The case of the gradient of generalised dot-product attention: inputs, contenders and checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.cases import error_rule, gdpa
from ikbo_jax.cases.error_rule import UNTUNED, Check
from ikbo_jax.cases.gdpa import APPROX_ERRORS
from ikbo_jax.ops import dispatch
from ikbo_jax.ops.gdpa_backward import kernel_vjp
from ikbo_jax.problems import GdpaBackwardProblem, GdpaBackwardTuning, GdpaProblem
from ikbo_jax.reference import gdpa_chunked, gdpa_chunked_vjp
from ikbo_jax.reference.gdpa import Arrays, Settings

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class Inputs(NamedTuple):
    """The arrays of a gradient; `out` and `lse` are None without a softmax."""

    arrays: Arrays
    out: jax.Array | None
    lse: jax.Array | None
    d_out: jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and the lengths of its sequences, see `cases.gdpa.Case`."""

    problem: GdpaBackwardProblem
    lengths: str = "spread"

    @property
    def forward(self) -> gdpa.Case:
        """The case of the op itself."""
        return gdpa.Case(GdpaProblem(**dataclasses.asdict(self.problem)), self.lengths)

    def inputs(self, seed: int = 0) -> Inputs:
        """Random inputs on the device, and what the XLA path makes of them."""
        arrays = self.forward.inputs(seed)
        out, lse = _results(arrays, self.forward.settings)
        has_lse = lse is not None
        return Inputs(arrays, out if has_lse else None, lse, self.forward.cotangent(seed))

    @property
    def useful_flops(self) -> int:
        """Useful FLOPs of the gradient."""
        return self.problem.useful_flops(self.forward.pairs)

    def runner(
        self, config: GdpaBackwardTuning | None, num_sms: int | None = None
    ) -> Callable[..., Gradients]:
        """The kernels with `config`, including their tile lists; XLA if `config` is None.

        `num_sms` is the device's number of SMs if None. Unlike the op, the kernels can be lowered
        on a machine without a device.
        """
        settings = self.forward.settings
        if config is None:
            return jax.jit(lambda *inputs: _by_xla(Inputs(*inputs), settings))
        options: dict[str, Any] = {
            "query_config": config.query,
            "key_config": config.key,
            "num_sms": dispatch.num_sms() if num_sms is None else num_sms,
        }

        def gradients(
            arrays: Arrays, out: jax.Array | None, lse: jax.Array | None, d_out: jax.Array
        ) -> Gradients:
            return kernel_vjp(Arrays(*arrays), settings, d_out, out=out, lse=lse, **options)

        return jax.jit(gradients)

    def check(self, actual: Gradients, inputs: Inputs) -> Check:
        """Compares gradients with the XLA path; of the three, returns the one nearest its bound.

        The error of the XLA path is its difference to the XLA path in f32. An approximate tanh
        adds its error: relative to the largest value, a sum of n terms of either sign is about
        √n / 4 of the sum of their absolute values.
        """
        p = self.problem
        plain, (errors, largest) = _truth(inputs, self.forward.settings)
        longest_q, longest_kv = (int(lengths.max()) for lengths in self.forward.numbers)
        sharing = -(-p.batch // max(p.batch_kv, 1))
        terms = (longest_kv * (p.batch if p.broadcast_q else 1), *2 * (longest_q * sharing,))
        approx = APPROX_ERRORS.get(p.approx or "", 0.0)
        checks = [
            Check(
                float(error_rule.largest_difference(x, xla)),
                error_rule.bound_to_plain(float(e), float(most), p.dtype, p.head_dim + count)
                + approx * float(most) * max(1.0, count**0.5 / 4),
            )
            for x, xla, e, most, count in zip(actual, plain, errors, largest, terms, strict=True)
        ]
        wrong = [check for check in checks if not check.ok]
        return max(wrong or checks, key=lambda check: check.error / max(check.bound, 1e-30))


@functools.partial(jax.jit, static_argnums=1)
def _results(arrays: Arrays, settings: Settings) -> tuple[jax.Array, jax.Array | None]:
    return gdpa_chunked.chunked(arrays, settings)


@functools.partial(jax.jit, static_argnums=1, compiler_options=UNTUNED)
def _truth(inputs: Inputs, settings: Settings) -> Any:
    """Gradients by XLA; and of each, the largest difference to f32 and the largest value."""
    plain = _by_xla(inputs, settings)
    floats = (x.astype(jnp.float32) for x in inputs.arrays[:3])
    arrays = Arrays._make((*floats, *inputs.arrays[3:]))
    with jax.default_matmul_precision("highest"):
        d_out = inputs.d_out.astype(jnp.float32)
        exact = _by_xla(inputs._replace(arrays=arrays, d_out=d_out), settings)
    compared = [error_rule.compare(x, want) for x, want in zip(plain, exact, strict=True)]
    return plain, tuple(zip(*compared, strict=True))


def _by_xla(inputs: Inputs, settings: Settings) -> Gradients:
    found: Gradients = gdpa_chunked_vjp.chunked_vjp(Arrays(*inputs.arrays), settings, inputs.d_out)
    return found
