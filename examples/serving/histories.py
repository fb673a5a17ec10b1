"""A ranker of users whose histories grow, with random weights, users and items.

A user is a sequence of events. Events and candidates go through the same layers: an event attends
to the events up to itself, a candidate to all events and to itself, so that the keys and values of
an event serve all later events and all candidates (Zhai et al., "Actions Speak Louder than Words",
2024). What is known of an event never changes: the time of an event counts from the event before.

The model has two forms: `Growing` for a `HistoryScorer`, and `Whole` for a `Scorer`, which encodes
whole histories. Letters: E events, B candidates, U users, S positions, D
the width, N heads of width H.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import ikbo_jax as ikbo
from examples.movielens.model import rms_norm, softmax_attention
from ikbo_jax import serving

Tree = Any
UserIds = Sequence[int] | npt.NDArray[np.integer]
#: Codes of what a user did with an item, and of the time since the event before.
ACTIONS, GAPS = 6, 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the network, by their letters above, and of the pages of a history."""

    items: int = 1683
    layers: int = 4
    width: int = 32
    heads: int = 2
    head_dim: int = 16
    page: int = 128
    most: int = 9

    @property
    def history(self) -> int:
        """S, positions of the longest history."""
        return self.page * self.most


class Events(NamedTuple):
    """Events: items, actions and codes of gaps, int32."""

    item: Any
    action: Any
    gap: Any


class Users(NamedTuple):
    """Whole histories: events [U, S], and their numbers [U] int32."""

    events: Events
    length: Any


def embedded(weights: Tree, events: Events) -> jax.Array:
    """The rows of events, [..., D]."""
    rows: jax.Array = weights["item"][events.item] + weights["action"][events.action]
    return rows + weights["gap"][events.gap]


def projected(layer: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of rows [..., D]: [..., N, H] each."""
    query, key, value = (jnp.einsum("...d,dnh->...nh", rms_norm(x), w) for w in layer["qkv"])
    return query, key, value


def next_rows(layer: Tree, x: jax.Array, attended: jax.Array) -> jax.Array:
    """The next layer's rows [..., D] of rows and what they attended to, [..., N, H]."""
    x = x + attended.reshape(*x.shape[:-1], -1) @ layer["out"]
    return x + jax.nn.gelu(rms_norm(x) @ layer["expand"]) @ layer["contract"]


def scores(weights: Tree, item: jax.Array, history: Sequence[Tree], **options: Any) -> jax.Array:
    """Scores [B] f32 of candidates, which attend to the history of every layer and to themselves.

    `history` has a key and a value of each layer; `options` are further arguments of the attention.
    """
    x = weights["item"][item]
    for layer, pages in zip(weights["layers"], history, strict=True):
        query, key, value = (rows[:, None] for rows in projected(layer, x))
        own: Tree = {"self_key": key, "self_value": value, "indices_are_sorted": True}
        out: Any = ikbo.attention(query, **pages, **own, **options)
        x = next_rows(layer, x, out)
    return (rms_norm(x) @ weights["head"]).astype(jnp.float32)


class Growing:
    """The model of a `HistoryScorer`."""

    def append(self, weights: Tree, history: serving.History, events: Events) -> Tree:
        """The pages, a key and a value of each layer, with the rows of the new events."""
        x, found = embedded(weights, events), []
        for layer, pages in zip(weights["layers"], history.pages, strict=True):
            query, key, value = projected(layer, x)
            written: dict[str, Any] = {"key": history.write(pages["key"], key)}
            written["value"] = history.write(pages["value"], value)
            found.append(written)
            out = ikbo.attention(
                query[:, None],
                **written,
                cand_to_user=history.event_to_user,
                page_table=history.table,
                key_value_seq_lengths=history.lengths,
                key_value_ranges=history.ranges,
                indices_are_sorted=True,
            )
            x = next_rows(layer, x, out)
        return found

    def score(
        self, weights: Tree, history: serving.History, item: jax.Array, cand_to_user: jax.Array
    ) -> jax.Array:
        """Scores [B] f32."""
        return scores(
            weights,
            item,
            history.pages,
            cand_to_user=cand_to_user,
            page_table=history.table,
            key_value_seq_lengths=history.lengths,
        )


class Whole:
    """The same model for a `Scorer`, whose users are whole histories."""

    def encode_users(self, weights: Tree, users: Users) -> Tree:
        """Keys and values [U, S, N, H] of each layer, and the lengths."""
        x, found = embedded(weights, users.events), []
        for layer in weights["layers"]:
            query, key, value = projected(layer, x)
            found.append({"key": key, "value": value})
            out = softmax_attention(query, key, value, users.length, is_causal=True)
            x = next_rows(layer, x, out)
        return {"layers": found, "length": users.length}

    def score(
        self, weights: Tree, state: Tree, item: jax.Array, cand_to_user: jax.Array
    ) -> jax.Array:
        """Scores [B] f32."""
        return scores(
            weights,
            item,
            state["layers"],
            cand_to_user=cand_to_user,
            key_value_seq_lengths=state["length"],
        )


class HistorySource:
    """What is served: users with log-normal histories, drawn for every user and position.

    In a request of the service, version n names a history of n events more than the user had at
    first.

    Args:
      num_users: number of users.
      sizes: sizes of the ranker.
      dtype: of the weights.
      median: median of the users' numbers of events at first, at most S - 128.
      sigma: their spread; 0: all have as many.
    """

    newest = "1"
    model: serving.Model = Whole()
    growing = Growing()
    #: Events and users of programs that append: events of known users, a new user's history.
    appends = ((64, 16), (1024, 1))

    def __init__(
        self,
        num_users: int = 10_000,
        sizes: Sizes | None = None,
        dtype: str = "float32",
        *,
        median: int = 300,
        sigma: float = 1.0,
    ) -> None:
        self.num_users, self.sizes, self.dtype = num_users, sizes or Sizes(), dtype
        drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, num_users)
        most = self.sizes.history - min(128, self.sizes.history // 2)
        self.lengths = drawn.round().clip(1, most).astype(int)
        self.num_items = self.sizes.items
        code = jax.ShapeDtypeStruct((), np.int32)
        head = jax.ShapeDtypeStruct((self.sizes.heads, self.sizes.head_dim), jnp.dtype(dtype))
        self.candidate: Tree = code
        self.event = Events(code, code, code)
        self.row = [{"key": head, "value": head} for _ in range(self.sizes.layers)]
        codes = jax.ShapeDtypeStruct((self.sizes.history,), np.int32)
        self.user = Users(Events(codes, codes, codes), code)

    def weights(self, version: str) -> Tree:
        """Random weights, whose seed is the version."""
        rng, at = np.random.default_rng(int(version)), self.sizes
        heads = (at.heads, at.head_dim)

        def draw(*shape: int, fan: int) -> npt.NDArray[Any]:
            return (rng.standard_normal(shape) * fan**-0.5).astype(jnp.dtype(self.dtype))

        layers = [
            {
                "qkv": draw(3, at.width, *heads, fan=at.width),
                "out": draw(at.heads * at.head_dim, at.width, fan=4 * at.heads * at.head_dim),
                "expand": draw(at.width, 2 * at.width, fan=at.width),
                "contract": draw(2 * at.width, at.width, fan=8 * at.width),
            }
            for _ in range(at.layers)
        ]
        tables = {"item": at.items, "action": ACTIONS, "gap": GAPS}
        found: dict[str, Any] = {name: draw(n, at.width, fan=3) for name, n in tables.items()}
        return found | {"layers": layers, "head": draw(at.width, fan=at.width)}

    def _drawn(self, user: npt.NDArray[Any], position: npt.NDArray[Any]) -> Events:
        """Events of users at positions, the same at every call."""
        mixed = user.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed + position.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        limits = (self.sizes.items, ACTIONS, GAPS)
        return Events(*((mixed >> np.uint64(8 * n)) % np.uint64(x) for n, x in enumerate(limits)))

    def events_of(self, users: list[int], starts: list[int], stops: list[int]) -> Events:
        """Events of users from and to these positions, as a store of events would return them."""
        spans = np.subtract(stops, starts)
        position = np.concatenate([np.arange(*span) for span in zip(starts, stops, strict=True)])
        found = self._drawn(np.repeat(np.asarray(users), spans), position)
        return Events(*(codes.astype(np.int32) for codes in found))

    def whole(self, users: UserIds, versions: UserIds) -> Users:
        """Whole histories: so many events of each user, and padding."""
        position = np.arange(self.sizes.history)
        found = self._drawn(np.asarray(users)[:, None], position[None])
        return Users(
            Events(*(codes.astype(np.int32) for codes in found)), np.asarray(versions, np.int32)
        )

    def features_of(self, users: UserIds) -> Users:
        """Whole histories of version 0."""
        return self.whole(users, self.lengths[np.asarray(users)])

    def candidates(self, items: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The items themselves."""
        return items
