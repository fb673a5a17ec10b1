"""The ranker: a history through causal self-attention, and candidates that attend to it.

The network has two parts, so that a server can keep the first one between requests:

* `Ranker.encode_users` computes everything that no candidate changes, at user batch;
* `Ranker.score` computes the logits of candidates, and looks their users up inside the ops.

Letters: U users, B candidates, S events of a history, T tokens of a candidate (which are also its
queries), P pooled rows, M compressed rows, D the width, N heads of width H.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ikbo_jax as ikbo
from ikbo_jax.layers.functional import merge_heads, project, projected
from ikbo_jax.layers.nnx import PFFN, PMA, CandidateAttention, LinearCompression

#: Fields of a user's profile, and the number of codes of each; code 0 means "unknown".
PROFILE = {"age": 10, "gender": 3, "occupation": 32, "region": 12}
#: Codes of an event: ratings (0 is the start of the history), ages as powers of two of seconds.
RATINGS, AGES = 6, 32
#: Tokens of a candidate: the movie, its genres, its decade.
CAND_TOKENS = 3
#: Codes of decades; 0 means "unknown".
DECADES = 12


class Users(NamedTuple):
    """Users as the model reads them.

    The first event of every history is the start of the history (movie 0, rating 0), so that no
    history is empty. Events are in the order of time; rows past the length have no effect.

    Attributes:
      profile: [U, len(PROFILE)] int32, codes of the fields of `PROFILE`.
      movie: [U, S] int32, the movies watched.
      rating: [U, S] int32, 1 to 5.
      age: [U, S] int32, code of the time from the event to the newest event of the history. It is
        not the time to the request, so that a user's state is valid until the user's next event.
      length: [U] int32, the number of valid rows, in [1, S].
    """

    profile: jax.Array
    movie: jax.Array
    rating: jax.Array
    age: jax.Array
    length: jax.Array


class Candidates(NamedTuple):
    """Candidates as the model reads them.

    Attributes:
      movie: [B] int32.
    """

    movie: jax.Array


class Catalogue(NamedTuple):
    """What is known of every movie; row 0 stands for no movie.

    Attributes:
      genres: [movies, genres] float32, 1 where the movie has the genre.
      decade: [movies] int32, code of the decade in which the movie was released.
    """

    genres: np.ndarray
    decade: np.ndarray


class LayerState(NamedTuple):
    """What one layer keeps of users.

    Attributes:
      key: [U, S, N, H], keys of the history.
      value: [U, S, N, H], values of the history.
      memory_key: [U, P, N, H], first weights of the personalised feed-forward net.
      memory_value: [U, P, N, H], second weights of the net.
      rows: [U, M, D], the users' part of the compressed rows.
    """

    key: jax.Array
    value: jax.Array
    memory_key: jax.Array
    memory_value: jax.Array
    rows: jax.Array


class UserState(NamedTuple):
    """What `Ranker.score` needs of users; the leading axis of every array is U.

    Attributes:
      layers: one `LayerState` for each layer.
      hidden: [U, hidden], the users' part of the head's hidden layer.
      taste: [U, D], the vector that is multiplied by a candidate's movie.
      length: [U] int32, the number of valid rows of a history.
    """

    layers: tuple[LayerState, ...]
    hidden: jax.Array
    taste: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the network.

    Attributes:
      movies: number of movies, with movie 0.
      genres: number of genres.
      history: S, rows of a history, with its start.
      layers: number of layers.
      width: D, width of events, tokens and queries.
      heads: N, heads of every attention.
      head_dim: H, width of a head.
      pooled: P, rows that a history is pooled to: the memory of the feed-forward net.
      compressed: M, rows that the tokens of user and candidate are compressed to.
      hidden: width of the head's hidden layer.
    """

    movies: int = 1683
    genres: int = 19
    history: int = 64
    layers: int = 2
    width: int = 32
    heads: int = 2
    head_dim: int = 16
    pooled: int = 8
    compressed: int = 8
    hidden: int = 64


#: For a Hopper GPU, whose kernels take heads of 64 and more, in bfloat16.
HOPPER = Sizes(history=256, layers=3, width=128, head_dim=64, pooled=128, compressed=64, hidden=256)


class Feature(nnx.Variable):
    """An array of the catalogue: part of the model, and not trained."""


class Layer(nnx.Module):
    """One layer: parameters, the users' part (`encode`) and the candidates' part (`score`)."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        width, heads = sizes.width, (sizes.heads, sizes.head_dim)
        user_tokens = len(PROFILE) + sizes.pooled
        self.self_attention = CandidateAttention(width, width, *heads, rngs=rngs)
        self.expand = nnx.Linear(width, 2 * width, rngs=rngs)
        self.contract = nnx.Linear(2 * width, width, rngs=rngs)
        self.pool = PMA(width, sizes.pooled, *heads, rngs=rngs)
        self.attention = CandidateAttention(width, width, *heads, rngs=rngs)
        self.feed_forward = PFFN(width, width, *heads, rngs=rngs)
        self.compression = LinearCompression(user_tokens, CAND_TOKENS, sizes.compressed, rngs=rngs)
        self.interact = nnx.Linear((sizes.compressed + 1) * width, width, rngs=rngs)

    def history(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Causal self-attention and a feed-forward net: [U, S, D] to [U, S, D]."""
        normed = rms_norm(x)
        params = weights(self.self_attention)
        out = softmax_attention(*projected(params, normed, normed), length, is_causal=True)
        x = x + merge_heads(out, params["w_out"])
        return x + self.contract(jax.nn.gelu(self.expand(rms_norm(x))))

    def pooled(self, history: jax.Array, length: jax.Array) -> jax.Array:
        """The history's rows, [U, S, D], pooled by seeds that attend to them: [U, P, D]."""
        params = weights(self.pool)
        seeds = jnp.broadcast_to(params["seeds"], (len(history), *params["seeds"].shape))
        out = softmax_attention(*projected(params, seeds, history), length)
        return rms_norm(merge_heads(out, params["w_out"]))

    def encode(
        self, x: jax.Array, profile: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array, LayerState]:
        """The next history [U, S, D], the pooled rows [U, P, D], and what the layer keeps."""
        x = self.history(x, length)
        normed = rms_norm(x)
        pooled = self.pooled(normed, length)
        attention, net = weights(self.attention), weights(self.feed_forward)
        tokens = jnp.concatenate([profile, pooled], axis=1)
        state = LayerState(
            key=project(normed, attention["w_key"]),
            value=project(normed, attention["w_value"]),
            memory_key=project(pooled, net["w_key"]),
            memory_value=project(pooled, net["w_value"]),
            rows=jnp.einsum("mk,ukd->umd", weights(self.compression)["w_user"], tokens),
        )
        return x, pooled, state

    def score(
        self,
        state: LayerState,
        length: jax.Array,
        queries: jax.Array,
        tokens: jax.Array,
        cand_to_user: jax.Array,
        *,
        indices_are_sorted: bool,
    ) -> jax.Array:
        """The candidates' next queries, [B, T, D], from queries and tokens [B, T, D]."""
        params = weights(self.attention)
        normed = rms_norm(queries)
        query, own_key, own_value = projected(params, normed, normed)
        out = ikbo.attention(
            *(query, state.key, state.value, cand_to_user),
            key_value_seq_lengths=length,
            self_key=own_key,
            self_value=own_value,
            indices_are_sorted=indices_are_sorted,
        )
        assert isinstance(out, jax.Array)
        queries = queries + merge_heads(out, params["w_out"])
        queries = queries + self._personal(state, rms_norm(queries), cand_to_user)
        # The users' part is compressed already, so its weight is the identity.
        w_cand = weights(self.compression)["w_cand"]
        identity = jnp.eye(w_cand.shape[0], dtype=w_cand.dtype)
        rows = ikbo.linear_compression(w_cand, identity, tokens, state.rows, cand_to_user)
        return queries + self.interaction(rows)

    def _personal(self, state: LayerState, x: jax.Array, cand_to_user: jax.Array) -> jax.Array:
        """The net whose weights are the user's pooled rows, [B, T, D] to [B, T, D]."""
        params = weights(self.feed_forward)
        query = project(x, params["w_query"])
        (batch, tokens, *heads), (users, rows) = query.shape, state.memory_key.shape[:2]
        out = ikbo.gdpa(
            query.reshape(batch * tokens, *heads),
            state.memory_key.reshape(users * rows, *heads),
            state.memory_value.reshape(users * rows, *heads),
            jnp.arange(batch + 1, dtype=jnp.int32) * tokens,
            jnp.arange(users + 1, dtype=jnp.int32) * rows,
            activation="gelu",
            scale=heads[1] ** -0.5,
            output_scale=rows**-0.5,
            q_to_kv=cand_to_user,
            max_seqlen_q=tokens,
            max_seqlen_kv=rows,
        )
        return merge_heads(out.reshape(query.shape), params["w_out"])

    def interaction(self, rows: jax.Array) -> jax.Array:
        """What the compressed rows [B, M, D] add to every query: [B, 1, D].

        The sum of products of all pairs of rows, a factorisation machine, brings user and candidate
        together.
        """
        rows = rms_norm(rows)
        # The sum over pairs is ((Σ r)² - Σ r²) / 2; the division by M keeps it near one.
        pairs = jnp.sum(rows, axis=1) ** 2 - jnp.sum(rows * rows, axis=1)
        pairs = pairs * jnp.asarray(0.5 / rows.shape[1], rows.dtype)
        flat = jax.nn.gelu(rows).reshape(rows.shape[0], -1)
        return self.interact(jnp.concatenate([flat, pairs], axis=1))[:, None]


class Ranker(nnx.Module):
    """The ranker on this library's ops, which copy no user.

    It computes in the dtype of its parameters, which are made in float32.

    Args:
      sizes: sizes of the network.
      catalogue: genres and decades of `sizes.movies` movies.
      rngs: its stream "params" supplies the keys.

    Raises:
      ValueError: the catalogue has another number of movies or genres than `sizes`.
    """

    def __init__(self, sizes: Sizes, catalogue: Catalogue, *, rngs: nnx.Rngs):
        if catalogue.genres.shape != (sizes.movies, sizes.genres):
            raise ValueError(
                f"sizes has movies={sizes.movies} and genres={sizes.genres}, but the catalogue's "
                f"genres have shape {catalogue.genres.shape}"
            )
        width = sizes.width
        self.sizes = sizes
        self.genres = Feature(jnp.asarray(catalogue.genres, jnp.float32))
        self.decade = Feature(jnp.asarray(catalogue.decade, jnp.int32))
        self.movie = nnx.Embed(sizes.movies, width, rngs=rngs)
        self.movie_bias = nnx.Param(jnp.zeros(sizes.movies, jnp.float32))
        self.genre = nnx.Linear(sizes.genres, width, rngs=rngs)
        self.decades = nnx.Embed(DECADES, width, rngs=rngs)
        self.rating = nnx.Embed(RATINGS, width, rngs=rngs)
        self.age = nnx.Embed(AGES, width, rngs=rngs)
        self.profile = nnx.Embed(sum(PROFILE.values()), width, rngs=rngs)
        self.layers = nnx.List([Layer(sizes, rngs) for _ in range(sizes.layers)])
        user = width * (1 + len(PROFILE))
        self.head_user = nnx.Linear(user, sizes.hidden, rngs=rngs)
        self.head_cand = nnx.Linear(width, sizes.hidden, use_bias=False, rngs=rngs)
        self.head_out = nnx.Linear(sizes.hidden, 1, rngs=rngs)
        self.taste = nnx.Linear(width, width, rngs=rngs)

    def __call__(
        self,
        users: Users,
        candidates: Candidates,
        cand_to_user: jax.Array,
        *,
        indices_are_sorted: bool = False,
    ) -> jax.Array:
        """The logits of candidates; see `encode_users` and `score`."""
        state = self.encode_users(users)
        return self.score(state, candidates, cand_to_user, indices_are_sorted=indices_are_sorted)

    def encode_users(self, users: Users) -> UserState:
        """Computes everything that depends on users alone, at user batch.

        Args:
          users: U users.

        Returns:
          A pytree of arrays with the leading axis U. Row u depends on user u alone, so rows of
          several calls may be concatenated.
        """
        x, profile = self.events(users), self.profile_tokens(users)
        states = []
        for layer in self.layers:
            x, pooled, state = layer.encode(x, profile, users.length)
            states.append(state)
        hidden = self.head_user(self.user_summary(pooled, profile))
        return UserState(tuple(states), hidden, self.tastes(x, users.length), users.length)

    def score(
        self,
        state: UserState,
        candidates: Candidates,
        cand_to_user: jax.Array,
        *,
        indices_are_sorted: bool = False,
    ) -> jax.Array:
        """Computes the logits of candidates.

        Args:
          state: U users, from `encode_users`.
          candidates: B candidates.
          cand_to_user: [B] int32, the user of every candidate, in [0, U), in any order.
          indices_are_sorted: whether `cand_to_user` is sorted, as in `ikbo_jax.attention`.

        Returns:
          Logits [B] f32, of the probability that the user watches the movie. A candidate's logit
          depends on this candidate and its user alone.
        """
        queries = tokens = self.tokens(candidates)
        for layer, user in zip(self.layers, state.layers, strict=True):
            queries = layer.score(
                *(user, state.length, queries, tokens, cand_to_user),
                indices_are_sorted=indices_are_sorted,
            )
        hidden = self.head_cand(jnp.mean(rms_norm(queries), axis=1)) + state.hidden[cand_to_user]
        return self.logits(hidden, state.taste[cand_to_user], candidates)

    def events(self, users: Users) -> jax.Array:
        """The events of the histories as rows, [U, S, D]."""
        side = self._genres(users.movie)
        return (
            look_up(self.movie, users.movie)
            + look_up(self.rating, users.rating)
            + look_up(self.age, users.age)
            + side
        )

    def profile_tokens(self, users: Users) -> jax.Array:
        """One token for every field of the profiles, [U, len(PROFILE), D]."""
        first = np.cumsum([0, *PROFILE.values()])[:-1].astype(np.int32)
        return look_up(self.profile, users.profile + first[None])

    def tokens(self, candidates: Candidates) -> jax.Array:
        """The candidates' tokens, [B, T, D]: the movie, its genres, its decade."""
        movie = candidates.movie
        decade = look_up(self.decades, self.decade[...][movie])
        return jnp.stack([look_up(self.movie, movie), self._genres(movie), decade], axis=1)

    def _genres(self, movie: jax.Array) -> jax.Array:
        """The projection of movies' genres, [..., D]."""
        genres = self.genres[...].astype(self.genre.kernel[...].dtype)
        return self.genre(genres[movie])

    def user_summary(self, pooled: jax.Array, profile: jax.Array) -> jax.Array:
        """What the head reads of users, [U, (1 + len(PROFILE)) · D]."""
        flat = profile.reshape(profile.shape[0], -1)
        return jnp.concatenate([jnp.mean(pooled, axis=1), flat], axis=1)

    def tastes(self, history: jax.Array, length: jax.Array) -> jax.Array:
        """The projection of every history's newest row, [U, D] from [U, S, D]."""
        newest = jnp.take_along_axis(history, length[:, None, None] - 1, axis=1)[:, 0]
        return self.taste(rms_norm(newest))

    def logits(self, hidden: jax.Array, taste: jax.Array, candidates: Candidates) -> jax.Array:
        """The end of the head: [B, hidden] before its activation, and [B, D], to [B] f32."""
        movie = candidates.movie
        out = self.head_out(jax.nn.gelu(hidden))[:, 0] + self.movie_bias[...][movie]
        return (out + jnp.sum(taste * look_up(self.movie, movie), axis=1)).astype(jnp.float32)


def weights(layer: Any) -> dict[str, jax.Array]:
    """The parameters of a layer of this library, by name."""
    return {name: getattr(layer, name)[...] for name in layer.names}


def look_up(table: nnx.Embed, codes: jax.Array) -> jax.Array:
    """The table's rows of codes, in the dtype of its parameter: a call would return float32."""
    rows: jax.Array = table.embedding[...][codes]
    return rows


def rms_norm(x: jax.Array) -> jax.Array:
    """Divides rows of the last axis by their root mean square, in f32; rounds to `x`'s dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    length: jax.Array,
    *,
    is_causal: bool = False,
) -> jax.Array:
    """`jax.nn.dot_product_attention` to the first `length` [U] keys of every user."""
    # It promotes bfloat16 logits to float32, which strict promotion, if set, would reject.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out: jax.Array = jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=length, is_causal=is_causal
        )
    return out
