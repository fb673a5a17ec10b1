"""A small model with the interface of `ikbo_jax.serving.Model`, and requests for it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from ikbo_jax import serving

EVENTS, WIDTH, HEADS, ITEMS = 6, 8, 2, 50
#: Rounding of a few float32 products of unit variance.
TOLERANCE = 2e-5
USER = {"events": jax.ShapeDtypeStruct((EVENTS, WIDTH), np.float32)}
CANDIDATE = {"item": jax.ShapeDtypeStruct((), np.int32)}
BUCKETS = serving.Buckets((4, 16), (1, 3), (1, 2))


class Model:
    """Attention to the user's events, and their compressed rows; two scores a candidate."""

    def encode_users(self, weights: Any, users: Any) -> Any:
        rows = users["events"]
        split = (*rows.shape[:2], HEADS, -1)
        return {
            "key": (rows @ weights["key"]).reshape(split),
            "value": (rows @ weights["value"]).reshape(split),
            "rows": jnp.tanh(rows).mean(1),
        }

    def score(self, weights: Any, state: Any, candidates: Any, cand_to_user: Any) -> Any:
        item = weights["items"][candidates["item"]]
        query = item.reshape(len(item), 1, HEADS, -1)
        out = ikbo.attention(
            query, state["key"], state["value"], cand_to_user, indices_are_sorted=True
        )
        assert isinstance(out, jax.Array)
        both = jnp.concatenate([out.reshape(item.shape), item, state["rows"][cand_to_user]], axis=1)
        return both @ weights["out"]


class Unreadable:
    """Stands for scores whose computation failed."""

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"items": (ITEMS, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH)}
    shapes["out"] = (3 * WIDTH, 2)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def make(model: Any = None, scorer_weights: Any = None, **options: Any) -> serving.Scorer:
    """Makes a scorer, by default of the small model and the weights of seed 0."""
    chosen: Any = {"user": USER, "candidate": CANDIDATE, "buckets": BUCKETS, "user_bytes": 1 << 15}
    found = weights() if scorer_weights is None else scorer_weights
    return serving.Scorer(model or Model(), found, **(chosen | options))


def features(user: Any, version: Any = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([user, version])
    return {"events": rng.standard_normal((EVENTS, WIDTH)).astype(np.float32)}


def request(
    user: int, items: Any, version: int = 0, fetched: list[int] | None = None
) -> serving.Request:
    """A request; `fetched` collects the users whose features were asked for."""

    def fetch() -> Any:
        if fetched is not None:
            fetched.append(user)
        return features(user, version)

    return serving.Request(user, version, fetch, {"item": np.asarray(items, np.int32)})


def random_requests(count: int, seed: int = 0, users: int = 8) -> list[serving.Request]:
    rng = np.random.default_rng(seed)
    most = BUCKETS.largest[0]
    return [
        request(int(rng.integers(users)), rng.integers(0, ITEMS, rng.integers(1, most + 1)))
        for _ in range(count)
    ]


def oracle(request: serving.Request, seed: int = 0) -> np.ndarray:
    """The scores in float64, one candidate after the other, in NumPy."""
    w = {name: value.astype(np.float64) for name, value in weights(seed).items()}
    events = features(request.user, request.version)["events"].astype(np.float64)
    key, value = events @ w["key"], events @ w["value"]
    out = []
    for item in w["items"][request.candidates["item"]]:
        heads = []
        for k, v, q in zip(*(np.split(x, HEADS, -1) for x in (key, value, item)), strict=True):
            logits = k @ q / np.sqrt(len(q))
            p = np.exp(logits - logits.max())
            heads.append(p @ v / p.sum())
        out.append(np.concatenate([*heads, item, np.tanh(events).mean(0)]) @ w["out"])
    return np.asarray(out).reshape(-1, 2)


def assert_right(
    requests: Sequence[serving.Request], answers: Sequence[Any], seed: int = 0
) -> None:
    assert len(answers) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(
            answer.scores, oracle(request, seed), atol=TOLERANCE, rtol=TOLERANCE
        )
