"""`rewrite` of models whose candidates are divided over devices; users and weights are whole."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewrite_basics import computed

import ikbo_jax as ikbo
from ikbo_jax.rewrite.attention import masked_keys
from ikbo_jax.rewrite.report import cost

U, B, S, D, V, SESSIONS = 3, 1024, 4, 8, 5, 6


def arrays() -> tuple[Any, Any, Any]:
    """Weights; the rows of users and sessions; and the rows of candidates, with both indices."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32) / 2

    def ids(below: int, *shape: int) -> Any:
        return rng.integers(0, below, shape).astype(np.int32)

    weights = {"two": normal(2 * D, D), "three": normal(3 * D, D), "own": normal(D, D)}
    weights |= {"table": normal(V, D), "compression": normal(6, 2 * S)}
    users = {
        "user": normal(U, D),
        "history": normal(U, S, D),
        "id": ids(V, U),
        "ids": ids(V, U, S),
        "length": np.asarray([2, 4, 0], np.int32),
        "session": normal(SESSIONS, D),
        "user_of_session": ids(U, SESSIONS),
    }
    candidates = {"cand": normal(B, D), "index": ids(U, B), "session_index": ids(SESSIONS, B)}
    candidates["candidate_tokens"] = normal(B, S, D)
    return weights, users, candidates


def floats_of(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if x.dtype == np.float32}


def look_up(x: Any, index: Any) -> Any:
    """Rows that are divided as the index is. Explicit axes want to be told."""
    sharding = explicit_sharding(index)
    return x[index] if sharding is None else x.at[index].get(out_sharding=sharding)


def explicit_sharding(x: Any) -> Any:
    """How Explicit axes divide an array; None if none do."""
    sharding = jax.typeof(x).sharding
    return sharding if any(sharding.spec) else None


def features_of_one_index(w, users, c):
    parts = [look_up(users["user"], c["index"]), look_up(users["history"], c["index"]).sum(1)]
    return jax.nn.relu(jnp.concatenate([*parts, c["cand"]], axis=1) @ w["three"])


def embedded_ids(w, users, c):
    one = look_up(w["table"], look_up(users["id"], c["index"]))
    many = look_up(w["table"], look_up(users["ids"], c["index"])).mean(axis=1)
    return jnp.tanh(jnp.concatenate([one, many, c["cand"]], axis=1) @ w["three"])


def attention_with(masked: Callable[..., Any]) -> Callable[..., Any]:
    def attention(w, users, c):
        history = look_up(users["history"], c["index"])
        mask = jnp.arange(S)[None] < look_up(users["length"], c["index"])[:, None]
        logits = jnp.einsum("bd,bsd->bs", c["cand"] @ w["own"], history)
        return jnp.einsum("bs,bsd->bd", masked(logits, mask), history)

    return attention


def sequence(w, users, c):
    x = jnp.concatenate([look_up(users["history"], c["index"]), c["cand"][:, None]], axis=1)
    mask = jnp.tril(jnp.ones((1, S + 1, S + 1), bool))
    for _ in range(2):
        logits = jnp.einsum("bqd,bkd->bqk", x @ w["own"], x)
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=-1)
        x = x + jnp.tanh(jnp.einsum("bqk,bkd->bqd", weights, x))
    return x[:, -1]


def called_in(call: Callable[..., Any]) -> Callable[..., Any]:
    def model(w, users, c):
        layer = call(lambda x: jax.nn.gelu(x @ w["own"]) * 2 + 1)
        x = layer(layer(look_up(users["user"], c["index"])))
        return jnp.concatenate([x, c["cand"]], axis=1) @ w["two"]

    return model


def scanned(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0]


def normed(w, users, c):
    x = jnp.concatenate([look_up(users["user"], c["index"]), c["cand"]], axis=1)
    x = (x - x.mean(axis=-1, keepdims=True)) * lax.rsqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return jnp.tanh(x @ w["two"])


def retrieved_items(w, users, c):
    history = look_up(users["history"], c["index"]) @ w["own"]
    positions = (c["index"] % S)[:, None, None]
    return jnp.take_along_axis(jnp.tanh(history), positions, axis=1)[:, 0] * c["cand"]


def sessions_of_users(w, users, c):
    users_rows = look_up(users["user"], look_up(users["user_of_session"], c["session_index"]))
    parts = users_rows, look_up(users["session"], c["session_index"]), c["cand"]
    return jnp.tanh(jnp.concatenate(parts, axis=1) @ w["three"])


def filled(w, users, c):
    index, options = jnp.where(c["index"] == 1, 9, c["index"]), {}
    if (sharding := explicit_sharding(index)) is not None:
        options["out_sharding"] = sharding
    rows = users["user"].at[index].get(mode="fill", fill_value=0.5, **options)
    return jnp.tanh(jnp.concatenate([rows, c["cand"]], axis=1) @ w["two"])


def compressed(w, users, c):
    rows = jnp.concatenate([look_up(users["history"], c["index"]), c["candidate_tokens"]], axis=1)
    return jnp.einsum("mk,bkn->bmn", w["compression"], rows)


def activation_unit(w, users, c):
    """DIN's, whose product of user and candidate is no broadcast."""
    keys = look_up(users["history"], c["index"])
    query = jnp.broadcast_to(c["cand"][:, None], keys.shape)
    hidden = jax.nn.relu(jnp.concatenate([keys, query, keys * query], axis=-1) @ w["three"])
    return jnp.sum(jax.nn.sigmoid(hidden.sum(axis=-1, keepdims=True)) * keys, axis=1)


def of_logits(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of logits [candidates, keys] that is no attention of this library."""

    def model(w, users, c):
        rows = jnp.tanh(look_up(users["history"], c["index"]) @ w["own"])
        logits = 4 * jnp.einsum("bd,bsd->bs", c["cand"], rows)
        return jnp.einsum("bs,bsd->bd", fn(logits), rows)

    return model


def resharded(w, users, c):
    """The looked-up values are divided along their features, and back again."""
    x = jnp.tanh(look_up(users["user"], c["index"]) @ w["own"])
    if (sharding := explicit_sharding(x)) is not None:
        x = jax.sharding.reshard(x, sharding.update(spec=P(None, sharding.mesh.axis_names[-1])))
        x = jax.sharding.reshard(jnp.tanh(x), sharding)
    else:
        x = jnp.tanh(x)
    return x * c["cand"]


MODELS: dict[str, Callable[..., Any]] = {
    "features_of_one_index": features_of_one_index,
    "embedded_ids": embedded_ids,
    "mask": attention_with(lambda x, m: jax.nn.softmax(jnp.where(m, x, -1e9), axis=-1)),
    "added_mask": attention_with(lambda x, m: jax.nn.softmax(x + jnp.where(m, 0.0, -1e9), axis=-1)),
    "activation": attention_with(lambda x, m: jax.nn.silu(x) * m.astype(x.dtype)),
    "sequence": sequence,
    "jit": called_in(jax.jit),
    "checkpoint": called_in(jax.checkpoint),
    "scan": called_in(scanned),
    "vmap": called_in(jax.vmap),
    "normed": normed,
    "retrieved_items": retrieved_items,
    "sessions_of_users": sessions_of_users,
    "filled": filled,
    "resharded": resharded,
    "compressed": compressed,
    "sigmoid": of_logits(jax.nn.sigmoid),
    # These combine the logits with a number that a program broadcasts.
    "capped_softmax": of_logits(lambda x: jax.nn.softmax(jnp.where(x > 3.0, 3.0, x), axis=-1)),
    "activation_unit": activation_unit,
    "twice_a_relu": of_logits(lambda x: jnp.where(x > 0, x, 0.0) * 2),
}
#: Run without `jax.jit` too.
EAGER = "sigmoid", "capped_softmax", "twice_a_relu"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES: dict[str, tuple[Any, Any, Any, AxisType]] = {
    "auto": ((8,), ("x",), P("x"), AUTO),
    "one_axis": ((8,), ("x",), P("x"), EXPLICIT),
    "both_axes": ((2, 4), ("x", "y"), P(("x", "y")), EXPLICIT),
    "one_of_two_axes": ((2, 4), ("x", "y"), P("x"), EXPLICIT),
}


#: Every model is divided over one axis and in one other way, which take turns.
DIVISIONS = [
    (layout, label)
    for n, label in enumerate(MODELS)
    for layout in ("one_axis", ("auto", "both_axes", "one_of_two_axes")[n % 3])
]


@pytest.mark.parametrize(("layout", "label"), DIVISIONS)
def test_a_training_step(layout: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are the original's, and no candidate's row or gradient is gathered."""
    model, (weights, users, candidates) = MODELS[label], arrays()

    def step(fn):
        def loss(weights, of_users, of_candidates, users, candidates):
            each = {**users, **of_users}, {**candidates, **of_candidates}
            return jnp.mean(jnp.sin(fn(weights, *each)))

        return jax.value_and_grad(loss, (0, 1, 2))

    # On a CPU, XLA's programs of the ops may move more than models of this size.
    monkeypatch.setattr(cost, "refusal", lambda *_: "")
    args = weights, floats_of(users), floats_of(candidates), users, candidates
    expected = computed(step(model), *args)
    sizes, axes, spec, kind = MESHES[layout]
    mesh = jax.make_mesh(sizes, axes, axis_types=(kind,) * len(axes))
    with jax.set_mesh(mesh):
        whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, spec)
        placed = jax.device_put(args, (whole, whole, divided, whole, divided))
        (report,) = ikbo.explain(ikbo.rewrite(model), placed[0], *placed[3:]).notes
        rewritten = step(ikbo.rewrite(model))
        compiled = jax.jit(rewritten).lower(*placed).compile()
        runs = [run(*placed) for run in (compiled, rewritten)[: 1 + (label in EAGER)]]
    assert report.changed
    of_candidates = [x for x in runs[0][1][2].values() if np.any(jax.device_get(x))]
    assert of_candidates
    assert all(x.sharding.spec[0] == spec[0] for x in of_candidates)
    for results in jax.device_get(runs):
        for found, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            atol = 5e-5 * np.abs(wanted).max() + 1e-7
            np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
    collective = r" = (\S+|\(.*?\)) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
    for shape, name in re.findall(collective, compiled.as_text()):
        if name == "all-reduce":
            assert not re.search(rf"\b{B}\b", shape), shape
        elif shape.startswith(f"s32[{B}]") and name == "all-gather":
            # `gdpa` gathers the index.
            assert label in ("added_mask", "activation")
        else:
            dims = re.findall(r"\d+", re.findall(r"\[(.*?)\]", shape)[0])
            assert np.prod([int(n) for n in dims]) < B, (name, shape)


@pytest.mark.parametrize("batch", [1, 5, 64, 88, 97, 130, 1000, 1024])
def test_rows_in_turns(batch: int) -> None:
    rows = jnp.arange(batch * 3.0).reshape(batch, 3), jnp.arange(float(batch))

    def of_row(row):
        return jnp.stack([row[0].sum(), row[0][0] * row[1]])

    np.testing.assert_array_equal(
        computed(lambda *rows: masked_keys.in_turns(of_row, rows), *rows),
        computed(lambda *rows: jax.vmap(of_row)(rows), *rows),
    )
    count = masked_keys._rows_in_a_turn(batch)
    assert count == {64: 64, 88: 8, 1000: 40, 1024: 64}.get(batch, 0)
