"""The last launch of `d_query="launch"`: d_query alone, with keys streamed past the queries.

    d_query = scale * dS @ key,   dS = P * (d_out @ value.T - delta),   P = exp(scores - lse)

This launch runs the kernel of `gdpa_backward` for queries, with a softmax, on rows of key heads: a
tile is 128 query rows of one user and key head, and it streams one range, its user's keys.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.attention_backward import context
from ikbo_jax.pallas.attention_backward.stored import FIRST_ROW, KEYS, ROWS, TARGET, USER
from ikbo_jax.pallas.gdpa_backward.context import BackwardContext, Operands, Shape
from ikbo_jax.pallas.gdpa_backward.kernels import launch_kernel
from ikbo_jax.pallas.hopper.row_order import RowOrder
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.pallas.worklist.rows import Rows
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Settings

#: Word of a user that has the number of its keys.
USER_KEYS = 3
#: For the numbers of words in `lists.WORK_WORDS`, the words of a tile that hold them.
TILE_WORDS = {0: FIRST_ROW, 1: FIRST_ROW, 2: ROWS, 3: USER, lists.STATISTICS_ROW: TARGET}


@dataclasses.dataclass(frozen=True)
class DQueryContext(BackwardContext):
    """The context of a warpgroup: reads the work from tiles of a user's rows, and from users.

    `rows` is the shape of the launch of d_key and d_value.
    """

    rows: Any = None

    @property
    def tile_count(self) -> Any:
        tiles = self.operands.tiles
        return tiles[tiles.shape[0] - 1, FIRST_ROW]

    @property
    def order(self) -> RowOrder | None:
        found: RowOrder | None = self.rows.row_order(self.operands.order)
        return found

    def tile_word(self, tile: Any, word: int) -> Any:
        tiles = self.operands.tiles
        if word == 4:  # the end of the tile's ranges
            return tiles[tile, USER] + 1
        if word == 5:
            return pl.cdiv(tiles[tile, KEYS], self.config.block)
        return tiles[tile, TILE_WORDS[word]]

    def range_word(self, index: Any, word: int) -> Any:
        if word == 2:
            return self.operands.ranges[index, USER_KEYS]
        return index * self.rows.kv_len


def d_query_kernel(
    operands: context.Operands,
    rows: Rows,
    shape: context.Shape,
    config: AttentionBackwardConfig,
) -> jax.Array:
    """Computes d_query [B * T, N, H] in the caller's order."""
    assert rows.tiles is not None
    query, d_out, statistics, key, value, _ = operands
    settings = Settings((SOFTMAX,), scale=shape.scale, logit_cap=shape.logit_cap)
    own_shape = Shape(
        heads=shape.kv_heads,
        streamed_per_head=1,
        heads_per_streamed=1,
        head_dim=shape.head_dim,
        activation=ActivationSpec.of(settings, query.dtype),
        scales=(shape.scale,),
        workers=shape.query_workers,
    )
    keys_values = tuple(x.reshape(-1, *x.shape[2:]) for x in (key, value))
    (d_query,) = launch_kernel(
        functools.partial(DQueryContext, rows=shape),
        own_shape,
        config.d_query_config,
        Operands((query, d_out), keys_values, rows.tiles, None, rows.users, statistics, rows.order),
        (jax.ShapeDtypeStruct(shape.d_query, query.dtype),),
        "ikbo_attention_backward_d_query",
    )
    return d_query
