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
MANY_ROWS, WANTED_TILES = 8192, 198
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
    tiles of all parts fill 1.5 times the SMs.
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
    normed, pull_back = jax.vjp(
        lambda x, scale, bias: _scaled(_normalised(norm, x), scale, bias),
        *(None if y is None else y.astype(jnp.float32) for y in (x, scale, bias)),
    )
    normed = normed.astype(x.dtype)
    projected: Any = kept.projection
    if projected is None:
        projected = _projections(arrays, normed)
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
    d_normed = _product("rc,fc->rf", rounded, weight, dtype)
    d_weight = _sum_of_rows(normed, rounded)
    ends = list(itertools.accumulate(d_z.shape[1] for d_z in d_projected))
    d_weights = jnp.split(d_weight, ends[:-1], axis=1)
    d_x, d_scale, d_bias = pull_back(d_normed.astype(jnp.float32))
    return NormLinear(
        d_x,
        d_scale,
        d_bias,
        tuple(d_w.reshape(w.shape) for d_w, w in zip(d_weights, weights, strict=True)),
        tuple(
            None if b is None else jnp.sum(d_z, axis=0).reshape(b.shape)
            for d_z, b in zip(d_projected, biases, strict=True)
        ),
    )


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
) -> jax.Array:
    """Computes the rows that `gated_linear` multiplies, in f32, from [rows, columns] f32."""
    by_group = a if gate.groups == 1 else a.reshape(a.shape[0], gate.groups, -1)
    by_group = _normalised(gate.norm, by_group)
    scale, bias = (
        None if y is None else jnp.repeat(y, a.shape[1] // y.shape[0]) for y in (scale, bias)
    )
    gated = _scaled(by_group.reshape(a.shape), scale, bias)
    gated = gated if u is None else u * gated
    parts: Any = [u, a, gated] if gate.concat else [gated]
    if seed is not None:
        kept = _kept_numbers(gate, seed, a.shape)[-len(parts) :]
        share = 1 / (1 - gate.dropout_rate)
        parts = [jnp.where(k, x * share, 0.0) for k, x in zip(kept, parts, strict=True)]
    return jnp.concatenate(parts, axis=1) if gate.concat else parts[0]


def gated_linear(gate: Gate, arrays: GatedLinear) -> jax.Array:
    """Computes gated_linear: [rows, features]."""
    u, a, scale, bias, weight, residual, seed, shared = arrays
    flat_u, flat_a = (None if x is None else _matrix(x).astype(jnp.float32) for x in (u, a))
    rows = _gated(gate, seed, flat_u, flat_a, scale, bias).astype(a.dtype)
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
    vectors = None if u is None else _matrix(u), _matrix(a), scale, bias
    floats = [None if y is None else y.astype(jnp.float32) for y in vectors]
    rows, pull_back = jax.vjp(functools.partial(_gated, gate, seed), *floats)
    d_rows = _product("rf,kf->rk", d_out, weight, dtype)
    d_u, d_a, d_scale, d_bias = pull_back(d_rows.astype(jnp.float32))
    return GatedLinear(
        None if u is None else d_u.reshape(u.shape),
        d_a.reshape(a.shape),
        d_scale,
        d_bias,
        _sum_of_rows(rows.astype(a.dtype), d_out),
        None if residual is None else d_out.astype(jnp.float32),
        None,
        None
        if shared is None
        else jnp.sum(d_out.reshape(shared.shape[0], -1, d_out.shape[1]), 1, dtype=jnp.float32),
    )
