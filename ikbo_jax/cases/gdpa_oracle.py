"""The oracle of gdpa: results and gradients where query sequence b has key sequence b."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.gdpa import Case, masks, one_sequence, rows_from
from ikbo_jax.reference.activations import SOFTMAX, elementwise
from ikbo_jax.reference.gdpa import Arrays, materialised

#: Names of the results of each direction, in order.
RESULTS = {
    "forward": ("out",),
    "backward": ("d_query", "d_key", "d_value"),
    "both": ("out", "d_query", "d_key", "d_value"),
}


class Inputs(NamedTuple):
    """The op's arrays, and a cotangent of the result."""

    arrays: Arrays
    d_out: jax.Array


def checked_rows(
    case: Case, result: Sequence[jax.Array], sequences: Sequence[int], direction: str
) -> np.ndarray:
    """Concatenates the results of some sequences to [rows, N, H].

    If queries are broadcast, the result includes all rows of d_query.
    """
    found = []
    for name, array in zip(RESULTS[direction], result, strict=True):
        rows = np.arange(array.shape[0])
        if not (name == "d_query" and case.problem.broadcast_q):
            offsets = _offsets(case, name)
            rows = np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in sequences])
        found.append(np.asarray(array[jnp.asarray(rows, jnp.int32)]))
    return np.concatenate(found)


def _offsets(case: Case, name: str) -> np.ndarray:
    offsets = case.sequences.keys if name in ("d_key", "d_value") else case.sequences.queries
    if offsets is None:
        return np.arange(case.problem.batch + 1) * case.broadcast_queries
    return offsets


def expected(
    case: Case, inputs: Inputs, sequences: Sequence[int], direction: str
) -> tuple[np.ndarray, np.ndarray]:
    """Computes exact f32 results of some sequences, and the errors that the error rule allows.

    For each of `RESULTS[direction]`, same-dtype jnp is a computation that rounds activated scores
    and gradients of scores to the inputs' dtype before they are multiplied by another operand.
    d_query of broadcast queries is a sum over all sequences.

    Returns:
      The expected result of `checked_rows`, [rows, N, H], and bounds, [rows, 1, 1].
    """
    names, dtype = RESULTS[direction], jnp.dtype(case.problem.dtype)
    found: dict[str, list] = {name: [] for name in names}
    per_sequence = tuple(x for x in names if not (x == "d_query" and case.problem.broadcast_q))
    for sequence in sequences:
        results = _exact_and_rounded(case, inputs, jnp.int32(sequence), per_sequence)
        for name in per_sequence:
            begin, end = _offsets(case, name)[sequence : sequence + 2]
            found[name].append(np.stack([np.asarray(x[name])[: end - begin] for x in results]))
    if per_sequence != names:
        found["d_query"] = [np.asarray(_summed_d_query(case, inputs))]
    exact_parts, bounds = [], []
    for name in names:
        exact, rounded = np.concatenate(found[name], axis=1)
        plain_error = np.abs(rounded.astype(dtype).astype(np.float32) - exact).max()
        bound = error_rule.bound(float(plain_error), float(np.abs(exact).max()), dtype, terms=0)
        exact_parts.append(exact)
        bounds.append(np.full((len(exact), 1, 1), bound))
    return np.concatenate(exact_parts), np.concatenate(bounds)


def worst_error(found: np.ndarray, exact: np.ndarray, bounds: np.ndarray) -> Check:
    """Returns the error with the largest ratio to its bound, and this bound."""
    errors = np.abs(found.astype(np.float64) - exact)
    # argmax treats NaN as the largest value.
    place = np.unravel_index(np.argmax(errors / bounds), errors.shape)
    return Check(float(errors[place]), float(np.broadcast_to(bounds, errors.shape)[place]))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _exact_and_rounded(
    case: Case, inputs: Inputs, sequence: jax.Array, names: tuple[str, ...]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Computes one sequence in f32, padded to the longest: by the reference, and by `_rounded`."""
    arrays, begin = one_sequence(case, inputs.arrays, sequence)
    one = Inputs(arrays, rows_from(inputs.d_out, begin, arrays.query.shape[0]))
    *floats, d_out = (x.astype(jnp.float32) for x in (*arrays[:3], one.d_out))
    out, pull = jax.vjp(
        lambda *x: materialised(Arrays._make([*x, *arrays[3:]]), case.settings), *floats
    )
    exact = (out, *pull(d_out))
    both = (dict(zip(RESULTS["both"], x, strict=True)) for x in (exact, _rounded(case, one)))
    exact_results, rounded_results = ({name: x[name] for name in names} for x in both)
    return exact_results, rounded_results


@functools.partial(jax.jit, static_argnums=0)
def _summed_d_query(case: Case, inputs: Inputs) -> jax.Array:
    """Sums d_query of broadcast queries over all sequences, exact and rounded: [2, T, N, H] f32."""

    def add(total: jax.Array, sequence: jax.Array) -> tuple[jax.Array, None]:
        results = _exact_and_rounded(case, inputs, sequence, ("d_query",))
        return total + jnp.stack([x["d_query"] for x in results]), None

    zeros = jnp.zeros((2, *inputs.arrays.query.shape), jnp.float32)
    return jax.lax.scan(add, zeros, jnp.arange(case.problem.batch, dtype=jnp.int32))[0]


def _rounded(case: Case, one: Inputs) -> tuple[jax.Array, ...]:
    """Computes `RESULTS["both"]` in f32, with operands rounded to the inputs' dtype.

    All heads have one activation, and as many key heads as query heads.
    """
    (query, key, value, *_), settings = one.arrays, case.settings

    def product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            axes, a.astype(b.dtype), b, preferred_element_type=jnp.float32, precision="highest"
        )

    is_query, is_key = masks(one.arrays)
    mask = is_query[:, None] & is_key[None]
    scale, output_scale = jnp.float32(settings.scale), jnp.float32(settings.output_scale)
    scores = scale * product("inh,jnh->nij", query, key)
    d_activated = product("inh,jnh->nij", one.d_out, value)
    if settings.activations[0] == SOFTMAX:
        activated = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0)
        d_activated -= jnp.sum(activated * d_activated, axis=-1, keepdims=True)
        d_scores = activated * d_activated
    else:
        activation = elementwise(settings.activations[0], settings.approx)
        activated = jnp.where(mask, activation.value(scores), 0)
        d_scores = jnp.where(mask, activation.slope(scores) * d_activated, 0)
    return (
        output_scale * product("nij,jnh->inh", activated, value),
        scale * output_scale * product("nij,jnh->inh", d_scores, key),
        scale * output_scale * product("nij,inh->jnh", d_scores, query),
        output_scale * product("nij,inh->jnh", activated, one.d_out),
    )
