"""Small ranking models, each written the way people write them, with what a rewrite makes of it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from problems import ragged_index, random_array

# Sizes differ from one another, so that a shape tells what an array is.
B, U, R = 48, 6, 3  # candidates, users, requests
D_USER, D_CAND, HIDDEN = 10, 12, 16
K_USER, K_CAND, K_REQ, N, M = 9, 5, 4, 8, 11  # rows and width of embeddings, compressed rows
S, HEADS, H = 7, 3, 4  # keys, heads, head width
VOCABULARY = 20


@functools.cache
def arrays() -> dict[str, jax.Array]:
    """Every argument that a model may have, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return random_array(rng, shape, jnp.float32)

    def weight(*shape: int) -> jax.Array:
        return normal(*shape) * jnp.float32(shape[0] ** -0.5)

    return {
        "user": normal(U, D_USER),
        "cand": normal(B, D_CAND),
        "index": jnp.asarray(ragged_index(rng, U, B, "unsorted")),
        "user_to_request": jnp.asarray(ragged_index(rng, R, U, "unsorted")),
        "counts": jnp.asarray([11, 3, 0, 20, 8, 6], jnp.int32),
        "user_emb": normal(U, K_USER, N),
        "cand_emb": normal(B, K_CAND, N),
        "request_emb": normal(R, K_REQ, N),
        "compress": weight(M, K_USER + K_CAND),
        "compress_flipped": weight(M, K_CAND + K_USER),
        "compress_three": weight(M, K_REQ + K_USER + K_CAND),
        "w_first": weight(D_USER + D_CAND, HIDDEN),
        "w_out": weight(HIDDEN, 1),
        "bias": normal(HIDDEN),
        "ids": jnp.asarray(rng.integers(0, VOCABULARY, (U, 5)), jnp.int32),
        "table": normal(VOCABULARY, D_USER),
        "history": normal(U, S, HIDDEN),
        "w_q": weight(D_CAND, HEADS * H),
        "w_k": weight(HIDDEN, HEADS * H),
        "w_v": weight(HIDDEN, HEADS * H),
    }


class Model(NamedTuple):
    """A model and what is expected of its rewrite.

    Attributes:
      name: the function's.
      fn: the model.
      became: what the report must say, in this order and perhaps with more in between.
      never: shapes that the rewritten program must not hold, since they are copies.
      materialised: how many places must be reported as materialised.
    """

    name: str
    fn: Callable[..., Any]
    became: tuple[str, ...]
    never: tuple[tuple[int, ...], ...]
    materialised: int

    def args(self) -> list[jax.Array]:
        """The model's arguments, each the array of its name."""
        return [arrays()[name] for name in inspect.signature(self.fn).parameters]


MODELS: dict[str, Model] = {}


def model(
    *became: str, never: tuple[tuple[int, ...], ...] = (), materialised: int = 0
) -> Callable[[Callable], Callable]:
    def add(fn: Callable) -> Callable:
        MODELS[fn.__name__] = Model(fn.__name__, fn, became, never, materialised)
        return fn

    return add


#: What the report says of a product, or of other work, that is done before the lookup.
BY_PARTS = "product by parts"
PRODUCT_OF_USERS = "product at the smaller batch"
WORK_OF_USERS = "work at the smaller batch"
#: The shape of a copy of the users' features for every candidate.
USER_ROWS = (B, D_USER)

# Compression of user and candidate embeddings.


@model("linear_compression", never=((B, K_USER, N),))
def compression_by_einsum(compress, user_emb, cand_emb, index):
    embeddings = jnp.concatenate([user_emb[index], cand_emb], axis=1)
    return jnp.einsum("mk,bkn->bmn", compress, embeddings)


@model("linear_compression", never=((B, K_USER, N),))
def compression_by_matmul(compress_flipped, user_emb, cand_emb, index):
    users = jnp.take(user_emb, index, axis=0, mode="clip")
    return compress_flipped @ jnp.concatenate([cand_emb, users], axis=1)


@model("linear_compression", never=((B, K_USER, N),))
def compression_of_repeated_users(compress, user_emb, cand_emb, counts):
    users = jnp.repeat(user_emb, counts, axis=0, total_repeat_length=B)
    embeddings = jnp.concatenate([users, cand_emb], axis=1)
    return jax.nn.relu(jnp.einsum("bkn,mk->bmn", embeddings, compress))


@model("linear_compression", never=((B, K_USER, N),))
def compression_of_one_user(compress, user_emb, cand_emb):
    user = jnp.broadcast_to(user_emb[:1], (B, K_USER, N))
    return compress @ jnp.concatenate([user, cand_emb], axis=1)


@model(
    "multilevel_linear_compression",
    never=((B, K_REQ + K_USER, N), (B, K_USER, N), (B, K_REQ, N), (U, K_REQ, N)),
)
def compression_of_three_levels(
    compress_three, request_emb, user_emb, cand_emb, user_to_request, index
):
    users = jnp.concatenate([request_emb[user_to_request], user_emb], axis=1)
    embeddings = jnp.concatenate([users[index], cand_emb], axis=1)
    return jnp.einsum("mk,bkn->bmn", compress_three, embeddings)


@model(WORK_OF_USERS, "linear_compression", never=((B, K_USER, N),))
def compression_of_normalised_embeddings(compress, user_emb, cand_emb, index):
    embeddings = jnp.concatenate([user_emb[index], cand_emb], axis=1)
    embeddings = embeddings / (jnp.sqrt(jnp.sum(embeddings**2, -1, keepdims=True)) + 1e-6)
    return jax.nn.gelu(jnp.einsum("mk,bkn->bmn", compress, embeddings))


# The first layer of a multi-layer perceptron.


@model(BY_PARTS, never=(USER_ROWS,))
def first_dense_layer(user, cand, index, w_first, bias, w_out):
    x = jnp.concatenate([user[index], cand], axis=-1)
    x = jax.nn.relu(x @ w_first + bias)
    return jax.nn.sigmoid(x @ w_out)


@model(BY_PARTS, never=(USER_ROWS,))
def half_precision_with_an_f32_sum(user, cand, index, w_first, w_out):
    half = jnp.bfloat16
    x = jnp.concatenate([user.astype(half)[index], cand.astype(half)], axis=1)
    x = jax.lax.dot(x, w_first.astype(half), preferred_element_type=jnp.float32)
    return jax.nn.relu(x) @ w_out


# Attention of candidates over the user's history.


@model(PRODUCT_OF_USERS, "attention", never=((B, S, HIDDEN), (B, S, HEADS * H), (B, HEADS, S, H)))
def attention_by_matmul_bnth(cand, history, index, w_q, w_k, w_v):
    def heads(x):
        return x.reshape(B, -1, HEADS, H).transpose(0, 2, 1, 3)

    tokens = history[index]
    q, k, v = heads(cand @ w_q), heads(tokens @ w_k), heads(tokens @ w_v)
    scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) * H**-0.5
    out = jax.nn.softmax(scores, axis=-1).astype(q.dtype) @ v
    return out.transpose(0, 2, 1, 3).reshape(B, HEADS * H)


# What must be materialised, or cannot be found, and stays right.


@model(BY_PARTS, "materialised", materialised=1)
def user_value_also_returned(user, cand, index, w_first):
    users = user[index]
    return jnp.concatenate([users, cand], axis=1) @ w_first, users


@model()
def an_embedding_of_few_rows_is_none(table, ids):
    return table[ids[:, 0]]
