"""`attention` with a range of keys for every candidate, a cap of its scores, and a bias of them."""

import functools
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig, FewQueriesConfig
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_blocks, attention_grouped

B, U, T, S, N, K, H = 8, 3, 3, 11, 4, 2, 8
SCALE = H**-0.5
#: All keys; some; none, in three ways; beyond the user's length; out of bounds.
RANGES = np.asarray(
    [[0, 11], [2, 7], [5, 5], [6, 3], [9, 11], [-4, 5], [3, 2**31 - 1], [12, 15]], np.int32
)
INDEX = np.asarray([2, 0, 1, 0, 1, 1, 0, 2], np.int32)
LENGTHS = np.asarray([11, 8, 6], np.int32)
#: Of a bias.
SHAPES = list(itertools.product([U], [1, N], [1, T], [S]))


def draw(dtype: str = "float32", seed: int = 0, own: int = 0) -> list[jax.Array]:
    """Query, key and value; keys and values of `own` tokens; cotangents of out and lse."""
    rng = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (U, S, K, H), (U, S, K, H), *[(B, own, K, H)] * (2 * (own > 0))]
    found = [problems.random_array(rng, shape, dtype) for shape in shapes]
    return [*found, problems.random_array(rng, (B, T, N, H), "float32")]


def draw_bias(shape: Any = SHAPES[0], seed: int = 0) -> jax.Array:
    return problems.random_array(np.random.default_rng(seed + 9), shape, "float32")


def attend(query: Any, key: Any, value: Any, *own: Any, **options: Any) -> tuple:
    tokens = dict(zip(("self_key", "self_value"), own, strict=False))
    options = {"key_value_ranges": RANGES, "key_value_seq_lengths": LENGTHS, **tokens, **options}
    return ikbo.attention(query, key, value, INDEX, return_residuals=True, **options)


def biased(query: Any, key: Any, value: Any, bias: Any, **options: Any) -> jax.Array:
    return attend(query, key, value, bias=bias, key_value_ranges=None, **options)[0]


def as_written(query: Any, key: Any, value: Any, bias: Any, cap: float | None = None) -> Any:
    """Copies everything of the user; scores and softmax as a model writes them."""
    key, value = (jnp.repeat(x[INDEX], N // K, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * np.float32(SCALE)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = (scores.astype(bias.dtype) + bias[INDEX]).astype(jnp.float32)
    seen = np.arange(S) < LENGTHS[INDEX][:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def both(run: Any, d_out: Any, floats: list[Any]) -> Any:
    out, pull = jax.vjp(run, *floats)
    return out, pull(d_out)


def with_lse(run: Any, d_out: Any, floats: list[Any]) -> Any:
    """Results, and gradients by `d_out` and by the sum of lse where it is finite."""
    (out, lse), pull = jax.vjp(run, *floats)
    return (out, lse), pull((d_out, jnp.where(lse > -99, 1.0, 0.0)))


def oracle(*floats: Any, **options: Any) -> tuple:
    own = dict(zip(("self_key", "self_value"), floats[3:], strict=False))
    options = {"scale": SCALE, "ranges": jnp.asarray(RANGES), **own, **options}
    return reference.materialised(*floats[:3], *map(jnp.asarray, (INDEX, LENGTHS)), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "cap"), [(0, None), (2, None), (0, 0.4), (2, 0.4)])
def test_values_and_gradients_are_numpys(own: int, cap: float | None) -> None:
    """Gradients beside own tokens are those of the oracle."""
    *floats, d_out = draw(own=own)
    inputs = problems.AttentionInputs(*floats[:3], INDEX, LENGTHS)
    options = {"scale": SCALE, "ranges": RANGES, "logit_cap": cap}
    tokens = dict(zip(("self_key", "self_value"), floats[3:], strict=False))
    exact = oracle_attention.numpy_attention_oracle(inputs, **options, **tokens)
    assert np.isneginf(exact[1]).any() == (own == 0)
    runs = [functools.partial(run, logit_cap=cap) for run in (attend, oracle)]
    (ours, found), (theirs, of_oracle) = jax.jit(lambda x: [with_lse(f, d_out, x) for f in runs])(
        floats
    )
    chex.assert_trees_all_close(ours, tuple(map(np.float32, exact)), atol=1e-5)
    chex.assert_trees_all_close(theirs, tuple(map(np.float32, exact)), atol=1e-5)
    chex.assert_trees_all_close(found, of_oracle, atol=1e-5)
    if not own:
        d_lse = np.where(np.isneginf(exact[1]), 0, 1)
        slopes = oracle_attention.numpy_attention_gradients(inputs, d_out, d_lse, **options)
        chex.assert_trees_all_close(found, tuple(map(np.float32, slopes)), atol=1e-5)
        assert not np.asarray(found[0])[2].any()


@pytest.mark.parametrize(("shape", "cap"), [*((x, None) for x in SHAPES), (SHAPES[3], 0.4)])
def test_results_and_gradients_of_a_bias_are_the_softmaxs(shape: Any, cap: float | None) -> None:
    *floats, d_out = draw()
    # A key of -inf, and a number beside which float32 keeps no score.
    bias = draw_bias(shape).at[0, ..., 2].set(-jnp.inf).at[1, ..., 3].set(-1e9)
    runs = [
        lambda *x: biased(*x, logit_cap=cap),
        lambda *x: as_written(*x, cap=cap),
        lambda *x: oracle(*x[:3], ranges=None, logit_cap=cap, bias=x[3])[0],
    ]
    ours, theirs, oracles = jax.jit(lambda x: [both(f, d_out, x) for f in runs])([*floats, bias])
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)
    chex.assert_trees_all_close(oracles[0], theirs[0], atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "cap", "biases"),
    [(4, None, []), (5, 0.4, []), *((keys, None, [draw_bias(SHAPES[3])]) for keys in (4, 5))],
    ids=["4", "5-capped", "4-bias", "5-bias"],
)
def test_chunks_of_keys(keys: int, cap: float | None, biases: list[jax.Array]) -> None:
    """The last chunk holds keys of the one before; groups are not full."""
    *floats, d_out = draw()
    blocks = attention_blocks.Blocking(group=2, groups=2, keys=keys)
    users, ranges = (jnp.asarray(INDEX), jnp.asarray(LENGTHS)), jnp.asarray(RANGES)
    options: Any = {"scale": SCALE, "logit_cap": cap, "ranges": None if biases else ranges}

    def by_chunks(*x: Any) -> Any:
        chosen = options | {"blocks": blocks} | ({"bias": x[3]} if biases else {})
        pulled = attention_grouped.decomposed_vjp(*x[:3], *users, d_out, None, **chosen)
        return attention_grouped.decomposed(*x[:3], *users, **chosen), pulled

    def at_once(*x: Any) -> Any:
        return oracle(*x[:3], **options, **({"bias": x[3]} if biases else {}))

    def pull_back(*x: Any) -> Any:
        results, pull = jax.vjp(at_once, *x)
        return results, pull((d_out, jnp.zeros((B, T, N))))

    ours, theirs = jax.jit(lambda x: (by_chunks(*x), pull_back(*x)))([*floats, *biases])
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_within_the_error_rule(dtype: str) -> None:
    *floats, _ = draw(dtype)
    inputs = problems.AttentionInputs(*floats, INDEX, LENGTHS)
    options = {"scale": SCALE, "ranges": RANGES}
    plain, _ = oracle_attention.materialised(*inputs, **options)
    exact, _ = oracle_attention.numpy_attention_oracle(inputs, **options)
    problems.assert_within_error_rule(attend(*floats)[0], exact, plain)


@pytest.mark.slow
def test_rows_that_see_nothing_ignore_nan() -> None:
    *floats, d_out = draw()
    dead = np.asarray([2, 3, 7])
    floats[0] = floats[0].at[dead].set(jnp.nan)
    d_out = d_out.at[dead].set(jnp.nan)
    found = jax.jit(lambda x: with_lse(attend, d_out, x))(floats)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((found[0][0], found[1])))
    np.testing.assert_array_equal(found[0][0][dead], 0)


def test_rows_without_a_finite_score_are_0() -> None:
    *floats, _ = draw()
    bias = draw_bias(SHAPES[3]).at[0, 1, 2].set(-jnp.inf)
    out, lse = jax.jit(lambda x: attend(*x, bias=bias, key_value_ranges=None))(floats)
    assert not np.asarray(out)[INDEX == 0, 2, 1].any()
    assert np.isneginf(np.asarray(lse)).sum() == np.sum(INDEX == 0)


def test_bias_of_16_bits_rounds_the_sum() -> None:
    """A model that adds 1e4 in bfloat16 weighs all keys alike."""
    *floats, _ = draw()
    floats.append(draw_bias().astype(jnp.bfloat16).at[0].set(-1e4))
    ours, theirs = jax.jit(lambda x: (biased(*x), as_written(*x)))(floats)
    np.testing.assert_allclose(ours, theirs, atol=2e-2)


def with_ranges(query: Any, key: Any, value: Any, ranges: Any) -> jax.Array:
    return attend(query, key, value, key_value_ranges=ranges)[0]


@pytest.mark.parametrize(
    ("run", "last"),
    [(with_ranges, [RANGES, RANGES[::-1]]), (biased, [draw_bias(SHAPES[2], i) for i in (0, 1)])],
    ids=["ranges", "bias"],
)
def test_vmap_is_one_problem_at_a_time(run: Any, last: list[Any]) -> None:
    each = [[*draw(seed=seed)[:3], jnp.asarray(x)] for seed, x in enumerate(last)]
    every = [jnp.stack(x) for x in zip(*each, strict=True)]
    for is_mapped in ((True,) * 4, (False, False, False, True), (True, False, False, False)):
        axes = [0 if x else None for x in is_mapped]
        arrays = [x if m else y for x, y, m in zip(every, each[0], is_mapped, strict=True)]
        found = jax.jit(jax.vmap(run, axes))(*arrays)
        of = [[x[i] if m else x for x, m in zip(arrays, is_mapped, strict=True)] for i in range(2)]
        chex.assert_trees_all_close(found, jnp.stack([run(*x) for x in of]), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [2, 100])
def test_explain_names_the_kernel_of_ranges_and_why_xla_computes_gradients(queries: int) -> None:
    key = jax.ShapeDtypeStruct((3, 11, 2, 64), jnp.bfloat16)
    shape = (jax.ShapeDtypeStruct((8, queries, 2, 64), jnp.bfloat16), key, key)
    (plan,) = ikbo.explain(attend, *shape).plans
    assert plan.sizes.endswith("bfloat16 key_value_ranges")
    assert isinstance(plan.cuda.config, FewQueriesConfig)
    assert plan.cuda.backward_config is None
    assert "key_value_ranges run in XLA" in plan.cuda.backward
    tiles = AttentionConfig()
    with pytest.raises(NotImplementedError, match="key_value_ranges need the kernel for few que"):
        ikbo.explain(functools.partial(attend, implementation="mosaic_gpu", config=tiles), *shape)
    capped = functools.partial(attend, key_value_ranges=None, logit_cap=30.0)
    (plan,) = ikbo.explain(capped, *shape).plans
    assert plan.sizes.endswith("bfloat16 logit_cap")
    assert plan.cuda.implementation == "mosaic_gpu"
    assert plan.cuda.backward_config is not None


def test_refusals_of_a_bias_and_its_plan() -> None:
    *floats, _ = draw()
    with pytest.raises(ValueError, match=re.escape("bias has shape (3, 2, 1, 11) but query")):
        biased(*floats[:3], jnp.zeros((U, 2, 1, S)))
    pages, table = [jnp.ones((4, 16, K, H))] * 2, jnp.zeros((U, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="do not go together"):
        biased(floats[0], *pages, jnp.ones((U, 1, 1, 16)), page_table=table)
    half = [jnp.zeros((*x.shape[:3], 64), jnp.bfloat16) for x in floats[:3]]
    (plan,) = ikbo.explain(biased, *half, draw_bias()).plans
    assert plan.sizes.endswith("bfloat16 bias")
    assert "a bias runs in XLA" in plan.cuda.reason
