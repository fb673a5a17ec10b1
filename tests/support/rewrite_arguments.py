"""The arguments of `rewrite_models`, by name.

Sizes differ from one another, so that a shape tells what an array is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from problems import ragged_index, random_array

B, U, R = 48, 6, 3  # candidates, users, requests
D_USER, D_CAND, D_REQ, HIDDEN = 10, 12, 14, 16
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
        "request": normal(R, D_REQ),
        "index": jnp.asarray(ragged_index(rng, U, B, "unsorted")),
        "other_index": jnp.asarray(ragged_index(rng, U, B, "unsorted")),
        "user_to_request": jnp.asarray(ragged_index(rng, R, U, "unsorted")),
        "counts": jnp.asarray([11, 3, 0, 20, 8, 6], jnp.int32),
        "user_emb": normal(U, K_USER, N),
        "cand_emb": normal(B, K_CAND, N),
        "request_emb": normal(R, K_REQ, N),
        "compress": weight(M, K_USER + K_CAND),
        "compress_flipped": weight(M, K_CAND + K_USER),
        "compress_three": weight(M, K_REQ + K_USER + K_CAND),
        "w_user": weight(D_USER, HIDDEN),
        "w_first": weight(D_USER + D_CAND, HIDDEN),
        "w_tower": weight(HIDDEN + D_CAND, HIDDEN),
        "w_request": weight(D_REQ + D_USER + D_CAND, HIDDEN),
        "w_hidden": weight(HIDDEN, HIDDEN),
        "w_layers": normal(3, HIDDEN, HIDDEN) * jnp.float32(0.25),
        "w_cand": weight(D_CAND, HIDDEN),
        "w_gate": weight(D_USER, D_CAND),
        "w_out": weight(HIDDEN, 1),
        "bias": normal(HIDDEN),
        "norm_scale": normal(D_USER),
        "norm_bias": normal(D_USER),
        "ids": jnp.asarray(rng.integers(0, VOCABULARY, (U, 5)), jnp.int32),
        "table": normal(VOCABULARY, D_USER),
        "history": normal(U, S, HIDDEN),
        "w_q": weight(D_CAND, HEADS * H),
        "w_k": weight(HIDDEN, HEADS * H),
        "w_v": weight(HIDDEN, HEADS * H),
    }
