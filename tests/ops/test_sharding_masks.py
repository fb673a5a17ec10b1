"""`gdpa` with masks on eight devices: rows, heads, and the arrays of the masks are divided."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import mesh_of, step_of

import ikbo_jax as ikbo
from ikbo_jax import masks


@pytest.mark.parametrize("has_mask", [False, True])
def test_inside_shard_map_every_device_has_its_own_sequences(has_mask: bool) -> None:
    """Offsets, the index and targets vary over the devices; the memory does not."""
    mesh = mesh_of("8", "auto")
    rng = np.random.default_rng(0)
    query, memory = (rng.normal(size=(n, 2, 4)).astype(np.float32) for n in (40, 9))
    offsets = np.tile(np.asarray([0, 2, 5], np.int32), 8)
    targets = np.asarray(rng.integers(0, 3, 16), np.int32)
    index = np.asarray(rng.integers(0, 2, 16), np.int32)
    memory_offsets = np.asarray([0, 4, 9], np.int32)

    def part(query: Any, memory: Any, offsets: Any, targets: Any, index: Any) -> jax.Array:
        options = {"activation": ("softmax", "silu"), "q_to_kv": index}
        mask = masks.hstu(targets) if has_mask else None
        return ikbo.gdpa(query, memory, memory, offsets, memory_offsets, mask=mask, **options)

    def op(*arrays: Any) -> jax.Array:
        specs = (P("x"), P(), P("x"), P("x"), P("x"))
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P("x"))(*arrays)

    found, out = step_of(op)(query, memory, offsets, targets, index)

    def alone(query: Any, memory: Any, *others: Any) -> jax.Array:
        parts = zip(*(x.reshape(8, -1, *x.shape[1:]) for x in (query, *others)), strict=True)
        return jax.numpy.concatenate([part(q, memory, *rest) for q, *rest in parts])

    expected, exact = step_of(alone)(query, memory, offsets, targets, index)
    chex.assert_trees_all_close(out, exact, atol=1e-5)
    chex.assert_trees_all_close(found, expected, atol=1e-4)
