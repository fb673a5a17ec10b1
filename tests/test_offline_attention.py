"""The attention kernel compiled for sm_90a without a GPU: no spills, no serialised WGMMAs."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas import accumulator
from ikbo_jax.pallas import attention as kernel
from ikbo_jax.tuning import configs, table
from ikbo_jax.tuning.configs import AttentionConfig, AttentionProblem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux"),
]

DEFAULT = AttentionProblem(2048, 32, 64, 1024, 2, 2, 128, "bfloat16")
ONE_SLOT = AttentionConfig(k_stages=3, v_stages=3, q_slots=1)
REUSE = AttentionConfig(128, 2, 2, 3, reuse=True, balance=True)
EARLY = AttentionConfig(early_scores=True, late_turns=True)
NUM_SMS = 132


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its configuration (None: the default one), and which optional arguments it has."""

    problem: AttentionProblem
    config: AttentionConfig | None = None
    with_lengths: bool = False
    with_order: bool = False
    with_lse: bool = False

    @property
    def chosen(self) -> AttentionConfig:
        config = self.config or configs.default_attention_config(self.problem)
        assert config is not None
        return config

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        p = self.problem
        dtype = jnp.dtype(p.dtype)
        keys = jax.ShapeDtypeStruct((p.users, p.kv_len, p.kv_heads, p.head_dim), dtype)
        lengths = jax.ShapeDtypeStruct((p.users,), jnp.int32) if self.with_lengths else None
        index = jax.ShapeDtypeStruct((p.batch,), jnp.int32)

        def fn(query, key, value, cand_to_user, lengths, order):
            return kernel.attention_kernel(
                query,
                key,
                value,
                cand_to_user,
                lengths,
                scale=p.head_dim**-0.5,
                order=order,
                return_residuals=self.with_lse,
                config=self.chosen,
                num_sms=NUM_SMS,
            )

        query = jax.ShapeDtypeStruct((p.batch, p.q_len, p.q_heads, p.head_dim), dtype)
        return fn, query, keys, keys, index, lengths, index if self.with_order else None


def of(config: AttentionConfig | None = None, **sizes: Any) -> Case:
    return Case(dataclasses.replace(DEFAULT, **sizes), config)


def every_option(case: Case) -> Case:
    return dataclasses.replace(case, with_lengths=True, with_lse=True)


CASES = {
    "one_slot": of(ONE_SLOT),
    "late_turns": of(AttentionConfig(late_turns=True)),
    "all_options_ordered": dataclasses.replace(every_option(of()), with_order=True),
    "reuse_and_balance": dataclasses.replace(every_option(of(REUSE, kv_len=256)), with_order=True),
    "early_scores": dataclasses.replace(every_option(of(EARLY)), with_order=True),
    "small": of(batch=1, users=1, q_len=1, kv_len=1, q_heads=1, kv_heads=1),
} | {
    f"h{head_dim}_t{q_len}": every_option(of(head_dim=head_dim, q_len=q_len))
    for head_dim, q_len in ((64, 16), (96, 64), (128, 16), (192, 64), (256, 16))
}


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> offline.Compiler:
    try:
        return offline.Compiler(tmp_path_factory.mktemp("offline_attention"))
    except offline.OfflineUnavailableError as error:
        pytest.fail(str(error), pytrace=False)


def assert_fit(case: Case, compiler: offline.Compiler) -> None:
    assert configs.attention_illegal_reason(case.problem, case.chosen) is None
    (compiled,) = compiler.compile(*case.launch())
    assert not compiled.faults
    limit = case.chosen.smem_bytes(case.problem.head_dim)
    assert compiled.smem_bytes <= limit <= configs.MAX_SMEM_BYTES


@pytest.mark.parametrize("name", CASES)
def test_offline_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    assert_fit(CASES[name], compiler)


def table_rows() -> dict[str, Case]:
    """The rows of `sm90.json`, one of those that make the same kernel but for sizes.

    Of T only counts whether warpgroup tiles are parts of a candidate, or hold parts of several.
    """
    rows = (r for r in table._builtin_rows() if isinstance(r.problem, AttentionProblem))
    return {
        f"{r.problem.dtype}:h{r.problem.head_dim}:{r.problem.q_len % 64 == 0}:{r.config}": Case(
            r.problem, r.config
        )
        for r in rows
        if r.config is not None
    }


@pytest.mark.parametrize("name", table_rows())
def test_offline_table_row_is_fit(name: str, compiler: offline.Compiler) -> None:
    assert_fit(table_rows()[name], compiler)


@pytest.mark.parametrize("head_dim", configs.ATTENTION_HEAD_DIMS)
@pytest.mark.parametrize("q_slots", [1, 2])
def test_offline_shared_memory_is_what_the_config_says(head_dim: int, q_slots: int) -> None:
    """The legality rule may round up, by no more than what it aligns to."""
    config = AttentionConfig(block_kv=32, k_stages=2, v_stages=3, q_slots=q_slots)
    case = of(config, head_dim=head_dim)
    (module,) = offline.mosaic_modules(*case.launch())
    _, smem_bytes = offline.describe_module(module)
    assert 0 <= config.smem_bytes(head_dim) - smem_bytes <= configs.SMEM_ALIGNMENT


# The detector itself must be able to fail.


def test_offline_spills_are_found(compiler: offline.Compiler) -> None:
    (compiled,) = compiler.compile(*of(AttentionConfig(96, 2, 2, 1), head_dim=192).launch())
    assert any("bytes spilled" in fault for fault in compiled.faults)


def test_offline_serialised_wgmmas_are_found(
    compiler: offline.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waits, accumulators are read while WGMMAs write them."""
    monkeypatch.setattr(accumulator, "wait", lambda pending, *, interpret: None)
    (compiled,) = compiler.compile(*of().launch())
    assert any("C75" in fault for fault in compiled.faults)
