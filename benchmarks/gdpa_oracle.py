"""What the benchmark of generalised dot-product attention holds results and gradients to."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gdpa_providers import RESULTS, Inputs, Sizes
from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference.activations import SOFTMAX, elementwise
from ikbo_jax.reference.gdpa import Arrays


def checked_rows(
    result: Sequence[jax.Array], inputs: Inputs, sequences: Sequence[int], direction: str
) -> np.ndarray:
    """[rows, N, H]: what a direction returned for some sequences, one result after another.

    All rows of d_query if queries are broadcast.
    """
    found = []
    for name, array in zip(RESULTS[direction], result, strict=True):
        rows = np.arange(array.shape[0])
        if not (name == "d_query" and inputs.arrays.cu_seqlens_q is None):
            begin, end = _offsets(inputs, is_key=name in ("d_key", "d_value"))
            rows = np.concatenate([np.arange(begin[b], end[b]) for b in sequences])
        found.append(np.asarray(array[jnp.asarray(rows, jnp.int32)]))
    return np.concatenate(found)


def _offsets(inputs: Inputs, is_key: bool) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of every sequence among the keys, or among the rows of the result."""
    arrays = inputs.arrays
    cu = arrays.cu_seqlens_kv if is_key else arrays.cu_seqlens_q
    if cu is None:
        offsets = np.arange(arrays.cu_seqlens_kv.shape[0]) * arrays.query.shape[0]
    else:
        offsets = np.asarray(cu)
    return offsets[:-1], offsets[1:]


def oracle(
    sizes: Sizes, inputs: Inputs, sequences: Sequence[int], direction: str
) -> tuple[np.ndarray, np.ndarray]:
    """Exact f32 results of some sequences alone, and the errors that the error rule admits.

    The rule, for each of `RESULTS[direction]`: twice the error of the same computation with weights
    and gradients of scores rounded to the inputs' dtype before they meet another operand, and one
    rounding of the largest value. d_query of broadcast queries sums over all sequences, not over
    some.

    Returns:
      What `checked_rows` should be, [rows, N, H], and bounds, [rows, 1, 1].
    """
    names = RESULTS[direction]
    found: dict[str, list] = {name: [] for name in names}
    of_one = tuple(x for x in names if not (x == "d_query" and sizes.broadcast_q))
    for sequence in sequences:
        results = _exact_and_plain(sizes, inputs, jnp.int32(sequence), of_one)
        for name in of_one:
            begin, end = _offsets(inputs, is_key=name in ("d_key", "d_value"))
            length = end[sequence] - begin[sequence]
            found[name].append(np.stack([np.asarray(x[name])[:length] for x in results]))
    if of_one != names:
        found["d_query"] = [np.asarray(_summed_d_query(sizes, inputs))]
    finfo = jnp.finfo(sizes.dtype)
    exact_parts, bounds = [], []
    for name in names:
        exact, plain = np.concatenate(found[name], axis=1)
        plain = plain.astype(jnp.dtype(sizes.dtype)).astype(np.float32)
        bound = 2 * np.abs(plain - exact).max() + float(finfo.eps) / 2 * np.abs(exact).max()
        exact_parts.append(exact)
        bounds.append(np.full((len(exact), 1, 1), bound))
    return np.concatenate(exact_parts), np.concatenate(bounds)


def worst(found: np.ndarray, exact: np.ndarray, bounds: np.ndarray) -> tuple[float, float]:
    """The error that comes nearest to its bound or goes furthest beyond it, and that bound."""
    errors = np.abs(found.astype(np.float64) - exact)
    # A NaN is the largest.
    place = np.unravel_index(np.argmax(errors / bounds), errors.shape)
    return float(errors[place]), float(np.broadcast_to(bounds, errors.shape)[place])


@functools.partial(jax.jit, static_argnums=(0, 3))
def _exact_and_plain(
    sizes: Sizes, inputs: Inputs, sequence: jax.Array, names: tuple[str, ...]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """f32 results of one sequence, padded to the longest: by the reference, and by `_plain`."""
    one = _one_sequence(sizes, inputs, sequence)
    floats = (x.astype(jnp.float32) for x in one.arrays[:3])
    out, pull = jax.vjp(
        lambda *x: reference.materialised(Arrays(*x, *one.arrays[3:]), sizes.settings), *floats
    )
    exact = (out, *pull(one.d_out.astype(jnp.float32)))
    every = (
        dict(zip(RESULTS["both"], results, strict=True)) for results in (exact, _plain(sizes, one))
    )
    exact_results, plain_results = ({name: x[name] for name in names} for x in every)
    return exact_results, plain_results


@functools.partial(jax.jit, static_argnums=0)
def _summed_d_query(sizes: Sizes, inputs: Inputs) -> jax.Array:
    """[2, T, N, H] f32: exact and plain d_query of broadcast queries, of all sequences."""

    def add(total: jax.Array, sequence: jax.Array) -> tuple[jax.Array, None]:
        results = _exact_and_plain(sizes, inputs, sequence, ("d_query",))
        return total + jnp.stack([x["d_query"] for x in results]), None

    zeros = jnp.zeros((2, *inputs.arrays.query.shape), jnp.float32)
    return jax.lax.scan(add, zeros, jnp.arange(sizes.batch, dtype=jnp.int32))[0]


def _one_sequence(sizes: Sizes, inputs: Inputs, sequence: jax.Array) -> Inputs:
    """The inputs of one sequence; what lies past its last row is of no sequence."""
    arrays = inputs.arrays

    def rows(array: jax.Array, begin: jax.Array, longest: int) -> jax.Array:
        row = begin + jnp.arange(longest, dtype=jnp.int32)
        return array[jnp.minimum(row, array.shape[0] - 1)]

    def alone(cu: jax.Array) -> jax.Array:
        return jnp.stack([jnp.zeros_like(sequence), cu[sequence + 1] - cu[sequence]])

    begin_kv = arrays.cu_seqlens_kv[sequence]
    key, value = (rows(x, begin_kv, sizes.kv_len) for x in (arrays.key, arrays.value))
    query, cu_q, begin_q = arrays.query, None, sequence * sizes.q_len
    if arrays.cu_seqlens_q is not None:
        begin_q, cu_q = arrays.cu_seqlens_q[sequence], alone(arrays.cu_seqlens_q)
        query = rows(query, begin_q, sizes.q_len)
    one = Arrays(query, key, value, cu_q, alone(arrays.cu_seqlens_kv))
    return Inputs(one, rows(inputs.d_out, begin_q, sizes.q_len))


def _plain(sizes: Sizes, one: Inputs) -> tuple[jax.Array, ...]:
    """`RESULTS["both"]` of one sequence in f32, operands of products in the inputs' dtype."""
    (query, key, value, cu_q, cu_kv, _), settings = one.arrays, sizes.settings

    def product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            axes, a.astype(b.dtype), b, preferred_element_type=jnp.float32, precision="highest"
        )

    seen = (jnp.arange(key.shape[0], dtype=jnp.int32) < cu_kv[1])[None]
    if cu_q is not None:
        seen = seen & (jnp.arange(query.shape[0], dtype=jnp.int32) < cu_q[1])[:, None]
    scale, output_scale = jnp.float32(settings.scale), jnp.float32(settings.output_scale)
    scores = scale * product("inh,jnh->nij", query, key)
    d_weights = product("inh,jnh->nij", one.d_out, value)
    if sizes.activation == SOFTMAX:
        weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), 0)
        d_weights -= jnp.sum(weights * d_weights, axis=-1, keepdims=True)
        d_scores = weights * d_weights
    else:
        activation = elementwise(sizes.activation, sizes.approx)
        weights = jnp.where(seen, activation.value(scores), 0)
        d_scores = jnp.where(seen, activation.slope(scores) * d_weights, 0)
    return (
        output_scale * product("nij,jnh->inh", weights, value),
        scale * output_scale * product("nij,jnh->inh", d_scores, key),
        scale * output_scale * product("nij,inh->jnh", d_scores, query),
        output_scale * product("nij,inh->jnh", weights, one.d_out),
    )
