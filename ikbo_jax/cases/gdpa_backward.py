"""The case of gdpa's gradient: inputs, XLA path, kernels and check."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import case, gdpa
from ikbo_jax.cases.error_rule import UNTUNED, Check
from ikbo_jax.cases.gdpa import APPROX_ERRORS
from ikbo_jax.ops.gdpa_backward import kernel_vjp
from ikbo_jax.problems import GdpaBackwardConfig, GdpaBackwardProblem, GdpaProblem
from ikbo_jax.reference import gdpa_chunked, gdpa_chunked_vjp
from ikbo_jax.reference.gdpa import Arrays, Settings, materialised

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class Inputs(NamedTuple):
    """Holds the op's arrays, cotangent and results; `out`, `lse` are None without softmax."""

    arrays: Arrays
    d_out: jax.Array
    out: jax.Array | None = None
    lse: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Case(case.Case):
    """Combines a problem with lengths of sequences; see `cases.gdpa.Case`."""

    problem: GdpaBackwardProblem
    lengths: str = "spread"

    @property
    def forward(self) -> gdpa.Case:
        """The case of the op itself."""
        return gdpa.Case(GdpaProblem(**dataclasses.asdict(self.problem)), self.lengths)

    def inputs(self, seed: int = 0) -> Inputs:
        """Draws inputs and a cotangent; the XLA path computes the results."""
        arrays = self.forward.inputs(seed)
        out, lse = _results(arrays, self.forward.settings)
        d_out = self.forward.cotangent(seed)
        return Inputs(arrays, d_out, None if lse is None else out, lse)

    @property
    def useful_flops(self) -> int:
        return self.problem.useful_flops(self.forward.pairs)

    def xla_path(self) -> Callable[..., Gradients]:
        return lambda *inputs: _by_xla(Inputs(*inputs), self.forward.settings)

    def kernel(self, config: GdpaBackwardConfig, num_sms: int) -> Callable[..., Gradients]:
        """Returns the kernels, including their tile lists."""
        return lambda arrays, d_out, out, lse: kernel_vjp(
            *(Arrays(*arrays), self.forward.settings, d_out),
            out=out,
            lse=lse,
            config=config,
            num_sms=num_sms,
        )

    def check(self, actual: Gradients, inputs: Inputs) -> Check:
        """Compares gradients with the XLA path, and with the oracle for some sequences.

        An approximate tanh adds its error: relative to the largest value, a sum of n terms of
        either sign is about √n / 4 of the sum of their absolute values.
        """
        p = self.problem
        longest_q, longest_kv = (int(lengths.max()) for lengths in self.forward.numbers)
        sharing = -(-p.batch // max(p.batch_kv, 1))
        terms = (longest_kv * (p.batch if p.broadcast_q else 1), *2 * (longest_q * sharing,))
        approx = APPROX_ERRORS.get(p.approx or "", 0.0)
        return case.check_gradients(
            *(actual, _by_xla, inputs, (self.forward.settings,)),
            rounding=(p.dtype, [p.head_dim + count for count in terms]),
            relative=[approx * max(1.0, count**0.5 / 4) for count in terms],
            sampled=self._sampled(actual, inputs),
        )

    def _sampled(self, actual: Gradients, inputs: Inputs) -> list[float] | None:
        """Finds the largest errors in some sequences; None if they share keys."""
        if inputs.arrays.q_to_kv is not None:
            return None
        sequences = np.unique(np.linspace(0, self.problem.batch - 1, 3).astype(np.int32))
        found = [_sampled_errors(self.forward, actual, inputs, jnp.int32(n)) for n in sequences]
        return [float(x) for x in np.max(np.asarray(jax.device_get(found)), axis=0)]


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _sampled_errors(
    forward: gdpa.Case, gradients: Gradients, inputs: Inputs, sequence: jax.Array
) -> list[jax.Array]:
    """Compares gradients with the f32 oracle's for one sequence."""
    one, begin = gdpa.one_sequence(forward, Arrays(*inputs.arrays), sequence)
    begin_kv = inputs.arrays.cu_seqlens_kv[sequence]
    one = case.widened(one)
    is_query, is_key = gdpa.masks(one)
    d_out = gdpa.rows_from(inputs.d_out, begin, one.query.shape[0]).astype(jnp.float32)
    d_out = jnp.where(is_query[:, None, None], d_out, 0)

    def oracle(*floats: jax.Array) -> jax.Array:
        query, key, value = floats
        arrays = one._replace(query=query, key=key, value=value)
        return materialised(arrays, forward.settings)

    d_query, *d_keys = jax.vjp(oracle, *one[:3])[1](d_out)
    errors = [gdpa.largest_error(gradients[0], begin, d_query, is_query)]
    if forward.problem.broadcast_q:  # The gradient is a sum over all sequences.
        errors = [jnp.zeros(())]
    for x, exact in zip(gradients[1:], d_keys, strict=True):
        errors.append(gdpa.largest_error(x, begin_kv, exact, is_key))
    return errors


@functools.partial(jax.jit, static_argnums=1)
def _results(arrays: Arrays, settings: Settings) -> tuple[jax.Array, jax.Array | None]:
    return gdpa_chunked.chunked(arrays, settings)


def _by_xla(inputs: Inputs, settings: Settings) -> Gradients:
    return gdpa_chunked_vjp.chunked_vjp(Arrays(*inputs.arrays), settings, inputs.d_out)
