"""Orders candidates by user in one launch, without reading the whole index in every CTA.

A cluster owns neighbouring users, and its CTAs equal parts of the candidates. Each CTA

  1. lists its part's candidates of the cluster's users, in the order of users, and counts those of
     lower users,
  2. reads the counts of the cluster's other CTAs, which say where its first candidate of each user
     goes,
  3. stores its candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import peers
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import LANES, Threads, same
from ikbo_jax.pallas.look_up import parts
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE


class Order(NamedTuple):
    """Holds the arrays that the launch writes, in the order of users."""

    user: Any  # [B] int32, of each candidate, clamped
    order: Any  # [B] int32, the caller's number of each candidate


class Operands(NamedTuple):
    """Holds device memory that the launch reads."""

    user: Any  # [B] int32


class Shared(NamedTuple):
    """Holds shared memory, as `parts.Shared`; and the distance of places."""

    totals: Any
    listed: Any
    by_user: Any
    counts: Any
    moved: Any  # [listed_users]: from a place in `by_user` to the place in the result


def _order(ctx: WarpgroupContext) -> None:
    """Runs one warpgroup of the CTA."""
    shape, shared = ctx.shape, ctx.shared
    threads = Threads(ctx.config, ctx.consumer, ctx.interpret)
    number = lax.axis_index("cluster") if shape.parts > 1 else jnp.int32(0)
    listed, own = parts.list_users(ctx, threads, ctx.worker, number, counts_lower=True)

    def of_cta(ref: Any, place: jax.Array) -> list[jax.Array]:
        return [
            peers.load(ref, place, 1, i, interpret=ctx.interpret)[0] for i in range(shape.parts)
        ]

    if not ctx.interpret:
        peers.synchronise()
    lower = sum(of_cta(shared.totals, same(2 * threads.warps + 1)))

    @pl.loop(0, pl.cdiv(shape.listed_users, threads.count))
    def _(turn: Any) -> None:
        user = threads.number() + turn * threads.count
        is_user = user < shape.listed_users
        first = jnp.where(is_user, user, same(0)) * threads.warps
        before = jnp.maximum(first - 1, 0)
        starts = [jnp.where(first == 0, same(0), x) for x in of_cta(shared.counts, before)]
        ends = of_cta(shared.counts, first + (threads.warps - 1))
        moved = lower + sum(starts)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            moved = moved + jnp.where(same(i) < number, end - start, same(0))
            moved = moved - jnp.where(same(i) == number, start, same(0))
        threads.keep(shared.moved, user, moved, is_user)

    if ctx.interpret:
        threads.commit()
    else:
        peers.synchronise()  # the others have read, too

    @pl.loop(0, lax.div(own.after + (threads.count - 1), jnp.int32(threads.count)))
    def _(turn: Any) -> None:
        place = threads.number() + turn * threads.count
        is_listed = place < own.after
        user, candidate = parts.unpack(listed, threads, jnp.minimum(place, shape.most_listed - 1))
        local = jnp.where(is_listed, user - listed.user, same(0))
        place = place + threads.read(shared.moved, local)
        threads.write(ctx.outputs.user, place, user, is_listed)
        threads.write(ctx.outputs.order, place, candidate, is_listed)


def order(
    index: jax.Array,
    users: int,
    *,
    cluster: int = 8,
    ctas: int = 128,
    warpgroups: int = 4,
    interpret: Any = False,
) -> Order:
    """Orders candidates by user; candidates of one user are in the same order in every run.

    Args:
      index: [B] int32, clamped to [0, users).
    """
    batch, threads = index.shape[0], warpgroups * WARPGROUP_SIZE
    cluster = 1 if interpret else cluster
    listed = pl.cdiv(users, pl.cdiv(ctas, cluster))
    listed = max(listed, 2)
    groups = pl.cdiv(users, listed)
    shape = parts.Shape(batch, users, 1, 1, 1, 1, groups, listed, cluster)
    numbers = jax.ShapeDtypeStruct(index.shape, jnp.int32)
    words = memory.Words((shape.most_listed,))
    found: Order = launch_threads(
        _order,
        shape,
        Operands(index),
        Order(numbers, numbers),
        Shared(
            memory.Words((3 * threads // LANES + 2,)),
            words,
            words,
            memory.Words((listed * threads // LANES,)),
            memory.Words((listed,)),
        ),
        name="ikbo_cluster_order",
        workers=groups,
        warpgroups=warpgroups,
        cluster=cluster,
        config=warpgroups,
        interpret=interpret,
    )
    return found
