"""Merges own tokens into the softmax of an item's rows."""

from __future__ import annotations

import functools
from typing import Any

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


def merged(ctx: Context, item: Item, part: Part, state: State, token: Any = None) -> State:
    """Adds own tokens to a part's (acc, maximum, sums); of split keys, to the first split's."""

    def add() -> State:
        own = load(ctx, item, part) if token is None else token
        return softmax.with_token(*state, *own, ctx.shape.log2_scale)

    if ctx.shape.splits == 1:
        return add()
    return lax.cond(item.target < ctx.shape.rows, add, lambda: state)


def prefetch(ctx: Context, item: Item, part: Part) -> None:
    """Brings own tokens of a part's rows into L2."""
    own_tokens.prefetch(ctx, *_rows(ctx, item, part))


def _rows(ctx: Context, item: Item, part: Part) -> tuple[own_tokens.Rows, own_tokens.Order]:
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
    return rows, order


def load(ctx: Context, item: Item, part: Part) -> tuple[jax.Array, jax.Array]:
    """Loads scores and values of own tokens of a part's rows."""
    column = ctx.first_column_block * BLOCK_K if ctx.shares_columns else 0
    at_once = ctx.shape.head_dim <= MAX_COLUMNS
    rows = _rows(ctx, item, part)
    return own_tokens.load(ctx, *rows, ctx.columns, column, at_once=at_once)
