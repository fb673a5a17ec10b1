"""Short trainings of the ranking network, to compare the loss curves of its versions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from problems import random_array

import ikbo_jax as ikbo
from benchmarks import ranking_by_hand
from benchmarks import training_networks as networks
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.models import ranking

#: Parts of a curve whose mean losses are compared.
PARTS = 10
#: Differences below this are no news, however little the seeds differ.
FLOOR = 0.01
#: How far the planted signals stand out of the noise, and the steepness of the labels' odds.
SIGNAL, STEEPNESS = 2.0, 6.0


@functools.cache
def network_and_request(sizes: ranking.Sizes) -> tuple[Any, ranking.Request]:
    """Parameters and a request; JAX's own normal values would take a program for every shape."""
    rng = np.random.default_rng(0)
    with mock.patch.object(jax.random, "normal", lambda _, *args: random_array(rng, *args)):
        return jax.jit(lambda: (ranking.init(sizes), ranking.make_request(sizes)))()


def versions(sizes: ranking.Sizes) -> dict[str, Callable[..., jax.Array]]:
    """All versions of the network by name."""
    most = int(ranking.candidate_counts(sizes).max())
    return {
        "materialised": ranking.materialised,
        "co_designed": ranking.co_designed,
        "rewrite": ikbo.rewrite(ranking.materialised),
        "hand_optimised": functools.partial(ranking_by_hand.hand_optimised, most=most),
    }


def draw(sizes: ranking.Sizes, seed: int | jax.Array, index: jax.Array) -> tuple[Any, jax.Array]:
    """Draws a request with planted signals, and labels [B, tasks] in {-1, 1}; may be traced.

    The signal of a candidate shifts all of its tokens along one direction, the signal of a user its
    dense features. The odds of the first task follow the candidate's signal, and the odds of the
    others its product with the user's signal: a network has to bring both together.
    """
    user_dense, user_tokens, history, cand_tokens = ranking.draw_request(sizes, seed)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), 3)
    of_cand = jax.random.rademacher(keys[0], (sizes.candidates,), jnp.float32)
    of_user = jax.random.rademacher(keys[1], (sizes.users,), jnp.float32)

    def shifted(x: jax.Array, signal: jax.Array) -> jax.Array:
        """Adds the signal along a fixed direction, whose elements alternate in sign."""
        direction = 1 - 2 * (jax.lax.broadcasted_iota(jnp.float32, x.shape, x.ndim - 1) % 2)
        signal = signal.reshape(-1, *[1] * (x.ndim - 1))
        return x + (SIGNAL * signal * direction).astype(x.dtype)

    request = ranking.Request(
        shifted(user_dense, of_user), user_tokens, history, shifted(cand_tokens, of_cand), index
    )
    both = of_cand * of_user[index]
    odds = STEEPNESS * jnp.stack([of_cand, *[both] * (sizes.tasks - 1)], axis=1)
    is_met = jax.random.uniform(keys[2], odds.shape) < jax.nn.sigmoid(odds)
    return request, jnp.where(is_met, 1.0, -1.0)


def curves(
    network: Callable[..., jax.Array],
    sizes: ranking.Sizes,
    drawn: ranking.Sizes,
    seeds: int,
    steps: int,
) -> np.ndarray:
    """Losses [seeds, PARTS], each the mean over a part of the steps.

    Every step draws a request of its own. To keep all requests would take 13 GB at the sizes of the
    GPU test, and several times as much to draw them at once.

    Args:
      network: a version.
      sizes: its sizes; parameters and arrays have their dtype.
      drawn: the sizes, with the dtype in which requests are drawn.
      seeds: number of seeds.
      steps: number of steps.
    """
    step = networks.step_of(network, sizes.dtype)
    index = ranking.user_index(sizes)

    def narrow(x: jax.Array) -> jax.Array:
        return x.astype(sizes.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def train(state: networks.State, requests: jax.Array) -> jax.Array:
        def body(state: networks.State, number: jax.Array) -> Any:
            # The barrier keeps the versions' programs from drawing different numbers.
            request, labels = jax.lax.optimization_barrier(draw(drawn, number, index))
            state, (loss, _) = step(state, jax.tree.map(narrow, request), labels)
            return state, loss

        losses: jax.Array = jax.lax.scan(body, state, requests)[1]
        return losses

    # In float32 for every dtype, so that all versions start from the same parameters.
    wide = dataclasses.replace(sizes, dtype="float32")
    init = jax.jit(lambda seed: networks.start(ranking.init(wide, seed)))
    numbers = jnp.arange(seeds * steps, dtype=jnp.int32).reshape(seeds, steps)
    # The gradient of attention in `jax.nn`, and optax' count of steps, mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        options = UNTIMED_ON_GPU if jax.default_backend() == "gpu" else None
        compiled = jax.jit(train).lower(init(0), numbers[0]).compile(options)
        found = [compiled(init(seed), requests) for seed, requests in enumerate(numbers)]
    return np.asarray(found).reshape(seeds, PARTS, -1).mean(axis=-1)


def assert_learnt_alike(found: np.ndarray, reference: np.ndarray) -> None:
    """Losses fell, and differ from the reference's by less than the seeds differ.

    Most of the fall is in the first part, whose mean has little of the first step's loss left: on a
    GPU, the copies in float32 end at 0.25 to 0.33 of it.

    Args:
      found: losses [seeds, PARTS] of a version.
      reference: the same seeds in float32.
    """
    assert np.isfinite(found).all()
    assert (found[:, -1] < found[:, 0] / 2).all(), found
    noise = reference.std(axis=0, ddof=1)
    difference = np.abs(found.mean(axis=0) - reference.mean(axis=0))
    np.testing.assert_array_less(difference, np.maximum(noise, FLOOR))
