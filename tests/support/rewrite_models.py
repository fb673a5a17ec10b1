"""Small ranking models, each written the way people write them, with what a rewrite makes of it."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rewrite_arguments import D_REQ, D_USER, HEADS, HIDDEN, K_REQ, K_USER, B, H, N, S, U, arrays


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
def compression_of_equally_many(compress, user_emb, cand_emb):
    users = jnp.repeat(user_emb, B // U, axis=0)
    return jnp.einsum("mk,bkn->bmn", compress, jnp.concatenate([users, cand_emb], axis=1))


@model("linear_compression", never=((B, K_USER, N),))
def compression_of_tiled_users(compress, user_emb, cand_emb):
    users = jnp.tile(user_emb, (B // U, 1, 1))
    return jnp.einsum("mk,bkn->bmn", compress, jnp.concatenate([users, cand_emb], axis=1))


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
def vmap_over_an_index(user, cand, index, w_first, bias):
    def score(i, candidate):
        return jnp.concatenate([user[i], candidate]) @ w_first + bias

    return jax.vmap(score)(index, cand)


@model(BY_PARTS, never=(USER_ROWS, (B, D_REQ)))
def first_dense_layer_of_three_levels(request, user, cand, user_to_request, index, w_request):
    requests = request[user_to_request[index]]
    x = jnp.concatenate([requests, user[index], cand], axis=1)
    return jax.nn.relu(x @ w_request)


# Towers and the place where they meet.


@model(PRODUCT_OF_USERS, BY_PARTS, never=(USER_ROWS,))
def user_tower_after_the_lookup(user, cand, index, w_user, bias, w_tower):
    tower = jax.nn.gelu(user[index] @ w_user + bias)
    return jax.nn.relu(jnp.concatenate([tower, cand], axis=1) @ w_tower)


@model(WORK_OF_USERS, PRODUCT_OF_USERS, "looked up in place", never=(USER_ROWS,))
def two_towers_with_layer_norm(user, cand, index, norm_scale, norm_bias, w_user, w_cand):
    users = user[index]
    mean = users.mean(axis=-1, keepdims=True)
    variance = users.var(axis=-1, keepdims=True)
    users = (users - mean) * jax.lax.rsqrt(variance + 1e-6) * norm_scale + norm_bias
    return jnp.sum((users @ w_user) * (cand @ w_cand), axis=-1)


@model(PRODUCT_OF_USERS, WORK_OF_USERS, "looked up in place", never=(USER_ROWS,))
def gate_of_candidate_by_user(user, cand, index, w_gate):
    gate = jax.nn.sigmoid(user[index] @ w_gate)
    return cand * gate


@model(PRODUCT_OF_USERS, never=(USER_ROWS, (3, B, HIDDEN)))
def scan_over_candidate_layers_with_a_user_constant(user, cand, index, w_user, w_cand, w_layers):
    users = user[index]

    def layer(x, w):
        return jax.nn.relu(x @ w + users @ w_user), None

    x, _ = jax.lax.scan(layer, cand @ w_cand, w_layers)
    return x


@model(PRODUCT_OF_USERS, BY_PARTS, never=(USER_ROWS,))
def checkpointed_tower_in_a_jit(user, cand, index, w_user, w_hidden, w_tower):
    @jax.checkpoint
    def tower(x):
        return jnp.sin(x @ w_user) @ w_hidden

    @jax.jit
    def score(user, cand):
        return jnp.concatenate([tower(user[index]), cand], axis=1) @ w_tower

    return score(user, cand)


@model(PRODUCT_OF_USERS, BY_PARTS, never=(USER_ROWS,))
def conditional_tower(user, cand, index, w_user, w_hidden, w_tower):
    x = user[index] @ w_user
    x = jax.lax.cond(cand[0, 0] > 0, lambda x: x @ w_hidden, lambda x: x * 2, x)
    return jnp.concatenate([x, cand], axis=1) @ w_tower


@model(BY_PARTS, never=(USER_ROWS,))
def half_precision_with_an_f32_sum(user, cand, index, w_first, w_out):
    half = jnp.bfloat16
    x = jnp.concatenate([user.astype(half)[index], cand.astype(half)], axis=1)
    x = jax.lax.dot(x, w_first.astype(half), preferred_element_type=jnp.float32)
    return jax.nn.relu(x) @ w_out


@model(BY_PARTS, never=(USER_ROWS,))
def batch_on_another_axis(user, cand, index, w_first):
    users = user.T[:, index]
    return w_first.T @ jnp.concatenate([users, cand.T], axis=0)


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


@model(PRODUCT_OF_USERS)
def two_indices(user, cand, index, other_index, w_user):
    return jnp.tanh(user[index] @ w_user) * jnp.tanh(user[other_index] @ w_user)


@model(BY_PARTS, "materialised", materialised=1)
def user_value_also_returned(user, cand, index, w_first):
    users = user[index]
    return jnp.concatenate([users, cand], axis=1) @ w_first, users


@model()
def an_embedding_of_few_rows_is_none(table, ids):
    return table[ids[:, 0]]
