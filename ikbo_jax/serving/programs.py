"""The programs of a scorer, compiled before the first request; the cache folder; the counter."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ikbo_jax.serving.batches import Buckets, Tree

_COMPILATION = "/jax/core/compile/backend_compile_duration"
#: How often this process has compiled a program, or loaded one from the cache folder.
_compilations = 0


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    global _compilations
    if event == _COMPILATION:
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """How often this process has compiled, or loaded from a cache folder, since this import."""
    return _compilations


def use_cache_folder(folder: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a folder; a later process loads them instead of compiling.

    Sets JAX's persistent compilation cache for this process, for programs of any size. Call it
    before the first program compiles. Loading a program runs its code: whoever can write to the
    folder can run code in every process that uses it.
    """
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Model(Protocol):
    """What a scorer needs of a model: two functions that can be jitted."""

    def encode_users(self, weights: Tree, users: Tree) -> Tree:
        """The users' states: trees of arrays [U, ...] to a tree of arrays [U, ...].

        Whatever depends on a user alone belongs here, since states are kept between requests.
        """

    def score(
        self, weights: Tree, state: Tree, candidates: Tree, cand_to_user: jax.Array
    ) -> jax.Array:
        """The candidates' scores, [B] or [B, ...].

        A candidate's score must not depend on other candidates. `cand_to_user` [B] int32 names the
        row of every candidate's user in `state` and ascends.
        """


class Specs(NamedTuple):
    """Shapes and dtypes, trees of `jax.ShapeDtypeStruct`.

    Attributes:
      weights: the weights.
      user: a user's features, without an axis of users.
      candidate: a candidate's features, without an axis of candidates.
      state: a user's state, without an axis of users.
      score: a candidate's score.
    """

    weights: Tree
    user: Tree
    candidate: Tree
    state: Tree
    score: jax.ShapeDtypeStruct


def with_rows(spec: Tree, *rows: int) -> Tree:
    """Specs with further axes in front."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*rows, *leaf.shape), leaf.dtype), spec)


def specs_of(model: Model, weights: Tree, user: Tree, candidate: Tree) -> Specs:
    """The specs of a model with these weights; `user` and `candidate` as in `Specs`."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    states = jax.eval_shape(model.encode_users, shapes, with_rows(user, 1))
    state = _rows(states, "encode_users")
    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    scores = jax.eval_shape(model.score, shapes, states, with_rows(candidate, 1), index)
    return Specs(shapes, user, candidate, state, _rows(scores, "score"))


def _rows(spec: Tree, name: str) -> Tree:
    """One row of results of one row each."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        if leaf.shape[:1] != (1,):
            raise ValueError(
                f"{name} returns shape {leaf.shape} for one row{jax.tree_util.keystr(path)}, "
                "expected a first axis of size 1"
            )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), spec)


class Programs:
    """The compiled programs of a model, one for every bucket.

    All states live in one pool, arrays [slots, ...]: `encode` writes users' states to slots, and
    `score` reads the slots of a call's users.

    Args:
      model: the model.
      specs: its specs.
      buckets: the sizes to compile for.
      slots: number of slots of the pool.
    """

    def __init__(self, model: Model, specs: Specs, buckets: Buckets, slots: int) -> None:
        def encode(weights: Tree, pool: Tree, users: Tree, at: jax.Array) -> Tree:
            states = model.encode_users(weights, users)
            # Padding has a slot past the end.
            return jax.tree.map(lambda all, rows: all.at[at].set(rows, mode="drop"), pool, states)

        def score(
            weights: Tree, pool: Tree, at: jax.Array, candidates: Tree, cand_to_user: jax.Array
        ) -> jax.Array:
            states = jax.tree.map(lambda all: all.at[at].get(mode="clip"), pool)
            return model.score(weights, states, candidates, cand_to_user)

        # The pool is changed in place.
        jit_encode, jit_score = jax.jit(encode, donate_argnums=1), jax.jit(score)
        pool = with_rows(specs.state, slots)

        def index(size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size,), jnp.int32)

        def lower_encode(users: int) -> Any:
            return jit_encode.lower(specs.weights, pool, with_rows(specs.user, users), index(users))

        def lower_score(pair: tuple[int, int]) -> Any:
            cands, users = pair
            candidates = with_rows(specs.candidate, cands)
            return jit_score.lower(specs.weights, pool, index(users), candidates, index(cands))

        # XLA compiles, and loads from the cache folder, without the interpreter's lock; tracing
        # holds it, so that one thread traces.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:

            def compiled(lowered: Any) -> Any:
                return threads.submit(lowered.compile)

            encoders = {users: compiled(lower_encode(users)) for users in buckets.new_users}
            scorers = {pair: compiled(lower_score(pair)) for pair in buckets.pairs}
        self.encode: dict[int, Callable[..., Tree]] = {
            users: program.result() for users, program in encoders.items()
        }
        self.score: dict[tuple[int, int], Callable[..., jax.Array]] = {
            pair: program.result() for pair, program in scorers.items()
        }
