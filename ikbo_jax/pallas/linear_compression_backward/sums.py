"""Sums of cotangents over the candidates of each user, as a Mosaic GPU kernel for Hopper.

    sums[u] = sum of d_out[b] over the candidates b of user u

A work item is a tile of 128 rows and 64 columns of one user's sum, over all of the user's
candidates; where users are few, over one of several equal parts of them, which XLA adds in a fixed
order. A CTA takes every n-th work item. The kernel is limited by memory: each cotangent is read
once.

XLA sorts the candidates by user (`order`). A candidate's number is read one load ahead, since its
latency would otherwise delay every load.

Warpgroups: 0 and 1 are the consumers, which add 64 rows each in f32 registers. One warp of
warpgroup 2 is the producer.

Synchronisations:
  1. `stages.ready[s]`  producer -> consumers: TMA has filled stage s.
  2. `stages.free[s]`   consumers -> producer: both have read stage s, or it is unused so far.
  3. Staged sums: `commit_smem` before a TMA store, `wait_smem_to_gmem` before the next write.

A CTA waits for no other CTA.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma, operand_tiles, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.worklist import counted_order, work_order
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.linear_compression_backward import SumConfig

#: Work items per SM below which candidates of a user are divided.
ITEMS_PER_SM = 3


class _Shape(NamedTuple):
    """Static description of a launch."""

    users: int
    rows: int
    row_tiles: int
    column_tiles: int
    splits: int
    workers: int

    @property
    def items(self) -> int:
        return self.splits * self.users * self.row_tiles * self.column_tiles


class _Operands(NamedTuple):
    """Device memory that the launch reads."""

    d_out: Any  # [B, rows, columns]
    order: Any  # [B] int32, candidates sorted by user
    starts: Any  # [U + 1] int32, a user's first candidate in `order`


class _Item(NamedTuple):
    """A work item."""

    row: Any
    column_tile: Any
    user: Any
    split: Any
    begin: Any  # in `order`
    end: Any


def _item(ctx: WarpgroupContext, i: Any) -> _Item:
    """This CTA's `i`-th work item: tiles of one user's sum have neighbouring numbers."""
    shape, starts = ctx.shape, ctx.operands.starts
    number = i * shape.workers + ctx.worker
    rest, column_tile = lax.div(number, shape.column_tiles), lax.rem(number, shape.column_tiles)
    rest, row_tile = lax.div(rest, shape.row_tiles), lax.rem(rest, shape.row_tiles)
    split, user = lax.div(rest, shape.users), lax.rem(rest, shape.users)
    first, end = starts[user], starts[user + 1]
    count = end - first
    # The first `extra` parts have one candidate more.
    each, extra = lax.div(count, shape.splits), lax.rem(count, shape.splits)
    begin = first + split * each + jnp.minimum(split, extra)
    end = begin + each + (split < extra).astype(jnp.int32)
    return _Item(row_tile * TILE_ROWS, column_tile, user, split, begin, end)


def _count(ctx: WarpgroupContext) -> Any:
    """How many work items this CTA has."""
    return lax.div(ctx.shape.items - ctx.worker + ctx.shape.workers - 1, ctx.shape.workers)


def _produce(ctx: WarpgroupContext) -> None:
    """The producer warp."""
    stages, (_, cotangent), operands = ctx.shared.stages, ctx.shared.cotangent, ctx.operands
    last = operands.order.shape[0] - 1

    def one_item(i: Any, step: Any) -> Any:
        item = _item(ctx, i)

        def load(j: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            step, candidate = carry
            following = operands.order[jnp.minimum(j + 1, last)]
            stages.await_free(step)
            for consumer in range(NUM_CONSUMERS):
                plgpu.copy_gmem_to_smem(
                    operands.d_out.at[
                        candidate,
                        pl.ds(item.row + consumer * WGMMA_M, WGMMA_M),
                        pl.ds(item.column_tile * BLOCK_K, BLOCK_K),
                    ],
                    cotangent.at[stages.slot(step), consumer],
                    stages.ready_at(step),
                )
            return step + 1, following

        candidate = operands.order[jnp.minimum(item.begin, last)]
        step, _ = lax.fori_loop(item.begin, item.end, load, (step, candidate))
        return step

    lax.fori_loop(0, _count(ctx), one_item, jnp.int32(0))
    stages.drain()


def _consume(ctx: WarpgroupContext) -> None:
    """A consumer warpgroup."""
    shape, shared = ctx.shape, ctx.shared
    stages, (cotangent, _) = shared.stages, shared.cotangent
    stages.release_all()

    def one_item(i: Any, step: Any) -> Any:
        item = _item(ctx, i)

        def add(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            step, total = carry
            stages.await_ready(step)
            tile = cotangent.at[stages.slot(step), ctx.consumer]
            values = plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            plgpu.commit_smem()  # TMA will write where these threads have read
            stages.release(step)
            return step + 1, total + values

        zeros = mma.zeros(BLOCK_K, jnp.float32)
        step, total = lax.fori_loop(item.begin, item.end, add, (step, zeros))
        row = item.row + ctx.consumer * WGMMA_M
        if shape.splits == 1:
            _store_rounded(ctx, item, row, total)
        else:
            stores.store_rows(
                ctx.outputs[0],
                total,
                (item.split * shape.users + item.user) * shape.rows + row,
                item.column_tile,
                jnp.int32(0),
                jnp.clip(shape.rows - row, 0, WGMMA_M),
                ctx.staging(),
                interpret=ctx.interpret,
            )
        return step

    lax.fori_loop(0, _count(ctx), one_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _store_rounded(ctx: WarpgroupContext, item: _Item, row: Any, total: jax.Array) -> None:
    (output,), (matrix_view, copy_view) = ctx.outputs, ctx.shared.sums
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    operand_tiles.stage_rows(
        matrix_view.at[ctx.consumer], total.astype(output.dtype), interpret=ctx.interpret
    )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        copy_view.at[ctx.consumer, 0],
        output.at[item.user, pl.ds(row, WGMMA_M), pl.ds(item.column_tile * BLOCK_K, BLOCK_K)],
    )


def _order(cand_to_user: jax.Array, users: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Candidates [B] sorted by user, and where each user's begin [U + 1], int32."""
    batch = cand_to_user.shape[0]
    if users == 1:  # saves four kernels, 7 us for 1,960 candidates on an H100
        return jnp.arange(batch, dtype=jnp.int32), jnp.array([0, batch], jnp.int32)
    if interpret:
        order = work_order.by_user(cand_to_user)
    else:
        order = counted_order.by_user(cand_to_user, users)
    return order, work_order.starts(cand_to_user, users)


def user_sums_kernel(
    d_out: jax.Array,
    cand_to_user: jax.Array,
    users: int,
    *,
    config: SumConfig,
    num_sms: int,
    interpret: Any = False,
) -> jax.Array:
    """Sums cotangents over the candidates of each user.

    Returns [U, M, N] in the dtype of `d_out` [B, M, N], bf16 or f16; N is a multiple of 8, and B at
    least 1. Sums are f32, in the same order in every run, and rounded once; a user without
    candidates has zeros. `cand_to_user` is in [0, U), in any order.
    """
    batch, m, n = d_out.shape
    order, starts = _order(cand_to_user, users, interpret=bool(interpret))
    # Rows of 64 values: a tile is contiguous in memory then.
    flat = d_out.reshape(batch, m * n // BLOCK_K, BLOCK_K) if m * n % BLOCK_K == 0 else d_out
    _, rows, columns = flat.shape
    row_tiles, column_tiles = pl.cdiv(rows, TILE_ROWS), pl.cdiv(columns, BLOCK_K)
    tiles = users * row_tiles * column_tiles
    splits = max(1, min(pl.cdiv(ITEMS_PER_SM * num_sms, tiles), batch // users))
    shape = _Shape(users, rows, row_tiles, column_tiles, splits, min(num_sms, tiles * splits))
    output = jax.ShapeDtypeStruct((users, rows, columns), d_out.dtype)
    if splits > 1:
        output = jax.ShapeDtypeStruct((splits * users * rows, column_tiles, BLOCK_K), jnp.float32)
    (sums,) = launch(
        Roles(functools.partial(WarpgroupContext, shape, config), _produce, _consume),
        _Operands(flat, order, starts),
        (output,),
        config.shared,
        dtype=d_out.dtype,
        name="ikbo_linear_compression_sums",
        workers=shape.workers,
        interpret=interpret,
    )
    if splits > 1:
        sums = sums.reshape(splits, users, rows, column_tiles * BLOCK_K)[..., :columns]
        sums = jnp.sum(sums, axis=0).astype(d_out.dtype)
    return sums.reshape(users, m, n)
