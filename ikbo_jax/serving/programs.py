"""The compiled programs of a scorer, their cache folder, and a counter of compilations."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.serving.batches import Buckets, Tree
from ikbo_jax.serving.packing import Packing, RowPacking

_COMPILATION = "/jax/core/compile/backend_compile_duration"
#: Number of programs that this process has compiled, or loaded from the cache folder.
_compilations = 0


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    global _compilations
    if event == _COMPILATION:
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """Counts the programs that this process has compiled, or loaded from a cache folder."""
    return _compilations


def use_cache_folder(folder: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a folder; a later process loads them instead of compiling.

    Sets JAX's persistent compilation cache for this process, for programs of any size. Call it
    before the first program compiles. Loading a program runs its code: whoever can write to the
    folder can run code in every process that uses it. Raises ValueError for anything but the name
    of a folder, and OSError where the folder cannot be made.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"folder is {folder!r:.80}, expected the name of a folder")
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Model(Protocol):
    """Computes a scorer's model by two functions that can be jitted."""

    def encode_users(self, weights: Tree, users: Tree) -> Tree:
        """Computes users' states: maps a tree of arrays [U, ...] to a tree of arrays [U, ...].

        Whatever depends on a user alone belongs here, since states are kept between requests.
        """

    def score(
        self, weights: Tree, state: Tree, candidates: Tree, cand_to_user: jax.Array
    ) -> jax.Array:
        """Scores the candidates: [B] or [B, ...].

        A candidate's score must not depend on other candidates. `cand_to_user` [B] int32 names the
        row of every candidate's user in `state` and ascends.
        """


class Specs(NamedTuple):
    """Holds trees of `jax.ShapeDtypeStruct`, without axes of users or candidates.

    Attributes:
      user: a user's features.
      candidate: a candidate's features.
      state: a user's state.
      score: a candidate's score.
    """

    weights: Tree
    user: Tree
    candidate: Tree
    state: Tree
    score: jax.ShapeDtypeStruct


def with_rows(spec: Tree, *rows: int) -> Tree:
    """Prepends axes to specs."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*rows, *leaf.shape), leaf.dtype), spec)


def specs_of(model: Model, weights: Tree, user: Tree, candidate: Tree) -> Specs:
    """Finds a model's specs with these weights; `user` and `candidate` as in `Specs`."""
    shapes = checked_shapes(weights, user=user, candidate=candidate)
    states = jax.eval_shape(model.encode_users, shapes, with_rows(user, 1))
    state = _rows(states, "encode_users")
    return Specs(shapes, user, candidate, state, score_spec(model.score, shapes, states, candidate))


def checked_shapes(weights: Tree, **features: Tree) -> Tree:
    """Returns the specs of weights; raises ValueError if these or the features cannot be used."""
    for name, tree in {"weights": weights, **features}.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                expected = "an array or a jax.ShapeDtypeStruct" if name in features else "an array"
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} must be {expected}, but is a "
                    f"{type(leaf).__name__}, {leaf!r:.80}"
                )
    candidate = features["candidate"]
    if not jax.tree.leaves(candidate):
        raise ValueError(
            f"candidate is {candidate!r:.80}, expected at least 1 array, since its rows are counted"
        )
    for name, spec in features.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
            _check_dtype(f"{name}{jax.tree_util.keystr(path)}", leaf.dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)


def score_spec(
    score: Callable[..., Any], weights: Tree, user: Tree, candidate: Tree
) -> jax.ShapeDtypeStruct:
    """Finds the spec of a candidate's score; `user` is what `score` reads of one user."""
    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    scores = jax.eval_shape(score, weights, user, with_rows(candidate, 1), index)
    if not isinstance(scores, jax.ShapeDtypeStruct):
        # NumPy would stack several arrays, and users would get the scores of other users.
        raise ValueError(
            f"score returns {jax.tree.structure(scores)}, expected one array; stack several scores "
            "of a candidate along a further axis"
        )
    spec: jax.ShapeDtypeStruct = _rows(scores, "score")
    return spec


def check_finite(weights: Tree) -> None:
    """Raises ValueError if a weight is NaN or infinite: every score would be, too."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        # On the host, since JAX would compile a program.
        finite = np.isfinite(np.asarray(leaf))
        if not finite.all():
            raise ValueError(
                f"weights{jax.tree_util.keystr(path)} has {np.sum(~finite)} values of "
                f"{finite.size} that are not finite"
            )


def _check_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError if JAX would narrow a dtype, such as int64 ids to 32 bits."""
    taken = dtype
    if isinstance(dtype, np.dtype):
        taken = jax.dtypes.canonicalize_dtype(dtype)
    if taken != dtype:
        raise ValueError(
            f"{name} has dtype {dtype}, but JAX computes in {taken} here; use {taken}, or set "
            "jax_enable_x64"
        )


def _rows(spec: Tree, name: str) -> Tree:
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        if leaf.shape[:1] != (1,):
            raise ValueError(
                f"{name} returns shape {leaf.shape} for one row{jax.tree_util.keystr(path)}, "
                "expected a first axis of size 1"
            )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), spec)


class Job(NamedTuple):
    """Describes a function of arguments and of packed inputs, and the packings, one a program."""

    function: Callable[..., Any]
    inputs: dict[Any, Packing]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def compiled(*jobs: Job) -> list[dict[Any, Any]]:
    """Compiles the programs of jobs side by side; returns those of every job by their sizes."""
    # XLA compiles, and loads from the cache folder, without the interpreter's lock; tracing holds
    # it, so that one thread traces.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        started: list[dict[Any, concurrent.futures.Future[jax.stages.Compiled]]] = []
        for job in jobs:
            started.append({})
            for size, packing in job.inputs.items():
                jitted = jax.jit(functools.partial(job.function, packing), **job.options)
                lowered = jitted.lower(*job.arguments, packing.packed)
                started[-1][size] = threads.submit(lowered.compile)
    return [{size: program.result() for size, program in programs.items()} for programs in started]


class Programs:
    """Compiles the programs of a model, one for every bucket.

    All states live in one pool of `slots` slots: `encode` writes users' states to slots, and
    `score` reads the slots of a call's users. The pool has one array [slots, width] for each dtype
    of a state: one kernel scatters to it, or gathers from it. Weights and pool are lists of leaves,
    since flattening a tree of Python objects, such as the variables of Flax, takes time for every
    leaf of every call. A call's other inputs are packed.

    Attributes:
      pool: `jax.ShapeDtypeStruct` of the arrays of the pool.
      encode_inputs: by number of users, the packing of slots [U] and of the leaves of the users'
        features [U, ...].
      encode: by number of users, (weights, pool, packed inputs) to the pool.
      score_inputs: by bucket, the packing of slots [U], of `cand_to_user` [B] and of the leaves of
        the candidates [B, ...].
      score: by bucket, (weights, pool, packed inputs) to scores [B, ...].
      joint_inputs: by bucket, the packing of `cand_to_user` [B], of the leaves of the users'
        features [U, ...] and of the leaves of the candidates [B, ...].
      joint: by bucket, (weights, packed inputs) to scores [B, ...]: encodes the users and scores
        the candidates, without the pool; empty without the argument `joint`.
      device: the device that the programs run on; None if there are several (`jax.set_mesh`).
    """

    def __init__(
        self, model: Model, specs: Specs, buckets: Buckets, slots: int, *, joint: bool = False
    ) -> None:
        def index(size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size,), jnp.int32)

        def rows(spec: Tree, size: int) -> list[jax.ShapeDtypeStruct]:
            return jax.tree.leaves(with_rows(spec, size))

        self.encode_inputs = {
            users: Packing([index(users), *rows(specs.user, users)]) for users in buckets.new_users
        }
        self.score_inputs = {
            (cands, users): Packing([index(users), index(cands), *rows(specs.candidate, cands)])
            for cands, users in buckets.pairs
        }
        self.joint_inputs = {
            (cands, users): Packing(
                [index(cands), *rows(specs.user, users), *rows(specs.candidate, cands)]
            )
            for cands, users in (buckets.pairs if joint else ())
        }
        self._model, self._specs = model, specs
        self._state = RowPacking(jax.tree.leaves(specs.state))
        self.pool = rows(self._state.packed, slots)
        weights = jax.tree.leaves(specs.weights)

        # The pool is changed in place.
        encode, score, joint_programs = compiled(
            Job(self._encode, self.encode_inputs, (weights, self.pool), {"donate_argnums": 1}),
            Job(self._score, self.score_inputs, (weights, self.pool), {}),
            Job(self._encode_and_score, self.joint_inputs, (weights,), {}),
        )
        self.encode: dict[int, Callable[..., list[jax.Array]]] = encode
        self.score: dict[tuple[int, int], Callable[..., jax.Array]] = score
        self.joint: dict[tuple[int, int], Callable[..., jax.Array]] = joint_programs
        self.device = device_of([*encode.values(), *score.values()])

    def _encode(
        self, inputs: Packing, weights: list[Any], pool: list[jax.Array], packed: list[Any]
    ) -> list[jax.Array]:
        at, *features = inputs.unpacked(packed)
        states = self._encoded(weights, features)
        # Padding has slots past the end.
        leaves = checked(states, self._specs.state, len(at), "encode_users")
        return [
            all.at[at].set(rows, mode="drop", unique_indices=True)
            for all, rows in zip(pool, self._state.pack(leaves), strict=True)
        ]

    def _score(
        self, inputs: Packing, weights: list[Any], pool: list[jax.Array], packed: list[Any]
    ) -> jax.Array:
        at, cand_to_user, *candidates = inputs.unpacked(packed)
        states = self._state.unpack([all.at[at].get(mode="clip") for all in pool])
        state = unflatten(self._specs.state, states)
        return scored(self._model, self._specs, weights, state, candidates, cand_to_user)

    def _encode_and_score(
        self, inputs: Packing, weights: list[Any], packed: list[Any]
    ) -> jax.Array:
        """Encodes users and scores their candidates; keeps no state."""
        cand_to_user, *features = inputs.unpacked(packed)
        split = len(jax.tree.leaves(self._specs.user))
        state = self._encoded(weights, features[:split])
        candidates = features[split:]
        return scored(self._model, self._specs, weights, state, candidates, cand_to_user)

    def _encoded(self, weights: list[Any], features: list[Any]) -> Tree:
        specs = self._specs
        return self._model.encode_users(
            unflatten(specs.weights, weights), unflatten(specs.user, features)
        )


def scored(
    model: Any, specs: Specs, weights: list[Any], state: Tree, candidates: list[Any], index: Any
) -> jax.Array:
    """Scores by `model.score` what it reads of users, and candidates with their users' rows."""
    scores = model.score(
        *(unflatten(specs.weights, weights), state, unflatten(specs.candidate, candidates), index)
    )
    return checked(scores, specs.score, len(index), "score")[0]


def checked(result: Tree, spec: Tree, rows: int, name: str) -> list[jax.Array]:
    """Returns the leaves of a result; raises ValueError unless each has `rows` rows.

    `spec` was found with one row, with which a sum over all rows passes as well.
    """
    leaves: list[jax.Array] = jax.tree.leaves(result)
    wanted = jax.tree_util.tree_leaves_with_path(with_rows(spec, rows))
    for leaf, (path, row) in zip(leaves, wanted, strict=True):
        if leaf.shape != row.shape or leaf.dtype != row.dtype:
            raise ValueError(
                f"{name} returns shape {leaf.shape} and dtype {leaf.dtype} for {rows} rows"
                f"{jax.tree_util.keystr(path)}, expected {row.shape} and {row.dtype}"
            )
    return leaves


def device_of(programs: list[Any]) -> jax.Device | None:
    """Returns the device that programs run on; None if there are several."""
    # An input that a program does not read has no sharding.
    shardings = [s for p in programs for s in jax.tree.leaves(p.input_shardings)]
    devices: set[jax.Device] = set().union(*(sharding.device_set for sharding in shardings))
    return devices.pop() if len(devices) == 1 else None


def unflatten(spec: Tree, leaves: list[jax.Array]) -> Tree:
    """Returns the tree of a spec with these leaves."""
    return jax.tree.unflatten(jax.tree.structure(spec), leaves)
