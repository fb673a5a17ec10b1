"""Sums of candidates' rows by user, as a Mosaic GPU kernel for Hopper.

    sums[u] = sum of values[b] over the candidates b of user u

A CTA owns neighbouring users and a chunk of columns. CTAs share users and candidates evenly: in
the list of all candidates by user, in which each user's end is an entry as well, a CTA owns the
users whose first entry lies in its equal part.

The CTA's candidates, in the order of users, are divided evenly among its lanes: a lane is the
threads, one for each vector of the chunk, that add up the same candidates. So a lane's candidates
may begin or end within a user. A thread

  1. stores zeros for users without candidates,
  2. adds up its candidates; where the user changes, it stores the sum of the user before,
  3. adds the sums of later lanes to that of its last user, by a segmented scan in shared memory.

Each number is added in f32, in an order that the sizes and the index decide, and rounded once.

The kernel is limited by memory: each row is read once. Candidates are put into the order of users
by a launch of its own, unless they are sorted.

Synchronisations: `Threads.commit` in the search and in step 3. CTAs do not wait for each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import Threads, same
from ikbo_jax.pallas.hopper.row_vectors import Rows
from ikbo_jax.pallas.worklist import counted_order, work_order
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.problems.look_up import SegmentSumConfig, vector_words

#: Users that a thread reads at once in the search for a CTA's first one.
_SAMPLES = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      batch: candidates.
      users: users.
      vectors: vectors of a row.
      words: 32-bit words of a vector.
      numbers: numbers of a vector.
      chunks: chunks of columns.
      slices: CTAs of a chunk.
    """

    batch: int
    users: int
    vectors: int
    words: int
    numbers: int
    chunks: int
    slices: int

    @property
    def columns(self) -> int:
        """Vectors of a chunk."""
        return pl.cdiv(self.vectors, self.chunks)

    @property
    def each(self) -> int:
        """Entries of a CTA: candidates and users' ends."""
        return pl.cdiv(self.batch + self.users, self.slices)


class Operands(NamedTuple):
    """Device memory that the launch reads."""

    values: Any  # [B, width]
    index: Any  # [B] int32
    order: Any  # [B] int32, the number of each candidate in the order of users; None: sorted
    starts: Any  # [U + 1] int32, a user's first candidate in that order


class Shared(NamedTuple):
    """Shared memory."""

    sums: Any  # [numbers, threads] f32
    links: Any  # [threads]
    totals: Any  # of the search


class _Part(NamedTuple):
    """What the functions below share: a thread's part of the CTA's work."""

    ctx: WarpgroupContext
    threads: Threads
    lane: Any
    vector: Any  # of a row
    is_used: Any  # whether the thread has a lane and a vector

    @property
    def lanes(self) -> int:
        return self.threads.count // self.ctx.shape.columns

    def candidate(self, place: jax.Array) -> jax.Array:
        """The candidate at a place in the order of users."""
        order = self.ctx.operands.order
        place = jnp.clip(place, 0, self.ctx.shape.batch - 1)
        return place if order is None else self.threads.read(order, place, "global")

    def user(self, candidate: jax.Array) -> jax.Array:
        user = self.threads.read(self.ctx.operands.index, candidate, "global")
        return jnp.clip(user, 0, self.ctx.shape.users - 1)


class _Sums(NamedTuple):
    """A thread's sums on its way.

    Attributes:
      user: of `open`.
      open: sum of the last user so far.
      head: sum of the user that the lane began with, if an earlier lane has that user, too.
      is_head: 1 while that is the last user.
    """

    user: Any
    open: tuple[Any, ...]
    head: tuple[Any, ...]
    is_head: Any


def _sum(ctx: WarpgroupContext) -> None:
    """A warpgroup of the CTA."""
    shape = ctx.shape
    threads = Threads(ctx.config.warpgroups, ctx.consumer, ctx.interpret)
    chunk, piece = lax.rem(ctx.worker, shape.chunks), lax.div(ctx.worker, shape.chunks)
    thread = threads.number()
    lane = lax.div(thread, same(shape.columns))
    vector = chunk * shape.columns + (thread - lane * shape.columns)
    lanes = threads.count // shape.columns
    is_used = (lane < lanes) & (vector < shape.vectors)
    part = _Part(ctx, threads, lane, jnp.minimum(vector, shape.vectors - 1), is_used)
    first, end = _own_users(part, piece)
    _store_zeros(part, first, end)
    begin, after = ctx.operands.starts[first], ctx.operands.starts[end]

    @pl.when(begin < after)
    def _() -> None:
        _join(part, *_walk(part, begin, after))


def _own_users(part: _Part, piece: Any) -> tuple[Any, Any]:
    """The CTA's first user, and the one after its last.

    User u's first entry has number starts[u] + u. All threads search together.
    """
    shape, threads = part.ctx.shape, part.threads
    limits = [piece * shape.each, (piece + 1) * shape.each]
    found: list[Any] = [jnp.int32(0), jnp.int32(0)]
    unknown, level = shape.users, 0
    while unknown:
        stride = pl.cdiv(unknown, _SAMPLES * threads.count)
        counts = []
        for limit, base in zip(limits, found, strict=True):
            places = [
                base + (threads.number() + (i * threads.count + 1)) * stride - 1
                for i in range(_SAMPLES)
            ]
            starts = [
                threads.read(part.ctx.operands.starts, jnp.minimum(x, shape.users), "global")
                for x in places
            ]
            pairs = zip(places, starts, strict=True)
            below = [(x < shape.users) & (start + x < limit) for x, start in pairs]
            counts.append(sum(x.astype(jnp.int32) for x in below))
        both = threads.total(
            counts[0] + counts[1] * (1 << 16), part.ctx.shared.totals, level * threads.warps
        )
        number = lax.shift_right_logical(both, jnp.int32(16))
        found = [
            x + y * stride for x, y in zip(found, [both - (number << 16), number], strict=True)
        ]
        unknown, level = stride - 1, level + 1
    return found[0], found[1]


def _store_zeros(part: _Part, first: Any, end: Any) -> None:
    """Step 1."""
    threads, starts = part.threads, part.ctx.operands.starts
    rows = _output(part)
    zeros = rows.rounded([_no_sum()] * part.ctx.shape.numbers)

    @pl.loop(0, lax.div(end - first + (part.lanes - 1), jnp.int32(part.lanes)))
    def _(turn: Any) -> None:
        user = part.lane + (first + turn * part.lanes)
        place = jnp.minimum(user, part.ctx.shape.users - 1)
        count = threads.read(starts, place + 1, "global") - threads.read(starts, place, "global")
        rows.store(place, part.vector, zeros, part.is_used & (user < end) & (count == 0))


def _walk(part: _Part, begin: Any, after: Any) -> tuple[_Sums, Any]:
    """Step 2; returns the sums, and whether the lane has candidates."""
    shape, unroll = part.ctx.shape, part.ctx.config.unroll
    each = lax.div(after - begin + (part.lanes - 1), jnp.int32(part.lanes))
    first = jnp.minimum(part.lane * each + begin, after)
    end = jnp.minimum(first + each, after)
    is_later = first > begin
    before = part.user(part.candidate(first - 1))
    nothing = (_no_sum(),) * shape.numbers
    sums = _Sums(jnp.where(is_later, before, same(-1)), nothing, nothing, same(1))

    def candidates(turn: Any) -> list[jax.Array]:
        return [part.candidate(first + (turn * unroll + i)) for i in range(unroll)]

    values = Rows(part.ctx.operands.values, shape.words, part.ctx.interpret)

    def step(turn: Any, carry: tuple[_Sums, list[jax.Array]]) -> Any:
        sums, own = carry
        loaded = values.load([(x, part.vector) for x in own])
        users = [part.user(x) for x in own]
        following = candidates(turn + 1)  # on their way while this turn's are added
        for i in range(unroll):
            is_own = part.is_used & (first + (turn * unroll + i) < end)
            sums = _add(part, sums, users[i], values.floats(loaded[i]), is_own)
        return sums, following

    turns = lax.div(each + (unroll - 1), jnp.int32(unroll))
    sums, _ = lax.fori_loop(0, turns, step, (sums, candidates(0)))
    return sums, part.is_used & (first < end)


def _add(
    part: _Part, sums: _Sums, user: jax.Array, numbers: tuple[jax.Array, ...], is_own: jax.Array
) -> _Sums:
    """Adds a candidate's vector; stores the sum of the user before, if that is complete."""
    is_new = is_own & (user != sums.user)
    is_head = is_new & (sums.is_head == 1)
    rows = _output(part)
    rows.store(
        jnp.maximum(sums.user, 0),
        part.vector,
        rows.rounded(sums.open),
        is_new & (sums.is_head == 0),
    )
    zero = _no_sum()
    opened = [jnp.where(is_new, zero, x) for x in sums.open]
    return _Sums(
        jnp.where(is_new, user, sums.user),
        tuple(x + jnp.where(is_own, y, zero) for x, y in zip(opened, numbers, strict=True)),
        tuple(jnp.where(is_head, x, y) for x, y in zip(sums.open, sums.head, strict=True)),
        jnp.where(is_new, same(0), sums.is_head),
    )


def _join(part: _Part, sums: _Sums, is_wanted: jax.Array) -> None:
    """Step 3.

    `head` of each lane becomes the sum that it and later lanes add to a user of an earlier lane: a
    lane of one user alone is linked to the next lane.
    """
    shape, shared, threads = part.ctx.shape, part.ctx.shared, part.threads
    thread = threads.number()
    is_linked = is_wanted & (sums.is_head == 1)
    link = is_linked.astype(jnp.int32)
    heads = [jnp.where(is_linked, x, y) for x, y in zip(sums.open, sums.head, strict=True)]
    own = pl.ds(threads.warpgroup * WARPGROUP_SIZE if threads.warpgroups > 1 else 0, WARPGROUP_SIZE)

    def of_lane(distance: int) -> tuple[list[jax.Array], jax.Array]:
        """The sums and the link of a later lane."""
        threads.commit()  # all have read
        for i, x in enumerate(heads):
            shared.sums[i, own] = x
        shared.links[own] = link
        threads.commit()
        other = thread + distance * shape.columns
        is_lane = part.lane + distance < part.lanes
        other = jnp.where(is_lane, other, thread)
        numbers = [threads.read(shared.sums.at[i], other) for i in range(shape.numbers)]
        return (
            [jnp.where(is_lane, x, _no_sum()) for x in numbers],
            jnp.where(is_lane, threads.read(shared.links, other), same(0)),
        )

    distance = 1
    while distance < part.lanes:
        later, later_link = of_lane(distance)
        heads = [jnp.where(link == 1, x + y, x) for x, y in zip(heads, later, strict=True)]
        link = link * later_link
        distance *= 2
    later, _ = of_lane(1)
    rows = _output(part)
    total = rows.rounded([x + y for x, y in zip(sums.open, later, strict=True)])
    is_last = is_wanted & (sums.is_head == 0)
    rows.store(jnp.maximum(sums.user, 0), part.vector, total, is_last)


def _output(part: _Part) -> Rows:
    out = part.ctx.outputs
    words = part.ctx.shape.numbers * jnp.dtype(out.dtype).itemsize // 4
    return Rows(out, words, part.ctx.interpret)


def _no_sum() -> jax.Array:
    return same(0).astype(jnp.float32)


def _order(
    index: jax.Array, users: int, *, is_sorted: bool, interpret: bool
) -> tuple[jax.Array | None, jax.Array]:
    """Candidates in the order of users, None if they are sorted; and each user's first."""
    starts = work_order.starts(jnp.clip(index, 0, users - 1), users)
    if is_sorted:
        return None, starts
    if interpret:
        return work_order.by_user(jnp.clip(index, 0, users - 1)), starts
    return counted_order.by_user(index, users), starts


def segment_sum_kernel(
    values: jax.Array,
    cand_to_user: jax.Array,
    users: int,
    *,
    config: SegmentSumConfig,
    is_sorted: bool = False,
    dtype: Any = None,
    interpret: Any = False,
) -> jax.Array:
    """Sums rows over the candidates of each user.

    Args:
      values: [B, width], bf16, f16 or f32; B is at least 1. Rows that are no whole words of 32 bits
        are converted to f32 first, by XLA.
      cand_to_user: [B] int32, clamped to [0, users).
      users: U, at least 1.
      config: a legal configuration.
      is_sorted: whether `cand_to_user` does not decrease.
      dtype: of the sums; None: of the values.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      [U, width]. Sums are f32, in the same order in every run, and rounded once; a user without
      candidates has zeros.
    """
    batch, width = values.shape
    order, starts = _order(cand_to_user, users, is_sorted=is_sorted, interpret=bool(interpret))
    result = stored = jnp.dtype(dtype or values.dtype)
    words = vector_words(width, values.dtype.itemsize)
    if not words:
        values, words, stored = values.astype(jnp.float32), vector_words(width, 4), jnp.float32
    numbers = words * 4 // values.dtype.itemsize
    vectors = width // numbers
    chunks, slices = config.divide(batch, users, vectors)
    shape = Shape(batch, users, vectors, words, numbers, chunks, slices)
    threads = config.warpgroups * WARPGROUP_SIZE
    found: jax.Array = launch_threads(
        _sum,
        shape,
        Operands(values, cand_to_user, order, starts),
        jax.ShapeDtypeStruct((users, width), stored),
        Shared(
            memory.Floats((numbers, threads)),
            memory.Words((threads,)),
            memory.Words((4 * config.warpgroups * 4,)),
        ),
        name="ikbo_segment_sum",
        workers=chunks * slices,
        warpgroups=config.warpgroups,
        config=config,
        interpret=interpret,
    )
    return found.astype(result)
