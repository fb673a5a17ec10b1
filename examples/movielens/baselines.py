"""What the ranker is compared with: popularity and a matrix factorisation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.movielens import evaluate
from examples.movielens.impressions import Batch, Impressions

Parameters = dict[str, jax.Array]


def popularity(data: Impressions) -> evaluate.Metrics:
    """Metrics on the test part of the number of a movie's ratings in the training part."""

    def scorer(batch: Batch) -> np.ndarray:
        return data.popularity[np.asarray(batch.candidates.movie)].astype(np.float64)

    return evaluate.evaluate(scorer, data, data.test, 64)


@dataclasses.dataclass(frozen=True)
class Factorisation:
    """Logistic matrix factorisation: logit = bias[movie] + user · movie, of the same impressions.

    Source: Johnson, "Logistic matrix factorization for implicit feedback data", 2014.

    Attributes:
      rank: number of factors.
      steps: number of steps.
      users: requests of a step.
      learning_rate: peak of Adam's learning rate, which falls to 0 with a cosine.
      penalty: factor of the squared factors of the batch's users and movies in the loss.
    """

    rank: int = 32
    steps: int = 3000
    users: int = 32
    learning_rate: float = 5e-3
    penalty: float = 0.01

    def start(self, data: Impressions, seed: int) -> Parameters:
        """The initial parameters."""
        users, movies = jax.random.split(jax.random.key(seed))
        num_users, num_movies = len(data.data.profile), data.num_movies
        return {
            "user": 0.1 * jax.random.normal(users, (num_users, self.rank), jnp.float32),
            "movie": 0.1 * jax.random.normal(movies, (num_movies, self.rank), jnp.float32),
            "bias": jnp.zeros(num_movies, jnp.float32),
        }

    def logits(self, params: Parameters, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Logits [B], and the mean squared norm of the factors that made them."""
        user = params["user"][batch.user][batch.cand_to_user]
        movie = params["movie"][batch.candidates.movie]
        size = jnp.mean(jnp.sum(user * user + movie * movie, axis=1))
        return jnp.sum(user * movie, axis=1) + params["bias"][batch.candidates.movie], size

    def train(self, data: Impressions, seed: int) -> Parameters:
        """The parameters after training on the training part."""
        rule = optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.steps))

        def loss(params: Parameters, batch: Batch) -> jax.Array:
            logits, size = self.logits(params, batch)
            fit = jnp.mean(jax.nn.softplus(logits) - batch.label * logits)
            return fit + self.penalty * size

        @jax.jit
        def step(params: Parameters, moments: Any, batch: Batch) -> tuple[Parameters, Any]:
            updates, moments = rule.update(jax.grad(loss)(params, batch), moments, params)
            found: Parameters = optax.apply_updates(params, updates)
            return found, moments

        params = self.start(data, seed)
        moments = rule.init(params)
        for number in range(self.steps):
            batch = data.train_batch(self.users, seed, number)
            params, moments = step(params, moments, batch)
        return params

    def evaluate(self, data: Impressions, params: Parameters, chosen: Any) -> evaluate.Metrics:
        """Metrics of parameters on requests."""
        logits = jax.jit(lambda params, batch: self.logits(params, batch)[0])
        return evaluate.evaluate(lambda batch: np.asarray(logits(params, batch)), data, chosen, 64)
