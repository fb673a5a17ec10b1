"""What is trained: a loss, a step of Adam, tasks, and a network of generalised attention.

Parameters are kept in float32 and rounded to the network's dtype in every step, so that small
updates are not lost; gradients have the network's dtype, Adam's moments are float32.

The other network has jagged sequences and is trained in three versions. A sequence is a user's
history. Each block adds self-attention and a feed-forward net whose weights are the sequence's
pooled rows (PFFN); the rows are pooled by seeds (PMA). A perceptron computes one logit of a
sequence from its last pooled rows. All three attentions have one activation:

- `ikbo`: `ikbo_jax.gdpa`, on the jagged rows as they lie.
- `xla`: products over sequences padded to the longest one, scores of all pairs in memory.
- `cudnn-softmax`: another function, softmax attention by cuDNN over the padded sequences; it tells
  what a network costs that has the fastest attention that XLA offers.

The projections work on the jagged rows in all versions: padding would double their cost.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ikbo_jax
from benchmarks import production_providers
from benchmarks.ranking_by_hand import einsum_f32
from ikbo_jax._timing import programs
from ikbo_jax.cases import ranking as cases
from ikbo_jax.cases.gdpa import offsets_of, uniform_lengths
from ikbo_jax.layers import functional, parameters
from ikbo_jax.models import ranking
from ikbo_jax.models.strategies import rms_norm
from ikbo_jax.reference.activations import elementwise

ACTIVATION, APPROX = "gelu_tanh", "tanh"
#: The number of rows of all sequences is rounded up to a multiple of this.
MULTIPLE = 256
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of network and inputs: sequences have 1..max_length rows and are pooled to `seeds`."""

    batch: int = 1152
    max_length: int = 512
    width: int = 256
    heads: int = 4
    head_dim: int = 128
    seeds: int = 32
    blocks: int = 2
    dtype: str = "bfloat16"


class Inputs(NamedTuple):
    """Jagged sequences: rows [total, width], offsets [batch + 1]. Rows past the last are unused."""

    rows: jax.Array
    offsets: jax.Array


class Sequences(NamedTuple):
    """Sequences of up to `longest` rows; without offsets, all have the same rows."""

    offsets: jax.Array | None
    longest: int


#: Takes projected query, key and value [rows, N, H], and the sequences of queries and of keys.
Attention = Callable[..., jax.Array]


def init(sizes: Sizes, seed: int | jax.Array = 0) -> dict[str, Any]:
    """Draws float32 parameters."""
    keys = iter(jax.random.split(jax.random.key(seed), 64))
    width, heads = sizes.width, (sizes.heads, sizes.head_dim)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[0] ** -0.5

    def made(specs: dict[str, parameters.Spec]) -> dict[str, jax.Array]:
        return {name: spec.make(normal) for name, spec in specs.items()}

    def block() -> dict[str, Any]:
        return {
            "attention": made(parameters.pffn_specs(width, width, *heads)),
            "pma": made(parameters.pma_specs(sizes.seeds, width, width, *heads)),
            "pffn": made(parameters.pffn_specs(width, width, *heads)),
        }

    return {
        "blocks": [block() for _ in range(sizes.blocks)],
        "w_hidden": normal((width, width)),
        "w_logits": normal((width, 1)),
    }


def draw_sequences(sizes: Sizes, seed: int = 0) -> tuple[Inputs, jax.Array]:
    """Draws inputs and labels [batch, 1] in {-1, 1}."""
    lengths = uniform_lengths(sizes.batch, sizes.max_length)
    offsets = jnp.asarray(offsets_of(lengths), jnp.int32)
    keys = jax.random.split(jax.random.key(seed))
    # XLA would copy an odd number of rows before every product.
    total = -(-int(lengths.sum()) // MULTIPLE) * MULTIPLE
    rows = jax.random.normal(keys[0], (total, sizes.width), sizes.dtype)
    labels = jax.random.rademacher(keys[1], (sizes.batch, 1), jnp.float32)
    return Inputs(rows, offsets), labels


def network(attend: Attention, sizes: Sizes, params: Any, inputs: Inputs) -> jax.Array:
    """Computes logits [batch, 1] f32."""
    offsets = jnp.arange(sizes.batch + 1, dtype=jnp.int32) * sizes.seeds
    own, of_pool = Sequences(inputs.offsets, sizes.max_length), Sequences(offsets, sizes.seeds)
    of_seeds = Sequences(None, sizes.seeds)
    pooled = rows = inputs.rows
    for block in params["blocks"]:
        normed = rms_norm(rows)
        with jax.named_scope("self_attention"):
            qkv = functional.projected(block["attention"], normed, normed)
            out = attend(*qkv, own, own)
            rows = rows + functional.merge_heads(out, block["attention"]["w_out"])
        normed = rms_norm(rows)
        with jax.named_scope("pma"):
            qkv = functional.projected(block["pma"], block["pma"]["seeds"], normed)
            out = attend(*qkv, of_seeds, own)
            pooled = rms_norm(functional.merge_heads(out, block["pma"]["w_out"]))
        with jax.named_scope("pffn"):
            out = attend(*functional.projected(block["pffn"], normed, pooled), own, of_pool)
            rows = rows + functional.merge_heads(out, block["pffn"]["w_out"])
    final = jnp.mean(pooled.reshape(sizes.batch, sizes.seeds, -1), axis=1)
    logits = jax.nn.gelu(final @ params["w_hidden"]) @ params["w_logits"]
    return logits.astype(jnp.float32)


def ours(query: Any, key: Any, value: Any, queries: Sequences, keys: Sequences) -> jax.Array:
    """Attends by `ikbo_jax.gdpa`."""
    is_broadcast, cu_kv = queries.offsets is None, keys.offsets
    assert cu_kv is not None
    return ikbo_jax.gdpa(
        *(query, key, value, queries.offsets, cu_kv),
        activation=ACTIVATION,
        approx=APPROX,
        scale=query.shape[-1] ** -0.5,
        output_scale=keys.longest**-0.5,
        broadcast_q=is_broadcast,
        max_seqlen_q=None if is_broadcast else queries.longest,
        max_seqlen_kv=keys.longest,
    )


def _padded(attend: Callable[..., jax.Array]) -> Attention:
    def run(query: Any, key: Any, value: Any, queries: Sequences, keys: Sequences) -> jax.Array:
        op = production_providers.padded(attend, queries.longest, keys.longest)
        return op(query, key, value, queries.offsets, keys.offsets)

    return run


@_padded
def xla(query: Any, key: Any, value: Any, _: Any, kv_lengths: Any) -> Any:
    """Computes products over padded sequences, with scores of all pairs in memory."""
    scores = einsum_f32("btnh,bsnh->bnts", query, key) * jnp.float32(query.shape[-1] ** -0.5)
    weights = elementwise(ACTIVATION, None).value(scores).astype(value.dtype)
    is_key = jnp.arange(key.shape[1], dtype=jnp.int32)[None] < kv_lengths[:, None]
    weights = jnp.where(is_key[:, None, None], weights, 0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value)
    return out * jnp.asarray(key.shape[1] ** -0.5, out.dtype)


def softmax() -> Attention:
    """Makes softmax attention in place of all three; raises NotImplementedError without cuDNN."""
    return _padded(production_providers.softmax())


# Steps and tasks


class State(NamedTuple):
    """What a step changes: parameters in float32, and the state of the optimiser."""

    params: Any
    optimiser: Any


#: Takes parameters in the network's dtype and inputs; returns logits, [..., tasks] f32.
Network = Callable[[Any, Any], jax.Array]


def optimiser(learning_rate: float = LEARNING_RATE) -> optax.GradientTransformation:
    """Makes Adam with optax' defaults."""
    return optax.adam(learning_rate)


def start(params: Any) -> State:
    """Makes the state before the first step, in buffers of its own, which the step may reuse."""
    wide = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return State(wide, optimiser().init(wide))


def loss_of(network: Network, dtype: Any) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """Makes the mean log loss of float32 parameters, inputs and labels in {-1, 1}."""

    def loss(params: Any, inputs: Any, labels: jax.Array) -> jax.Array:
        logits = network(jax.tree.map(lambda x: x.astype(dtype), params), inputs)
        return jnp.mean(jax.nn.softplus(-labels * logits))

    return loss


def step_of(
    network: Network, dtype: Any
) -> Callable[[State, Any, jax.Array], tuple[State, tuple[jax.Array, jax.Array]]]:
    """Makes a step: state, inputs and labels to the next state, loss and norm of the gradient."""
    loss = loss_of(network, dtype)

    def step(state: State, inputs: Any, labels: jax.Array) -> tuple[State, Any]:
        value, gradients = jax.value_and_grad(loss)(state.params, inputs, labels)
        with jax.named_scope("update"):
            updates, moments = optimiser().update(gradients, state.optimiser, state.params)
            params = optax.apply_updates(state.params, updates)
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        return State(params, moments), (value, norm)

    return step


class Task(NamedTuple):
    """What all versions of a point train on: float32 parameters, inputs, labels, first loss."""

    params: Any
    inputs: Any
    labels: jax.Array
    expected: float


def task_of(sizes: Any) -> Task:
    """Draws the seeded task of a point, on the device; an oracle computes the first loss."""
    options = programs.UNTIMED_ON_GPU if jax.default_backend() == "gpu" else None
    untimed = functools.partial(jax.jit, compiler_options=options)
    if not isinstance(sizes, Sizes):
        params = ranking.init(sizes)
        request, shape = ranking.make_request(sizes), (sizes.candidates, sizes.tasks)
        labels = jax.random.rademacher(jax.random.key(1), shape, jnp.float32)
        logits = untimed(cases.oracle)(params, request)
        return Task(params, request, labels, float(jnp.mean(jax.nn.softplus(-labels * logits))))
    # The padded network in float32, of parameters rounded as in a step.
    params, (inputs, labels) = init(sizes), draw_sequences(sizes)
    wide = inputs._replace(rows=inputs.rows.astype(jnp.float32))
    rounded = jax.tree.map(lambda x: x.astype(sizes.dtype).astype(jnp.float32), params)
    loss = loss_of(functools.partial(network, xla, sizes), jnp.float32)
    with jax.default_matmul_precision("highest"):
        return Task(params, inputs, labels, float(untimed(loss)(rounded, wide, labels)))
