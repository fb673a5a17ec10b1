"""Loops of a CTA's threads over numbers in shared memory: sums.

A thread takes consecutive numbers, so that it adds up in registers, and exchanges one result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.per_thread import Threads, same


def fold(
    threads: Threads,
    count: int,
    read: Callable[[list[jax.Array]], list[Any]],
    body: Callable[[jax.Array, Any, Any], Any],
    init: Any,
    parts: tuple[int, int, int] | None = None,
) -> Any:
    """Folds a thread's consecutive numbers: carry = body(place, number, carry).

    The last threads' places are past `count`. `read` takes the places of a turn; all its loads
    should come before the first use of one. `parts` are turns, instead of `threads.parts(count)`.
    """
    turns, step, each = parts or threads.parts(count)
    first = threads.number() * each

    def turn(i: Any, carry: Any) -> Any:
        places = [first + (i * step + x) for x in range(step)]
        for place, number in zip(places, read(places), strict=True):
            carry = body(place, number, carry)
        return carry

    return lax.fori_loop(0, turns, turn, init)


def _add(sums: tuple[jax.Array, ...], numbers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(sums, numbers, strict=True))


def running_sums(
    threads: Threads,
    count: int,
    read: Callable[[list[jax.Array]], list[Any]],
    store: Callable[[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]], None],
    scratch: Any,
    at: int = 0,
    *,
    kinds: int = 1,
    add: Callable[..., tuple[jax.Array, ...]] = _add,
    others: Sequence[jax.Array] = (),
    parts: tuple[int, int, int] | None = None,
) -> list[jax.Array]:
    """Adds up numbers, and calls store(place, sums of lower places, numbers) for each place.

    A place has `kinds` numbers, which `add` adds to sums. Synchronises the threads once, between
    the first reads and the second. `store` may overwrite the numbers at its place, if `read` reads
    no other place (`padded`). Returns for each of `others`, numbers of the threads, the sum before.
    """
    zeros = (same(0),) * kinds
    own = fold(threads, count, read, lambda _, numbers, sums: add(sums, numbers), zeros, parts)
    before = threads.sums_before([*own, *others], scratch, at)

    def keep(place: jax.Array, numbers: Any, sums: tuple[jax.Array, ...]) -> Any:
        store(place, sums, numbers)
        return add(sums, numbers)

    fold(threads, count, read, keep, tuple(before[:kinds]), parts)
    return before[kinds:]


def sum_up(
    threads: Threads,
    ref: Any,
    count: int,
    value: Callable[[jax.Array], jax.Array] | None,
    scratch: Any,
    at: int,
    *,
    others: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Sets ref[i] to the sum of value(0) to value(i - 1), for i < count; see `running_sums`.

    Without `value`, the numbers are those in `ref`, which has `padded` words in shared memory.
    """

    def read(places: list[jax.Array]) -> list[tuple[jax.Array]]:
        return [((value or (lambda i: threads.read(ref, i)))(x),) for x in places]

    def store(place: jax.Array, before: Any, _: Any) -> None:
        threads.keep(ref, place, before[0], place < ref.shape[0])

    return running_sums(threads, count, read, store, scratch, at, others=others)


def padded(threads: Threads, count: int) -> int:
    """Counts the words of which each thread may read its places, those past `count` too.

    If a thread read the last number instead, it might read what another thread overwrites.
    """
    return threads.count * threads.parts(count)[2]


def clear(threads: Threads, ref: Any) -> None:
    """Zeroes shared memory."""
    turns, places_of = threads.rounds(ref.shape[0])

    @pl.loop(0, turns)
    def _(turn: Any) -> None:
        for x in places_of(turn):
            threads.keep(ref, x, same(0), x < ref.shape[0])
