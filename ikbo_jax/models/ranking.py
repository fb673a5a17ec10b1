"""A representative ranking network in the style of InterFormer and Kunlun, in two versions.

A request holds users (dense features, tokens, a history) and their candidates (tokens). Each layer

1. applies self-attention to the history, at user batch;
2. pools the history to a few rows (PMA), at user batch;
3. lets every candidate's queries attend to the history of its user (target attention);
4. applies to the queries a feed-forward net whose weights are the user's pooled rows (PFFN);
5. compresses the embeddings of user and candidate together (linear compression), computes the
   interactions of the compressed rows (a factorisation machine) and adds them to the queries.

A multi-layer perceptron computes two logits from the final user and candidate rows.

`materialised` is the usual form of such models: every layer that combines user and candidate copies
the user. All versions are pure functions of the same parameters; `strategies` holds the operations
that differ.

Source of the layers: InterFormer (sequences and features learn from each other), Wukong (linear
compression beside a factorisation machine) and Kunlun (PMA and PFFN by GDPA), all by Meta; Guo et
al., "DeepFM", 2017, for the interaction.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ikbo_jax.layers import functional, parameters
from ikbo_jax.models import strategies
from ikbo_jax.models.strategies import Strategy, rms_norm
from ikbo_jax.ops.linear_compression import pad_weight
from ikbo_jax.ops.sharded import vary_over_same_axes


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of network and request.

    Attributes:
      candidates: B; `users`: U.
      width: N, width of tokens, history and queries.
      user_dense: number of dense features of a user, projected to `dense_tokens` tokens.
      user_tokens: number of a user's further tokens.
      pooled: number of rows that a history is pooled to; keys and values of the feed-forward net.
      cand_tokens: K_cand, number of tokens of a candidate.
      history: S, number of events of a user.
      queries: T, number of queries of a candidate.
      head_dim: H, width of each of the `heads` of every attention.
      compressed: M, number of rows that user and candidate are compressed to.
      rank: number of factors of a row in the factorisation machine.
      hidden: width of the hidden layer of the final perceptron.
      tasks: number of logits of a candidate.
      dtype: name of the dtype of parameters and inputs.
    """

    candidates: int = 1024
    users: int = 15
    layers: int = 3
    width: int = 256
    user_dense: int = 512
    dense_tokens: int = 32
    user_tokens: int = 1018
    pooled: int = 128
    cand_tokens: int = 866
    history: int = 1024
    queries: int = 64
    heads: int = 2
    head_dim: int = 128
    compressed: int = 433
    rank: int = 16
    hidden: int = 512
    tasks: int = 2
    dtype: str = "bfloat16"

    @property
    def user_rows(self) -> int:
        """K_user, the number of a user's rows that are compressed."""
        return self.user_tokens + self.dense_tokens + self.pooled


#: Sizes for a CPU. CPUs multiply bfloat16 slowly, hence float32.
SMALL = Sizes(
    candidates=256,
    users=4,
    layers=2,
    width=64,
    user_dense=64,
    dense_tokens=8,
    user_tokens=255,
    pooled=32,
    cand_tokens=217,
    history=256,
    queries=4,
    head_dim=32,
    compressed=109,
    hidden=64,
    dtype="float32",
)


class Request(NamedTuple):
    """Holds the inputs of the network; candidates are sorted by user.

    Attributes:
      user_dense: [U, user_dense].
      user_tokens: [U, user_tokens, N].
      history: [U, S, N].
      cand_tokens: [B, K_cand, N].
      cand_to_user: [B] int32.
    """

    user_dense: jax.Array
    user_tokens: jax.Array
    history: jax.Array
    cand_tokens: jax.Array
    cand_to_user: jax.Array


jax.export.register_namedtuple_serialization(
    Request, serialized_name="ikbo_jax.models.ranking.Request"
)


def candidate_counts(sizes: Sizes, seed: int = 0) -> np.ndarray:
    """Draws every user's number of candidates, [U] int64: near B / U, sums to B, may be 0."""
    rng = np.random.default_rng(seed)
    popularity = rng.uniform(0.5, 1.5, sizes.users)
    return rng.multinomial(sizes.candidates, popularity / popularity.sum())


def make_request(sizes: Sizes, seed: int = 0) -> Request:
    """Draws a request; users have different numbers of candidates."""
    return Request._make([*draw_request(sizes, seed), user_index(sizes, seed)])


def user_index(sizes: Sizes, seed: int = 0) -> jax.Array:
    """Returns the user of every candidate, [B] int32, sorted."""
    return index_of(candidate_counts(sizes, seed))


def index_of(counts: np.ndarray) -> jax.Array:
    """Makes the sorted index [B] int32 of users with these numbers of candidates."""
    return jnp.asarray(np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def draw_request(sizes: Sizes, seed: int | jax.Array) -> tuple[jax.Array, ...]:
    """Draws the fields of a request except `cand_to_user`; `seed` may be traced."""
    shapes = (
        (sizes.users, sizes.user_dense),
        (sizes.users, sizes.user_tokens, sizes.width),
        (sizes.users, sizes.history, sizes.width),
        (sizes.candidates, sizes.cand_tokens, sizes.width),
    )
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.dtype(sizes.dtype))
        for key, shape in zip(keys, shapes, strict=True)
    )


def init(sizes: Sizes, seed: int | jax.Array = 0) -> dict[str, Any]:
    """Draws parameters: nested dicts with the parameter names of the Flax layers.

    `seed` may be traced: one program for all parameters compiles much faster than one a shape.
    """
    dtype = jnp.dtype(sizes.dtype)
    # A separate key: parameters must not repeat the values of a request with the same seed.
    key = jax.random.fold_in(jax.random.key(seed), 1)
    shapes: list[tuple[int, ...]] = []

    def record_shape(shape: tuple[int, ...]) -> jax.Array:
        shapes.append(shape)
        return jnp.zeros(shape, dtype)

    # One draw serves all parameters: generators for about sixty shapes compile half a minute.
    jax.eval_shape(lambda: _parameters(sizes, record_shape))
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    values = jax.random.normal(key, (int(ends[-1]),), jnp.float32)
    # Without the barrier, XLA might fuse the generator into the kernel of every slice.
    values = jax.lax.optimization_barrier(values)
    remaining = iter(ends)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        """Takes the next matrix, scaled so that its product keeps the variance of the operand."""
        end = int(next(remaining))
        matrix = values[end - math.prod(shape) : end].reshape(shape)
        return (matrix * jnp.float32(max(1, shape[0]) ** -0.5)).astype(dtype)

    return _parameters(sizes, normal)


def _parameters(sizes: Sizes, normal: Callable[[tuple[int, ...]], jax.Array]) -> dict[str, Any]:
    """Makes the tree of parameters; `normal` makes a matrix of a shape."""
    dtype = jnp.dtype(sizes.dtype)

    def initialised(specs: dict[str, parameters.Spec]) -> dict[str, jax.Array]:
        return {name: spec.make(normal) for name, spec in specs.items()}

    width, heads = sizes.width, (sizes.heads, sizes.head_dim)
    attention = functools.partial(parameters.attention_specs, width, width, width, *heads)

    def layer() -> dict[str, Any]:
        both = normal((sizes.user_rows + sizes.cand_tokens, sizes.compressed))
        return {
            "self_attention": initialised(attention()),
            "pma": initialised(parameters.pma_specs(sizes.pooled, width, width, *heads)),
            "attention": initialised(attention()),
            "pffn": initialised(attention()),
            "compression": {
                "w_user": both[: sizes.user_rows].T,
                "w_cand": both[sizes.user_rows :].T,
            },
            "interaction": {
                "w_factors": normal((width, sizes.rank)),
                "w_out": normal(((sizes.compressed + 1) * sizes.rank, width)),
            },
        }

    user = width + sizes.user_dense
    cand = width * (1 + sizes.layers)
    return {
        "w_dense": normal((sizes.user_dense, sizes.dense_tokens * width)),
        "w_queries": normal((sizes.cand_tokens, sizes.queries)).T,
        "layers": [layer() for _ in range(sizes.layers)],
        "head": {
            "w_hidden": normal((user + cand, sizes.hidden)),
            "b_hidden": jnp.zeros(sizes.hidden, dtype),
            "w_logits": normal((sizes.hidden, sizes.tasks)),
            "b_logits": jnp.zeros(sizes.tasks, dtype),
        },
    }


def materialised(params: dict[str, Any], request: Request) -> jax.Array:
    """Scores by the network in its usual form, which copies every user to its candidates.

    Returns logits [B, tasks] f32.
    """
    return network(params, request, strategies.MATERIALISED)


def co_designed(params: dict[str, Any], request: Request) -> jax.Array:
    """Scores like `materialised` without copies of users; takes parameters of `prepare`, too."""
    return network(params, request, strategies.CO_DESIGNED)


def prepare(params: dict[str, Any]) -> dict[str, Any]:
    """Computes once, for serving by `co_designed`, what depends on parameters alone.

    That saves 10 of 115 kernels, 2 to 3 us each. The gradient is for parameters of `init`.
    """

    def layer(params: dict[str, Any]) -> dict[str, Any]:
        pma = dict(params["pma"])
        pma["queries"] = functional.project(pma.pop("seeds"), pma.pop("w_query"))
        compression = {name: pad_weight(w) for name, w in params["compression"].items()}
        return params | {"pma": pma, "compression": compression}

    first = _with_queries(params)
    head, last = params["head"], params["layers"][-1]
    of_user = last["pma"]["w_out"].shape[-1] + params["w_dense"].shape[0]
    split = head["w_hidden"][:of_user], head["w_hidden"][of_user:]
    layers = [layer(x) for x in (first, *params["layers"][1:])]
    rest = {name: x for name, x in params.items() if name != "w_queries"}
    return rest | {"layers": layers, "head": head | {"w_hidden": split}}


def network(params: dict[str, Any], request: Request, strategy: Strategy) -> jax.Array:
    """Scores by a strategy: logits [B, tasks] f32."""
    # The named scopes let a profile tell the parts of the network from one another.
    index, width = request.cand_to_user, request.history.shape[-1]
    users = request.history.shape[0]
    first, *rest = params["layers"]
    with jax.named_scope("embedding"):
        # With one user the product is a matrix-vector product, which XLA would fuse into every
        # layer's concatenation and repeat there, 0.12 ms each. The barrier prevents that.
        (dense,) = strategy.barrier((request.user_dense @ params["w_dense"],))
        dense = dense.reshape(users, -1, width)
        # Without the barrier, every layer would have a kernel for the users' numbers.
        (numbers,) = strategy.barrier((jnp.arange(users, dtype=jnp.int32),))
        history, cand_tokens = request.history, strategy.prepare(request.cand_tokens)
        if strategy.joins_queries:
            first = _with_queries(params)
        else:
            queries = _query_rows(params["w_queries"], request.cand_tokens)
    interactions = []
    for layer in (first, *rest):
        with jax.named_scope("self_attention"):
            history = strategy.attend_to_itself(layer["self_attention"], history)
        with jax.named_scope("pooling"):
            of_pooling, of_attention = strategy.remember(layer, history)
            raw = strategy.pool(layer["pma"], of_pooling, numbers)
            pooled = rms_norm(raw)
        with jax.named_scope("compression"):
            rows = jnp.concatenate([request.user_tokens, dense, pooled], axis=1)
            compressed = strategy.compress(layer["compression"], rows, cand_tokens, index)
            num_queries = compressed.shape[1] - _compressed_rows(layer)
            if num_queries:
                queries, compressed = _first_rows(compressed, num_queries)
        with jax.named_scope("attention"):
            queries = strategy.attend(layer["attention"], queries, of_attention, index)
        with jax.named_scope("interaction"):
            interaction = _interaction(layer["interaction"], compressed, num_queries)
        with jax.named_scope("feed_forward"):
            queries = strategy.feed_forward(layer["pffn"], queries, raw, index, interaction)
        history, queries, interaction = strategy.barrier((history, queries, interaction))
        interactions.append(interaction)
    with jax.named_scope("head"):
        user = jnp.concatenate([jnp.mean(pooled, axis=1), request.user_dense], axis=1)
        cand = jnp.concatenate([jnp.mean(rms_norm(queries), axis=1), *interactions], axis=1)
        head = params["head"]
        hidden = strategy.join(head["w_hidden"], user, cand, index) + head["b_hidden"][None]
        logits = jax.nn.gelu(hidden) @ head["w_logits"] + head["b_logits"][None]
    return logits.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _first_rows(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first rows of [B, M, N], and all rows.

    The gradient adds the first rows' cotangent in place. JAX' own pads it to all rows and adds:
    0.11 ms by count at the default sizes.
    """
    return x[:, :count], x


_first_rows.defvjp(
    lambda x, count: (_first_rows(x, count), None),
    lambda count, _, d: (jax.lax.dynamic_update_slice(d[1], d[1][:, :count] + d[0], (0, 0, 0)),),
)


def _compressed_rows(layer: dict[str, Any]) -> int:
    """Returns M of a layer, without queries that its compression makes, too."""
    interaction = layer["interaction"]
    rows: int = interaction["w_out"].shape[0] // interaction["w_factors"].shape[1] - 1
    return rows


def _with_queries(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the first layer, whose compression makes the queries, too, as its first rows.

    Both are products of the candidates' tokens, which one kernel then reads once. Queries have no
    part of the user, so the users' weights are 0.
    """
    first = params["layers"][0]
    queries = params.get("w_queries")  # missing after `prepare`
    if queries is None:
        return first
    of_user = first["compression"]["w_user"]
    nothing = jnp.zeros_like(of_user, shape=(queries.shape[0], of_user.shape[1]))
    compression = {
        "w_user": jnp.concatenate([nothing, of_user]),
        "w_cand": jnp.concatenate([queries, first["compression"]["w_cand"]]),
    }
    return first | {"compression": compression}


def _for_every_candidate(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Broadcasts `weight` to the candidates of `x` [B, ...]; returns operands of a batched product.

    The weight's gradient then takes 0.18 ms instead of 0.53 ms by one product over all candidates.
    """
    # Inside `shard_map`, the sum of the gradient over devices must not come before its sum over
    # candidates.
    weight, x = vary_over_same_axes((weight, x))
    sharding = jax.typeof(x).sharding
    weights = jnp.broadcast_to(
        weight,
        (x.shape[0], *weight.shape),
        # With Explicit axes, the product takes candidates that are divided alike.
        out_sharding=sharding.update(spec=PartitionSpec(sharding.spec[0], None, None)),
    )
    return weights, x


def _query_rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Multiplies [T, K] by [B, K, N], one product for each candidate: [B, T, N]."""
    weights, tokens = _for_every_candidate(weight, tokens)
    return weights @ tokens


def _interaction(params: dict[str, jax.Array], rows: jax.Array, first: int) -> jax.Array:
    """Projects every row's factors, and their products summed over pairs of rows: [B, N].

    Skips rows before the `first`, by their factors: a slice of the rows would be copied.
    """
    weights, rows = _for_every_candidate(params["w_factors"], rows)
    factors = (rows @ weights)[:, first:]
    wide = factors.astype(jnp.float32)
    # The sum over pairs of rows is ((Σ f)² - Σ f²) / 2; the division by M keeps it near one.
    # Both sums, side by side, are one kernel, which reads the factors once. Without the barrier,
    # XLA may compute a sum within the concatenation below, where one thread adds its M numbers.
    sums = jnp.sum(jnp.concatenate([wide, wide * wide], axis=2), axis=1)
    total, squares = jnp.split(jax.lax.optimization_barrier(sums), 2, axis=1)
    pairs = total**2 - squares
    pairs = (pairs * jnp.float32(0.5 / factors.shape[1])).astype(rows.dtype)
    found = jnp.concatenate([factors.reshape(rows.shape[0], -1), pairs], axis=1)
    return rms_norm(found @ params["w_out"])
