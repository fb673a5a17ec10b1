"""The linear layers around attention, and their gradients, in plain jnp.

Norms, activations and sums are f32. Rows are rounded to the inputs' dtype before they are
multiplied by a weight, as kernels must; results are rounded once.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from ikbo_jax.reference.activations import elementwise

#: Kinds of norms.
NORMS = ("layer", "rms")
#: What the gradient of `norm_linear` may compute again.
RECOMPUTABLE = ("norm", "projection")
#: Rows whose sum is divided into parts, and tiles of 64 x 128 that all parts should have.
MANY_ROWS, WANTED_TILES = 8192, 264
#: Bits of a random number that decides whether a number is dropped.
DROPOUT_BITS = 21


class Norm(NamedTuple):
    """Static options of a norm: its kind, None for no norm, and what is added to the variance."""

    kind: str | None = "layer"
    eps: float = 1e-6


class NormLinear(NamedTuple):
    """Arrays of `norm_linear`; `norm_scale`, `norm_bias` and every bias may be None."""

    x: Any
    norm_scale: Any
    norm_bias: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]


class Projected(NamedTuple):
    """Results of `norm_linear`.

    Attributes:
      out: the activated groups of columns.
      projection: every group before its activation; None unless the gradient needs it.
    """

    out: tuple[Any, ...]
    projection: tuple[Any, ...] | None = None


class GatedLinear(NamedTuple):
    """Arrays of `gated_linear`; u, norm_scale, norm_bias and those after weight may be None.

    `seed` is [3] uint32: two words of a key, and the number of the first row.
    """

    u: Any
    a: Any
    norm_scale: Any
    norm_bias: Any
    weight: Any
    residual: Any
    seed: Any
    shared: Any = None


class Gate(NamedTuple):
    """Static options of `gated_linear`.

    Attributes:
      norm: the norm of `a`.
      groups: groups of columns that are normalised on their own.
      concat: whether rows are [u, a, u · norm(a)], not u · norm(a) alone.
      dropout_rate: share of the numbers that are dropped where there is a seed.
    """

    norm: Norm
    groups: int = 1
    concat: bool = False
    dropout_rate: float = 0.0


def _normalised(norm: Norm, x: jax.Array) -> jax.Array:
    """Normalises f32 numbers along the last axis."""
    if norm.kind is None:
        return x
    if norm.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.eps)


def _scaled(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """Multiplies f32 rows by a scale and adds a bias, where they are not None."""
    x = x if scale is None else x * scale.astype(jnp.float32)[None]
    return x if bias is None else x + bias.astype(jnp.float32)[None]


def _product(equation: str, a: jax.Array, b: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _sum_of_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes a.T @ b in f32, of many rows in equal parts.

    Otherwise XLA would make parts, and first copy both operands, to give all parts a multiple of 8
    rows: 2.8 of 28 ms of a training step of five HSTU layers on an H200. It makes none where the
    tiles of all parts fill the SMs twice; where they fill them 1.7 times, it does.
    """
    rows, *columns = a.shape[0], a.shape[1], b.shape[1]
    tiles = -(-columns[0] // 64) * -(-columns[1] // 128)
    least = max(4, -(-WANTED_TILES // tiles))
    parts = 1
    if isinstance(rows, int) and rows >= MANY_ROWS:  # an exported program's may be a symbol
        parts = next((n for n in range(least, 4 * least) if rows % n == 0), 1)
    a, b = (x.reshape(parts, -1, x.shape[1]) for x in (a, b))
    return jnp.sum(_product("prm,prn->pmn", a, b), axis=0)


def _matrix(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _projections(arrays: NormLinear, norm: jax.Array) -> list[jax.Array]:
    """Multiplies normalised rows by every weight and adds its bias: [rows, columns] f32 each."""
    found = []
    for weight, bias in zip(arrays.weights, arrays.biases, strict=True):
        product = _product("rf,fc->rc", norm, _matrix(weight))
        found.append(_scaled(product, None, None if bias is None else bias.reshape(-1)))
    return found


def norm_linear(
    norm: Norm, activations: tuple[str, ...], has_projection: bool, arrays: NormLinear
) -> Projected:
    """Computes norm_linear; if `has_projection`, with groups before their activation."""
    x, dtype = arrays.x, arrays.x.dtype
    rows = _normalised(norm, x.astype(jnp.float32))
    normed = _scaled(rows, arrays.norm_scale, arrays.norm_bias).astype(dtype)
    shapes = [(x.shape[0], *weight.shape[1:]) for weight in arrays.weights]
    projected = [
        z.reshape(shape) for z, shape in zip(_projections(arrays, normed), shapes, strict=True)
    ]
    out = tuple(
        elementwise(name, None).value(z).astype(dtype)
        for name, z in zip(activations, projected, strict=True)
    )
    kept = None
    if has_projection:
        kept = tuple(
            None if name == "identity" else z.astype(dtype)
            for name, z in zip(activations, projected, strict=True)
        )
    return Projected(out, kept)


def norm_linear_vjp(
    norm: Norm,
    activations: tuple[str, ...],
    arrays: NormLinear,
    kept: Projected,
    cotangents: Projected,
    dtype: Any,
) -> NormLinear:
    """Computes the gradients of all arrays in f32.

    What is None of `kept`, results of `norm_linear`, is computed again. Cotangents of `projection`
    come from second derivatives. The cotangent of the normalised rows is rounded to `dtype`.
    """
    x, scale, bias, weights, biases = arrays
    rows, pull_back = jax.vjp(functools.partial(_normalised, norm), x.astype(jnp.float32))
    projected: Any = kept.projection
    if projected is None:
        projected = _projections(arrays, _scaled(rows, scale, bias).astype(x.dtype))
    d_projected = []
    for number, (name, d_out) in enumerate(zip(activations, cotangents.out, strict=True)):
        d_z = _matrix(d_out).astype(jnp.float32)
        if name != "identity":
            z = _matrix(projected[number]).astype(jnp.float32)
            d_z = d_z * elementwise(name, None).slope(z)
        if cotangents.projection is not None and cotangents.projection[number] is not None:
            d_z = d_z + _matrix(cotangents.projection[number]).astype(jnp.float32)
        d_projected.append(d_z)
    # One product of all groups: its sum over columns stays in one accumulator. Behind the barrier,
    # XLA joins the groups once, not again as a part of the second product.
    rounded = jax.lax.optimization_barrier(
        jnp.concatenate([d_z.astype(x.dtype) for d_z in d_projected], axis=1)
    )
    weight = jnp.concatenate([_matrix(w) for w in weights], axis=1)
    d_normed = _product("rc,fc->rf", rounded, weight, dtype).astype(jnp.float32)
    sums = jnp.sum(rounded, axis=0, keepdims=True, dtype=jnp.float32)
    of_rows = _sum_of_rows(rows.astype(x.dtype), rounded)
    d_weight, d_scale, d_bias = _of_factors(weight, of_rows, sums, scale, bias)
    ends = list(itertools.accumulate(d_z.shape[1] for d_z in d_projected))
    d_weights, d_biases = (jnp.split(y, ends[:-1], axis=-1) for y in (d_weight, sums))
    (d_x,) = pull_back(_scaled(d_normed, scale, None))
    return NormLinear(
        d_x,
        d_scale,
        d_bias,
        tuple(d_w.reshape(w.shape) for d_w, w in zip(d_weights, weights, strict=True)),
        tuple(
            None if b is None else d_b.reshape(b.shape)
            for d_b, b in zip(d_biases, biases, strict=True)
        ),
    )


def _of_factors(
    weight: jax.Array,
    of_rows: jax.Array,
    of_bias: Any,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Computes the gradients of a weight and of the scale and the bias of the norm before it.

    These factors of the columns of normalised rows may as well be factors of the rows of the
    weight [K, columns]. So the weight's gradient gives theirs, without another pass over the rows.
    In a layer of HSTU with 100,072 rows of 512, such passes move 1.4 GB.

    Args:
      of_rows: rowsᵀ · d_out, of rows without the factors.
      of_bias: the same of what multiplies the bias, or [1, columns]; None without a bias.
      scale: [K], or [parts] for equal parts of the weight's rows, or None; `bias` likewise.
    """
    weight = weight.astype(jnp.float32)
    scale, bias = (None if y is None else y.astype(jnp.float32)[:, None] for y in (scale, bias))

    def repeated(factor: jax.Array) -> jax.Array:
        return jnp.repeat(factor, weight.shape[0] // factor.shape[0], axis=0)

    def summed(product: jax.Array, factor: jax.Array) -> jax.Array:
        return jnp.sum(product.reshape(factor.shape[0], -1), axis=1)

    d_weight, d_scale, d_bias = of_rows, None, None
    if scale is not None:
        d_weight, d_scale = d_weight * repeated(scale), summed(weight * of_rows, scale)
    if bias is not None:
        d_weight, d_bias = d_weight + of_bias * repeated(bias), summed(weight * of_bias, bias)
    return d_weight, d_scale, d_bias


def _kept_numbers(gate: Gate, seed: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """Draws which numbers dropout keeps: a bool [rows, columns] for u, a and u · norm(a).

    Threefry's two words of a row and a column give all three, so a mask does not depend on how
    rows are divided over devices.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    words = threefry_2x32((seed[0], seed[1]), jnp.stack((row + seed[2], column)))
    spare = 32 - DROPOUT_BITS
    low = words & jnp.uint32(2**spare - 1)
    numbers = [*(words >> jnp.uint32(spare)), (low[0] << jnp.uint32(spare - 1)) | (low[1] >> 1)]
    dropped = jnp.uint32(round(gate.dropout_rate * 2**DROPOUT_BITS))
    return [number >= dropped for number in numbers]


def _gated(
    gate: Gate,
    seed: jax.Array | None,
    u: jax.Array | None,
    a: Any,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> list[jax.Array]:
    """Computes the parts of the rows that `gated_linear` multiplies, of f32 rows `_by_group`."""
    scale, bias = (y if y is None or gate.groups == 1 else y.reshape(-1, 1) for y in (scale, bias))
    gated = _scaled(_normalised(gate.norm, a), scale, bias)
    gated = gated if u is None else u * gated
    parts: Any = [u, a, gated] if gate.concat else [gated]
    if seed is not None:
        kept = _kept_numbers(gate, seed, _matrix(a).shape)[-len(parts) :]
        share = 1 / (1 - gate.dropout_rate)
        parts = [
            jnp.where(k.reshape(a.shape), x * share, 0.0) for k, x in zip(kept, parts, strict=True)
        ]
    return parts


def _by_group(gate: Gate, x: jax.Array) -> jax.Array:
    """Cuts rows into the groups of columns that are normalised on their own, if there are several.

    XLA fuses a norm with what is computed of it only where no reshape is between.
    """
    return x.reshape(x.shape[0], *([gate.groups, -1] if gate.groups > 1 else [-1]))


def gated_linear(gate: Gate, arrays: GatedLinear) -> jax.Array:
    """Computes gated_linear: [rows, features]."""
    u, a, scale, bias, weight, residual, seed, shared = arrays
    u_rows, a_rows = (None if x is None else _by_group(gate, x).astype(jnp.float32) for x in (u, a))
    parts = _gated(gate, seed, u_rows, a_rows, scale, bias)
    rows = jnp.concatenate([_matrix(x.astype(a.dtype)) for x in parts], axis=1)
    out = _product("rk,kf->rf", rows, weight)
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    if shared is not None:
        by_group = out.reshape(shared.shape[0], -1, out.shape[1])
        out = (by_group + shared.astype(jnp.float32)[:, None]).reshape(out.shape)
    return out.astype(a.dtype)


def gated_linear_vjp(gate: Gate, arrays: GatedLinear, d_out: jax.Array, dtype: Any) -> GatedLinear:
    """Computes the gradients of all arrays in f32; the rows that are multiplied, again.

    The cotangent of these rows is rounded to `dtype`.
    """
    u, a, scale, bias, weight, residual, seed, shared = arrays
    vectors: list[Any] = [None if x is None else _by_group(gate, x) for x in (u, a)]

    def gated(*factors: Any) -> tuple[list[jax.Array], Any]:
        """Computes the rows again, and what pulls their cotangents back, in f32.

        Behind a barrier, a result takes one pass over the rows, norm included. Otherwise XLA would
        compute the norms of all results in four passes, and copy all parts of the rows to one
        array: 1.3 of 25.8 ms of a training step of five HSTU layers on an H200.
        """
        held = jax.lax.optimization_barrier(vectors)
        floats = [None if y is None else y.astype(jnp.float32) for y in held]
        return jax.vjp(lambda *x: _gated(gate, seed, *x, *factors), *floats)

    def sums_of_rows(parts: list[jax.Array]) -> list[jax.Array]:
        rounded = jax.lax.optimization_barrier([x.astype(a.dtype) for x in parts])
        return [_sum_of_rows(_matrix(x), d_out) for x in rounded]

    num_parts = 3 if gate.concat else 1
    d_parts = _product("rf,kf->rk", d_out, weight, dtype).reshape(
        a.shape[0], num_parts, *vectors[1].shape[1:]
    )
    d_rows = [d_parts[:, i].astype(jnp.float32) for i in range(num_parts)]
    d_u, d_a = (gated(scale, bias)[1](d_rows)[i] for i in (0, 1))
    *of_others, of_gated = sums_of_rows(gated(None, None)[0])
    of_gate = of_others[0] if gate.concat else None
    if bias is not None and (of_gate is None or seed is not None):
        # What multiplies the bias: the gate, with the numbers that dropout keeps of u · norm(a).
        no_norm, ones = gate._replace(norm=Norm(None)), jnp.ones(vectors[1].shape, jnp.float32)
        u_rows = None if u is None else vectors[0].astype(jnp.float32)
        (of_gate,) = sums_of_rows(_gated(no_norm, seed, u_rows, ones, None, None)[-1:])
    of_gated_rows = jnp.split(weight, num_parts)[-1]
    d_weight, d_scale, d_bias = _of_factors(of_gated_rows, of_gated, of_gate, scale, bias)
    return GatedLinear(
        None if u is None else d_u.reshape(u.shape),
        d_a.reshape(a.shape),
        d_scale,
        d_bias,
        jnp.concatenate([*of_others, d_weight]),
        None if residual is None else d_out.astype(jnp.float32),
        None,
        None
        if shared is None
        else jnp.sum(d_out.reshape(shared.shape[0], -1, d_out.shape[1]), 1, dtype=jnp.float32),
    )
