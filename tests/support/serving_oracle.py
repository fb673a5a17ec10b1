"""Scores of the example's sources without a scorer, with which answers are compared."""

from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt

from examples.serving.models import Source


class Offline:
    """Scores the candidates of one user, without padding and without a cache."""

    def __init__(self, source: Source, version: str) -> None:
        self.source, self.weights = source, source.weights(version)
        self._encode = jax.jit(source.model.encode_users)
        self._score = jax.jit(source.model.score)

    def scores(
        self, user: int, items: Sequence[int] | npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        """The scores of items for a user, [n] f32."""
        users = self.source.features_of([user])
        candidates = self.source.candidates(np.asarray(items, np.int32))
        state = self._encode(self.weights, users)
        index = np.zeros(len(items), np.int32)
        return np.asarray(self._score(self.weights, state, candidates, index))
