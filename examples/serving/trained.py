"""What is served after training: a checkpoint of `examples/movielens`, real users and movies."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.movielens import data as movielens
from examples.movielens import train
from examples.movielens.impressions import Requests, users_of
from examples.serving.models import RandomSource, Tree, UserIds


class TrainedSource(RandomSource):
    """The ranker of a checkpoint; users and movies have MovieLens' ids.

    A user's history is the newest of the user's ratings. User 0 stands for an unknown user without
    ratings, movie 0 for no movie. The version of weights is the step of a checkpoint.

    Args:
      folder: a run's folder of checkpoints, as `python -m examples.movielens` prints it.
      data: folder of MovieLens-100k; None: the cache folder, which is filled if it is empty.

    Raises:
      FileNotFoundError: there is no checkpoint, or no data.
      ValueError: the checkpoint was trained on another number of movies.
    """

    def __init__(self, folder: pathlib.Path, data: pathlib.Path | None = None) -> None:
        identity, steps = train.described(folder)
        self.data = movielens.load(data)
        sizes = train.Sizes(**identity["sizes"])
        if sizes.movies != len(self.data.titles):
            raise ValueError(
                f"the checkpoint has movies={sizes.movies}, but the data have "
                f"{len(self.data.titles)}"
            )
        super().__init__(len(self.data.profile), sizes)
        self.folder, self.newest = folder, str(steps[-1])
        self._dtype = jnp.dtype(train.Protocol(**identity["protocol"]).dtype)
        user = np.arange(self.num_users)
        self._first = np.searchsorted(self.data.ratings.user, user)
        self._last = np.searchsorted(self.data.ratings.user, user, side="right")

    def weights(self, version: str) -> Tree:
        """The weights of a checkpoint's step, in the dtype in which the run computed.

        Raises:
          ValueError: the version is no number.
          FileNotFoundError: there is no checkpoint of this step.
        """
        # optax' count of steps mixes dtypes.
        with jax.numpy_dtype_promotion("standard"):
            ranker = train.load(self.folder, self.data.catalogue, int(version))
        params, rest = nnx.state(ranker, nnx.Param, ...)
        rounded = jax.tree.map(lambda x: x.astype(self._dtype), params)
        return jax.tree.map(np.asarray, nnx.merge_state(rounded, rest))

    def features_of(self, users: UserIds) -> Tree:
        """The users' profiles and newest ratings."""
        rows = np.asarray(users)
        last = self._last[rows]
        first = np.maximum(self._first[rows], last - (self.sizes.history - 1))
        found = users_of(self.data, self.sizes.history, Requests(rows, first, last, last, last))
        return jax.tree.map(lambda x: np.asarray(x, np.int32), found)
