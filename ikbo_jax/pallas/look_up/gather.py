"""Lookups of users' rows, as a Mosaic GPU kernel for Hopper.

    out[b] = user[cand_to_user[b]]

The vectors of the result, 16 bytes each, are numbered row by row. A CTA, of one warpgroup, copies
neighbouring ones; each thread has several in flight. CTAs do not wait for each other.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.row_vectors import Rows
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.problems.look_up import LookUpConfig, vector_words


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch: `vectors` of a row, each of `words` 32-bit words."""

    batch: int
    users: int
    vectors: int
    words: int


class Operands(NamedTuple):
    """Device memory that the launch reads."""

    user: Any  # [U, width]
    index: Any  # [B] int32


def _copy(ctx: WarpgroupContext) -> None:
    """The CTA's warpgroup."""
    shape, operands = ctx.shape, ctx.operands
    first = ctx.worker * (ctx.config.accesses * WARPGROUP_SIZE)
    thread = per_thread.number()
    places, users = [], []
    for i in range(ctx.config.accesses):
        number = thread + (first + i * WARPGROUP_SIZE)
        candidate, vector = per_thread.divided(number, shape.vectors)
        places.append((candidate, vector))
        wanted = jnp.minimum(candidate, shape.batch - 1)
        user = per_thread.gather(operands.index, wanted, "global")
        users.append(jnp.clip(user, 0, shape.users - 1))
    source = Rows(operands.user, shape.words)
    target = Rows(ctx.outputs, shape.words)
    vectors = [(user, vector) for user, (_, vector) in zip(users, places, strict=True)]
    for words, (candidate, vector) in zip(source.load(vectors), places, strict=True):
        is_own = candidate < shape.batch
        target.store(candidate, vector, words, is_own, streams=ctx.config.streams)


def look_up_kernel(user: jax.Array, cand_to_user: jax.Array, *, config: LookUpConfig) -> jax.Array:
    """Copies each candidate's user's row: [B, width].

    `user` [U, width] is bf16, f16 or f32, with rows of whole words of 32 bits; `cand_to_user` [B]
    int32 is clamped to [0, U). U and B are at least 1.
    """
    (users, width), (batch,) = user.shape, cand_to_user.shape
    words = vector_words(width, user.dtype.itemsize)
    vectors = width * user.dtype.itemsize // (4 * words)
    return launch_threads(
        _copy,
        Shape(batch, users, vectors, words),
        Operands(user, cand_to_user),
        jax.ShapeDtypeStruct((batch, width), user.dtype),
        memory.shared(),
        name="ikbo_look_up",
        workers=pl.cdiv(batch * vectors, config.accesses * WARPGROUP_SIZE),
        config=config,
    )
