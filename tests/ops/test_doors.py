"""Flax's own attention layers and Keras's models on the ops: the results of models on copies."""

import copy
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import ikbo_jax as ikbo
from ikbo_jax.layers import attention_fn, functional

INDEX = np.array([1, 0, 0, 1, 1], np.int32)
RANDOM = np.random.default_rng(0)
X_CAND, X_USER = (
    jnp.asarray(RANDOM.normal(size=shape), jnp.float32) for shape in ((5, 3, 8), (2, 6, 12))
)
MASK = jnp.asarray(RANDOM.random((2, 1, 1, 6)) < 0.7).at[:, :, :, 0].set(True)


def test_nnx_attention_takes_users_at_their_own_batch() -> None:
    layer = nnx.MultiHeadAttention(
        2,
        8,
        16,
        in_kv_features=12,
        decode=False,
        rngs=nnx.Rngs(0),
        attention_fn=attention_fn(INDEX),
    )
    usual = copy.copy(layer)
    usual.attention_fn = nnx.dot_product_attention
    with jax.numpy_rank_promotion("allow"):
        expected = usual(X_CAND, X_USER[INDEX], mask=MASK[INDEX])
        found = layer(X_CAND, X_USER, mask=MASK)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (plan,) = ikbo.explain(nnx.jit(layer), X_CAND, X_USER).plans
    assert (plan.problem.batch, plan.problem.users) == (5, 2)


def test_linen_attention_takes_users_at_their_own_batch() -> None:
    make = functools.partial(linen.MultiHeadDotProductAttention, 2, qkv_features=16)
    with jax.numpy_rank_promotion("allow"):
        params = make().init(jax.random.key(0), X_CAND, X_USER[INDEX])
        expected = make().apply(params, X_CAND, X_USER[INDEX], mask=MASK[INDEX])
        found = make(attention_fn=attention_fn(INDEX)).apply(params, X_CAND, X_USER, mask=MASK)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_decoding_masks_the_cache_as_flax_does(library: str) -> None:
    """Flax's masks are of float32."""
    x = X_USER[:, :3, :8]

    def steps(attend: Any) -> Any:
        if library == "nnx":
            layer = nnx.MultiHeadAttention(2, 8, 16, rngs=nnx.Rngs(0), **attend)
            layer.init_cache(x.shape)
            return [layer(x[:, t : t + 1], decode=True) for t in range(3)]
        layer = linen.MultiHeadDotProductAttention(2, qkv_features=16, decode=True, **attend)
        state = linen.MultiHeadDotProductAttention(2, qkv_features=16, decode=True).init(
            jax.random.key(0), x, x
        )
        found = []
        for t in range(3):
            row = x[:, t : t + 1]
            out, changed = layer.apply(state, row, row, mutable=["cache"])
            found.append(out)
            state |= changed
        return found

    with jax.numpy_rank_promotion("allow"):
        expected = steps({})
        found = steps({"attention_fn": attention_fn(np.arange(2, dtype=np.int32))})
    for out, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 0.1}, "no dropout of attention weights, but dropout_rate=0.1"),
        ({"module": object()}, "keeps no attention weights for sow_weights=True"),
        ({"query": [1.0]}, "attention_fn: query must be an array, but is a list"),
        ({"dropout_rate": np.ones(2)}, r"dropout_rate must be a number .*, but is float64\[2\]"),
        (
            {"dropout_rate": 0.1, "deterministic": "yes"},
            "deterministic must be a bool known while tracing, but is a str, 'yes'",
        ),
    ],
)
def test_attention_fn_refuses_by_name(options: Any, message: str) -> None:
    heads = jnp.ones((2, 6, 2, 8))
    with pytest.raises((NotImplementedError, ValueError), match=message):
        attention_fn(INDEX)(**{"query": heads[INDEX], "key": heads, "value": heads} | options)


@pytest.fixture
def keras(monkeypatch: Any) -> Any:
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "jax"))
    return pytest.importorskip("keras")


# Keras converts its variables by an `__array__` without `copy`.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_model_is_saved_loaded_and_trained(keras: Any, tmp_path: Any) -> None:
    from ikbo_jax.layers import keras as layers

    x_cand, x_user = keras.Input((3, 8)), keras.Input((6, 12))
    index = keras.Input((), dtype="int32")
    tokens = layers.CandidateAttention(2, 8, name="attend")(x_cand, x_user, index)
    rows = layers.LinearCompression(4, name="compress")(x_user[:, :, :8], tokens, index)
    model = keras.Model([x_cand, x_user, index], rows)
    assert rows.shape == (None, 4, 8)
    arrays = [np.asarray(X_CAND), np.asarray(X_USER), INDEX]
    out = model.predict_on_batch(arrays)

    attend, compress = (
        {w.name: w.value for w in model.get_layer(name).weights} for name in ("attend", "compress")
    )
    expected = functional.attend(attend, X_CAND, X_USER, INDEX)
    expected = functional.compress(compress, X_USER[:, :, :8], expected, INDEX)
    np.testing.assert_allclose(out, expected, atol=1e-5)

    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict_on_batch(arrays), out)
    loaded.compile("sgd", "mse")
    first, *_, last = (loaded.train_on_batch(arrays, np.ones((5, 4, 8))) for _ in range(4))
    assert last < first
    # Rows that Keras's mask hides have no effect, wherever they are; their number may be unknown.
    history, attend = keras.Input((None, 12)), layers.CandidateAttention(2, 8)
    masked = attend(x_cand, keras.layers.Masking()(history), index)
    masked = keras.Model([x_cand, history, index], masked).predict_on_batch(
        [
            arrays[0],
            arrays[1] * np.array([[1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0]])[..., None],
            INDEX,
        ]
    )
    rows = jnp.stack([X_USER[0, jnp.array([0, 2, 3, 5])], X_USER[1, 1:5]])
    params = {w.name: w.value for w in attend.weights}
    np.testing.assert_allclose(masked, functional.attend(params, X_CAND, rows, INDEX), atol=1e-5)
    with pytest.raises(ValueError, match=r"x_user_mask has shape \(5, 6\) but x_user has \(2, 6,"):
        attend(X_CAND, X_USER, INDEX, x_user_mask=np.ones((5, 6), bool))
    with pytest.raises(
        ValueError, match="num_heads of CandidateAttention must be an integer of at least 1"
    ):
        layers.CandidateAttention(0, 8)(*arrays)
    layer = layers.CandidateAttention(2, 4)
    with pytest.raises(ValueError, match="x_user must have 3 axes, but has shape None"):
        layer(jnp.ones((5, 3, 8)), None, INDEX)
    with pytest.raises(ValueError, match=r"e_cand must have 3 axes, but has shape \(3, 8\)"):
        layers.LinearCompression(4)(jnp.ones((2, 6, 8)), jnp.ones((3, 8)), INDEX)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_subclassed_keras_model_is_saved_and_loaded(keras: Any, tmp_path: Any) -> None:
    """Keras builds it before it loads the parameters, by a call with floats."""
    from ikbo_jax.layers import keras as layers

    @keras.saving.register_keras_serializable("test_doors")
    class Model(keras.Model):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.attend, self.compress = (
                layers.CandidateAttention(2, 8),
                layers.LinearCompression(4),
            )

        def call(self, inputs: Any) -> Any:
            x_cand, x_user, index, lengths = inputs
            tokens = self.attend(x_cand, x_user, index, lengths)
            return self.compress(x_user[:, :, :8], tokens, index)

    model, arrays = Model(), [X_CAND, X_USER, INDEX, jnp.array([6, 2], jnp.int32)]
    out = model(arrays)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(arrays), out)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("seed", [None, 3])
def test_a_keras_model_that_calls_layers_draws_every_matrix(keras: Any, seed: Any) -> None:
    """A model of methods is traced before its layers have parameters."""
    from ikbo_jax.layers import keras as layers

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            draw = keras.initializers.LecunNormal(seed)
            self.attend = layers.CandidateAttention(4, 16, kernel_initializer=draw)
            self.compress = layers.LinearCompression(200, kernel_initializer=draw)

        def call(self, x_cand: Any, x_user: Any, index: Any) -> Any:
            return self.compress(x_user, self.attend(x_cand, x_user, index), index)

    x_cand, x_user = (jnp.asarray(RANDOM.normal(size=(n, 90, 64)), jnp.float32) for n in (5, 2))
    model = Model()
    assert model(x_cand, x_user, INDEX).shape == (5, 200, 64)
    weights = {w.name: np.asarray(w.value) for w in model.weights}
    matrices = [weights[name].reshape(64, 64) for name in ("w_query", "w_key", "w_value", "w_out")]
    matrices += [weights["w_user"][:64, :64], weights["w_cand"][:64, :64]]
    of_pairs = np.corrcoef([x.ravel() for x in matrices])
    np.testing.assert_allclose(of_pairs, np.eye(len(matrices)), atol=0.1)
    np.testing.assert_allclose(np.std(matrices, (1, 2)), [1 / 8] * 4 + [180**-0.5] * 2, rtol=0.05)
