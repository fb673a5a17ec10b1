"""The kernel for users with few queries compiled for sm_90a: no spills, no serialised WGMMAs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
from test_offline_attention import operands, page_table

from ikbo_jax.pallas.few_queries.kernel import few_queries_kernel
from ikbo_jax.problems import AttentionProblem, memory
from ikbo_jax.problems.few_queries import MOST_TABLE_ROWS, MOST_TABLED, head_group
from ikbo_jax.problems.few_queries import FewQueriesConfig as Config

pytestmark = pytest.mark.slow

NUM_SMS = 132


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its configuration, and which optional arguments it has.

    `bundle`: groups of query heads that one listing serves; `has_own`: whether candidates have an
    own token.
    """

    problem: AttentionProblem
    config: Config
    with_options: bool = True
    lists: bool = False
    bundle: int = 1
    has_own: bool = False

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        p = self.problem

        def fn(query, key, value, cand_to_user, lengths, targets, ranges, own, pages):
            return few_queries_kernel(
                query,
                key,
                value,
                cand_to_user,
                lengths,
                ranges,
                own,
                own,
                pages,
                scale=p.head_dim**-0.5,
                return_residuals=self.with_options,
                config=self.config,
                num_sms=NUM_SMS,
                logit_cap=30.0 if p.has_logit_cap else None,
                targets=targets,
                lists=self.lists,
            )

        shapes = operands(p, has_lengths=self.with_options, page=p.page)
        targets = shapes[3] if self.with_options and not self.lists else None
        ranges = jax.ShapeDtypeStruct((p.batch, 2), jnp.int32) if p.has_ranges else None
        own = (p.batch, 1, p.kv_heads, p.head_dim) if self.has_own else None
        own = own and jax.ShapeDtypeStruct(own, p.dtype)
        return fn, *shapes, targets, ranges, own, page_table(p)


def of(head_dim: int, config: Config, heads: tuple[int, int] = (4, 4), **changes: Any) -> Case:
    """A case, of which `changes` are fields, or of its problem."""
    options = {x: changes.pop(x) for x in ("with_options", "lists", "bundle") if x in changes}
    default = AttentionProblem(1024, 16, 1, 512, *heads, head_dim, "bfloat16")
    return Case(dataclasses.replace(default, **changes), config, **options)


CASES = {
    "h64": of(64, Config()),
    "h64_plain": of(64, Config(), with_options=False),
    "h64_wide": of(64, Config(tile_rows=128)),
    "h64_split": of(64, Config(splits=4)),
    "h64_turns": of(64, Config(128, 1, 128, 4, 4, turns=True)),
    "h128_blocks_of_64": of(128, Config(64, 2, 64, 4, 4), with_options=False),
    "h64_one_user_t64": of(
        64, Config(64, 1, 128, 5, 5, 4), (1, 1), batch=69, users=1, q_len=64, kv_len=128
    ),
    "h64_f16_gqa": of(64, Config(), (8, 2), q_len=5, dtype="float16"),
    "h96": of(96, Config(block_kv=64)),
    "h128_wide": of(128, Config(128, 1, 64, 4, 3)),
    "h128": of(128, Config(64, 1, 128, 2, 2)),
    "h96_gqa_split": of(96, Config(64, 2, 64, 5, 5), (8, 2)),
    "h128_gqa": of(128, Config(64, 1, 64, 4, 4), (8, 2)),
    "h128_gqa_capped": of(128, Config(64, 1, 64, 4, 4), (20, 4), has_logit_cap=True),
    "h256_capped": of(256, Config(64, 1, 64, 2, 2), has_logit_cap=True),
    "h128_gqa_plain": of(128, Config(64, 2, 32, 5, 5), (8, 2), with_options=False),
    # Keys and values that L2 does not hold: a user's row slots are neighbours.
    "h128_wide_neighbours": of(
        128, Config(128, 1, 64, 3, 3), batch=7918, users=565, q_len=8, kv_len=768
    ),
    "h64_wide_turns_neighbours": of(
        64,
        Config(128, 1, 128, 5, 5, turns=True),
        (8, 8),
        with_options=False,
        batch=947,
        users=63,
        q_len=4,
        kv_len=10880,
    ),
    "h128_gqa_split_neighbours": of(
        128, Config(64, 2, 64, 4, 4), (8, 2), batch=700, users=300, q_len=8, kv_len=4096
    ),
    "h64_listed_gqa": of(
        64,
        Config(128, 1, 128, 4, 4, 4),
        (2, 1),
        with_options=False,
        lists=True,
        batch=4723,
        users=98,
        kv_len=172,
    ),
    "h64_listed_most": of(64, Config(128, 2), (1, 1), lists=True, batch=16384, users=16),
    "h128_listed": of(128, Config(64, 1, 128, 2, 2), (1, 1), lists=True, users=99),
    "h96_listed_gqa_split": of(
        96, Config(64, 2, 64, 5, 5), (8, 2), lists=True, bundle=2, q_len=3, batch=120, users=60
    ),
    # One listing serves all heads, or half of them.
    "h64_listed_bundles": of(
        64,
        Config(64, 1, 128, 5, 5, 4),
        with_options=False,
        lists=True,
        bundle=2,
        batch=4000,
        users=159,
        kv_len=99,
    ),
    "h128_listed_bundles": of(
        128, Config(64, 1, 64, 4, 4), (8, 8), lists=True, bundle=8, batch=2800, users=54, kv_len=100
    ),
    "h192": of(192, Config(64, 1, 64, 3, 3)),
    "h192_split": of(192, Config(64, 2, 32, 5, 5), with_options=False),
    "h192_listed": of(192, Config(64, 1, 64, 3, 3), (1, 1), lists=True, users=99),
    "h256": of(256, Config(64, 1, 64, 2, 2)),
    "h256_gqa_split": of(256, Config(64, 3, 32, 4, 4), (8, 2), q_len=5, dtype="float16"),
    "h256_turns": of(256, Config(64, 1, 64, 2, 2, turns=True), with_options=False),
    # 128 rows of wide heads: each consumer has its rows, and all columns.
    "h192_wide": of(192, Config(128, 1, 64, 3, 2, turns=True)),
    "h192_wide_gqa_split": of(192, Config(128, 2, 64, 3, 3, 1), (8, 2), with_options=False),
    "h192_wide_listed": of(192, Config(128, 1, 64, 2, 2), (1, 1), lists=True, users=99),
    "h256_wide": of(256, Config(128, 1, 32, 3, 3)),
    "h256_wide_plain": of(256, Config(128, 1, 64, 2, 2, 1), with_options=False),
    "h256_wide_lengths": of(256, Config(128, 1, 64, 2, 2, 1)),
    "h256_wide_gqa_split": of(256, Config(128, 3, 32, 5, 5, 1), (8, 2), q_len=5, dtype="float16"),
    "h256_wide_listed": of(256, Config(128, 1, 32, 3, 3), (1, 1), lists=True, users=99),
    "h192_blocks_of_80": of(192, Config(64, 1, 80, 3, 2, turns=True)),
    "h192_blocks_of_80_listed": of(
        192, Config(64, 1, 80, 3, 2, turns=True), (1, 1), lists=True, users=99
    ),
    "h256_blocks_of_80": of(256, Config(64, 1, 80, 2, 2, turns=True)),
    "h256_blocks_of_80_gqa_plain": of(
        256, Config(64, 1, 80, 2, 2, turns=True), (8, 2), with_options=False
    ),
    # The index is searched: it is too long for a table.
    "h64_gqa_searched": of(64, Config(), (8, 2), batch=MOST_TABLED + 1),
    "h128_wide_searched": of(128, Config(128, 1, 64, 3, 3), batch=MOST_TABLED + 1),
    # A table of as many candidates, users and row slots as there may be.
    "h128_largest_table": of(
        128, Config(64, 1, 128, 2, 2), batch=MOST_TABLED, users=MOST_TABLE_ROWS, q_len=4
    ),
    "h128_mqa_7": of(128, Config(128, 1, 64, 3, 3), (7, 1)),
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
    problem = dataclasses.replace(CASES[name].problem, has_ranges=True)
    CASES[f"{name}_ranges"] = dataclasses.replace(CASES[name], problem=problem)
#: Cases whose candidates have an own token, too.
OWN = (
    *("h64_plain", "h64_split", "h64_f16_gqa", "h128_wide_neighbours", "h128_ranges", "h128_mqa_7"),
    *("h128_gqa", "h64_wide_turns_neighbours", "h192_wide_gqa_split", "h256_wide_gqa_split"),
    *("h256_gqa_split", "h256_blocks_of_80_gqa_plain", "h64_wide_ranges"),
)
CASES |= {f"{name}_own": dataclasses.replace(CASES[name], has_own=True) for name in OWN}
#: Shared memory has room for a ring of own tokens, but the ring of keys is short.
SHORT = of(128, Config(64, 1, 128, 2, 2), (20, 4), with_options=False)
CASES["h128_gqa_short_own"] = dataclasses.replace(SHORT, has_own=True)
#: Cases whose keys and values are in pages of 128 positions.
PAGED = ("h64", "h64_split", "h128_wide_ranges", "h128_listed", "h128_gqa", "h256_wide", "h192")
for name in PAGED:
    problem = dataclasses.replace(CASES[name].problem, page=128)
    CASES[f"{name}_pages"] = dataclasses.replace(CASES[name], problem=problem)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_offline_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    case = CASES[name]
    assert case.config.illegal_reason(case.problem) is None
    (compiled,) = compiler.compile_fit(*case.launch())
    table = None if case.lists else case.config.table(case.problem)
    group = head_group(case.problem.q_heads, case.problem.kv_heads)
    own = case.config.own_stages(case.problem.q_len, group) if case.has_own else None
    sizes = own, case.problem.head_dim, group
    _, shared = case.config.shared_with_own(*sizes, lists=case.lists, table=table)
    assert compiled.smem_bytes == memory.smem_bytes(shared)
    if case.lists:
        assert case.config.lists(case.problem, NUM_SMS)
        assert case.config.listings(case.problem, NUM_SMS).bundle == case.bundle
