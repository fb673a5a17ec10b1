"""Numbers the query rows of attention's gradient in one launch, and describes users and tiles.

XLA numbers rows in five to nine kernels of 1 to 2 us each (`rows.by_xla`). Here each CTA, of one
warpgroup, does steps 1 to 3 for all users:

  1. It counts each user's candidates. Where the users of two neighbouring candidates differ, a
  thread subtracts the candidate's number from its user's count and adds the number to its
  predecessor's count, so that the lengths of a user's runs add up, in any order of the candidates.
  2. A thread adds up the rows, blocks and tiles of some users; the warpgroup exchanges the sums.
  3. It writes where each user's rows, blocks and tiles begin to shared memory.
  4. It describes some users, parts of their rows, and tiles of rows in device memory.

If the CTAs of `statistics` are few, they number the rows themselves. CTAs do not wait for each
other.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import Threads, cdiv
from ikbo_jax.pallas.worklist.scan import running_sums
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Words of a part of a user's rows in device memory: first query row, number of query rows, first
#: row in `d_query`, number of the user's keys.
USER_WORDS = 4
#: Words of a tile of query rows in device memory, for launches that compute d_query alone: first
#: query row, number of query rows, user, number of its keys, first row's target.
TILE_WORDS = 5
#: Most candidates and users: of more, XLA's kernels take less time than one CTA.
MOST_CANDIDATES, MOST_USERS = 16384, 4096
#: Most CTAs of a launch. Each numbers all rows, and describes some users and tiles.
MOST_WORKERS = 64
#: A CTA has one warpgroup.
THREADS = Threads(1, 0)
#: Added to statistics where the promised order is wrong: the bits of an f32 NaN.
NAN_BITS = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static description of query rows: `block_q` of a block, `splits` parts of a user's rows.

    `group` query heads share a key head. `is_sorted`: whether the caller promises that
    `cand_to_user` never decreases. `tile_rows`: None if no launch takes tiles of rows.
    """

    batch: int
    users: int
    kv_len: int
    q_len: int
    group: int
    block_q: int
    splits: int
    is_sorted: bool
    tile_rows: int | None = None

    @property
    def per_candidate(self) -> int:
        """Number of rows of a candidate."""
        return self.q_len * self.group

    @property
    def rows(self) -> int:
        return self.batch * self.per_candidate

    @property
    def is_packed(self) -> bool:
        """Whether rows of a key head are not where the caller's queries are."""
        return not self.is_sorted or self.group > 1

    @property
    def most_tiles(self) -> int:
        """Largest number of tiles of any index."""
        assert self.tile_rows is not None
        return self.rows // self.tile_rows + min(self.users, self.rows)

    @property
    def workers(self) -> int:
        """Number of CTAs of the launch: one for each 128 users, parts or tiles."""
        most = self.users * self.splits
        if self.tile_rows is not None:
            most = max(most, self.most_tiles + 1)
        return min(pl.cdiv(most, WARPGROUP_SIZE), MOST_WORKERS)

    @property
    def users_each(self) -> int:
        """Number of a thread's neighbouring users: odd, so that threads read different banks."""
        return pl.cdiv(self.users, WARPGROUP_SIZE) | 1


class Operands(NamedTuple):
    """Device memory that the launch reads."""

    index: Any  # [B] int32: the user of a candidate
    lengths: Any  # [U] int32, or None


class Outputs(NamedTuple):
    """Device memory that the launch fills with int32 (`rows.Rows`); None where not wanted."""

    users: Any  # [U * USER_WORDS]
    parts: Any  # [U * splits * USER_WORDS]
    tiles: Any  # [(most tiles + 1) * TILE_WORDS]
    poison: Any  # [1]
    position: Any  # [B]; only `statistics` fills it
    order: Any  # [B]; only `statistics` fills it


def shared(sizes: Sizes, *, ranked: int = 0) -> Any:
    """Declares shared memory; `ranked` is the number of candidates that a CTA ranks."""
    # For each user, and zeros for threads without a user.
    words = memory.Words((sizes.users_each * WARPGROUP_SIZE,))
    return memory.shared(
        candidates=words,
        first_rows=words,
        first_targets=words,
        ends=None if sizes.tile_rows is None else words,  # tiles of a user and of those before
        sums=memory.Words((3 * per_thread.WARPS,)),  # of a thread's users
        poison=memory.Words((1,)),
        ranks=memory.Words((ranked * per_thread.WARPS,)) if ranked else None,
    )


def outputs(sizes: Sizes, *, has_order: bool = False) -> Outputs:
    """Declares `Outputs`; `has_order` includes `position`."""

    def words(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((math.prod(shape),), jnp.int32)

    has_tiles = sizes.tile_rows is not None
    return Outputs(
        users=words(sizes.users, USER_WORDS),
        parts=words(sizes.users * sizes.splits, USER_WORDS) if sizes.splits > 1 else None,
        tiles=words(sizes.most_tiles + 1, TILE_WORDS) if has_tiles else None,
        poison=words(1) if sizes.is_sorted else None,
        position=words(sizes.batch) if has_order else None,
        order=words(sizes.batch) if has_order else None,
    )


def users_of(ctx: WarpgroupContext, candidates: list[jax.Array]) -> list[jax.Array]:
    """Loads the users of candidates, clamped."""
    # All loads before the first use of one: each takes 300 ns.
    found = [THREADS.read(ctx.operands.index, x, "global") for x in candidates]
    return [jnp.clip(x, 0, ctx.shape.users - 1) for x in found]


def number(ctx: WarpgroupContext) -> None:
    """Does steps 1 to 3 for all users."""
    shared, thread = ctx.shared, per_thread.number()
    everyone = thread >= 0
    THREADS.keep(shared.poison, thread, per_thread.same(0), thread == 0)

    @pl.loop(0, ctx.shape.users_each)
    def _(turn: Any) -> None:
        index = turn * WARPGROUP_SIZE + thread
        THREADS.keep(shared.candidates, index, per_thread.same(0), everyone)

    plgpu.commit_smem()
    _count(ctx)
    plgpu.commit_smem()
    _add_up(ctx)
    plgpu.commit_smem()


def _count(ctx: WarpgroupContext) -> None:
    """Counts each user's candidates, and finds whether the promised order is wrong."""
    sizes, shared, last = ctx.shape, ctx.shared, ctx.shape.batch - 1
    rounds, numbers = THREADS.rounds(sizes.batch + 1)

    @pl.loop(0, rounds)
    def _(turn: Any) -> None:
        places = numbers(turn)
        users = users_of(ctx, [jnp.clip(x + step, 0, last) for x in places for step in (-1, 0)])
        for place, before, user in zip(places, users[::2], users[1::2], strict=True):
            is_first, is_end = place == 0, place == sizes.batch
            is_other = (before != user) | is_first | is_end
            ends = is_other & ~is_first & (place <= sizes.batch)
            begins = is_other & (place < sizes.batch)
            THREADS.add(shared.candidates, before, place, ends)
            THREADS.add(shared.candidates, user, -place, begins)
            if sizes.is_sorted:
                is_wrong = ends & begins & (user < before)
                nan, zero = per_thread.same(NAN_BITS), per_thread.same(0)
                THREADS.keep(shared.poison, zero, nan, is_wrong)


def _add_up(ctx: WarpgroupContext) -> None:
    """Stores the first row, the first target and the end of the tiles of each user."""
    sizes, shared = ctx.shape, ctx.shared

    def numbers(user: jax.Array) -> tuple[jax.Array, ...]:
        rows = THREADS.read(shared.candidates, user) * sizes.per_candidate
        found = [rows, cdiv(rows, sizes.block_q) * sizes.block_q]
        if sizes.tile_rows is not None:
            found.append(cdiv(rows, sizes.tile_rows))
        return tuple(found)

    def read(users: list[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return [numbers(x) for x in users]

    def store(user: jax.Array, before: Any, numbers: Any) -> None:
        kept = [(shared.first_rows, before[0]), (shared.first_targets, before[1])]
        if shared.ends is not None:
            kept.append((shared.ends, before[2] + numbers[2]))
        for ref, x in kept:
            THREADS.keep(ref, user, x, user >= 0)

    kinds, each = 2 + (sizes.tile_rows is not None), sizes.users_each
    running_sums(THREADS, sizes.users, read, store, shared.sums, kinds=kinds, parts=(each, 1, each))


def describe(ctx: WarpgroupContext) -> None:
    """Writes this CTA's share of the descriptions to device memory (step 4)."""
    sizes, outputs = ctx.shape, ctx.outputs
    zero, thread = per_thread.same(0), per_thread.number()
    _write_all(ctx, outputs.users, sizes.users, _user)
    if outputs.parts is not None:
        _write_all(ctx, outputs.parts, sizes.users * sizes.splits, _part)
    if outputs.tiles is not None:
        _write_all(ctx, outputs.tiles, sizes.most_tiles + 1, _tile)
    if outputs.poison is not None:
        is_wanted = (thread == 0) & (zero + ctx.worker == 0)
        poison = THREADS.read(ctx.shared.poison, zero)
        THREADS.write(outputs.poison, zero, poison, is_wanted)


def _write_all(ctx: WarpgroupContext, ref: Any, count: int, words_of: Any) -> None:
    """Writes words_of(ctx, index) for this CTA's share of the indices below `count`."""
    turns, workers = pl.cdiv(count, WARPGROUP_SIZE), lax.axis_size("worker")

    @pl.loop(0, (turns - ctx.worker + workers - 1) // workers)
    def _(turn: Any) -> None:
        index = (ctx.worker + turn * workers) * WARPGROUP_SIZE + per_thread.number()
        is_wanted, words = index < count, words_of(ctx, index)
        assert ref.shape[0] == count * len(words)
        for i, word in enumerate(words):
            THREADS.write(ref, index * len(words) + i, word, is_wanted)


class _User(NamedTuple):
    """Users, one for each thread."""

    first_row: jax.Array
    rows: jax.Array
    first_target: jax.Array
    keys: jax.Array


def _user(ctx: WarpgroupContext, user: jax.Array) -> _User:
    """Describes users; from the number of users on, the last one."""
    sizes, shared = ctx.shape, ctx.shared
    user = jnp.minimum(user, sizes.users - 1)
    keys = per_thread.same(sizes.kv_len)
    if ctx.operands.lengths is not None:
        keys = jnp.clip(THREADS.read(ctx.operands.lengths, user, "global"), 0, sizes.kv_len)
    return _User(
        THREADS.read(shared.first_rows, user),
        THREADS.read(shared.candidates, user) * sizes.per_candidate,
        THREADS.read(shared.first_targets, user),
        keys,
    )


def _part(ctx: WarpgroupContext, index: jax.Array) -> tuple[jax.Array, ...]:
    """Describes parts of users' rows."""
    sizes = ctx.shape
    number = lax.div(index, per_thread.same(sizes.splits))
    user = _user(ctx, number)
    # All parts but a user's last ones have whole blocks.
    part_rows = cdiv(cdiv(user.rows, sizes.block_q), sizes.splits) * sizes.block_q
    begin = (index - number * sizes.splits) * part_rows
    return (
        user.first_row + begin,
        jnp.clip(user.rows - begin, 0, part_rows),
        user.first_target + begin,
        user.keys,
    )


def _tile(ctx: WarpgroupContext, index: jax.Array) -> tuple[jax.Array, ...]:
    """Describes tiles; the entry after the last possible tile begins with the number of tiles."""
    sizes, ends, read = ctx.shape, ctx.shared.ends, THREADS.read
    size: Any = sizes.tile_rows
    # Users whose tiles all come before this one.
    user = count_at_most(lambda x: read(ends, x), sizes.users, index, per_thread.same(0))
    user = jnp.minimum(user, sizes.users - 1)
    found = _user(ctx, user)
    start = (index - (THREADS.read(ends, user) - cdiv(found.rows, size))) * size
    total = THREADS.read(ends, per_thread.same(sizes.users - 1))
    return (
        jnp.where(index < sizes.most_tiles, found.first_row + start, total),
        jnp.clip(found.rows - start, 0, size),
        user,
        found.keys,
        found.first_target + start,
    )


def number_and_describe(ctx: WarpgroupContext) -> None:
    """Numbers all rows, and describes the CTA's share, on the CTA's warpgroup."""
    number(ctx)
    describe(ctx)


# Host side


def fits(sizes: Sizes) -> bool:
    """Whether the problem is small enough for CTAs that number all rows."""
    return sizes.batch <= MOST_CANDIDATES and sizes.users <= MOST_USERS


def numbering_kernel(operands: Operands, sizes: Sizes) -> Outputs:
    """Numbers rows and describes users; returns the arrays that `sizes` asks for."""
    return launch_threads(
        number_and_describe,
        sizes,
        operands,
        outputs(sizes),
        shared(sizes),
        name="ikbo_attention_backward_rows",
        workers=sizes.workers,
    )
