"""Masks of generalised dot-product attention as dense rules, and oracles in NumPy's f64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import problems_gdpa
from problems_gdpa import Shape

import ikbo_jax as ikbo
from ikbo_jax import masks
from ikbo_jax.reference.gdpa import Arrays, Settings, out_shape

#: Takes a sequence's number, queries and keys; returns [queries, keys] bool.
Rule = Callable[[int, int, int], np.ndarray]


class Case(NamedTuple):
    """A mask and its rule, of query sequences with these lengths."""

    mask: masks.Mask
    rule: Rule


def sees(
    queries: int,
    length: int,
    targets: int = 0,
    contextual: int = 0,
    window: int | None = None,
    full_tail: int = 0,
    target_group_size: int = 1,
    causal: bool = True,
) -> np.ndarray:
    """HSTU's rule, pair by pair: [queries, length] bool."""
    contextual = min(max(contextual, 0), length)
    targets = min(max(targets, 0), length - contextual)
    last = (length - contextual + 1 if contextual else length) - targets
    found = np.zeros((queries, length), bool)

    def number(i: int) -> int:
        return min(max(i - contextual + 1, 0) if contextual else i, last)

    for row in range(queries):
        i = length - queries + row
        for j in range(length) if i >= 0 else ():
            gap = number(i) - number(j)
            gap = gap if causal else abs(gap)
            is_full = full_tail > 0 and number(i) >= last - full_tail
            is_near = window is None or gap <= window or is_full
            first = length - targets
            of_group = i >= first and j >= first and (not causal or j <= i)
            of_group &= (i - first) // target_group_size == (j - first) // target_group_size
            of_context = contextual > 0 and number(i) == 0 and number(j) < last
            found[row, j] = i == j or (gap > 0 and is_near) or of_context or of_group
    return found


def causal(window: int | None = None) -> Case:
    """A mask of `masks.causal`."""

    def rule(_: int, queries: int, length: int) -> np.ndarray:
        return sees(queries, length, window=window)

    return Case(masks.causal(window), rule)


def hstu_case(
    targets: tuple[int, ...] | None, contextual: int | tuple[int, ...] = 0, **numbers: Any
) -> Case:
    """A mask of `masks.hstu`."""

    def array(values: Any) -> Any:
        return np.asarray(values, np.int32) if isinstance(values, tuple) else values

    def rule(sequence: int, queries: int, length: int) -> np.ndarray:
        mine = 0 if targets is None else targets[sequence]
        tokens = contextual[sequence] if isinstance(contextual, tuple) else contextual
        return sees(queries, length, mine, tokens, **numbers)

    return Case(masks.hstu(array(targets), contextual=array(contextual), **numbers), rule)


def intervals_case(shape: Shape, columns: int, seed: int = 0) -> Case:
    """A mask of drawn intervals: some are empty, overlap, or leave the sequence."""
    rng, batch = np.random.default_rng(seed), len(shape.q_to_kv or shape.kv_lens)
    if isinstance(shape.q_lens, int):
        rows, starts = shape.q_lens * batch, [shape.q_lens * i for i in range(batch)]
    else:
        rows = shape.before + sum(shape.q_lens) + shape.after
        starts = list(shape.before + np.cumsum((0, *shape.q_lens)))
    begin, end = rng.integers(-2, max(shape.kv_lens) + 3, (2, rows, columns), dtype=np.int32)

    def rule(sequence: int, queries: int, length: int) -> np.ndarray:
        mine = slice(starts[sequence], starts[sequence] + queries)
        key = np.arange(length)
        return np.any((key >= begin[mine, :, None]) & (key < end[mine, :, None]), axis=1)

    return Case(masks.intervals(begin, end), rule)


def cases(shape: Shape) -> dict[str, Case]:
    """One case for every kind of mask and every number."""
    batch = len(shape.q_to_kv or shape.kv_lens)
    targets = tuple(np.random.default_rng(3).integers(0, 5, batch).tolist())
    tokens = tuple(np.random.default_rng(4).integers(0, 3, batch).tolist())
    return {
        "causal": causal(),
        "window": causal(2),
        "targets": hstu_case(targets),
        "targets_and_window": hstu_case(targets, 2, window=3, full_tail=2),
        "groups": hstu_case(targets, tokens, target_group_size=2),
        "both_ways": hstu_case(targets, 1, window=2, target_group_size=3, causal=False),
        "interval": intervals_case(shape, 1),
        "two_intervals": intervals_case(shape, 2),
    }


def _of_sequences(arrays: Arrays, settings: Settings, rule: Rule) -> Any:
    """`problems_gdpa.sequences`, with the mask and the weights [N, i, j] of every sequence."""
    for number, found in enumerate(problems_gdpa.sequences(arrays, settings)):
        scores = found[-1]
        seen = rule(number, *scores.shape[1:])
        weights = np.zeros_like(scores)
        for head, name in enumerate(settings.activations):
            some = seen.any(axis=1) if name == "softmax" else slice(None)
            x = np.where(seen, scores[head], -np.inf) if name == "softmax" else scores[head]
            weights[head][some] = problems_gdpa.numpy_activation(name, x[some])
        yield *found, seen, np.where(seen, weights, 0)


def oracle(
    arrays: Arrays, settings: Settings, d_out: Any, rule: Rule
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Out, and the gradients of query, key and value, in f64."""
    query, key, _, d_out = (np.asarray(x).astype(np.float64) for x in (*arrays[:3], d_out))
    out = np.zeros(out_shape(arrays, settings))
    d_query, d_key, d_value = (np.zeros(x.shape) for x in arrays[:3])

    def of_key_heads(x: np.ndarray) -> np.ndarray:
        heads = x.shape[1] // key.shape[1]
        return x.reshape(len(x), key.shape[1], heads, key.shape[2]).sum(2)

    for rows, of_keys, of_out, keys, values, scores, seen, weights in _of_sequences(
        arrays, settings, rule
    ):
        out[of_out] = settings.output_scale * np.einsum("nij,jnh->inh", weights, values)
        upstream = settings.output_scale * d_out[of_out]
        d_scores = np.einsum("inh,jnh->nij", upstream, values)
        for head, name in enumerate(settings.activations):
            if name == "softmax":
                mean = np.sum(weights[head] * d_scores[head], axis=-1, keepdims=True)
                d_scores[head] = weights[head] * (d_scores[head] - mean)
            else:
                d_scores[head] *= problems_gdpa.numpy_slope(name, scores[head])
        d_scores = problems_gdpa.score_slope(settings, scores) * np.where(seen, d_scores, 0)
        d_query[rows] += np.einsum("nij,jnh->inh", d_scores, keys)
        d_key[of_keys] += of_key_heads(np.einsum("nij,inh->jnh", d_scores, query[rows]))
        d_value[of_keys] += of_key_heads(np.einsum("nij,inh->jnh", weights, upstream))
    return out, (d_query, d_key, d_value)


def lse(arrays: Arrays, settings: Settings, rule: Rule) -> np.ndarray:
    """The logarithm of the sum of a row's powers over the keys that it sees, [rows, N]."""
    found = np.full(out_shape(arrays, settings)[:2], -np.inf)
    for _, _, of_out, _, _, scores, seen, _ in _of_sequences(arrays, settings, rule):
        found[of_out] = np.logaddexp.reduce(np.where(seen, scores, -np.inf), axis=2).T
    return found


def attend(arrays: Arrays, mask: masks.Mask, **options: Any) -> jax.Array:
    """`gdpa` of arrays and a mask, with the scales of `problems_gdpa`."""
    scales = {"scale": problems_gdpa.SCALE, "output_scale": problems_gdpa.OUTPUT_SCALE}
    broadcast_q = arrays.cu_seqlens_q is None
    options = {"q_to_kv": arrays.q_to_kv, "broadcast_q": broadcast_q, **scales, **options}
    return ikbo.gdpa(*arrays[:5], mask=mask, **options)
