"""The attention kernel compiled for sm_90a without a GPU: no spills, no serialised WGMMAs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.flash import attention as kernel
from ikbo_jax.problems import AttentionConfig as Config
from ikbo_jax.problems import AttentionProblem
from ikbo_jax.problems.hopper import WGMMA_M
from ikbo_jax.tuning import table_rows

pytestmark = pytest.mark.slow

DEFAULT = AttentionProblem(2048, 32, 64, 1024, 2, 2, 128, "bfloat16")
ONE_SLOT = Config(k_stages=3, v_stages=3, q_slots=1)
REUSE = Config(128, 2, 2, 3, reuse=True, balance=True)
NUM_SMS = 132


def operands(problem: Any, *, has_lengths: bool, page: int = 0) -> tuple[Any, ...]:
    """Shapes of queries, keys, values, users of candidates, and lengths of keys.

    `page`: the positions of a page of keys and values, or 0.
    """
    p, shape, dtype = problem, jax.ShapeDtypeStruct, jnp.dtype(problem.dtype)
    query = shape((p.batch, p.q_len, p.q_heads, p.head_dim), dtype)
    keys = shape((p.users, p.kv_len, p.kv_heads, p.head_dim), dtype)
    if page:
        pages = 2 * p.users * p.kv_len // page
        keys = shape((pages, page, p.kv_heads, p.head_dim), dtype)
    lengths = shape((p.users,), jnp.int32) if has_lengths else None
    return query, keys, keys, shape((p.batch,), jnp.int32), lengths


def page_table(problem: AttentionProblem) -> Any:
    """Shape of the users' pages, or None."""
    p = problem
    return jax.ShapeDtypeStruct((p.users, p.kv_len // p.page), jnp.int32) if p.page else None


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its configuration, and which optional arguments it has.

    Without a configuration, the most promising one of this kernel.
    """

    problem: AttentionProblem
    config: Config | None = None
    with_lengths: bool = False
    with_order: bool = False
    with_lse: bool = False
    with_own: bool = False

    @property
    def chosen(self) -> Config:
        candidates = self.problem.configs()
        return self.config or next(c for c in candidates if isinstance(c, Config))

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        p = self.problem

        def fn(query, key, value, cand_to_user, lengths, numbers, own, pages):
            # Candidates in any order are read and stored in place, or copied and stored elsewhere.
            order, targets = (None, numbers) if p.q_len % WGMMA_M else (numbers, None)
            return kernel.attention_kernel(
                query,
                key,
                value,
                cand_to_user,
                lengths,
                scale=p.head_dim**-0.5,
                order=order,
                targets=targets,
                self_key=own,
                self_value=own,
                page_table=pages,
                return_residuals=self.with_lse,
                config=self.chosen,
                num_sms=NUM_SMS,
                logit_cap=30.0 if p.has_logit_cap else None,
            )

        shapes = operands(p, has_lengths=self.with_lengths, page=p.page)
        own = jax.ShapeDtypeStruct((p.batch, 1, p.kv_heads, p.head_dim), jnp.dtype(p.dtype))
        numbers = shapes[3] if self.with_order else None
        return fn, *shapes, numbers, own if self.with_own else None, page_table(p)


def of(config: Config | None = None, **sizes: Any) -> Case:
    return Case(dataclasses.replace(DEFAULT, **sizes), config)


def every_option(case: Case) -> Case:
    return dataclasses.replace(case, with_lengths=True, with_order=True, with_lse=True)


# What no row of the table has.
CASES = {
    "one_slot": of(ONE_SLOT),
    "reuse_and_balance": every_option(of(REUSE, kv_len=256)),
    "h64_small": every_option(Case(AttentionProblem(1, 1, 1, 1, 1, 1, 64, "bfloat16"), Config())),
    "h256_t16": every_option(of(head_dim=256, q_len=16)),
    "h96_t100_one_slot_f16": every_option(of(ONE_SLOT, head_dim=96, q_len=100, dtype="float16")),
    "h128_t1_capped": every_option(
        of(Config(), q_len=1, q_heads=20, kv_heads=4, has_logit_cap=True)
    ),
    "h256_t16_capped": every_option(of(head_dim=256, q_len=16, has_logit_cap=True)),
    "h128_t5": every_option(of(Config(), q_len=5)),
    # Tiles of one user; what the list of tiles is.
    "h64_t1_one_user": of(Config(128, 4, 4, one_user=True), head_dim=64, q_len=1),
    "h128_t8_one_user": every_option(of(Config(one_user=True), q_len=8)),
    "h96_one_user_early_f16": every_option(
        of(Config(one_user=True, early_scores=True, late_turns=True), head_dim=96, dtype="float16")
    ),
    "h192_t16_one_user": every_option(of(Config(64, one_user=True), head_dim=192, q_len=16)),
    "h256_one_user": every_option(of(Config(64, 2, 3, 1, one_user=True), head_dim=256)),
    "h256_t16_one_user": every_option(
        of(Config(64, 2, 3, 1, one_user=True), head_dim=256, q_len=16)
    ),
    # Two query slots for short keys.
    "h256_t16_two_slots_reuse": every_option(
        of(Config(32, 3, 3, 2, reuse=True), head_dim=256, q_len=16, kv_len=96)
    ),
    "h192_t3_f16": every_option(of(head_dim=192, q_len=3, dtype="float16")),
}
CASES |= {
    f"{name}_own": dataclasses.replace(case, with_own=True)
    for name, case in {
        **{name: CASES[name] for name in ("h64_small", "h96_t100_one_slot_f16", "h128_t5")},
        **{name: CASES[name] for name in ("h64_t1_one_user", "h128_t8_one_user")},
        "one_slot": every_option(CASES["one_slot"]),
        "early": every_option(of(Config(early_scores=True, late_turns=True), kv_len=512)),
        "balance": every_option(of(Config(balance=True, late_turns=True))),
        "t33_two_stages": every_option(of(Config(128, 2, 2, 3), q_len=33)),
    }.items()
}
#: Cases whose keys and values are in pages of 128 positions.
PAGED = ("one_slot", "h128_t5_own", "h192_t16_one_user", "early_own", "h128_t1_capped")
PAGED = (*PAGED, "h128_t8_one_user", "h192_t3_f16")
for name in PAGED:
    problem = dataclasses.replace(CASES[name].problem, page=128)
    CASES[f"{name}_pages"] = dataclasses.replace(CASES[name], problem=problem)


def assert_fit(case: Case, compiler: offline.Compiler) -> None:
    assert case.chosen.illegal_reason(case.problem) is None
    assert not case.with_own or case.chosen.takes_own_tokens(case.problem)
    *_, compiled = compiler.compile_fit(*case.launch())
    assert compiled.smem_bytes == case.chosen.smem_bytes(case.problem.head_dim)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_offline_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    assert_fit(CASES[name], compiler)


def shipped_rows() -> dict[str, Case]:
    """The rows of `sm90.json`, one of those that make the same kernel but for sizes.

    Of T only counts whether warpgroup tiles are parts of a candidate, or hold parts of several.
    Optional arguments add code and take none away, so rows have all of them; but with reuse or
    balance, for which a case above has them, and in f16, they are compiled without.
    """
    cases = {}
    for row in table_rows.builtin_rows():
        problem, config = row.problem, row.config
        if config is None or not isinstance(problem, AttentionProblem):
            continue
        has_tiles = problem.q_len % 64 == 0
        case = Case(problem, config)
        if problem.dtype == "bfloat16" and not (config.reuse or config.balance):
            case = every_option(case)
        cases[f"{problem.dtype}:h{problem.head_dim}:{has_tiles}:{config}"] = case
    return cases


@pytest.mark.parametrize("name", shipped_rows())
def test_offline_table_row_is_fit(name: str, compiler: offline.Compiler) -> None:
    assert_fit(shipped_rows()[name], compiler)
