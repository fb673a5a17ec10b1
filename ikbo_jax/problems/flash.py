"""What the configurations of the attention kernel and of the GDPA forward kernel share."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Widest heads whose keys the kernel of tiles reads in pages: H = 256 spills 32 bytes.
MAX_PAGED_WIDTH = 192


@dataclasses.dataclass(frozen=True)
class FlashConfig(Config):
    """Query slots, and a ring of blocks of keys and one of values.

    Attributes:
      block_kv: keys of a block, which fills a pipeline stage; a multiple of 16.
      k_stages: stages of the ring of key blocks; `v_stages`: of value blocks.
      q_slots: number of query slots. With 2 or 3, the queries of the next tiles are loaded early,
        and TMA stores the output from the slot of the finished tile. With 1, the kernel uses 32 KiB
        less shared memory at H = 128 but stores the output from registers, which costs short
        sequences more than further stages gain. 3 is for one or two blocks of keys.
    """

    block_kv: int = 128
    k_stages: int = 2
    v_stages: int = 3
    q_slots: int = 2

    def rings(self, head_dim: int, value_parts: int = 1) -> dict[str, Any]:
        """Declares `query`, `key`, `value` and `staging` of the kernel's shared memory.

        `value_parts` are loaded separately into a stage of values.
        """
        blocks = hopper.column_blocks(head_dim)
        block = (blocks, self.block_kv, BLOCK_K)
        return {
            "query": memory.ring(
                self.q_slots,
                ready=NUM_CONSUMERS * blocks,
                tiles=(NUM_CONSUMERS, blocks, WGMMA_M, BLOCK_K),
            ),
            "key": memory.ring(self.k_stages, ready=blocks, tiles=block),
            "value": memory.ring(self.v_stages, ready=blocks * value_parts, tiles=block),
            "staging": memory.Staging((NUM_CONSUMERS, WGMMA_M, self.block_kv)),
        }

    @abc.abstractmethod
    def shared(self, head_dim: int) -> Any:
        """Declares one CTA's shared memory and barriers, as a tuple (`problems.memory`)."""

    def smem_bytes(self, head_dim: int) -> int:
        return memory.smem_bytes(self.shared(head_dim))

    @hopper.first_reason
    def why_not_tiles(self, problem: Any, max_block_kv: Mapping[int, int]) -> Iterator[str | None]:
        """Checks dtype, head width, block and rings; `max_block_kv` is by head width."""
        yield why_not_operands(problem, self.block_kv, max_block_kv)
        yield hopper.why_too_few(self, k_stages=2, v_stages=2)
        if self.q_slots not in (1, 2, 3):
            yield f"q_slots must be 1, 2 or 3, but is {self.q_slots}"


def why_not_operands(problem: Any, block_kv: int, max_block_kv: Mapping[int, int]) -> str | None:
    """Checks dtype, head width, and keys of a block; `max_block_kv` is by head width."""
    width, operands = problem.head_dim, "scores and accumulator"
    return (
        hopper.why_not_dtype(problem.dtype)
        or hopper.why_not_head_dim(width, max_block_kv)
        or hopper.why_not_block("block_kv", block_kv, max_block_kv[width], width, operands)
    )


def why_not_pages(problem: Any, block_kv: int) -> str | None:
    """Checks that a block of keys is in one page of an `AttentionProblem`."""
    if problem.page % block_kv:
        return f"block_kv must divide pages of {problem.page} positions, but is {block_kv}"
    return None


def tiles_read_pages(problem: Any) -> bool:
    """Whether the kernel of tiles has a block for the pages, if any, of an `AttentionProblem`."""
    p = problem
    return p.page == 0 or (p.page % WGMMA_M == 0 and p.head_dim <= MAX_PAGED_WIDTH)


@hopper.first_reason
def why_not_users(problem: Any, *, takes_ranges: bool = False) -> Iterator[str | None]:
    """Checks ranges, and numbers of users, keys and heads, of an `AttentionProblem`."""
    yield problem.why_not_scores(takes_ranges=takes_ranges)
    if problem.kv_len < 1 or problem.users < 1:
        yield f"the kernel needs a user and a key, but U={problem.users} and S={problem.kv_len}"
    yield hopper.why_not_heads(problem.q_heads, problem.kv_heads)
