"""Divides the ratings by time, and makes requests with impressions of them.

A request is a moment of one user: the history is what the user rated strictly earlier, and the
impressions are the movies that the user rated next (watched, label 1) and sampled movies (label 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.movielens.data import Data, Ratings
from examples.movielens.model import AGES, Candidates, Users

#: Impressions of a request, and how many of them are watched at most.
IMPRESSIONS, WATCHED = 64, 16
#: Of every user's ratings, in the order of time: for training, and for training and validation.
TRAIN, VALIDATION = 0.8, 0.9


class Split(NamedTuple):
    """Bounds of every user's parts as positions in the sorted ratings, [users] int64 each.

    A user's training part is [start, validation), the validation part [validation, test), and the
    test part [test, end). Ratings of one user with equal times are in one part.
    """

    start: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    end: np.ndarray


class Requests(NamedTuple):
    """Requests; a history is `ratings[first:last]`, the watched movies `ratings[watched:until]`.

    Attributes:
      user: [R] int32.
      first: [R] int64.
      last: [R] int64.
      watched: [R] int64, at least `last`: ratings of the same second lie between them.
      until: [R] int64.
    """

    user: np.ndarray
    first: np.ndarray
    last: np.ndarray
    watched: np.ndarray
    until: np.ndarray

    def take(self, index: np.ndarray) -> Requests:
        """The requests with these numbers."""
        return Requests(*(field[index] for field in self))


class Batch(NamedTuple):
    """Requests as the models read them.

    Attributes:
      users: the users, at user batch.
      candidates: all impressions of all requests, request after request.
      cand_to_user: [B] int32, sorted.
      label: [B] float32, 1 for watched movies.
      user: [U] int32, the users' ids, for matrix factorisation.
    """

    users: Users
    candidates: Candidates
    cand_to_user: jax.Array
    label: jax.Array
    user: jax.Array


def split(ratings: Ratings, train: float = TRAIN, validation: float = VALIDATION) -> Split:
    """Divides every user's ratings by time; a cut moves back to where the time changes.

    A user whose first part would be empty is in the training part as a whole.
    """
    _, start = np.unique(ratings.user, return_index=True)
    end = np.append(start[1:], len(ratings.user))
    cuts = []
    for fraction in (train, validation):
        cut = start + np.floor((end - start) * fraction).astype(np.int64)
        for i, (low, high) in enumerate(zip(start, end, strict=True)):
            # The first rating with the time of the cut.
            cut[i] = low + np.searchsorted(ratings.time[low:high], ratings.time[cut[i]])
        cuts.append(np.where(cut == start, end, cut))
    return Split(start, cuts[0], np.maximum(*cuts), end)


def requests(
    ratings: Ratings, low: np.ndarray, high: np.ndarray, start: np.ndarray, history: int
) -> Requests:
    """One request for every `WATCHED` ratings of [low, high) of a user, the last may have fewer.

    Args:
      ratings: the ratings.
      low: [users], first rating that may be watched.
      high: [users], end of these ratings.
      start: [users], the user's first rating.
      history: S, rows of a history; its first row is no rating.

    Returns:
      The requests, except those without any earlier rating.
    """
    rows = []
    for begin, a, b in zip(start, low, high, strict=True):
        for watched in range(a, b, WATCHED):
            # Ratings of the request's own second are not known yet.
            last = begin + np.searchsorted(ratings.time[begin:watched], ratings.time[watched])
            if last > begin:
                first = max(begin, last - (history - 1))
                rows.append((ratings.user[begin], first, last, watched, min(watched + WATCHED, b)))
    user, *bounds = np.array(rows, np.int64).reshape(-1, 5).T
    return Requests(user.astype(np.int32), *bounds)


class Impressions:
    """Makes batches of requests.

    Args:
      data: the data set.
      history: S, rows of a history.

    Attributes:
      train: requests of the training part.
      validation: requests of the validation part; histories contain training ratings, too.
      test: requests of the test part; histories contain all earlier ratings.
      popularity: [movies] number of training ratings.
    """

    def __init__(self, data: Data, history: int):
        self.data, self.history = data, history
        ratings, parts = data.ratings, split(data.ratings)
        self.split = parts
        self.train, self.validation, self.test = (
            requests(ratings, low, high, parts.start, history)
            for low, high in (
                (parts.start, parts.validation),
                (parts.validation, parts.test),
                (parts.test, parts.end),
            )
        )
        self.num_movies = len(data.titles)
        self.is_train = np.zeros(len(ratings.user), bool)
        for low, high in zip(parts.start, parts.validation, strict=True):
            self.is_train[low:high] = True
        self.popularity = np.bincount(ratings.movie[self.is_train], minlength=self.num_movies)
        # Sampled movies of training requests may be watched later: the training part does not
        # know of it. Those of validation and test requests are never watched.
        self._rated_in_train = self._rated(self.is_train)
        self._rated_ever = self._rated(np.ones_like(self.is_train))
        if (unrated := self.num_movies - int(self._rated_ever.sum(axis=1).max())) < IMPRESSIONS:
            raise ValueError(
                f"a request has {IMPRESSIONS} impressions, but a user has only {unrated} movies "
                "without a rating"
            )

    def _rated(self, which: np.ndarray) -> np.ndarray:
        """[users, movies] bool: whether one of the chosen ratings is of user and movie."""
        found = np.zeros((len(self.data.profile), self.num_movies), bool)
        found[self.data.ratings.user[which], self.data.ratings.movie[which]] = True
        found[:, 0] = True
        return found

    def train_batch(self, users: int, seed: int, step: int) -> Batch:
        """Batch number `step` of a run: a function of its arguments, so runs can be resumed."""
        per_epoch = len(self.train.user) // users
        if not per_epoch:
            raise ValueError(
                f"a batch has {users} requests, but there are only {len(self.train.user)}"
            )
        epoch, number = divmod(step, per_epoch)
        order = np.random.default_rng([seed, 0, epoch]).permutation(len(self.train.user))
        chosen = self.train.take(order[number * users : (number + 1) * users])
        draws = np.random.default_rng([seed, 1, step]).random((users, self.num_movies))
        return self._batch(chosen, self._rated_in_train, draws)

    def evaluation(self, chosen: Requests, users: int) -> Iterator[tuple[Batch, int]]:
        """Batches of validation or test requests with their number of requests.

        Sampled movies are the same in every call. The last batch repeats its last request.
        """
        for first in range(0, len(chosen.user), users):
            index = np.arange(first, min(first + users, len(chosen.user)))
            padded = np.pad(index, (0, users - len(index)), mode="edge")
            # By the request's own numbers, so that all models rank the same movies.
            rows = chosen.take(padded)
            draws = [
                np.random.default_rng([int(user), int(watched)]).random(self.num_movies)
                for user, watched in zip(rows.user, rows.watched, strict=True)
            ]
            yield self._batch(rows, self._rated_ever, np.stack(draws)), len(index)

    def _batch(self, chosen: Requests, rated: np.ndarray, draws: np.ndarray) -> Batch:
        """Requests with their watched movies, and the unrated movies of the least draws."""
        users = len(chosen.user)
        keys = draws + rated[chosen.user]
        movie = np.argpartition(keys, IMPRESSIONS, axis=1)[:, :IMPRESSIONS].astype(np.int32)
        label = np.zeros((users, IMPRESSIONS), np.float32)
        for row, (first, until) in enumerate(zip(chosen.watched, chosen.until, strict=True)):
            movie[row, : until - first] = self.data.ratings.movie[first:until]
            label[row, : until - first] = 1
        return Batch(
            self.users(chosen),
            Candidates(jnp.asarray(movie.reshape(-1))),
            jnp.asarray(np.repeat(np.arange(users, dtype=np.int32), IMPRESSIONS)),
            jnp.asarray(label.reshape(-1)),
            jnp.asarray(chosen.user),
        )

    def users(self, chosen: Requests) -> Users:
        """The users of requests as the model reads them."""
        return jax.tree.map(jnp.asarray, users_of(self.data, self.history, chosen))


def users_of(data: Data, history: int, chosen: Requests) -> Users:
    """The users of requests as the model reads them, in NumPy.

    Args:
      data: the data set.
      history: S, rows of a history.
      chosen: the requests, each with at most S - 1 ratings.
    """
    ratings, shape = data.ratings, (len(chosen.user), history)
    movie, rating, age = (np.zeros(shape, np.int32) for _ in range(3))
    length = (1 + chosen.last - chosen.first).astype(np.int32)
    for row, (first, last) in enumerate(zip(chosen.first, chosen.last, strict=True)):
        events = slice(1, 1 + last - first)
        movie[row, events] = ratings.movie[first:last]
        rating[row, events] = ratings.rating[first:last]
        # A user without ratings has no newest event.
        if last > first:
            age[row, events] = age_code(ratings.time[last - 1] - ratings.time[first:last])
    fields: Any = (data.profile[chosen.user], movie, rating, age, length)
    return Users(*fields)


def age_code(seconds: np.ndarray) -> np.ndarray:
    """Codes of times from an event to the newest event: 1 for 0 s, then powers of two."""
    return np.minimum(1 + np.ceil(np.log2(1.0 + seconds)), AGES - 1).astype(np.int32)
