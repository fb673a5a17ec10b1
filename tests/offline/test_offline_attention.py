"""Attention's kernels compiled for sm_90a without a GPU: no spills, no serialised WGMMAs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.few_queries.kernel import few_queries_kernel
from ikbo_jax.pallas.flash import attention as kernel
from ikbo_jax.problems import AttentionConfig as Config
from ikbo_jax.problems import AttentionProblem, memory
from ikbo_jax.problems.few_queries import MOST_TABLE_ROWS, MOST_TABLED, head_group
from ikbo_jax.problems.few_queries import FewQueriesConfig as FewConfig
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

    Without a configuration, the most promising one of the kernel of tiles. `lists` and `bundle` are
    of the kernel for few queries: whether CTAs list the candidates of users, and how many groups of
    query heads one listing serves.
    """

    problem: AttentionProblem
    config: Config | FewConfig | None = None
    with_lengths: bool = False
    with_order: bool = False
    with_lse: bool = False
    with_own: bool = False
    lists: bool = False
    bundle: int = 1

    @property
    def chosen(self) -> Any:
        candidates = self.problem.configs()
        return self.config or next(c for c in candidates if isinstance(c, Config))

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        p, is_for_few = self.problem, isinstance(self.config, FewConfig)

        def fn(query, key, value, cand_to_user, lengths, numbers, ranges, own, pages):
            options = {
                "scale": p.head_dim**-0.5,
                "logit_cap": 30.0 if p.has_logit_cap else None,
                "self_key": own,
                "self_value": own,
                "page_table": pages,
                "return_residuals": self.with_lse,
                "config": self.chosen,
                "num_sms": NUM_SMS,
            }
            arrays = query, key, value, cand_to_user, lengths
            if is_for_few:
                options |= {"targets": numbers, "lists": self.lists}
                return few_queries_kernel(*arrays, ranges, **options)
            # Candidates in any order are read and stored in place, or copied and stored elsewhere.
            order, targets = (None, numbers) if p.q_len % WGMMA_M else (numbers, None)
            return kernel.attention_kernel(*arrays, order=order, targets=targets, **options)

        shapes = operands(p, has_lengths=self.with_lengths, page=p.page)
        own = jax.ShapeDtypeStruct((p.batch, 1, p.kv_heads, p.head_dim), jnp.dtype(p.dtype))
        numbers = shapes[3] if self.with_order and not self.lists else None
        ranges = jax.ShapeDtypeStruct((p.batch, 2), jnp.int32) if p.has_ranges else None
        return fn, *shapes, numbers, ranges, own if self.with_own else None, page_table(p)


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


# The kernel for few queries.


def few(
    head_dim: int,
    config: FewConfig,
    heads: tuple[int, int] = (4, 4),
    sizes: tuple[int, int, int, int] = (1024, 16, 1, 512),
    *,
    with_options: bool = True,
    lists: bool = False,
    bundle: int = 1,
    **changes: Any,
) -> Case:
    """A case of the kernel for few queries, of B, U, T, S, with changes of the problem's fields."""
    default = AttentionProblem(*sizes, *heads, head_dim, "bfloat16")
    case = Case(dataclasses.replace(default, **changes), config, lists=lists, bundle=bundle)
    return every_option(case) if with_options else case


FEW = {
    "h64": few(64, FewConfig()),
    "h64_plain": few(64, FewConfig(), with_options=False),
    "h64_wide": few(64, FewConfig(tile_rows=128)),
    "h64_split": few(64, FewConfig(splits=4)),
    "h64_turns": few(64, FewConfig(128, 1, 128, 4, 4, turns=True)),
    "h128_blocks_of_64": few(128, FewConfig(64, 2, 64, 4, 4), with_options=False),
    "h64_one_user_t64": few(64, FewConfig(64, 1, 128, 5, 5, 4), (1, 1), (69, 1, 64, 128)),
    "h64_f16_gqa": few(64, FewConfig(), (8, 2), q_len=5, dtype="float16"),
    "h96": few(96, FewConfig(block_kv=64)),
    "h128_wide": few(128, FewConfig(128, 1, 64, 4, 3)),
    "h128": few(128, FewConfig(64, 1, 128, 2, 2)),
    "h96_gqa_split": few(96, FewConfig(64, 2, 64, 5, 5), (8, 2)),
    "h128_gqa": few(128, FewConfig(64, 1, 64, 4, 4), (8, 2)),
    "h128_gqa_capped": few(128, FewConfig(64, 1, 64, 4, 4), (20, 4), has_logit_cap=True),
    "h256_capped": few(256, FewConfig(64, 1, 64, 2, 2), has_logit_cap=True),
    "h128_gqa_plain": few(128, FewConfig(64, 2, 32, 5, 5), (8, 2), with_options=False),
    # Keys and values that L2 does not hold: a user's row slots are neighbours.
    "h128_wide_neighbours": few(128, FewConfig(128, 1, 64, 3, 3), (4, 4), (7918, 565, 8, 768)),
    "h64_wide_turns_neighbours": few(
        64,
        FewConfig(128, 1, 128, 5, 5, turns=True),
        (8, 8),
        (947, 63, 4, 10880),
        with_options=False,
    ),
    "h128_gqa_split_neighbours": few(128, FewConfig(64, 2, 64, 4, 4), (8, 2), (700, 300, 8, 4096)),
    "h64_listed_gqa": few(
        64,
        FewConfig(128, 1, 128, 4, 4, 4),
        (2, 1),
        (4723, 98, 1, 172),
        with_options=False,
        lists=True,
    ),
    "h64_listed_most": few(64, FewConfig(128, 2), (1, 1), lists=True, batch=16384, users=16),
    "h128_listed": few(128, FewConfig(64, 1, 128, 2, 2), (1, 1), lists=True, users=99),
    "h96_listed_gqa_split": few(
        96, FewConfig(64, 2, 64, 5, 5), (8, 2), lists=True, bundle=2, q_len=3, batch=120, users=60
    ),
    # One listing serves all heads, or half of them.
    "h64_listed_bundles": few(
        64,
        FewConfig(64, 1, 128, 5, 5, 4),
        sizes=(4000, 159, 1, 99),
        with_options=False,
        lists=True,
        bundle=2,
    ),
    "h128_listed_bundles": few(
        128, FewConfig(64, 1, 64, 4, 4), (8, 8), (2800, 54, 1, 100), lists=True, bundle=8
    ),
    "h192": few(192, FewConfig(64, 1, 64, 3, 3)),
    "h192_split": few(192, FewConfig(64, 2, 32, 5, 5), with_options=False),
    "h192_listed": few(192, FewConfig(64, 1, 64, 3, 3), (1, 1), lists=True, users=99),
    "h256": few(256, FewConfig(64, 1, 64, 2, 2)),
    "h256_gqa_split": few(256, FewConfig(64, 3, 32, 4, 4), (8, 2), q_len=5, dtype="float16"),
    "h256_turns": few(256, FewConfig(64, 1, 64, 2, 2, turns=True), with_options=False),
    # 128 rows of wide heads: each consumer has its rows, and all columns.
    "h192_wide": few(192, FewConfig(128, 1, 64, 3, 2, turns=True)),
    "h192_wide_gqa_split": few(192, FewConfig(128, 2, 64, 3, 3, 1), (8, 2), with_options=False),
    "h192_wide_listed": few(192, FewConfig(128, 1, 64, 2, 2), (1, 1), lists=True, users=99),
    "h256_wide": few(256, FewConfig(128, 1, 32, 3, 3)),
    "h256_wide_plain": few(256, FewConfig(128, 1, 64, 2, 2, 1), with_options=False),
    "h256_wide_lengths": few(256, FewConfig(128, 1, 64, 2, 2, 1)),
    "h256_wide_gqa_split": few(
        256, FewConfig(128, 3, 32, 5, 5, 1), (8, 2), q_len=5, dtype="float16"
    ),
    "h256_wide_listed": few(256, FewConfig(128, 1, 32, 3, 3), (1, 1), lists=True, users=99),
    "h192_blocks_of_80": few(192, FewConfig(64, 1, 80, 3, 2, turns=True)),
    "h192_blocks_of_80_listed": few(
        192, FewConfig(64, 1, 80, 3, 2, turns=True), (1, 1), lists=True, users=99
    ),
    "h256_blocks_of_80": few(256, FewConfig(64, 1, 80, 2, 2, turns=True)),
    "h256_blocks_of_80_gqa_plain": few(
        256, FewConfig(64, 1, 80, 2, 2, turns=True), (8, 2), with_options=False
    ),
    # The index is searched: it is too long for a table.
    "h64_gqa_searched": few(64, FewConfig(), (8, 2), batch=MOST_TABLED + 1),
    "h128_wide_searched": few(128, FewConfig(128, 1, 64, 3, 3), batch=MOST_TABLED + 1),
    # A table of as many candidates, users and row slots as there may be.
    "h128_largest_table": few(
        128, FewConfig(64, 1, 128, 2, 2), batch=MOST_TABLED, users=MOST_TABLE_ROWS, q_len=4
    ),
    "h128_mqa_7": few(128, FewConfig(128, 1, 64, 3, 3), (7, 1)),
}
#: Cases whose candidates have ranges of keys, too.
RANGED = (
    *("h64_plain", "h64_wide", "h64_split", "h64_turns", "h64_f16_gqa", "h96", "h128_wide", "h128"),
    *("h128_gqa_plain", "h64_listed_most", "h128_listed_bundles", "h192", "h192_listed", "h256"),
    *("h192_wide", "h256_wide", "h256_wide_listed", "h256_blocks_of_80"),
    *("h128_gqa_capped", "h256_capped"),
    *("h64_gqa_searched", "h192_blocks_of_80_listed", "h192_wide_listed", "h256_wide_gqa_split"),
)
for name in RANGED:
    problem = dataclasses.replace(FEW[name].problem, has_ranges=True)
    FEW[f"{name}_ranges"] = dataclasses.replace(FEW[name], problem=problem)
#: Cases whose candidates have an own token, too.
FEW_OWN = (
    *("h64_plain", "h64_split", "h64_f16_gqa", "h128_wide_neighbours", "h128_ranges", "h128_mqa_7"),
    *("h128_gqa", "h64_wide_turns_neighbours", "h192_wide_gqa_split", "h256_wide_gqa_split"),
    *("h256_gqa_split", "h256_blocks_of_80_gqa_plain", "h64_wide_ranges"),
)
FEW |= {f"{name}_own": dataclasses.replace(FEW[name], with_own=True) for name in FEW_OWN}
#: Shared memory has room for a ring of own tokens, but the ring of keys is short.
SHORT = few(128, FewConfig(64, 1, 128, 2, 2), (20, 4), with_options=False)
FEW["h128_gqa_short_own"] = dataclasses.replace(SHORT, with_own=True)
#: Cases whose keys and values are in pages of 128 positions.
FEW_PAGED = ("h64", "h64_split", "h128_wide_ranges", "h128_listed", "h128_gqa", "h256_wide", "h192")
for name in FEW_PAGED:
    problem = dataclasses.replace(FEW[name].problem, page=128)
    FEW[f"{name}_pages"] = dataclasses.replace(FEW[name], problem=problem)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FEW)
def test_offline_kernel_for_few_queries_is_fit(name: str, compiler: offline.Compiler) -> None:
    case = FEW[name]
    assert case.config.illegal_reason(case.problem) is None
    (compiled,) = compiler.compile_fit(*case.launch())
    table = None if case.lists else case.config.table(case.problem)
    group = head_group(case.problem.q_heads, case.problem.kv_heads)
    own = case.config.own_stages(case.problem.q_len, group) if case.with_own else None
    sizes = own, case.problem.head_dim, group
    _, shared = case.config.shared_with_own(*sizes, lists=case.lists, table=table)
    assert compiled.smem_bytes == memory.smem_bytes(shared)
    if case.lists:
        assert case.config.lists(case.problem, NUM_SMS)
        assert case.config.listings(case.problem, NUM_SMS).bundle == case.bundle
