"""The PTX of the kernel for lse and delta of every query row, executed on a CPU."""

from __future__ import annotations

import sys

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.attention_backward import rows

pytestmark = [
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux"),
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "group", "has_d_lse", "is_sorted"),
    [
        ("bfloat16", 64, 2, 1, True, True),
        ("float16", 96, 1, 3, False, False),
        ("bfloat16", 256, 2, 2, True, False),
    ],
)
def test_emulated_statistics_are_those_of_xla(
    dtype: str,
    head_dim: int,
    kv_heads: int,
    group: int,
    has_d_lse: bool,
    is_sorted: bool,
    sm90: emulator.Emulator,
) -> None:
    batch, q_len, block_q, users = 9, 3, 32, 4
    rng = np.random.default_rng(0)
    shape = (batch, q_len, kv_heads * group, head_dim)
    out, d_out = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    lse = rng.normal(size=shape[:3]).astype(np.float32)
    lse[0, 0], lse[1, 0], lse[2, 0] = -np.inf, 3e6, -3e6
    d_lse = jnp.asarray(rng.normal(size=shape[:3]), jnp.float32) if has_d_lse else None
    index = rng.integers(0, users, batch)
    found = rows.make_rows(
        jnp.asarray(np.sort(index) if is_sorted else index, jnp.int32),
        None,
        users=users,
        kv_len=100,
        q_len=q_len,
        group=group,
        block_q=block_q,
        splits=1,
        is_sorted=is_sorted,
    )
    arguments = (out, jnp.asarray(lse), d_out, d_lse, found, kv_heads, 8 * block_q)
    with sm90.emulated(0):
        emulated = np.asarray(rows.statistics(*arguments))
    want = np.asarray(rows.statistics(*arguments, interpret=True))
    at = np.asarray(found.targets).ravel()
    np.testing.assert_allclose(emulated[:, :, at], want[:, :, at], rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("has_x64", [False, True])
def test_emulated_statistics_are_nan_where_a_promised_order_is_wrong(
    has_x64: bool, sm90: emulator.Emulator
) -> None:
    shape = (4, 2, 1, 64)
    out, lse = jnp.ones(shape, jnp.bfloat16), jnp.zeros(shape[:3], jnp.float32)
    sizes = {"users": 3, "kv_len": 100, "q_len": 2, "group": 1, "block_q": 16, "splits": 1}
    for index, is_nan in (([0, 0, 1, 2], False), ([1, 0, 1, 2], True)):
        found = rows.make_rows(jnp.asarray(index, jnp.int32), None, is_sorted=True, **sizes)
        with sm90.emulated(0), jax.enable_x64(has_x64):
            emulated = np.asarray(rows.statistics(out, lse, out, None, found, 1, 64))
        at = np.asarray(found.targets).ravel()
        assert np.isnan(emulated[:, :, at]).all() == is_nan
        assert np.isnan(emulated[:, :, at]).any() == is_nan
