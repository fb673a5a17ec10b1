"""What activations and their slopes have in common, on f32 [64, columns] in a kernel.

The special function unit limits their speed.  It returns 16 results a cycle, and at H = 128 the
products consume 8 scores a cycle: with two results per score it takes as long as the tensor core.
Therefore the sigmoids of two neighbouring scores share one reciprocal, and Φ takes one exponential.

    activation, approximation             results per value    per value and slope
    gelu_tanh, silu                       1.5                  1.5
    gelu                                  1                    2
    gelu_tanh, silu, approx "tanh"        1                    1
    all others, approx "polynomial"       0                    0

The two neighbours are columns of one row: an infinite or NaN score can spoil only its own row,
which the product that follows spoils anyway.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic

LOG2_E = math.log2(math.e)
#: Columns that are activated at a time.  Every operation is emitted for all columns of a chunk:
#: with 128 columns, scores and their exponentials would be live together, which spills.  A branch
#: with 128 results spills, too.
CHUNK = 16
#: Coefficients, in rising powers, of log2(Φ(−x)) on 0 ≤ x ≤ `PHI_DOMAIN`.  The errors of Φ(−x) and
#: x · Φ(−x) are below 1.5e-8, less than their rounding; beyond the domain both are below 1e-14.
PHI_DOMAIN = 8.0
LOG2_PHI = (
    -0.99999994,
    -1.151107,
    -0.45919305,
    -0.052546434,
    0.0071427813,
    -0.00020247867,
    -0.00015727888,
    3.296803e-05,
    -2.275873e-06,
)
#: Scores are raised to these bounds, below which |gelu_tanh| and |silu| are less than 1e-17.  So
#: their sigmoids stay above 2⁻⁶³, and the product of two reciprocals of sigmoids is finite.
MIN_GELU_TANH = -7.5
MIN_SILU = -42.0
#: Slopes of gelu_tanh lower scores to this bound, above which the sigmoid is 1: the square of a
#: huge score would be infinite.
MAX_GELU_TANH = 10.0


def by_chunks(names: tuple[str, ...], head: Any, x: jax.Array, evaluate: Any) -> Any:
    """Calls `evaluate(name, x)` for the head's activation, a chunk of x [64, columns] at a time."""

    def of_head(x: jax.Array) -> Any:
        return _of_head(names, head, lambda name: evaluate(name, x))

    if mosaic.is_interpreted():
        return of_head(x)
    chunks = [lax.slice(x, (0, i), (x.shape[0], i + CHUNK)) for i in range(0, x.shape[1], CHUNK)]
    return jax.tree.map(lambda *parts: lax.concatenate(parts, 1), *map(of_head, chunks))


def _of_head(names: tuple[str, ...], head: Any, evaluate: Any) -> Any:
    """Calls `evaluate` for the head's activation; branches only where activations differ."""
    kinds = tuple(dict.fromkeys(names))
    if len(kinds) == 1:
        return evaluate(kinds[0])
    kind = jnp.int32(0)
    for i, name in enumerate(names):
        if number := kinds.index(name):
            kind = jnp.where(head == i, jnp.int32(number), kind)
    return lax.switch(kind, [functools.partial(evaluate, name) for name in kinds])


def horner(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Evaluates the polynomial of x with `coefficients` in rising powers."""
    total = x * jnp.float32(coefficients[-1]) + jnp.float32(coefficients[-2])
    for c in coefficients[-3::-1]:
        total = total * x + jnp.float32(c)
    return total


def reciprocal(x: jax.Array) -> jax.Array:
    """Computes 1 / x for 1 ≤ x < 2⁶³; two neighbouring columns share one: 1 / a = b · (1 / ab)."""
    if mosaic.is_interpreted():
        return 1 / x

    @inline.code(x, returns=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plgpu.Layout.WGMMA))
    def inverted(x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        registers = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            a, b = (vector.extract(register, [], [i]) for i in (0, 1))
            inverse = mgpu.utils.inline_ptx(
                "rcp.approx.ftz.f32 $0, $1;", arith.mulf(a, b), result_types=f32
            )
            products = [arith.mulf(inverse, factor) for factor in (b, a)]
            registers[index] = vector.from_elements(pair, products)
        return inline.accumulator(registers)

    return inverted
