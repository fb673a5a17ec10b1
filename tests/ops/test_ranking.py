"""The ranking network: its versions agree, and only the materialised one copies users."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from training_runs import assert_learnt_alike, curves, network_and_request, versions

import ikbo_jax as ikbo
from benchmarks import ranking_by_hand
from ikbo_jax.layers import nnx
from ikbo_jax.models import ranking, strategies
from ikbo_jax.reference import gdpa_chunked

pytestmark = pytest.mark.slow

# Sizes differ from one another, so that a shape tells what an array is.
TINY = ranking.Sizes(
    **{"candidates": 24, "users": 3, "layers": 1, "width": 16, "user_dense": 10},
    **{"dense_tokens": 2, "user_tokens": 10, "pooled": 5, "cand_tokens": 13, "history": 12},
    **{"queries": 4, "heads": 2, "head_dim": 8, "compressed": 11, "rank": 6, "hidden": 18},
    dtype="float32",
)
B, S, WIDTH = TINY.candidates, TINY.history, TINY.width
HEADS = (TINY.heads, TINY.head_dim)
#: What a copy of a user's tensor for every candidate looks like.
COPIES = {
    (B, TINY.user_rows, WIDTH),
    (B, TINY.user_rows + TINY.cand_tokens, WIDTH),
    (B, S, WIDTH),
    (B, S, *HEADS),
    (B, TINY.pooled, WIDTH),
    (B, TINY.pooled, *HEADS),
    (B, WIDTH + TINY.user_dense),
}
VERSIONS = versions(TINY)


def shapes_in(text: str) -> set[tuple[int, ...]]:
    stable = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    compiled = re.findall(r"[a-z]\d+\[([\d,]+)\]", text)
    found = {tuple(map(int, s.rstrip("x").split("x"))) for s in stable}
    return found | {tuple(map(int, s.split(","))) for s in compiled}


inputs = functools.partial(network_and_request, TINY)


def co_designed_and_gradient(params, request):
    def loss(params):
        out = ranking.co_designed(params, request)
        return jnp.sum(out**2), out

    gradient, out = jax.grad(loss, has_aux=True)(params)
    return out, gradient


@functools.cache
def lowered(name: str):
    # One program tells that neither the network nor its gradient copies a user.
    fn = co_designed_and_gradient if name == "co_designed" else VERSIONS[name]
    # The XLA path of gdpa reads the keys of a few tiles at a time; of these sizes it would take all
    # candidates at once.
    with mock.patch.object(gdpa_chunked, "MAX_ELEMENTS", 512):
        return jax.jit(fn).lower(*inputs())


@functools.cache
def compiled(name: str):
    return lowered(name).compile()


@pytest.mark.parametrize("name", list(VERSIONS)[1:])
def test_versions_agree_and_copy_no_user(name: str) -> None:
    expected = compiled("materialised")(*inputs())
    assert (expected.shape, expected.dtype) == ((B, TINY.tasks), jnp.float32)
    assert expected.std() > 0.1
    out = compiled(name)(*inputs())
    out = out[0] if name == "co_designed" else out
    np.testing.assert_allclose(out, expected, atol=2e-5)
    copies = COPIES & shapes_in(lowered("materialised").as_text())
    assert len(copies) == len(COPIES)
    text = lowered(name).as_text() + compiled(name).as_text()
    assert shapes_in(text) & copies == set()


@pytest.mark.parametrize("users", [TINY.users, 1])
def test_the_rewrite_finds_every_meeting_of_user_and_candidate(users: int) -> None:
    sizes = dataclasses.replace(TINY, users=users)
    shapes = jax.eval_shape(lambda: (ranking.init(sizes), ranking.make_request(sizes)))
    explanation = ikbo.explain(VERSIONS["rewrite"], *shapes)
    (report,) = explanation.notes
    assert report.materialised == ()
    combined = ["attention", "gdpa", "linear_compression"]
    assert sorted(p.op for p in explanation.plans) == combined
    by_hand = sorted(p.op for p in ikbo.explain(ranking.co_designed, *shapes).plans)
    # Its pooling of the history, by a softmax at user batch, is nothing that a rewrite changes.
    # Projections of the history, twice, and of pooled rows; of the queries, twice, and sums with
    # the history and, twice, with the queries.
    linear = ["norm_linear"] * 3 + ["gated_linear"] * 5
    assert by_hand == sorted(["attention", *combined, *linear])
    assert "product by parts, then added, strategies.py" in report.details


def test_tuned_copies_are_the_same_network() -> None:
    lowered_tuned = jax.jit(ranking_by_hand.tuned_copies).lower(*inputs())
    rows = TINY.user_rows + TINY.cand_tokens
    assert (B, -(-rows // 8) * 8, WIDTH) in shapes_in(lowered_tuned.as_text())
    np.testing.assert_allclose(
        lowered_tuned.compile()(*inputs()), compiled("materialised")(*inputs()), atol=2e-5
    )


def test_attention_of_the_network_runs_in_float16_on_a_cpu() -> None:
    """XLA's CPU backend refuses the algorithm by which `jax.nn` multiplies float16."""
    query, key, value = (
        jax.random.normal(x, (2, 3, 2, 8), jnp.float16)
        for x in jax.random.split(jax.random.key(0), 3)
    )
    out = jax.jit(strategies.softmax_attention)(query, key, value)
    assert out.dtype == jnp.float16
    exact = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (query, key, value)))
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-3)


def test_folding_by_user_and_back() -> None:
    index = jnp.asarray([2, 0, 2, 2, 1, 0], jnp.int32)
    x = np.arange(6 * 2 * 3, dtype=np.float32).reshape(6, 2, 3)

    @jax.jit
    def there_and_back(x):
        fold, few = (ranking_by_hand.fold_by_user(index, 4, slots) for slots in (3, 2))
        folded = fold.fold(x)
        return folded, fold.unfold(folded), few.unfold(few.fold(x))

    folded, back, of_few = map(np.asarray, there_and_back(x))
    assert folded.shape == (4, 6, 3)
    np.testing.assert_array_equal(folded[2], x[[0, 2, 3]].reshape(6, 3))
    np.testing.assert_array_equal(folded[3], np.zeros((6, 3)))
    np.testing.assert_array_equal(back, x)
    # Candidates without a slot are NaN, and harm no other user.
    np.testing.assert_array_equal(of_few[[0, 1, 2, 4, 5]], x[[0, 1, 2, 4, 5]])
    assert np.isnan(of_few[3]).all()


def test_prepared_parameters_give_the_same_logits() -> None:
    params, request = inputs()
    network, prepared = jax.jit(ranking.co_designed), jax.jit(ranking.prepare)(params)
    for layer in prepared["layers"]:
        assert all(isinstance(w, ikbo.PaddedWeight) for w in layer["compression"].values())
    expected = network(params, request)
    np.testing.assert_allclose(network(prepared, request), expected, atol=1e-6)


@functools.cache
def gradient_of(name: str):
    """By the parameters, of the sum of the squared logits."""
    params, request = inputs()
    return jax.jit(jax.grad(lambda params: jnp.sum(VERSIONS[name](params, request) ** 2)))(params)


@pytest.mark.parametrize("name", ["co_designed", "rewrite", "hand_optimised"])
def test_gradients_of_all_versions_agree(name: str) -> None:
    found = compiled("co_designed")(*inputs())[1] if name == "co_designed" else gradient_of(name)
    expected = gradient_of("materialised")
    largest = {x.shape: np.abs(x).max() for x in jax.tree.leaves(expected)}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * largest[b.shape]), found, expected
    )


def test_parameters_are_those_of_the_layers() -> None:
    layer = inputs()[0]["layers"][0]

    def layers():
        rngs = flax_nnx.Rngs(0)
        return {
            "attention": nnx.CandidateAttention(WIDTH, WIDTH, *HEADS, rngs=rngs),
            "pma": nnx.PMA(WIDTH, TINY.pooled, *HEADS, rngs=rngs),
            "pffn": nnx.PFFN(WIDTH, WIDTH, *HEADS, rngs=rngs),
            "compression": nnx.LinearCompression(
                TINY.user_rows, TINY.cand_tokens, TINY.compressed, rngs=rngs
            ),
        }

    of_layers = flax_nnx.eval_shape(layers)
    for name, module in of_layers.items():
        made = flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, layer[name])


def test_full_sizes_are_the_published_ones() -> None:
    sizes = ranking.Sizes()
    assert (sizes.user_rows, sizes.cand_tokens, sizes.compressed, sizes.width) == (
        1178,
        866,
        433,
        256,
    )
    counts = ranking.candidate_counts(sizes)
    assert counts.sum() == 1024
    assert len(set(counts.tolist())) > 1
    params, request = jax.eval_shape(lambda: (ranking.init(sizes), ranking.make_request(sizes)))
    logits = jax.eval_shape(ranking.co_designed, params, request)
    assert (logits.shape, logits.dtype) == ((1024, 2), jnp.float32)


#: Larger than the tiny sizes where too few candidates would learn nothing.
TRAINED = dataclasses.replace(TINY, candidates=48, users=6, history=16)


@functools.cache
def losses(name: str, dtype: str) -> np.ndarray:
    sizes = dataclasses.replace(TRAINED, dtype=dtype)
    return curves(versions(sizes)[name], sizes, TRAINED, 3, 150)  # seeds and steps


@pytest.mark.parametrize("name", ["co_designed", "rewrite"])
def test_versions_learn_as_the_copies_do_in_float32(name: str) -> None:
    """Training works: loss curves agree within seed noise."""
    assert_learnt_alike(losses(name, "bfloat16"), losses("materialised", "float32"))
