"""`rewrite` of attention by cuDNN, on copies of looked-up keys and values.

A rewritten program holds no call of cuDNN, so it runs on a CPU, beside the same model in XLA. JAX
traces the original if it is told that cuDNN is there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.extend import core
from rewrite_basics import (
    computed,
    every_equation,
    gradients_by_all,
    largest_outside_ops,
    report_of,
    useful_flops,
)

import ikbo_jax as ikbo

B, U, T, S, D, N, H = 24, 4, 8, 64, 16, 4, 64
RNG = np.random.default_rng(0)
BF16 = jnp.bfloat16
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
HISTORY, QUERY, W_K, W_V = (
    problems.random_array(RNG, shape, BF16) / 4
    for shape in ((U, S, D), (B, T, N, H), (D, N, H), (D, N, H))
)
LENGTHS = jnp.asarray([S, 1, 17, 40], jnp.int32)


@pytest.fixture(autouse=True)
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)


def projected(rows, w):
    return jnp.einsum("bsd,dnh->bsnh", rows, w)


def model(history, query, w_k, w_v, *, implementation="cudnn", lengths=None, **kwargs):
    key, value = (projected(history[INDEX], w) for w in (w_k, w_v))
    if lengths is not None:
        kwargs["key_value_seq_lengths"] = lengths[INDEX]
    # JAX's own function mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            query, key, value, implementation=implementation, scale=0.1, **kwargs
        )
    return out.astype(jnp.float32)


def calls_of_cudnn(fn, *args) -> list[core.JaxprEqn]:
    found = every_equation(jax.make_jaxpr(fn)(*args))
    return [eqn for eqn in found if eqn.primitive.name == "dot_product_attention_fwd_wrapper"]


ARGS = (HISTORY, QUERY, W_K, W_V)


def assert_close(fn, expected, *args) -> None:
    results = (jax.tree.leaves(computed(f, *args)) for f in (fn, expected))
    for found, wanted in zip(*results, strict=True):
        found, wanted = (x.astype(np.float32) for x in (found, wanted))
        np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "options",
    [{}, {"lengths": LENGTHS}, {"lengths": jnp.full(U, S, jnp.int32)}],
    ids=["whole", "lengths", "full_lengths"],
)
def test_it_becomes_attention(options) -> None:
    fn = functools.partial(model, **options)
    in_xla = functools.partial(model, implementation="xla", **options)
    assert calls_of_cudnn(fn, *ARGS)
    assert not calls_of_cudnn(ikbo.rewrite(fn), *ARGS)

    with jax.numpy_dtype_promotion("standard"):
        for of in (lambda fn: fn, gradients_by_all(ARGS)):
            assert_close(of(ikbo.rewrite(fn)), of(in_xla), *ARGS)
    original, ours = useful_flops(fn, *ARGS)
    # Projections run at user batch, attention as often as before, and no history is copied.
    assert original - ours == (B - U) * S * D * N * H * 4
    assert largest_outside_ops(fn, *ARGS) < B * S * N * H


def dot(query, key, implementation):
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(query, key, key, implementation=implementation)


def in_jitted_layers(dot, history, query, w):
    @jax.jit
    def layer(x, rows):
        return x + dot(x, projected(rows, w))

    rows = history[INDEX]
    return layer(layer(query, rows), rows)


FORMS = {
    "in_jitted_layers": in_jitted_layers,
    "under_vmap": lambda dot, history, query, w: jax.vmap(
        lambda x, n: dot(x, projected(history, w)[n])
    )(query, INDEX),
    "of_one_user": lambda dot, history, query, w: dot(
        query, projected(jnp.broadcast_to(history[:1], (B, S, D)), w)
    ),
    "of_grouped_heads": lambda dot, history, query, w: dot(
        query, projected(history[INDEX], w[:, :2])
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_the_call(name) -> None:
    in_cudnn, in_xla = (
        functools.partial(FORMS[name], functools.partial(dot, implementation=each))
        for each in ("cudnn", "xla")
    )
    args = ARGS[:3]
    assert not calls_of_cudnn(ikbo.rewrite(in_cudnn), *args)
    assert_close(ikbo.rewrite(in_cudnn), in_xla, *args)


def own_queries(history, query, w_k, w_v, *, causal):
    """Self-attention over the history, on copies, whose last row meets the candidate."""
    q, k, v = (projected(history[INDEX], w) for w in (w_k, w_v, w_v))
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=LENGTHS[INDEX], implementation="cudnn"
        )
    return jnp.einsum("bnh,btnh->btn", out[:, -1], query)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_the_user_stay_with_cudnn_at_user_batch(causal) -> None:
    fn = functools.partial(own_queries, causal=causal)
    (eqn,) = calls_of_cudnn(ikbo.rewrite(fn), *ARGS)
    assert [v.aval.shape for v in eqn.invars[:3]] == [(U, S, N, H)] * 3
    assert eqn.params["mask_type"].name == ("PADDING_CAUSAL" if causal else "PADDING")
    # Lengths of queries and of keys, by user.
    assert [v.aval.shape for v in eqn.invars[4:6]] == [(U,)] * 2


#: Options of the call, and what the report says of it.
OTHERS = {
    "with_lengths_of_queries": (
        {"query_seq_lengths": jnp.arange(B, dtype=jnp.int32) % T + 1},
        "lengths of queries",
    ),
    "with_a_bias": ({"bias": jnp.ones((B, N, T, S), BF16)}, "with bias or mask"),
    "with_causal_mask": ({"is_causal": True}, "with a causal mask"),
    "with_lengths_of_candidates": (
        {"key_value_seq_lengths": jnp.arange(B, dtype=jnp.int32) + 1},
        "lengths that are not looked up like the keys",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are_written(name) -> None:
    options, reason = OTHERS[name]
    fn = functools.partial(model, **options)
    assert calls_of_cudnn(ikbo.rewrite(fn), *ARGS)
    assert reason in str(report_of(fn, *ARGS))
