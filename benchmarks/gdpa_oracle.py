"""The oracle of the benchmark of generalised dot-product attention, for results and gradients."""

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
    """The results of a direction for some sequences, concatenated to [rows, N, H].

    If queries are broadcast, all rows of d_query are included.
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
    """Start and end of every sequence in the rows of the keys, or in the rows of the result."""
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
    """Exact f32 results of some sequences, and the largest errors that the error rule allows.

    For each of `RESULTS[direction]`, the rule allows twice the error of a computation that rounds
    activated scores and gradients of scores to the inputs' dtype before they are multiplied by
    another operand, plus one rounding of the largest value. d_query of broadcast queries is a sum
    over all sequences.

    Returns:
      The expected result of `checked_rows`, [rows, N, H], and bounds, [rows, 1, 1].
    """
    names = RESULTS[direction]
    found: dict[str, list] = {name: [] for name in names}
    per_sequence = tuple(x for x in names if not (x == "d_query" and sizes.broadcast_q))
    for sequence in sequences:
        results = _exact_and_rounded(sizes, inputs, jnp.int32(sequence), per_sequence)
        for name in per_sequence:
            begin, end = _offsets(inputs, is_key=name in ("d_key", "d_value"))
            length = end[sequence] - begin[sequence]
            found[name].append(np.stack([np.asarray(x[name])[:length] for x in results]))
    if per_sequence != names:
        found["d_query"] = [np.asarray(_summed_d_query(sizes, inputs))]
    finfo = jnp.finfo(sizes.dtype)
    exact_parts, bounds = [], []
    for name in names:
        exact, rounded = np.concatenate(found[name], axis=1)
        rounded = rounded.astype(jnp.dtype(sizes.dtype)).astype(np.float32)
        bound = 2 * np.abs(rounded - exact).max() + float(finfo.eps) / 2 * np.abs(exact).max()
        exact_parts.append(exact)
        bounds.append(np.full((len(exact), 1, 1), bound))
    return np.concatenate(exact_parts), np.concatenate(bounds)


def worst_error(found: np.ndarray, exact: np.ndarray, bounds: np.ndarray) -> tuple[float, float]:
    """The error with the largest ratio to its bound, and that bound."""
    errors = np.abs(found.astype(np.float64) - exact)
    # argmax treats NaN as the largest value.
    place = np.unravel_index(np.argmax(errors / bounds), errors.shape)
    return float(errors[place]), float(np.broadcast_to(bounds, errors.shape)[place])


@functools.partial(jax.jit, static_argnums=(0, 3))
def _exact_and_rounded(
    sizes: Sizes, inputs: Inputs, sequence: jax.Array, names: tuple[str, ...]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """f32 results of one sequence, padded to the longest: by the reference, and by `_rounded`."""
    one = _one_sequence(sizes, inputs, sequence)
    floats = (x.astype(jnp.float32) for x in one.arrays[:3])
    out, pull = jax.vjp(
        lambda *x: reference.materialised(Arrays(*x, *one.arrays[3:]), sizes.settings), *floats
    )
    exact = (out, *pull(one.d_out.astype(jnp.float32)))
    both = (
        dict(zip(RESULTS["both"], results, strict=True))
        for results in (exact, _rounded(sizes, one))
    )
    exact_results, rounded_results = ({name: x[name] for name in names} for x in both)
    return exact_results, rounded_results


@functools.partial(jax.jit, static_argnums=0)
def _summed_d_query(sizes: Sizes, inputs: Inputs) -> jax.Array:
    """[2, T, N, H] f32: d_query of broadcast queries over all sequences, exact and rounded."""

    def add(total: jax.Array, sequence: jax.Array) -> tuple[jax.Array, None]:
        results = _exact_and_rounded(sizes, inputs, sequence, ("d_query",))
        return total + jnp.stack([x["d_query"] for x in results]), None

    zeros = jnp.zeros((2, *inputs.arrays.query.shape), jnp.float32)
    return jax.lax.scan(add, zeros, jnp.arange(sizes.batch, dtype=jnp.int32))[0]


def _one_sequence(sizes: Sizes, inputs: Inputs, sequence: jax.Array) -> Inputs:
    """The inputs of one sequence, padded to the longest with rows outside the sequence."""
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


def _rounded(sizes: Sizes, one: Inputs) -> tuple[jax.Array, ...]:
    """`RESULTS["both"]` of one sequence in f32, with operands rounded to the inputs' dtype."""
    (query, key, value, cu_q, cu_kv, _), settings = one.arrays, sizes.settings

    def product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            axes, a.astype(b.dtype), b, preferred_element_type=jnp.float32, precision="highest"
        )

    mask = (jnp.arange(key.shape[0], dtype=jnp.int32) < cu_kv[1])[None]
    if cu_q is not None:
        mask = mask & (jnp.arange(query.shape[0], dtype=jnp.int32) < cu_q[1])[:, None]
    scale, output_scale = jnp.float32(settings.scale), jnp.float32(settings.output_scale)
    scores = scale * product("inh,jnh->nij", query, key)
    d_activated = product("inh,jnh->nij", one.d_out, value)
    if sizes.activation == SOFTMAX:
        activated = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0)
        d_activated -= jnp.sum(activated * d_activated, axis=-1, keepdims=True)
        d_scores = activated * d_activated
    else:
        activation = elementwise(sizes.activation, sizes.approx)
        activated = jnp.where(mask, activation.value(scores), 0)
        d_scores = jnp.where(mask, activation.slope(scores) * d_activated, 0)
    return (
        output_scale * product("nij,jnh->inh", activated, value),
        scale * output_scale * product("nij,jnh->inh", d_scores, key),
        scale * output_scale * product("nij,inh->jnh", d_scores, query),
        output_scale * product("nij,inh->jnh", activated, one.d_out),
    )
