"""Attention weights of the GDPA forward kernel: activated scores without a constant factor.

Each instruction per score, which overlaps the tensor core's work, costs time and power.  Therefore
activations take raw scores s, as the product q @ k.T leaves them, and omit a constant,

    act(scale * s) = constant * weight(s),

which multiplies each row's sum of weights times values instead.  Instructions per score, including
half an instruction to round to bf16, and how many of them the special function unit executes:

    activation                approx          instructions    special
    identity, relu            -               0.5, 1.5        0
    leaky_relu, relu_squared  -               2.5             0
    hardswish                 -               2.5             0
    gelu_tanh                 "tanh_bf16"     4               1
    silu                      "tanh_bf16"     3               1
    gelu_tanh                 "tanh"          5.5             1
    silu                      "tanh"          3.5             1
    gelu                      "polynomial"    9.5             0
    silu                      -               7.5             1.5
    gelu_tanh                 -               9.5             1.5
    gelu                      -               12.5            1

In f16, whose range ends at 65504, weights include the constant, for one more multiplication.  They
also include it where `scale` is not positive or far from 1.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from ikbo_jax.pallas.activations import values as activations
from ikbo_jax.pallas.activations.cap import Cap, Method, capped, scale_and_cap
from ikbo_jax.pallas.hopper import inline, mosaic
from ikbo_jax.reference.activations import (
    APPROXIMATIONS,
    PACKED,
    POLYNOMIAL,
    POLYNOMIAL_DOMAIN,
    SOFTMAX,
    TANH_CUBIC,
    TANH_SCALE,
    one_by_one,
)
from ikbo_jax.reference.gdpa import Settings

#: Beyond these scales, powers of the scale, or sums without the constant, might leave f32's range.
MIN_SCALE, MAX_SCALE = 2.0**-10, 2.0**10
#: Argument of `round_weights`: f32 weights, or two bf16 arrays, (scores, tanh).
Weights = jax.Array | tuple[jax.Array, jax.Array]


class ActivationSpec(NamedTuple):
    """Static description of how scores become weights.

    `names` are of the heads, or one for all. `scale` is of the scores, or of capped scores.
    `has_f32_range`: whether the weights' dtype has the range of f32, as bf16 has.
    """

    names: tuple[str, ...]
    approx: str | None
    scale: float
    output_scale: float
    has_f32_range: bool
    cap: Cap | None = None

    @classmethod
    def of(cls, settings: Settings, dtype: Any) -> ActivationSpec:
        """Describes the activations of a call whose arrays have this dtype.

        The cap's tanh is approximate if every head has an activation whose tanh is.
        """
        names, approx = settings.activations, one_by_one(settings.approx)
        is_approx = approx == "tanh" and set(names) <= set(APPROXIMATIONS[approx])
        method = Method.APPROXIMATE if is_approx else Method.SMALL_EXACT
        of_cap = settings.scale, settings.logit_cap, None if SOFTMAX in names else method
        scale, cap = scale_and_cap(*of_cap)
        has_f32_range = dtype == jnp.bfloat16
        return cls(names, settings.approx, scale, settings.output_scale, has_f32_range, cap)

    @property
    def takes_raw_scores(self) -> bool:
        return MIN_SCALE <= self.scale <= MAX_SCALE

    @property
    def is_packed(self) -> bool:
        """Whether weights are computed from two scores at a time, in bf16."""
        is_one_kind = len(set(self.names)) == 1 and self.names[0] in APPROXIMATIONS[PACKED]
        is_packed = self.approx == PACKED and is_one_kind
        return is_packed and self.takes_raw_scores and self.has_f32_range

    def constant(self, name: str) -> float:
        """act(scale * s) / weight(s)."""
        full_name = activations.full_name(name, self.approx)
        if full_name.startswith("tanh"):
            return self.scale / 2
        return self.scale**2 if full_name == "relu_squared" else self.scale


def compute_weights(spec: ActivationSpec, head: Any, scores: jax.Array) -> Weights:
    """Computes weights of one head's raw scores [64, columns] f32, for `round_weights`."""
    scores = capped(spec.cap, scores)
    if spec.is_packed:
        return _packed(spec, scores)
    if not spec.takes_raw_scores:
        if spec.scale != 1:
            scores = scores * jnp.float32(spec.scale)
        return activations.activate(spec.names, spec.approx, head, scores)

    def evaluate(name: str, scores: jax.Array) -> jax.Array:
        full_name = activations.full_name(name, spec.approx)
        compute = _WEIGHTS.get(full_name, functools.partial(activations.weight, full_name))
        weights = compute(scores, spec.scale)
        constant = spec.constant(name)
        return weights if spec.has_f32_range or constant == 1 else weights * jnp.float32(constant)

    return activations.by_chunks(spec.names, head, scores, evaluate)


def _packed(spec: ActivationSpec, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = scores.astype(jnp.bfloat16)
    if spec.names[0] == "silu":
        return s, jnp.tanh(s * jnp.bfloat16(spec.scale / 2))
    linear, cubic = TANH_SCALE * spec.scale, TANH_SCALE * TANH_CUBIC * spec.scale**3
    return s, jnp.tanh(s * (s * s * jnp.bfloat16(cubic) + jnp.bfloat16(linear)))


def round_weights(weights: Weights, dtype: Any) -> jax.Array:
    """Rounds weights to `dtype`, the dtype of the values."""
    if isinstance(weights, tuple):
        s, inner = weights
        return s * inner + s
    return weights.astype(dtype)


def scale_result(spec: ActivationSpec, head: Any, acc: jax.Array) -> jax.Array:
    """Scales the sum of weights times values to the result of one head."""
    constants = [spec.output_scale] * len(spec.names)
    if spec.takes_raw_scores and spec.has_f32_range:
        constants = [spec.output_scale * spec.constant(name) for name in spec.names]
    if len(set(constants)) == 1:
        return acc if constants[0] == 1 else acc * jnp.float32(constants[0])
    factor = jnp.float32(constants[0])
    for i, constant in enumerate(constants):
        if constant != constants[0]:
            factor = jnp.where(head == i, jnp.float32(constant), factor)
    return acc * factor


def _hardswish(s: jax.Array, scale: float) -> jax.Array:
    return s * _saturated(s, scale / 6, 0.5)


def _tanh_silu(s: jax.Array, scale: float) -> jax.Array:
    inner = jnp.tanh(s * jnp.float32(scale / 2))  # tanh.approx.f32: see `mosaic.compiler_params`
    return s * inner + s


def _tanh_gelu_tanh(s: jax.Array, scale: float) -> jax.Array:
    linear, cubic = TANH_SCALE * scale, TANH_SCALE * TANH_CUBIC * scale**3
    inner = jnp.tanh(s * (s * s * jnp.float32(cubic) + jnp.float32(linear)))
    return s * inner + s


def _polynomial_gelu(s: jax.Array, scale: float) -> jax.Array:
    """Beyond its domain the polynomial keeps its last value; there Φ saturates at 0 or 1."""
    square = jnp.minimum(s * s, jnp.float32((POLYNOMIAL_DOMAIN / scale) ** 2))
    coefficients = tuple(c * scale ** (2 * k + 1) for k, c in enumerate(POLYNOMIAL))
    slope = activations.horner(coefficients, square)
    return s * _saturated(s, slope, 0.5)


#: Functions of raw scores that are not `values.weight`.
_WEIGHTS = {
    "hardswish": _hardswish,
    "tanh silu": _tanh_silu,
    "tanh gelu_tanh": _tanh_gelu_tanh,
    "polynomial gelu": _polynomial_gelu,
}


def _saturated(x: jax.Array, slope: Any, offset: float) -> jax.Array:
    """Computes x * slope + offset, limited to [0, 1], in one instruction.

    A NaN x may give 0, but the caller multiplies the result by x, which gives NaN.
    """
    if mosaic.is_interpreted():
        slope = slope if isinstance(slope, jax.Array) else jnp.float32(slope)
        return jnp.clip(x * slope + jnp.float32(offset), 0.0, 1.0)
    factors = (slope,) if isinstance(slope, jax.Array) else ()
    factor = "$2" if factors else _immediate(slope)

    @inline.code(x, *factors, returns=x)
    def evaluated(*arrays: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        registers = np.empty_like(arrays[0].registers)
        for index in np.ndindex(registers.shape):
            results = [
                mgpu.utils.inline_ptx(
                    f"fma.rn.sat.f32 $0, $1, {factor}, {_immediate(offset)};",
                    *(vector.extract(array.registers[index], [], [i]) for array in arrays),
                    result_types=f32,
                )
                for i in (0, 1)
            ]
            registers[index] = vector.from_elements(pair, results)
        return inline.accumulator(registers)

    return evaluated


@functools.cache
def _immediate(value: float) -> str:
    """Formats an f32 number for PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
