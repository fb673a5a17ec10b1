"""Attention's backward kernel compiled for sm_90a without a GPU: no spills, no serial WGMMAs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from test_offline_attention import operands

from ikbo_jax.pallas.attention_backward import products, statistics
from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel
from ikbo_jax.pallas.attention_backward.own import add_own_tokens
from ikbo_jax.pallas.worklist import numbering
from ikbo_jax.problems import AttentionBackwardProblem, AttentionProblem, attention_backward
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig as Config
from ikbo_jax.tuning import table_rows

pytestmark = pytest.mark.slow


def launch(problem, config, has_lengths, *, has_d_lse, **options) -> tuple[Any, ...]:
    """The kernel's host function, and the shapes it takes."""
    kernel = functools.partial(attention_backward_kernel, config=config, num_sms=132, **options)
    query, *rest = operands(problem, has_lengths=has_lengths)
    lse = jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32)
    return kernel, query, *rest, query, lse, query, lse if has_d_lse else None


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
    chunks: int = 1
    logit_cap: float | None = None

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            2048, 32, self.q_len, self.kv_len, self.q_heads, 2, self.head_dim, self.dtype
        )

    def launch(self) -> tuple[Any, ...]:
        options = {"scale": 0.0884, "indices_are_sorted": True, "dtype": self.sum_dtype}
        options["logit_cap"] = self.logit_cap
        return launch(self.problem, self.config, self.has_lengths, has_d_lse=True, **options)


CASES = {
    "h128": Case(Config(64)),
    "h128_f16_parts": Case(Config(64, d_query="parts"), dtype="float16", has_lengths=False),
    "h128_one_tile": Case(Config(64), kv_len=128),
    "h128_few_queries_capped": Case(
        Config(64, 2, d_query="parts"), q_len=1, q_heads=10, logit_cap=30.0
    ),
    "h128_two_launches_capped": Case(Config(64, 3, d_query="launch"), logit_cap=30.0),
    "h256_stored_capped": Case(Config(48, 2, 1, "stored", 64, 3), 256, logit_cap=30.0),
    "h128_few_queries": Case(Config(16, 2, 2, d_query="parts"), q_len=1, q_heads=8),
    "h128_narrow": Case(Config(32, 2, 2), q_len=16),
    "h96_narrow": Case(Config(32, 2, 2), 96, q_len=16),
    "h128_two_launches": Case(Config(64, 3, d_query="launch")),
    "h128_two_launches_wide": Case(Config(64, 3, 1, "launch", 96, 2), dtype="float16"),
    "h64_two_launches": Case(Config(128, 2, 1, "launch", 128, 3), 64, has_lengths=False),
    "h64_two_slots": Case(Config(64, 3, 2, "launch", 128, 3), 64, q_len=2),
    "h64_two_slots_wide_blocks": Case(Config(128, 2, 2, "launch", 128, 3), 64, q_len=8),
    "h128_two_slots": Case(Config(64, 2, 2, "launch", 64, 3), q_len=2),
    "h96_two_slots_f16": Case(Config(64, 2, 2, "launch", 64, 3), 96, q_len=2, dtype="float16"),
    "h128_stored": Case(Config(64, 3, 1, "stored", kv_stages=4)),
    "h128_stored_f16": Case(Config(64, 3, 1, "stored"), dtype="float16"),
    "h128_stored_in_chunks": Case(Config(64, 3, 1, "stored"), kv_len=16384, chunks=2),
    "h96_stored_f32_sums": Case(Config(64, 3, 1, "stored"), 96, sum_dtype="float32"),
    "h64_stored": Case(Config(128, 3, 1, "stored", kv_stages=4), 64),
    "h64_stored_overlapped": Case(Config(64, 4, 1, "stored", kv_stages=5), 64),
    "h128_stored_few_queries": Case(Config(16, 3, 2, "stored"), q_len=1, q_heads=8),
    "h128_f32_sums": Case(Config(64), sum_dtype="float32"),
    "h64_f32_sums": Case(Config(128), 64, sum_dtype="float32"),
    "h128_two_launches_f32_sums": Case(Config(64, 3, d_query="launch"), sum_dtype="float32"),
    "h64_split_queries": Case(Config(128, splits=4), 64, q_len=1),
    "h96_widest": Case(Config(64), 96),
    "h64_widest": Case(Config(128), 64),
    "h256_stored": Case(Config(48, 2, 1, "stored", 64, 3), 256),
    "h192_stored": Case(Config(64, 2, 1, "stored", 64, 4), 192, has_lengths=False),
    "h192_stored_f16": Case(Config(64, 2, 1, "stored", 64, 2), 192, dtype="float16"),
    "h256_stored_f32_sums": Case(
        Config(48, 2, 1, "stored", 64, 2, splits=2), 256, sum_dtype="float32"
    ),
    "h64_few_queries": Case(Config(16, 4, 2, d_query="parts"), 64, q_len=1),
    "h128_added_parts": Case(Config(64, d_query="parts", splits=4), q_heads=4, kv_len=300),
    "h96_added_f32_sums": Case(Config(64, 3, 1, "stored", splits=7), 96, sum_dtype="float32"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_offline_attention_backward_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    case = CASES[name]
    assert case.config.illegal_reason(case.problem) is None
    launches = compiler.compile_fit(*case.launch())
    # Numbers of rows, which the next launch may compute, too; statistics; gradients of keys and
    # values, in two launches for wide heads; d_query.
    p = case.problem
    group = p.q_heads // p.kv_heads
    sizes = numbering.Sizes(p.batch, p.users, p.kv_len, p.q_len, group, 64, 1, is_sorted=True)
    of_rows = 1 if statistics.numbers_rows(sizes, p.kv_heads) else 2
    of_keys = 1 if case.head_dim <= attention_backward.MAX_BOTH_SUMS else 2
    of_queries = 1 - case.config.has_d_query
    of_parts = case.config.has_parts
    assert len(launches) == of_rows + case.chunks * (of_keys + of_queries + of_parts)
    most = max(compiled.smem_bytes for compiled in launches)
    assert most == case.config.smem_bytes(case.head_dim)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_offline_gradient_of_own_tokens_is_fit(head_dim: int, compiler: offline.Compiler) -> None:
    rows, tokens, statistics = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((64, 8, 4, head_dim), jnp.bfloat16),
            ((64, 1, 2, head_dim), jnp.bfloat16),
            ((64, 8, 4), jnp.float32),
        )
    )
    add = functools.partial(add_own_tokens, scale=0.1)
    compiler.compile_fit(add, rows, rows, tokens, tokens, statistics, rows, statistics)


ROWS = [
    row for row in table_rows.builtin_rows() if isinstance(row.problem, AttentionBackwardProblem)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.problem.describe().replace(" ", "_"))
def test_offline_row_of_the_table_is_fit(row: table_rows.Row, compiler: offline.Compiler) -> None:
    p = row.problem
    options = {"scale": p.head_dim**-0.5, "indices_are_sorted": False}
    compiler.compile_fit(*launch(p, row.config, has_lengths=False, has_d_lse=False, **options))


# The check itself must be able to fail.


def test_offline_wide_descriptors_are_found(compiler, monkeypatch) -> None:
    """Products of 64 bits in descriptors, with which ptxas 12.9.86 and 13.0.88 crashed.

    Here the descriptors' shared constant is outside of the loops, so all versions compile them.
    """

    def offset(descriptor: Any, count: Any, num_bytes: int) -> Any:
        i64 = ir.IntegerType.get_signless(64)
        size = arith.constant(i64, num_bytes >> 4)
        return arith.addi(descriptor, arith.muli(arith.extui(i64, count), size))

    monkeypatch.setattr(products, "_offset", offset)
    *_, compiled, _ = compiler.compile(*CASES["h128"].launch())
    assert compiled.ptxas.wide_descriptors
    assert len(compiled.faults) == 1
