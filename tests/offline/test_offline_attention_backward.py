"""Attention's backward kernel compiled for sm_90a without a GPU: no spills, no serial WGMMAs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel
from ikbo_jax.pallas.hopper import mma
from ikbo_jax.problems import AttentionProblem
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig as Config
from ikbo_jax.problems.hopper import MAX_SMEM_BYTES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and a configuration."""

    config: Config
    head_dim: int = 128
    q_heads: int = 2
    q_len: int = 64
    kv_len: int = 1024
    dtype: str = "bfloat16"
    has_lengths: bool = True
    sum_dtype: str | None = None

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            2048, 32, self.q_len, self.kv_len, self.q_heads, 2, self.head_dim, self.dtype
        )

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        p, shape, dtype = self.problem, jax.ShapeDtypeStruct, jnp.dtype(self.dtype)
        kernel = functools.partial(
            attention_backward_kernel,
            scale=0.0884,
            indices_are_sorted=True,
            config=self.config,
            num_sms=132,
            dtype=self.sum_dtype,
        )
        query = shape((p.batch, p.q_len, p.q_heads, p.head_dim), dtype)
        key = shape((p.users, p.kv_len, p.kv_heads, p.head_dim), dtype)
        lengths = shape((p.users,), jnp.int32) if self.has_lengths else None
        lse = shape(query.shape[:-1], jnp.float32)
        return (
            kernel,
            query,
            key,
            key,
            shape((p.batch,), jnp.int32),
            lengths,
            query,
            lse,
            query,
            lse,
        )


CASES = {
    "h128": Case(Config(64)),
    "h128_f16_parts": Case(Config(64, d_query="parts"), dtype="float16", has_lengths=False),
    "h128_one_tile": Case(Config(64), kv_len=128),
    "h128_few_queries": Case(Config(16, 2, 2, d_query="parts"), q_len=1, q_heads=8),
    "h128_narrow": Case(Config(32, 2, 2), q_len=16),
    "h128_two_launches": Case(Config(64, 3, d_query="launch")),
    "h128_two_launches_wide": Case(Config(64, 3, 1, "launch", 96, 2), dtype="float16"),
    "h64_two_launches": Case(Config(128, 2, 1, "launch", 128, 3), 64, has_lengths=False),
    "h128_f32_sums": Case(Config(64), sum_dtype="float32"),
    "h64_f32_sums": Case(Config(128), 64, sum_dtype="float32"),
    "h128_two_launches_f32_sums": Case(Config(64, 3, d_query="launch"), sum_dtype="float32"),
    "h64_split_queries": Case(Config(128, splits=4), 64, q_len=1),
    "h96_widest": Case(Config(64), 96),
    "h64_widest": Case(Config(128), 64),
    "h64_few_queries": Case(Config(16, 4, 2, d_query="parts"), 64, q_len=1),
}


@pytest.mark.parametrize("name", CASES)
def test_offline_attention_backward_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    case = CASES[name]
    assert case.config.illegal_reason(case.problem) is None
    launches = compiler.compile(*case.launch())
    assert len(launches) == 1 + (case.config.d_query == "launch")
    for compiled in launches:
        assert not compiled.faults
        assert compiled.smem_bytes <= case.config.smem_bytes(case.head_dim) <= MAX_SMEM_BYTES


# The check itself must be able to fail.


@pytest.mark.parametrize("function", ["_block", "_last_d_query"])
def test_offline_missing_wait_is_found(
    function: str, compiler: offline.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the waits for a block's products, or for a tile's sums, ptxas sees accumulators that
    are read while WGMMAs write them."""
    wait, left_out = mma.wait, []

    def planted(pending: int, *, interpret: bool) -> None:
        if sys._getframe(1).f_code.co_name == function:
            left_out.append(pending)
        else:
            wait(pending, interpret=interpret)

    monkeypatch.setattr(mma, "wait", planted)
    (compiled,) = compiler.compile(*CASES["h64_few_queries"].launch())
    assert left_out
    assert compiled.ptxas.serialized
