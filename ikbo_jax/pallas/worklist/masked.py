"""Lists tiles of masked queries: the keys that a tile's rows see, in the list's own launch.

A tile takes the keys between the first and the last one that its rows see, without whole blocks
that none of its rows sees between the history and a target's group. Tiles are sorted by groups of
neighbouring keys, then by the blocks that are left, as `positions` sorts segments: here a segment
is one tile, which every thread finds by bisection.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.hopper.per_thread import cdiv, same, select
from ikbo_jax.pallas.worklist import by_xla
from ikbo_jax.pallas.worklist.keys_of_tile import keys_of_tile
from ikbo_jax.pallas.worklist.lists import TILE_WORDS, Offsets, TileList, early_keys, mask_words
from ikbo_jax.pallas.worklist.scan import running_sums
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.pallas.worklist.segments import SegmentContext, Shape, load, running_maxima
from ikbo_jax.pallas.worklist.tiles import launch_list, list_tiles
from ikbo_jax.problems import memory
from ikbo_jax.problems.attention_tile_cost import MOST_LISTED_WORDS
from ikbo_jax.reference.hstu import Rule, Sequence

#: Segments that are few: the search in their tiles has no places past the end.
MOST_PADDED = 1023

# The launch


@dataclasses.dataclass(frozen=True)
class MaskedShape(Shape):
    """The shape of a list of masked tiles, in which a segment is one tile."""

    rule: Rule = Rule()

    @property
    def of_sequences(self) -> Shape:
        return Shape(*(getattr(self, field.name) for field in dataclasses.fields(Shape)))

    @property
    def parts(self) -> int:
        """Number of segments of the sequences, second parts included."""
        of_sequences = self.of_sequences
        return of_sequences.segments * (1 + of_sequences.has_rest)

    @property
    def segments(self) -> int:
        return self.of_sequences.most

    @property
    def has_rest(self) -> bool:
        return False

    @property
    def most(self) -> int:
        return self.segments


class Tile(NamedTuple):
    """Tiles, one for each thread; the first attributes are those of a `segments.Segment`."""

    start: jax.Array
    length: jax.Array
    kv_start: jax.Array
    kv_length: jax.Array
    source: jax.Array
    mask: tuple[jax.Array, ...]


class MaskedContext(SegmentContext):
    """The context of a warpgroup that lists masked tiles."""

    @property
    def of_sequences(self) -> SegmentContext:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return SegmentContext(**(fields | {"shape": self.shape.of_sequences}))

    def segment(self, index: jax.Array) -> Any:
        """Describes the tiles with these numbers; tiles past the last one are empty."""
        shape, shared, read = self.shape, self.shared, self.threads.read
        ends = shared.tile_ends
        number = count_at_most(lambda x: read(ends, x), ends.shape[0], index, same(0))
        begin = jnp.where(number > 0, read(ends, jnp.maximum(number - 1, 0)), 0)
        exists, number = number < shape.parts, jnp.minimum(number, shape.parts - 1)
        done = (index - begin) * shape.size
        segments = shape.of_sequences.segments
        is_rest = number >= segments
        number = jnp.where(is_rest, number - segments, number)
        found = self.of_sequences.segment(number)
        start = jnp.where(is_rest, found.rest_start, found.start)
        length = jnp.where(is_rest, found.rest, found.length)
        kv_length = select(is_rest, 0, found.kv_length)
        rows = jnp.where(exists, jnp.minimum(length - done, shape.size), 0)
        place = jnp.clip(number - int(not shape.is_broadcast), 0, max(shape.sequences - 1, 0))
        numbers = [
            0 if ref is None else read(ref, place) for ref in (shared.contextual, shared.targets)
        ]
        position = kv_length - found.length + done
        sequence = Sequence(kv_length, *numbers)
        first, count, mask = keys_of_tile(
            shape.rule, position, jnp.maximum(rows, 1), sequence, shape.unit
        )
        return Tile(
            start + done,
            rows,
            jnp.where(kv_length > 0, found.kv_start + first, 0),
            count,
            done if shape.is_broadcast else start + done,
            mask,
        )


def list_masked_tiles(ctx: MaskedContext) -> None:
    """Lists the tiles of the CTA's part of all tiles."""
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    base = ctx.of_sequences
    arrays = (
        (ctx.operands.contextual, shared.contextual),
        (ctx.operands.num_targets, shared.targets),
    )
    load(base, [(x, ref, 0, shape.kv_rows) for x, ref in arrays if x is not None])
    (longest,) = running_maxima(base, base.shape)
    segments = base.shape.segments

    def tiles(places: list[jax.Array]) -> list[tuple[jax.Array]]:
        counts = []
        for x in places:
            is_rest = (x >= segments) & (x < shape.parts)
            found = base.segment(jnp.where(is_rest, x - segments, x))
            rows = jnp.where(is_rest, found.rest, jnp.where(x < segments, found.length, 0))
            counts.append((cdiv(rows, shape.size),))
        return counts

    def store(place: jax.Array, before: Any, count: Any) -> None:
        threads.keep(shared.tile_ends, place, before[0] + count[0], place < ends)

    ends = shared.tile_ends.shape[0]
    running_sums(threads, ends, tiles, store, shared.parts, 3 * threads.warps)
    threads.commit()

    def words(index: jax.Array, found: Tile, _: jax.Array) -> tuple[jax.Array, ...]:
        mask = (same(0) + x for x in found.mask)
        return found.source, found.start, found.length, found.kv_start, found.kv_length, *mask

    list_tiles(ctx, ctx.outputs, longest, words)


# Host side


def masked_tiles(
    offsets: Offsets, *, size: int, unit: int, keys_per_group: int | None = None
) -> TileList:
    """Lists tiles of queries that have a rule, sorted by the blocks of keys that their rows see.

    Tiles have `mask_words` further words. Tiles whose keys begin in the first `keys_per_group` rows
    come first, and so on, but for early tiles. Other arguments are as for `tiles.query_tiles`.
    """
    operands = offsets.arrays
    assert offsets.rule is not None
    kinds = {"is_merged": False, "rule": offsets.rule, "keys_per_group": keys_per_group}
    shape = MaskedShape.of(offsets, size, unit, early_keys=early_keys(offsets.rule), **kinds)
    if sum(x.shape[0] for x in operands if x is not None) + shape.parts > MOST_LISTED_WORDS:
        return by_xla.masked_tiles(offsets, size=size, unit=unit, keys_per_group=keys_per_group)
    # Few segments have a power of 2, less 1, of numbers of tiles, to search in.
    ends = min((1 << shape.parts.bit_length()) - 1, max(shape.parts, MOST_PADDED))

    def words(count: int, *, is_wanted: bool = True) -> Any:
        return memory.Words((count,)) if is_wanted else None

    return launch_list(
        list_masked_tiles,
        shape,
        operands,
        TILE_WORDS + mask_words(offsets.rule),
        "ikbo_masked_tile_list",
        MaskedContext,
        q_offsets=words(shape.sequences + 3, is_wanted=not shape.is_broadcast),
        kv_numbers=words(shape.sequences + 2, is_wanted=operands.q_to_kv is not None),
        tile_ends=words(ends),
        targets=words(shape.sequences, is_wanted=operands.num_targets is not None),
        contextual=words(shape.sequences, is_wanted=operands.contextual is not None),
    )
