"""Masks of generalised dot-product attention as dense rules."""

from typing import Any, NamedTuple

import jax
import numpy as np
import problems_gdpa
from problems_gdpa import Rule, Shape

from ikbo_jax import masks
from ikbo_jax.reference.gdpa import Arrays


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
        "both_ways": hstu_case(targets, 1, window=2, target_group_size=3, causal=np.False_),
        "interval": intervals_case(shape, 1),
        "two_intervals": intervals_case(shape, 2),
    }


def attend(arrays: Arrays, mask: masks.Mask, **options: Any) -> jax.Array:
    """`gdpa` of arrays and a mask, with the scales of `problems_gdpa`."""
    return problems_gdpa.attend(arrays, mask=mask, **options)
