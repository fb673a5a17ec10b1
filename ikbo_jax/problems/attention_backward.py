"""The gradient of broadcast attention: the configurations of its kernels."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.attention import AttentionSizes
from ikbo_jax.problems.gdpa_backward import GdpaBackwardConfig
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_q by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: two sums, scores and gradients of weights exceed a consumer thread's 240 registers and spill.
MAX_BLOCK_Q = {64: 128, 96: 64, 128: 64, 192: 64, 256: 48}
HEAD_DIMS = tuple(MAX_BLOCK_Q)
#: Largest head width of which one launch computes the gradients of keys and of values: a thread
#: has no registers for two sums of more columns.
MAX_BOTH_SUMS = 128
#: Largest block_kv of a launch for d_query by head width, for the same reason.
MAX_BLOCK_KV = {64: 128, 96: 96, 128: 96}
#: Largest block_q with a cap, and largest block_kv of wider heads than 64 columns in a launch for
#: d_query. With 128 queries of 64 columns, 1,016 to 1,136 bytes of a thread spill; with 96 keys of
#: 128 columns, 48 bytes.
MAX_CAPPED_BLOCK = 64
#: Keys of a tile: 64 for each consumer.
BLOCK_KV = TILE_ROWS
#: Buffers of gradients of scores: the consumers write one while they multiply by the other.
D_SCORES_BUFFERS = 2
#: Ways to compute d_query; see `AttentionBackwardConfig`.
D_QUERY = ("parts", "launch", "stored")
#: Most bytes of gradients of scores that "stored" keeps in device memory, 4.25 GiB. Of more, it
#: stores and multiplies those of some keys, then those of others. In halves, gradients for 4,096
#: keys took 1.12 times as long, for 8,192 1.07 times (`docs/experiments/attention_gradient.md`).
MAX_STORED_BYTES = 17 * 2**28
#: Keys of a block of the launch that multiplies stored gradients of scores.
STORED_BLOCK_KV = BLOCK_K
#: Words of a descriptor in shared memory: with 32 bytes, four words are one 16-byte access.
DESCRIPTOR_WORDS = 8
#: f32 columns of a shared memory row of 128 bytes.
SUM_COLUMNS = 32


def has_halves(head_dim: int) -> bool:
    """Whether queries and d_out of a block have slots of their own in the ring of blocks.

    A launch that stores gradients of scores without d_key has read a block's queries long before
    its d_out. So three slots hold what two stages would.
    """
    return head_dim > MAX_BOTH_SUMS


def most_blocks(batch: int, users: int, rows_per_candidate: int, block_q: int) -> int:
    """Bounds the query blocks of any index: every user may have a partial block."""
    return batch * rows_per_candidate // block_q + min(batch, users)


class DQueryConfig(GdpaBackwardConfig):
    """Tuning parameters of the launch of d_query alone, which is a kernel of gdpa's gradient."""

    packs_statistics = False


@dataclasses.dataclass(frozen=True)
class AttentionBackwardConfig(Config):
    """Tuning parameters of the attention backward kernel.

    Attributes:
      block_q: query rows of a block, a multiple of 16. Few rows for users with few queries.
      stages: stages of the ring of query blocks, two slots each, or with `has_halves` one less.
      kv_slots: slots for tiles of keys and values. With 2, the keys of the next tile are loaded
        early, which matters if a user has few queries.
      d_query: how d_query is computed, one of `D_QUERY`. "parts": each tile of keys stores its
        part, and they are added later; that takes S / 128 times as much memory. "launch": a second
        launch computes d_query, with seven products instead of five, but without sums in memory.
        "stored": the first launch stores gradients of scores in device memory, 2 bytes for each
        query and key, and a second launch multiplies them by the keys: five products. Heads wider
        than `MAX_BOTH_SUMS` need that: the first launch computes d_value, and a third one
        multiplies the gradients by the queries.
      block_kv: keys of a block of the launch of d_query, a multiple of 16; 64 if gradients of
        scores are stored.
      kv_stages: stages of that launch's ring of key blocks.
      splits: parts that a user's queries are cut into, where users are too few to occupy the
        device. The parts' gradients of keys and values are f32, and are added later.
    """

    block_q: int = 64
    stages: int = 2
    kv_slots: int = 1
    d_query: str = "parts"
    block_kv: int = 64
    kv_stages: int = 3
    splits: int = 1

    @property
    def has_d_query(self) -> bool:
        """Whether the first launch computes d_query."""
        return self.d_query == "parts"

    @property
    def stores_d_scores(self) -> bool:
        """Whether the first launch stores gradients of scores in device memory."""
        return self.d_query == "stored"

    @property
    def has_parts(self) -> bool:
        """Whether a launch adds parts of gradients."""
        return self.has_d_query or self.splits > 1

    @property
    def tile_rows(self) -> int | None:
        """Number of rows of a tile of the launch of d_query alone; None without such a launch."""
        return None if self.has_d_query else TILE_ROWS

    def shared(self, head_dim: int) -> Any:
        """Declares shared memory and barriers of a CTA of the first launch."""
        blocks = hopper.column_blocks(head_dim)
        half = (blocks, self.block_q, BLOCK_K)
        # A slot has a block's queries and its d_out; or slots alternate: a block's queries, its
        # d_out, the next block's queries.
        queries = memory.ring(self.stages, ready=2 * blocks + 1, tiles=(2, *half))
        statistics = (self.stages, 2, self.block_q)
        if has_halves(head_dim):
            slots = 2 * self.stages - 1
            queries = memory.ring(slots, ready=blocks + 1, tiles=half)
            # TMA writes to whole 128 bytes.
            statistics = (slots, 1, -(-self.block_q // SUM_COLUMNS) * SUM_COLUMNS)
        d_query: dict[str, Any] = dict.fromkeys(("d_scores", "d_query", "part_ready", "part_free"))
        if self.has_d_query or self.stores_d_scores:
            buffers = (D_SCORES_BUFFERS, NUM_CONSUMERS, self.block_q, BLOCK_K)
            d_query["d_scores"] = memory.Tiles(buffers)
        if self.has_d_query:
            parts = -(-head_dim // SUM_COLUMNS)
            d_query |= {
                "d_query": memory.Floats((parts, self.block_q, SUM_COLUMNS), True),
                # Arrays, so that they can be indexed; only element 0 is used.
                "part_ready": memory.Barriers(2, NUM_CONSUMERS),
                "part_free": memory.Barriers(2, 1),
            }
        return memory.shared(
            keys_values=memory.ring(
                self.kv_slots,
                ready=2 * NUM_CONSUMERS * blocks,
                tiles=(2, NUM_CONSUMERS, blocks, WGMMA_M, BLOCK_K),
            ),
            queries=queries,
            statistics=memory.Floats(statistics),
            # One more than slots, of the part of d_query.
            items=memory.descriptors(self.kv_slots, DESCRIPTOR_WORDS, spare=1),
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, self.block_q)),
            **d_query,
        )

    @property
    def d_query_config(self) -> DQueryConfig:
        return DQueryConfig(self.block_kv, self.kv_stages)

    def stored_shared(self, head_dim: int) -> Any:
        blocks, tiles = hopper.column_blocks(head_dim), NUM_CONSUMERS
        return memory.shared(
            items=memory.descriptors(2, DESCRIPTOR_WORDS)._replace(
                free=memory.Barriers(2, NUM_CONSUMERS)
            ),
            # Gradients of scores, queries by keys, of every tile of 64 queries (or keys, for
            # d_key), and keys (or queries) by columns.
            blocks=memory.ring(
                self.kv_stages, ready=tiles + blocks, tiles=(tiles + blocks, WGMMA_M, BLOCK_K)
            ),
            result=memory.Tiles((tiles, blocks, WGMMA_M, BLOCK_K)),
        )

    def stored_tiles(self, tiles: int, kv_heads: int, blocks: int) -> int:
        """Counts tiles of keys, of a user's `tiles`, whose dS is stored at once; 0 if none is."""
        most = MAX_STORED_BYTES // (kv_heads * BLOCK_KV * blocks * self.block_q * 2)
        return -(-tiles // -(-tiles // most)) if most else 0

    def smem_bytes(self, head_dim: int) -> int:
        found: list[Any] = [self.shared(head_dim)]
        if self.d_query == "launch":
            found.append(self.d_query_config.shared(head_dim, 1))
        elif self.stores_d_scores:
            found.append(self.stored_shared(head_dim))
        return max(map(memory.smem_bytes, found))

    def _why_not_capped(self, problem: AttentionSizes) -> str | None:
        """Why the kernels cannot take a cap with these blocks; None if they can."""
        is_wide_kv = self.d_query == "launch" and self.block_kv > MAX_CAPPED_BLOCK
        if self.block_q > MAX_CAPPED_BLOCK or (is_wide_kv and problem.head_dim > BLOCK_K):
            most, blocks = MAX_CAPPED_BLOCK, f"block_q={self.block_q} and block_kv={self.block_kv}"
            return f"a logit_cap at H={problem.head_dim} needs blocks of {most}, but has {blocks}"
        return None

    @hopper.first_reason
    def illegal_reason(self, problem: AttentionSizes) -> Iterator[str | None]:
        width = problem.head_dim
        yield hopper.why_not_dtype(problem.dtype)
        yield hopper.why_not_head_dim(width, HEAD_DIMS, "attention backward kernel takes")
        if min(problem.batch, problem.q_len, problem.kv_len, problem.users) < 1:
            yield (
                f"the attention backward kernel needs a query, a user and a key, but "
                f"B={problem.batch}, T={problem.q_len}, U={problem.users} and S={problem.kv_len}"
            )
        yield hopper.why_not_heads(problem.q_heads, problem.kv_heads)
        operands = "scores and the sums"
        yield hopper.why_not_block("block_q", self.block_q, MAX_BLOCK_Q[width], width, operands)
        if getattr(problem, "has_logit_cap", False):
            yield self._why_not_capped(problem)
        yield hopper.why_too_few(self, stages=2, splits=1)
        if self.kv_slots not in (1, 2):
            yield f"kv_slots must be 1 or 2, but is {self.kv_slots}"
        if self.d_query not in D_QUERY:
            yield f"d_query must be one of {', '.join(D_QUERY)}, but is {self.d_query}"
        if not self.stores_d_scores and width > MAX_BOTH_SUMS:
            yield (
                f"d_query must be stored for heads wider than {MAX_BOTH_SUMS}, but is "
                f"{self.d_query} at H={width}"
            )
        if self.d_query == "launch":
            widest, operands = MAX_BLOCK_KV[width], "scores and a sum"
            yield hopper.why_not_block("block_kv", self.block_kv, widest, width, operands)
        if self.stores_d_scores and self.block_kv != STORED_BLOCK_KV:
            yield f"block_kv must be {STORED_BLOCK_KV} for stored, but is {self.block_kv}"
        if not self.has_d_query:
            yield hopper.why_too_few(self, kv_stages=2)
        if self.stores_d_scores:
            group = problem.q_heads // problem.kv_heads
            blocks = most_blocks(problem.batch, problem.users, problem.q_len * group, self.block_q)
            if not self.stored_tiles(1, problem.kv_heads, blocks):
                yield (
                    f"gradients of scores of {BLOCK_KV} keys and {blocks * self.block_q} queries "
                    f"of {problem.kv_heads} heads take more than {MAX_STORED_BYTES} bytes"
                )
        yield hopper.why_not_smem(self, self.smem_bytes(width), width)
