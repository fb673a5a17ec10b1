"""Arrays of a weak type, such as a broadcast Python number: results have the documented dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import ikbo_jax as ikbo


def weak(*shape: int) -> jax.Array:
    array = jnp.broadcast_to(jnp.asarray(0.5), shape)
    assert array.weak_type
    return array


INDEX = jnp.zeros(2, jnp.int32)
OFFSETS = jnp.asarray([0, 1, 2], jnp.int32)
CALLS = {
    "attention": lambda: ikbo.attention(
        weak(2, 1, 1, 4), weak(1, 3, 1, 4), weak(1, 3, 1, 4), INDEX, return_residuals=True
    ),
    "attention without keys": lambda: ikbo.attention(
        weak(2, 1, 1, 4), weak(1, 0, 1, 4), weak(1, 0, 1, 4), INDEX, return_residuals=True
    ),
    "merge_attention": lambda: ikbo.merge_attention(
        weak(2, 1, 1, 4), weak(2, 1, 1), weak(2, 1, 1, 4), weak(2, 1, 1)
    ),
    "gdpa": lambda: ikbo.gdpa(weak(2, 1, 4), weak(2, 1, 4), weak(2, 1, 4), OFFSETS, OFFSETS),
    "linear_compression": lambda: ikbo.linear_compression(
        weak(2, 3), weak(2, 3), weak(2, 3, 4), weak(1, 3, 4), INDEX
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_have_no_weak_type(name: str) -> None:
    """A weak float32 added to a bfloat16 would be a bfloat16."""
    for result in jax.tree.leaves(jax.eval_shape(CALLS[name])):
        assert result.dtype == jnp.float32
        assert not result.weak_type
