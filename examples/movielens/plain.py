"""The ranker as it is usually written: every user is copied to its candidates, in plain JAX.

`ikbo_jax.rewrite` of it is the third version: no line of this file changes for it.
"""

import jax
import jax.numpy as jnp

from examples.movielens.model import Candidates, Layer, Ranker, Users, rms_norm, weights


class PlainRanker(Ranker):
    """The function of `Ranker`, of the same parameters, with copies and without this library's ops.

    History and profile are encoded at user batch, as in `Ranker`; the copies begin where a
    candidate first needs its user.
    """

    def __call__(
        self, users: Users, candidates: Candidates, cand_to_user: jax.Array, **_: bool
    ) -> jax.Array:
        """The logits of candidates, [B] f32; whether `cand_to_user` is sorted has no effect."""
        x, profile = self.events(users), self.profile_tokens(users)
        queries = tokens = self.tokens(candidates)
        position = jnp.arange(users.movie.shape[1], dtype=jnp.int32)
        valid = position[None] < users.length[:, None]
        for layer in self.layers:
            x = layer.history(x, users.length)
            normed = rms_norm(x)
            pooled = layer.pooled(normed, users.length)
            queries = queries + attend(layer, queries, normed[cand_to_user], valid[cand_to_user])
            queries = queries + feed_forward(layer, queries, pooled[cand_to_user])
            user_tokens = jnp.concatenate([profile, pooled], axis=1)
            queries = queries + compress(layer, user_tokens[cand_to_user], tokens)
        user = self.head_user(self.user_summary(pooled, profile)[cand_to_user])
        hidden = user + self.head_cand(jnp.mean(rms_norm(queries), axis=1))
        taste = self.tastes(x, users.length)[cand_to_user]
        return self.logits(hidden, taste, candidates)


def attend(layer: Layer, queries: jax.Array, history: jax.Array, valid: jax.Array) -> jax.Array:
    """Attention of candidates to their copy of the history and to themselves.

    Args:
      layer: the layer.
      queries: [B, T, D].
      history: [B, S, D].
      valid: [B, S] bool, whether a row of the history is valid.

    Returns:
      [B, T, D].
    """
    params, own = weights(layer.attention), rms_norm(queries)
    rows = jnp.concatenate([history, own], axis=1)
    query = jnp.einsum("btd,dnh->btnh", own, params["w_query"])
    key = jnp.einsum("bsd,dnh->bsnh", rows, params["w_key"])
    value = jnp.einsum("bsd,dnh->bsnh", rows, params["w_value"])
    mask = jnp.concatenate([valid, jnp.ones(own.shape[:2], bool)], axis=1)[:, None, None]
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return jnp.einsum("btnh,nhd->btd", out, params["w_out"])


def feed_forward(layer: Layer, queries: jax.Array, memory: jax.Array) -> jax.Array:
    """The net whose two weights are projected from the user's rows [B, P, D]: [B, T, D]."""
    params = weights(layer.feed_forward)
    query = jnp.einsum("btd,dnh->btnh", rms_norm(queries), params["w_query"])
    key = jnp.einsum("bpd,dnh->bpnh", memory, params["w_key"])
    value = jnp.einsum("bpd,dnh->bpnh", memory, params["w_value"])
    scores = jnp.einsum("btnh,bpnh->bntp", query, key) * query.shape[-1] ** -0.5
    hidden = jax.nn.gelu(scores, approximate=False)
    out = jnp.einsum("bntp,bpnh->btnh", hidden, value) * memory.shape[1] ** -0.5
    return jnp.einsum("btnh,nhd->btd", out, params["w_out"])


def compress(layer: Layer, user_tokens: jax.Array, tokens: jax.Array) -> jax.Array:
    """Compression of the tokens of user and candidate, and what it adds to queries: [B, 1, D]."""
    params = weights(layer.compression)
    weight = jnp.concatenate([params["w_user"], params["w_cand"]], axis=1)
    both = jnp.concatenate([user_tokens, tokens], axis=1)
    return layer.interaction(jnp.einsum("mk,bkd->bmd", weight, both))
