"""Merges own tokens into the softmax of an item's rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.few_queries import candidates
from ikbo_jax.pallas.few_queries.context import Context, Item, Part
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import own_tokens
from ikbo_jax.problems.few_queries import MAX_COLUMNS
from ikbo_jax.problems.hopper import BLOCK_K

State = tuple[jax.Array, jax.Array, jax.Array]


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
