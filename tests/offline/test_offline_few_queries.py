"""The kernel for users with few queries compiled for sm_90a: no spills, no serialised WGMMAs."""

from __future__ import annotations

import dataclasses
from typing import Any

import offline
import pytest
from test_offline_attention import operands

from ikbo_jax.pallas.few_queries.kernel import few_queries_kernel
from ikbo_jax.problems import AttentionProblem, memory
from ikbo_jax.problems.few_queries import MOST_TABLE_ROWS, MOST_TABLED, FewQueriesConfig

pytestmark = pytest.mark.slow

NUM_SMS = 132


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its configuration, and which optional arguments it has.

    `bundle`: groups of query heads that one listing serves.
    """

    problem: AttentionProblem
    config: FewQueriesConfig
    with_options: bool = True
    lists: bool = False
    bundle: int = 1

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        p = self.problem

        def fn(query, key, value, cand_to_user, lengths, targets):
            return few_queries_kernel(
                query,
                key,
                value,
                cand_to_user,
                lengths,
                scale=p.head_dim**-0.5,
                return_residuals=self.with_options,
                config=self.config,
                num_sms=NUM_SMS,
                targets=targets,
                lists=self.lists,
            )

        shapes = operands(p, has_lengths=self.with_options)
        return fn, *shapes, shapes[3] if self.with_options and not self.lists else None


def problem(head_dim: int, heads: tuple[int, int] = (4, 4), **sizes: Any) -> AttentionProblem:
    default = AttentionProblem(1024, 16, 1, 512, *heads, head_dim, "bfloat16")
    return dataclasses.replace(default, **sizes)


CASES = {
    "h64": Case(problem(64), FewQueriesConfig()),
    "h64_plain": Case(problem(64), FewQueriesConfig(), with_options=False),
    "h64_wide": Case(problem(64), FewQueriesConfig(tile_rows=128)),
    "h64_split": Case(problem(64), FewQueriesConfig(splits=4)),
    "h64_turns": Case(problem(64), FewQueriesConfig(128, 1, 128, 4, 4, turns=True)),
    "h128_stagger": Case(
        problem(128), FewQueriesConfig(64, 2, 64, 4, 4, stagger=True), with_options=False
    ),
    "h64_one_user_t64": Case(
        problem(64, (1, 1), batch=69, users=1, q_len=64, kv_len=128),
        FewQueriesConfig(64, 1, 128, 5, 5, 4),
    ),
    "h64_f16_gqa": Case(problem(64, (8, 2), q_len=5, dtype="float16"), FewQueriesConfig()),
    "h96": Case(problem(96), FewQueriesConfig(block_kv=64)),
    "h128_wide": Case(problem(128), FewQueriesConfig(128, 1, 64, 4, 3)),
    "h128": Case(problem(128), FewQueriesConfig(64, 1, 128, 2, 2)),
    "h96_gqa_split": Case(problem(96, (8, 2)), FewQueriesConfig(64, 2, 64, 5, 5)),
    "h128_gqa": Case(problem(128, (8, 2)), FewQueriesConfig(64, 1, 64, 4, 4)),
    "h128_gqa_plain": Case(problem(128, (8, 2)), FewQueriesConfig(64, 2, 32, 5, 5), False),
    # Keys and values that L2 does not hold: a user's row slots are neighbours.
    "h128_wide_neighbours": Case(
        problem(128, batch=7918, users=565, q_len=8, kv_len=768), FewQueriesConfig(128, 1, 64, 3, 3)
    ),
    "h64_wide_turns_neighbours": Case(
        problem(64, (8, 8), batch=947, users=63, q_len=4, kv_len=10880),
        FewQueriesConfig(128, 1, 128, 5, 5, turns=True),
        with_options=False,
    ),
    "h128_gqa_split_neighbours": Case(
        problem(128, (8, 2), batch=700, users=300, q_len=8, kv_len=4096),
        FewQueriesConfig(64, 2, 64, 4, 4),
    ),
    "h64_listed_gqa": Case(
        problem(64, (2, 1), batch=4723, users=98, kv_len=172),
        FewQueriesConfig(128, 1, 128, 4, 4, 4),
        with_options=False,
        lists=True,
    ),
    "h64_listed_most": Case(
        problem(64, (1, 1), batch=16384, users=16), FewQueriesConfig(128, 2), lists=True
    ),
    "h128_listed": Case(
        problem(128, (1, 1), users=99), FewQueriesConfig(64, 1, 128, 2, 2), lists=True
    ),
    "h96_listed_gqa_split": Case(
        problem(96, (8, 2), q_len=3, batch=120, users=60),
        FewQueriesConfig(64, 2, 64, 5, 5),
        lists=True,
        bundle=2,
    ),
    # One listing serves all heads, or half of them.
    "h64_listed_bundles": Case(
        problem(64, batch=4000, users=159, kv_len=99),
        FewQueriesConfig(64, 1, 128, 5, 5, 4),
        with_options=False,
        lists=True,
        bundle=2,
    ),
    "h128_listed_bundles": Case(
        problem(128, (8, 8), batch=2800, users=54, kv_len=100),
        FewQueriesConfig(64, 1, 64, 4, 4),
        lists=True,
        bundle=8,
    ),
    "h192": Case(problem(192), FewQueriesConfig(64, 1, 64, 3, 3)),
    "h192_split": Case(problem(192), FewQueriesConfig(64, 2, 32, 5, 5), False),
    "h192_listed": Case(
        problem(192, (1, 1), users=99), FewQueriesConfig(64, 1, 64, 3, 3), lists=True
    ),
    "h256": Case(problem(256), FewQueriesConfig(64, 1, 64, 2, 2)),
    "h256_gqa_split": Case(
        problem(256, (8, 2), q_len=5, dtype="float16"), FewQueriesConfig(64, 3, 32, 4, 4)
    ),
    "h256_turns": Case(problem(256), FewQueriesConfig(64, 1, 64, 2, 2, turns=True), False),
    # 128 rows of wide heads: each consumer has its rows, and all columns.
    "h192_wide": Case(problem(192), FewQueriesConfig(128, 1, 64, 3, 2, turns=True)),
    "h192_wide_gqa_split": Case(problem(192, (8, 2)), FewQueriesConfig(128, 2, 64, 3, 3, 1), False),
    "h192_wide_listed": Case(
        problem(192, (1, 1), users=99), FewQueriesConfig(128, 1, 64, 2, 2), lists=True
    ),
    "h256_wide": Case(problem(256), FewQueriesConfig(128, 1, 32, 3, 3)),
    "h256_wide_plain": Case(problem(256), FewQueriesConfig(128, 1, 64, 2, 2, 1), False),
    "h256_wide_lengths": Case(problem(256), FewQueriesConfig(128, 1, 64, 2, 2, 1)),
    "h256_wide_gqa_split": Case(
        problem(256, (8, 2), q_len=5, dtype="float16"), FewQueriesConfig(128, 3, 32, 5, 5, 1)
    ),
    "h256_wide_listed": Case(
        problem(256, (1, 1), users=99), FewQueriesConfig(128, 1, 32, 3, 3), lists=True
    ),
    "h192_blocks_of_80": Case(problem(192), FewQueriesConfig(64, 1, 80, 3, 2, turns=True)),
    "h192_blocks_of_80_listed": Case(
        problem(192, (1, 1), users=99), FewQueriesConfig(64, 1, 80, 3, 2, turns=True), lists=True
    ),
    "h256_blocks_of_80": Case(problem(256), FewQueriesConfig(64, 1, 80, 2, 2, turns=True)),
    "h256_blocks_of_80_gqa_plain": Case(
        problem(256, (8, 2)), FewQueriesConfig(64, 1, 80, 2, 2, turns=True), False
    ),
    # The index is searched: it is too long for a table.
    "h64_gqa_searched": Case(problem(64, (8, 2), batch=MOST_TABLED + 1), FewQueriesConfig()),
    "h128_wide_searched": Case(
        problem(128, batch=MOST_TABLED + 1), FewQueriesConfig(128, 1, 64, 3, 3)
    ),
    # A table of as many candidates, users and row slots as there may be.
    "h128_largest_table": Case(
        problem(128, batch=MOST_TABLED, users=MOST_TABLE_ROWS, q_len=4),
        FewQueriesConfig(64, 1, 128, 2, 2),
    ),
    "h128_mqa_7": Case(problem(128, (7, 1)), FewQueriesConfig(128, 1, 64, 3, 3)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_offline_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    case = CASES[name]
    assert case.config.illegal_reason(case.problem) is None
    (compiled,) = compiler.compile_fit(*case.launch())
    table = None if case.lists else case.config.table(case.problem)
    shared = case.config.shared(case.problem.head_dim, lists=case.lists, table=table)
    assert compiled.smem_bytes == memory.smem_bytes(shared)
    if case.lists:
        assert case.config.lists(case.problem, NUM_SMS)
        assert case.config.listings(case.problem, NUM_SMS).bundle == case.bundle
