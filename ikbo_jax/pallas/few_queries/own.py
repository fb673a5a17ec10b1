"""Merges own tokens into the softmax of an item's rows.

If candidates are in the order of queries, the own keys and values of an item's candidates lie side
by side. The producer loads them as the item's last steps, one for each tile of 64 rows. So they
arrive behind the user's keys, and no load is waited for. A product of queries and own keys has a
row's score in the column of its candidate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import candidates
from ikbo_jax.pallas.few_queries.context import Context, Item, Part
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, own_tokens
from ikbo_jax.problems.few_queries import MAX_COLUMNS
from ikbo_jax.problems.hopper import BLOCK_K

State = tuple[jax.Array, jax.Array, jax.Array]
_SCALAR = plgpu.Layout.WG_SPLAT(())


def merged_at(ctx: Context, item: Item, part: Part, query: Any, step: Any, state: State) -> State:
    """Adds own tokens to a part's (acc, maximum, sums), in steps from `step` on; skips others.

    If consumers share the keys, consumer 1 does, which does not store. `query`: the item's tiles.
    """
    steps = ctx.own_steps(item)
    is_taken = (steps > 0) & (part.gives | (part.stores & ~part.takes))
    tile = part.tile if ctx.tiles > 1 else 0

    def skip_step(step: Any) -> None:
        ctx.shared.key.skip(step)
        ctx.shared.value.skip(step)

    pl.when((steps > 0) & (~is_taken | (part.tile > 0)))(functools.partial(skip_step, step))
    state = lax.cond(
        is_taken,
        functools.partial(_merged_at, ctx, part, query.at[tile], step + tile, state),
        lambda: state,
    )
    if ctx.tiles > 1:
        is_further = (steps > 1) & (part.tile == 0)
        pl.when(is_further)(functools.partial(skip_step, step + 1))
    return state


def _merged_at(ctx: Context, part: Part, query: Any, step: Any, state: State) -> State:
    shared, columns = ctx.shared, ctx.shape.own_columns
    shared.key.await_ready(step)
    keys = shared.key.matrix(step)
    scores = mma.product(query, keys, ctx.shape.head_dim, columns=columns, interpret=ctx.interpret)
    mma.wait(0, interpret=ctx.interpret)
    scores = mma.after_wait(scores, interpret=ctx.interpret)
    shared.key.release(step)
    shared.value.await_ready(step)
    values = shared.value.matrix(step)
    if ctx.shares_columns:
        values = values.at[pl.ds(ctx.first_column_block, ctx.columns // BLOCK_K)]
    # Row `begin` of the first candidate's queries is the tile's first one.
    begin = lax.rem(lax.rem(part.target, ctx.shape.rows), ctx.shape.q_len)
    token = own_tokens.read(ctx, scores, values, begin, ctx.columns, ctx.shape.head_rows)
    plgpu.commit_smem()  # TMA writes the stage only after these reads
    shared.value.release(step)
    return softmax.with_token(*state, *token, ctx.shape.log2_scale)


def merged(ctx: Context, item: Item, part: Part, state: State) -> State:
    """Adds own tokens to a part's (acc, maximum, sums); of split keys, to the first split's."""
    if ctx.shape.splits == 1:
        return _merged(ctx, item, part, state)
    is_first = item.target < ctx.shape.rows
    return lax.cond(is_first, lambda: _merged(ctx, item, part, state), lambda: state)


def _merged(ctx: Context, item: Item, part: Part, state: State) -> State:
    shape = ctx.shape
    rows = own_tokens.Rows(
        part.offset if shape.listed else lax.rem(part.target, shape.rows),
        jnp.int32(0),
        part.rows,
        item.head,
        lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads)),
        shape.group,
        shape.head_rows,
    )
    order = own_tokens.Order(
        candidates.tables(ctx),
        functools.partial(candidates.candidate_of, ctx),
        functools.partial(candidates.interpreted, ctx),
        shape.listed > 0,
    )
    acc, *_ = state
    column = ctx.first_column_block * BLOCK_K if ctx.shares_columns else 0
    token = own_tokens.load(
        ctx, rows, order, acc.shape[1], column, at_once=shape.head_dim <= MAX_COLUMNS
    )
    return softmax.with_token(*state, *token, shape.log2_scale)
