"""Copies candidates into the order of users, for kernels that read a user's queries side by side.

XLA takes four kernels of 1 to 2 us each. If candidates are few, one launch copies them: each CTA
compares the users of some candidates with the users of all while the queries are loaded. The number
of candidates that come first is a candidate's place. The launch of `counted_order` orders more
candidates; XLA copies large queries, and sorts what that launch does not take.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import Threads
from ikbo_jax.pallas.worklist import counted_order, scan, work_order
from ikbo_jax.pallas.worklist.counted_order import ACCESSES, ELEMENTS, Operands, Order, count_order
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Candidates of a CTA: each thread compares its share of all candidates with each of them.
CANDIDATES = 8
#: Most candidates that are compared with each other. On an H100, 1,024 took 1.9 us, and counting
#: them 2.2; 4,096 took 5.7 us, and counting them 2.8.
MOST_COMPARED = 2048
#: Most CTAs: each reads the whole index.
MOST_CTAS = 8 * 132
#: Most bytes of queries that the launch of many candidates copies, which takes 22 us at 3 TB/s. XLA
#: copies larger ones as fast as memory allows, and its launch of 2 us is little beside that.
MOST_COPIED = 2**25


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch; `vectors` are 16-byte parts of a candidate's queries."""

    batch: int
    users: int
    vectors: int

    @property
    def groups(self) -> int:
        return pl.cdiv(self.batch, CANDIDATES)

    @property
    def parts(self) -> int:
        """Number of CTAs that share a group of candidates."""
        return pl.cdiv(CANDIDATES * self.vectors, ACCESSES * WARPGROUP_SIZE)

    @property
    def workers(self) -> int:
        return self.groups * self.parts

    @property
    def fits(self) -> bool:
        return self.batch <= MOST_COMPARED and self.workers <= MOST_CTAS


def pack(query: jax.Array, cand_to_user: jax.Array, users: int) -> Order:
    """Copies candidates into the order of users, without their positions.

    The order is as of `counted_order.by_user`. `query` [B, T, N, H] has 16 bits, H is a multiple of
    8, and `cand_to_user` [B] int32 is clamped to [0, users).
    """
    shape = Shape(query.shape[0], users, math.prod(query.shape[1:]) // ELEMENTS)
    if not shape.fits:
        return _pack_many(query, cand_to_user, users)
    numbers = jax.ShapeDtypeStruct(cand_to_user.shape, jnp.int32)
    return launch_threads(
        _pack,
        shape,
        Operands(query, cand_to_user),
        Order(jax.ShapeDtypeStruct(query.shape, query.dtype), numbers, numbers, None),
        memory.shared(
            ranks=memory.Words((CANDIDATES * per_thread.WARPS,)),  # a warp's part of a place
            places=memory.Words((CANDIDATES,)),
        ),
        name="ikbo_attention_pack",
        workers=shape.workers,
    )


def _pack_many(query: jax.Array, cand_to_user: jax.Array, users: int) -> Order:
    """Packs many candidates, or large queries."""
    if not counted_order.fits(cand_to_user.shape[0], users):
        return by_xla(query, cand_to_user, users)
    if query.size * query.dtype.itemsize <= MOST_COPIED:
        return count_order(query, cand_to_user, users)
    found = count_order(None, cand_to_user, users)
    return found._replace(query=query[found.order])


def by_xla(query: jax.Array, cand_to_user: jax.Array, users: int) -> Order:
    """Packs candidates by XLA."""
    if cand_to_user.shape[0] <= work_order.MAX_COUNTED:
        order = work_order.by_user(jnp.clip(cand_to_user, 0, users - 1))
    else:
        # Not clamped, as the gradient sorts the same index: XLA then sorts once.
        order = work_order.by_user(cand_to_user)
    return Order(query[order], jnp.clip(cand_to_user, 0, users - 1)[order], order, None)


def _pack(ctx: WarpgroupContext) -> None:
    """Orders and copies the CTA's candidates."""
    shape, shared, outputs = ctx.shape, ctx.shared, ctx.outputs
    read = functools.partial(per_thread.gather)
    thread, zero = per_thread.number(), per_thread.same(0)
    group = lax.div(ctx.worker, jnp.int32(shape.parts))
    part = ctx.worker - group * shape.parts
    first = group * CANDIDATES
    vectors = [
        (part * ACCESSES + i) * WARPGROUP_SIZE + thread for i in range(ACCESSES)
    ]  # of the group
    own = [lax.div(x, per_thread.same(shape.vectors)) for x in vectors]
    loaded = [
        counted_order.load_queries(
            ctx.operands.query, jnp.minimum(first + x, shape.batch - 1), v - x * shape.vectors
        )
        for v, x in zip(vectors, own, strict=True)
    ]
    users = _rank(ctx, first)
    plgpu.commit_smem()
    # Threads of the last candidates of the index have none.
    candidate = jnp.minimum(thread, CANDIDATES - 1)
    place = scan.rank_of(Threads(1, 0), shared.ranks, candidate)
    user = zero
    for i, x in enumerate(users):
        user = jnp.where(candidate == i, x, user)
    is_own = thread < CANDIDATES
    per_thread.scatter(shared.places, candidate, place, is_own)
    is_own = is_own & (first + thread < shape.batch) & (zero + part == 0)
    for ref, values in ((outputs.user, user), (outputs.order, first + candidate)):
        per_thread.scatter(ref, place, values, is_own, space="global")
    plgpu.commit_smem()
    for words, v, x in zip(loaded, vectors, own, strict=True):
        place = read(shared.places, jnp.minimum(x, CANDIDATES - 1), "shared")
        is_wanted = (x < CANDIDATES) & (first + x < shape.batch)
        counted_order.store_queries(outputs.query, place, v - x * shape.vectors, words, is_wanted)


def _rank(ctx: WarpgroupContext, first: Any) -> list[jax.Array]:
    """Stores each warp's part of the places of this CTA's candidates; returns their users."""
    shape, last = ctx.shape, ctx.shape.batch - 1

    def users_of(candidates: list[jax.Array]) -> list[jax.Array]:
        # All loads before the first use of one.
        found = [
            per_thread.gather(ctx.operands.index, jnp.minimum(x, last), "global")
            for x in candidates
        ]
        return [jnp.clip(x, 0, shape.users - 1) for x in found]

    def others_of(candidates: list[jax.Array]) -> list[jax.Array]:
        users = zip(candidates, users_of(candidates), strict=True)
        return [jnp.where(x <= last, user, shape.users) for x, user in users]

    def is_before(other: tuple[Any, Any], own: tuple[Any, Any]) -> jax.Array:
        return (other[1] < own[1]) | ((other[1] == own[1]) & (other[0] < own[0]))

    mine = [per_thread.same(0) + (first + i) for i in range(CANDIDATES)]
    own = users_of(mine)
    pairs = list(zip(mine, own, strict=True))
    scan.rank(others_of, shape.batch, pairs, is_before, ctx.shared.ranks)
    return own
