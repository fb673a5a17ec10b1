"""Copies of candidates' queries by threads: 16 bytes each, several of them in flight."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import per_thread, stores

#: Accesses of 16 bytes of a thread, which are in flight at once, and 16-bit numbers of one.
ACCESSES, VECTOR = 4, 8


def load(query: Any, candidate: jax.Array, vector: jax.Array) -> tuple[jax.Array, ...]:
    """The words of a candidate's vector, one vector for each thread."""
    size = math.prod(query.shape[1:])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(per_thread.LAYOUT,) * 2),
        return_type=(per_thread.INT32,) * 4,
    )
    def issue(_: Any, query: ir.Value, *arrays: mgpu.FragmentedArray) -> Any:
        candidate, vector = map(per_thread.scalar, arrays)
        address = stores.device_address(query, [(candidate, size), (vector, VECTOR)], 2)
        words = per_thread.load_words(address, 4, is_early=True)
        return tuple(per_thread.array(x, arrays[0]) for x in words)

    found: tuple[jax.Array, ...] = issue(query, candidate, vector)
    return found


def store(
    query: Any,
    place: jax.Array,
    vector: jax.Array,
    words: tuple[jax.Array, ...],
    is_wanted: jax.Array,
) -> None:
    """Stores words of `load`."""
    size = math.prod(query.shape[1:])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(per_thread.LAYOUT,) * 7))
    def issue(_: Any, query: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        place, vector, wanted, *words = map(per_thread.scalar, arrays)
        address = stores.device_address(query, [(place, size), (vector, VECTOR)], 2)
        zero = mgpu.c(0, ir.IntegerType.get_signless(32))
        per_thread.store_words(address, words, arith.cmpi(arith.CmpIPredicate.ne, wanted, zero))

    issue(query, place, vector, is_wanted.astype(jnp.int32), *words)


def prefetch(query: Any, first: Any, line: jax.Array, is_wanted: jax.Array) -> None:
    """Asks L2 for a line of 128 bytes for each thread that wants it, from a candidate's on.

    The lines are consecutive ones of the array, and `line` is the number of one.
    """
    size = math.prod(query.shape[1:])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(per_thread.LAYOUT,) * 3))
    def issue(_: Any, query: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        first, line, wanted = map(per_thread.scalar, arrays)
        address = stores.device_address(query, [(first, size), (line, 64)], 2)
        zero = mgpu.c(0, ir.IntegerType.get_signless(32))
        mgpu.utils.inline_ptx(
            "prefetch.global.L2 [$0];",
            address,
            predicate=arith.cmpi(arith.CmpIPredicate.ne, wanted, zero),
            has_side_effects=True,
        )

    issue(query, per_thread.same(0) + first, line, is_wanted.astype(jnp.int32))
