"""Short trainings of the ranking network, to compare the loss curves of its versions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from benchmarks import training_task
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.models import ranking

#: Parts of a curve whose mean losses are compared.
PARTS = 10
#: Differences below this are no news, however little the seeds differ.
FLOOR = 0.01


def versions(sizes: ranking.Sizes) -> dict[str, Callable[..., jax.Array]]:
    """All versions of the network by name."""
    most = int(ranking.candidate_counts(sizes).max())
    return {
        "materialised": ranking.materialised,
        "co_designed": ranking.co_designed,
        "rewrite": ikbo.rewrite(ranking.materialised),
        "hand_optimised": functools.partial(ranking.hand_optimised, most=most),
    }


def draws(sizes: ranking.Sizes, seed: int, steps: int) -> Any:
    """Requests and labels of `steps` steps, stacked along a leading axis."""
    index = ranking.user_index(sizes)
    one = functools.partial(training_task.draw, sizes, index=index)
    return jax.jit(jax.vmap(lambda seed: one(seed)))(seed * steps + jnp.arange(steps))


def curves(
    network: Callable[..., jax.Array], sizes: ranking.Sizes, data: Sequence[Any]
) -> np.ndarray:
    """Losses [seeds, PARTS], each the mean over a part of the steps.

    Args:
      network: a version.
      sizes: its sizes; parameters and arrays have their dtype.
      data: the result of `draws` for every seed, in any dtype.
    """
    step = training_task.step_of(network, sizes.dtype)

    def narrow(x: jax.Array) -> jax.Array:
        return x.astype(sizes.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def train(state: training_task.State, data: Any) -> jax.Array:
        def body(state: training_task.State, drawn: Any) -> Any:
            request, labels = drawn
            state, (loss, _) = step(state, jax.tree.map(narrow, request), labels)
            return state, loss

        losses: jax.Array = jax.lax.scan(body, state, data)[1]
        return losses

    # In float32 for every dtype, so that all versions start from the same parameters.
    wide = dataclasses.replace(sizes, dtype="float32")
    init = jax.jit(lambda seed: training_task.start(ranking.init(wide, seed)))
    # The gradient of attention in `jax.nn`, and optax' count of steps, mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        options = UNTIMED_ON_GPU if jax.default_backend() == "gpu" else None
        compiled = jax.jit(train).lower(init(0), data[0]).compile(options)
        found = [compiled(init(seed), drawn) for seed, drawn in enumerate(data)]
    return np.asarray(found).reshape(len(data), PARTS, -1).mean(axis=-1)


def assert_learnt_alike(found: np.ndarray, reference: np.ndarray) -> None:
    """Losses fell, and differ from the reference's by less than the seeds differ.

    Args:
      found: losses [seeds, PARTS] of a version.
      reference: the same seeds in float32.
    """
    assert np.isfinite(found).all()
    assert (found[:, -1] < found[:, 0] / 4).all(), found
    noise = reference.std(axis=0, ddof=1)
    difference = np.abs(found.mean(axis=0) - reference.mean(axis=0))
    np.testing.assert_array_less(difference, np.maximum(noise, FLOOR))
