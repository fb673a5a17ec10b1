"""What is served: the MovieLens ranker, its weights by version, the features of users and movies.

`SOURCES` names the choices of the command. A source needs what `Source` lists and nothing of an
engine.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from examples.movielens.model import (
    AGES,
    DECADES,
    HOPPER,
    PROFILE,
    Candidates,
    Catalogue,
    Ranker,
    Sizes,
    Users,
)
from examples.serving.histories import HistorySource
from examples.serving.histories import Sizes as HistorySizes
from ikbo_jax import serving
from ikbo_jax.serving.programs import with_rows

Tree = Any
UserIds = Sequence[int] | npt.NDArray[np.integer]


class UnknownUserError(LookupError):
    """There is no user of this id."""


class Source(Protocol):
    """What is served.

    Attributes:
      model: the model.
      user: a user's features, a tree of `jax.ShapeDtypeStruct`.
      candidate: a candidate's features in the same form.
      num_users: users are numbered from 0.
      num_items: candidates are numbered from 0.
      newest: the version of the newest weights.
    """

    model: serving.Model
    user: Tree
    candidate: Tree
    num_users: int
    num_items: int
    newest: str

    def weights(self, version: str) -> Tree:
        """The weights of a version."""

    def features_of(self, users: UserIds) -> Tree:
        """The features of several users, arrays [n, ...]."""

    def candidates(self, items: npt.NDArray[np.int32]) -> Tree:
        """The features of candidates, one row for each item."""


def request(source: Source, user: int, items: npt.ArrayLike, version: int = 0) -> serving.Request:
    """The request to rank items for a user, whose features the scorer asks the source for.

    Raises:
      UnknownUserError: if there is no such user.
      serving.BadRequestError: if an item is out of range; the message names both values.
    """
    if not 0 <= user < source.num_users:
        raise UnknownUserError(f"user is {user}, expected one in [0, {source.num_users})")
    if isinstance(source, HistorySource):
        version += int(source.lengths[user])
    return serving.Request(user, version, None, candidates(source, items))


def candidates(source: Source, items: npt.ArrayLike) -> Tree:
    """The features of candidates.

    Args:
      source: a source.
      items: [n] integers.

    Raises:
      serving.BadRequestError: if an item is out of range; the message names both values.
    """
    rows = np.asarray(items)
    # Two reductions, and no array of the size of the items, unless one is wrong.
    if rows.size and not (rows.min() >= 0 and rows.max() < source.num_items):
        wrong = np.flatnonzero((rows < 0) | (rows >= source.num_items))[0]
        raise serving.BadRequestError(
            f"candidates[{wrong}] is {rows[wrong]}, expected one in [0, {source.num_items})"
        )
    return source.candidates(rows.astype(np.int32, copy=False))


@dataclasses.dataclass(frozen=True)
class ModuleModel:
    """The two functions of a ranker of Flax NNX, of whose variables the weights are the state."""

    graph: Any

    def encode_users(self, weights: Tree, users: Tree) -> Tree:
        """The users' states."""
        return nnx.merge(self.graph, weights).encode_users(users)

    def score(
        self, weights: Tree, state: Tree, candidates: Tree, cand_to_user: jax.Array
    ) -> jax.Array:
        """Logits [B]."""
        ranker = nnx.merge(self.graph, weights)
        scores: jax.Array = ranker.score(state, candidates, cand_to_user, indices_are_sorted=True)
        return scores


class RandomSource:
    """A ranker with random weights, and random users and movies.

    Args:
      num_users: number of users.
      sizes: sizes of the ranker; by default those of MovieLens-100k.
      dtype: of its floating-point weights, in which it computes.
    """

    newest = "1"

    def __init__(
        self, num_users: int = 10_000, sizes: Sizes | None = None, dtype: str = "float32"
    ) -> None:
        self.num_users, self.sizes, self.dtype = num_users, sizes or Sizes(), dtype
        self.num_items = self.sizes.movies
        code: Any = jax.ShapeDtypeStruct((), np.int32)
        profile, events = with_rows(code, len(PROFILE)), with_rows(code, self.sizes.history)
        self.user: Tree = Users(profile, events, events, events, code)
        self.candidate: Tree = Candidates(code)
        self.model: serving.Model = ModuleModel(nnx.graphdef(nnx.eval_shape(self._ranker)))

    def _ranker(self) -> Ranker:
        genres = np.zeros((self.sizes.movies, self.sizes.genres), np.float32)
        decade = np.zeros(self.sizes.movies, np.int32)
        return Ranker(self.sizes, Catalogue(genres, decade), rngs=nnx.Rngs(0))

    def weights(self, version: str) -> Tree:
        """Random weights, whose seed is the version, and random genres and decades."""
        # Of NumPy's generator: JAX's would compile a program for every shape.
        rng = np.random.default_rng(int(version))

        def draw(leaf: jax.ShapeDtypeStruct) -> npt.NDArray[Any]:
            if np.issubdtype(leaf.dtype, np.integer):
                return rng.integers(0, DECADES, leaf.shape).astype(leaf.dtype)
            scale = max(1, *leaf.shape[:1]) ** -0.5
            return (rng.standard_normal(leaf.shape) * scale).astype(jnp.dtype(self.dtype))

        return jax.tree.map(draw, nnx.state(nnx.eval_shape(self._ranker)))

    @functools.cached_property
    def _table(self) -> Users:
        """Profiles and histories of all users, as a service has them in the host's memory."""
        rng = np.random.default_rng(0)

        def draw(least: int, above: Any, *shape: int) -> Any:
            return rng.integers(least, above, (self.num_users, *shape), np.int32)

        history = self.sizes.history
        return Users(
            profile=draw(0, list(PROFILE.values()), len(PROFILE)),
            movie=draw(0, self.sizes.movies, history),
            rating=draw(1, 6, history),
            age=draw(0, AGES, history),
            length=draw(1, history + 1),
        )

    def features_of(self, users: UserIds) -> Tree:
        """Rows of a table of all users, which is drawn when it is first asked for."""
        rows = np.asarray(users)
        return Users(*(leaf[rows] for leaf in self._table))

    def candidates(self, items: Any) -> Tree:
        """The movies themselves: what is known of them is part of the ranker."""
        return Candidates(items)


TINY = Sizes(
    movies=200,
    history=8,
    layers=1,
    width=8,
    heads=1,
    head_dim=8,
    pooled=2,
    compressed=2,
    hidden=8,
)
HOPPER_HISTORIES = HistorySizes(width=256, heads=4, head_dim=64)
SOURCES: dict[str, Callable[[], Source]] = {
    "random": RandomSource,
    "tiny": functools.partial(RandomSource, 100, TINY),
    # Histories that grow, up to 1,152 events; with keys and values in pages.
    "histories": HistorySource,
    "histories-tiny": functools.partial(
        HistorySource, 100, HistorySizes(200, 2, 8, 1, 8, page=4, most=8), median=8
    ),
    "histories-hopper": functools.partial(HistorySource, 10_000, HOPPER_HISTORIES, "bfloat16"),
    # Whose kernels a Hopper GPU runs; "random" runs the ops in XLA.
    "hopper": functools.partial(RandomSource, 10_000, HOPPER, "bfloat16"),
    # Longer histories: the share of a call that a user's state saves grows with them.
    "hopper-long": functools.partial(
        RandomSource, 10_000, dataclasses.replace(HOPPER, history=1024), "bfloat16"
    ),
    "hopper-longest": functools.partial(
        RandomSource, 10_000, dataclasses.replace(HOPPER, history=2048), "bfloat16"
    ),
}


def source_of(name: str, checkpoint: str = "", data: str = "") -> Source:
    """The source of a name in `SOURCES`, or of a checkpoint.

    Args:
      name: the name; of no effect beside a checkpoint.
      checkpoint: folder of a run's checkpoints, or empty.
      data: folder of MovieLens-100k; empty: the cache folder.
    """
    if not checkpoint:
        return SOURCES[name]()
    # orbax and the data are needed for this source alone.
    from examples.serving.trained import TrainedSource

    return TrainedSource(pathlib.Path(checkpoint), pathlib.Path(data) if data else None)
