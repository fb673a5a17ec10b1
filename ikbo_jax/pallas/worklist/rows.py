"""Numbers query rows of the gradient of attention: a user's rows side by side.

A *row* of a key head is a query of one of its N / K query heads; rows are numbered by candidate in
user order, then by query, then by query head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.worklist import counted_order, numbering, work_order
from ikbo_jax.pallas.worklist.numbering import TILE_WORDS, USER_WORDS, Sizes
from ikbo_jax.reference import jagged


class Rows(NamedTuple):
    """Where rows are.

    Attributes:
      cand_to_user: [B] int32, the user of each candidate; clamped to [0, users) by its readers.
      order: [B] int32, candidates in user order; None if they are in user order already.
      position: [B] int32, the inverse of `order`, or None.
      users: [U, USER_WORDS] int32, the description of each user; `parts` of each part of its rows.
      tiles: [most tiles + 1, TILE_WORDS] int32: first row, number of rows, user, number of its
        keys, and the first row's target, of tiles of one user; the last entry begins with their
        number. None if no launch takes tiles.
      poison: [1] int32, the bits of 0, or of NaN, which makes all gradients NaN, if candidates are
        not in the promised user order; None if no order was promised.
    """

    cand_to_user: jax.Array
    order: jax.Array | None
    position: jax.Array | None
    users: jax.Array
    parts: jax.Array
    tiles: jax.Array | None
    poison: jax.Array | None

    @property
    def is_valid(self) -> jax.Array | None:
        """Whether the promised order is right; None if no order was promised."""
        return None if self.poison is None else self.poison[0] == 0

    @property
    def user(self) -> jax.Array:
        """Clamped user of each candidate, [B] int32."""
        return jnp.clip(self.cand_to_user, 0, len(self.users) - 1)

    def targets(self, sizes: Sizes) -> jax.Array:
        """Computes the rows of the kernel's `d_query` that each candidate has, [B, T, N / K]."""
        first_row, _, first_target, _ = jnp.moveaxis(self.users[self.user], 1, 0)
        place = self.position
        if place is None:
            place = jnp.arange(sizes.batch, dtype=jnp.int32)
        first = first_target + place * sizes.per_candidate - first_row
        within = jnp.arange(sizes.per_candidate, dtype=jnp.int32)
        return first[:, None, None] + within.reshape(sizes.q_len, sizes.group)[None]


def make_rows(cand_to_user: jax.Array, lengths: jax.Array | None, sizes: Sizes) -> Rows:
    """Numbers the rows by a launch; if there are too many candidates or users, by XLA.

    `cand_to_user` [B] and `lengths` [U] int32 are clamped; lengths of None are kv_len.
    """
    if not numbering.fits(sizes):
        return by_xla(cand_to_user, lengths, sizes)
    order, position = _order(cand_to_user, sizes)
    found = numbering.numbering_kernel(numbering.Operands(cand_to_user, lengths), sizes)
    return described(cand_to_user, found._replace(order=order, position=position))


def _order(index: jax.Array, sizes: Sizes) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes `Rows.order` and `Rows.position`."""
    if sizes.is_sorted:
        return None, None
    found = counted_order.ordered(None, index, sizes.users, has_position=True)
    return found.order, found.position


def described(index: jax.Array, found: numbering.Outputs) -> Rows:
    """Makes `Rows` from the results of a launch."""
    users = found.users.reshape(-1, USER_WORDS)
    parts = users if found.parts is None else found.parts.reshape(-1, USER_WORDS)
    tiles = None if found.tiles is None else found.tiles.reshape(-1, TILE_WORDS)
    return Rows(index, found.order, found.position, users, parts, tiles, found.poison)


def by_xla(cand_to_user: jax.Array, lengths: jax.Array | None, sizes: Sizes) -> Rows:
    """Numbers the rows, as `make_rows` does, by XLA; a launch may still order candidates."""
    placed = _order(cand_to_user, sizes)
    users, per_candidate, block_q = sizes.users, sizes.per_candidate, sizes.block_q
    index = jnp.clip(cand_to_user, 0, users - 1)
    starts = work_order.starts(index, users)
    first_candidate, counts = starts[:-1], starts[1:] - starts[:-1]
    rows = counts * per_candidate
    blocks = -(-rows // block_q)
    first_target = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * block_q
    keys = jnp.full((users,), sizes.kv_len, jnp.int32)
    if lengths is not None:
        keys = jnp.clip(lengths.astype(jnp.int32), 0, sizes.kv_len)
    words = (first_candidate * per_candidate, rows, first_target, keys)
    assert len(words) == USER_WORDS
    described = jnp.stack(words, axis=1)
    # All parts but a user's last ones have whole blocks.
    part_rows = -(-blocks // sizes.splits) * block_q
    begin = part_rows[:, None] * jnp.arange(sizes.splits, dtype=jnp.int32)[None]
    part_words = (
        words[0][:, None] + begin,
        jnp.clip(rows[:, None] - begin, 0, part_rows[:, None]),
        first_target[:, None] + begin,
        jnp.broadcast_to(keys[:, None], begin.shape),
    )
    parts = jnp.stack(part_words, axis=2).reshape(users * sizes.splits, USER_WORDS)
    poison = None
    if sizes.is_sorted:
        is_valid = jnp.all(index[1:] >= index[:-1])
        poison = jnp.where(is_valid, jnp.int32(0), jnp.int32(numbering.NAN_BITS))[None]
    tiles = None if sizes.tile_rows is None else _tiles(described, sizes)
    return Rows(cand_to_user, *placed, described, parts, tiles, poison)


def _tiles(users: jax.Array, sizes: Sizes) -> jax.Array:
    """Computes `Rows.tiles` from `Rows.users`."""
    height: Any = sizes.tile_rows
    first_row, rows, target, keys = (users[:, i] for i in range(USER_WORDS))
    counts = -(-rows // height)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(sizes.most_tiles + 1, dtype=jnp.int32)
    user = jnp.minimum(jagged.search_right(ends, number), len(users) - 1)
    start = (number - (ends - counts)[user]) * height
    words = (
        jnp.where(number < sizes.most_tiles, first_row[user] + start, ends[-1]),
        jnp.clip(rows[user] - start, 0, height),
        user,
        keys[user],
        target[user] + start,
    )
    return jnp.stack(words, axis=1)
