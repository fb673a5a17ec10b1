"""What is trained: a loss, a step of Adam, and tasks.

Parameters are kept in float32 and rounded to the network's dtype in every step, so that small
updates are not lost; gradients have the network's dtype, Adam's moments are float32. The ranking
network's task can be learnt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import training_gdpa
from ikbo_jax._timing import programs
from ikbo_jax.cases import ranking as cases
from ikbo_jax.models import ranking

LEARNING_RATE = 1e-3
#: Sequences whose loss the oracle of the network of generalised attention computes at once.
ORACLE_BATCH = 64
#: How far the planted signals stand out of the noise, and the steepness of the labels' odds.
SIGNAL, STEEPNESS = 2.0, 6.0


class State(NamedTuple):
    """What a step changes: parameters in float32, and the state of the optimiser."""

    params: Any
    optimiser: Any


#: Takes parameters in the network's dtype and inputs; returns logits, [..., tasks] f32.
Network = Callable[[Any, Any], jax.Array]


def optimiser(learning_rate: float = LEARNING_RATE) -> optax.GradientTransformation:
    """Adam with optax' defaults."""
    return optax.adam(learning_rate)


def start(params: Any) -> State:
    """The state before the first step, in buffers of its own, which the step may reuse."""
    wide = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return State(wide, optimiser().init(wide))


def loss_of(network: Network, dtype: Any) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """The loss: takes float32 parameters, inputs and labels in {-1, 1}; mean log loss, f32."""

    def loss(params: Any, inputs: Any, labels: jax.Array) -> jax.Array:
        logits = network(jax.tree.map(lambda x: x.astype(dtype), params), inputs)
        return jnp.mean(jax.nn.softplus(-labels * logits))

    return loss


def step_of(
    network: Network, dtype: Any
) -> Callable[[State, Any, jax.Array], tuple[State, tuple[jax.Array, jax.Array]]]:
    """A step: takes state, inputs and labels; returns the next state, and loss and gradient norm.

    The gradient's norm is the Euclidean norm over all parameters.
    """
    loss = loss_of(network, dtype)

    def step(state: State, inputs: Any, labels: jax.Array) -> tuple[State, Any]:
        value, gradients = jax.value_and_grad(loss)(state.params, inputs, labels)
        with jax.named_scope("update"):
            updates, moments = optimiser().update(gradients, state.optimiser, state.params)
            params = optax.apply_updates(state.params, updates)
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        return State(params, moments), (value, norm)

    return step


def draw(sizes: ranking.Sizes, seed: int | jax.Array, index: jax.Array) -> tuple[Any, jax.Array]:
    """A request with planted signals, and its labels [B, tasks] in {-1, 1}; may be traced.

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


class Task(NamedTuple):
    """What all versions of a point train on: float32 parameters, inputs, labels, first loss."""

    params: Any
    inputs: Any
    labels: jax.Array
    expected: float


def task_of(sizes: Any) -> Task:
    """The seeded task of a point, on the device."""
    if isinstance(sizes, training_gdpa.Sizes):
        params, (inputs, labels) = training_gdpa.init(sizes), training_gdpa.draw(sizes)
        return Task(params, inputs, labels, _gdpa_loss(sizes, params, inputs, labels))
    params = ranking.init(sizes)
    inputs, labels = draw(sizes, 0, ranking.user_index(sizes))
    logits = _untimed(cases.oracle, params, inputs)(params, inputs)
    loss = float(jnp.mean(jax.nn.softplus(-labels * logits)))
    return Task(params, inputs, labels, loss)


def _gdpa_loss(sizes: training_gdpa.Sizes, params: Any, inputs: Any, labels: jax.Array) -> float:
    """The loss of the padded network in float32, of parameters that are rounded as in a step."""
    rows = inputs.rows.astype(jnp.float32)
    rounded = jax.tree.map(lambda x: x.astype(sizes.dtype).astype(jnp.float32), params)
    offsets = np.asarray(inputs.offsets)
    # All parts have one size: the last rows of short parts are not read.
    count = min(ORACLE_BATCH, sizes.batch)
    most = count * sizes.max_length
    padded = jnp.pad(rows, ((0, most), (0, 0)))

    def part_loss(
        params: Any, rows: jax.Array, first: jax.Array, offsets: jax.Array, labels: jax.Array
    ) -> jax.Array:
        part = training_gdpa.Inputs(jax.lax.dynamic_slice_in_dim(rows, first, most), offsets)
        part_sizes = dataclasses.replace(sizes, batch=count)
        with jax.default_matmul_precision("highest"):
            logits = training_gdpa.network(training_gdpa.xla, part_sizes, params, part)
        return jnp.sum(jax.nn.softplus(-labels * logits))

    arguments = [
        (part[0], part - part[0], labels[start : start + count])
        for start in range(0, sizes.batch - count + 1, count)
        for part in [offsets[start : start + count + 1]]
    ]
    compiled = _untimed(part_loss, rounded, padded, *arguments[0])
    total = sum(float(compiled(rounded, padded, *rest)) for rest in arguments)
    return total / (len(arguments) * count)


def _untimed(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn`, compiled for `args` quickly: its time does not matter."""
    options = programs.UNTIMED_ON_GPU if jax.default_backend() == "gpu" else None
    return jax.jit(fn).lower(*args).compile(options)
