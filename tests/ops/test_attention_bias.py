"""`attention` with a bias of the scores: the results of a materialised softmax."""

import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import mesh_of, on

import ikbo_jax as ikbo
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped

B, U, T, S, N, K, H = 8, 3, 3, 11, 4, 2, 8
INDEX = np.asarray([2, 0, 1, 0, 1, 1, 0, 2], np.int32)
LENGTHS = np.asarray([11, 8, 6], np.int32)
SHAPES = list(itertools.product([U], [1, N], [1, T], [S]))


def draw(shape: Any = SHAPES[0], seed: int = 0) -> list[jax.Array]:
    """Query, key, value, bias; the cotangent of out."""
    rng = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (U, S, K, H), (U, S, K, H), shape, (B, T, N, H)]
    return [problems.random_array(rng, x, "float32") for x in shapes]


def attend(query: Any, key: Any, value: Any, bias: Any, **options: Any) -> Any:
    options = {"key_value_seq_lengths": LENGTHS, **options}
    return ikbo.attention(query, key, value, INDEX, bias=bias, **options)


def as_written(query: Any, key: Any, value: Any, bias: Any, cap: float | None = None) -> Any:
    """Copies everything of the user; scores and softmax as a model writes them."""
    key, value = (jnp.repeat(x[INDEX], N // K, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * np.float32(H**-0.5)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = (scores.astype(bias.dtype) + bias[INDEX]).astype(jnp.float32)
    seen = np.arange(S) < LENGTHS[INDEX][:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def both(run: Any, d_out: Any, floats: list[Any]) -> Any:
    out, pull = jax.vjp(run, *floats)
    return out, pull(d_out)


@pytest.mark.parametrize(("shape", "cap"), [*((x, None) for x in SHAPES), (SHAPES[3], 0.4)])
def test_results_and_gradients_are_the_softmaxs(shape: Any, cap: float | None) -> None:
    *floats, d_out = draw(shape)
    # A key of -inf, and a number beside which float32 keeps no score.
    floats[3] = floats[3].at[0, ..., 2].set(-jnp.inf).at[1, ..., 3].set(-1e9)
    runs = [lambda *x: attend(*x, logit_cap=cap), lambda *x: as_written(*x, cap=cap)]
    runs.append(
        lambda *x: reference.materialised(
            *x[:3], *map(jnp.asarray, (INDEX, LENGTHS)), scale=H**-0.5, logit_cap=cap, bias=x[3]
        )[0]
    )
    ours, theirs, oracles = jax.jit(lambda x: [both(run, d_out, x) for run in runs])(floats)
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)
    chex.assert_trees_all_close(oracles[0], theirs[0], atol=1e-5)


@pytest.mark.parametrize("keys", [4, 5])
def test_chunks_of_keys(keys: int) -> None:
    """The last chunk holds keys of the one before; groups are not full."""
    *floats, d_out = draw(SHAPES[3])
    options: Any = {"scale": H**-0.5, "blocks": attention_grouped.Blocking(2, 2, keys)}

    def by_chunks(*x: Any) -> Any:
        operands = *x[:3], jnp.asarray(INDEX), jnp.asarray(LENGTHS)
        out, _ = attention_grouped.decomposed(*operands, bias=x[3], **options)
        pulled = attention_grouped.decomposed_vjp(*operands, d_out, None, bias=x[3], **options)
        return out, pulled

    ours, theirs = jax.jit(lambda x: (by_chunks(*x), both(as_written, d_out, x)))(floats)
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)


def test_bias_of_16_bits_rounds_the_sum() -> None:
    """A model that adds 1e4 in bfloat16 weighs all keys alike."""
    *floats, _ = draw()
    floats[3] = floats[3].astype(jnp.bfloat16).at[0].set(-1e4)
    ours, theirs = jax.jit(lambda x: (attend(*x), as_written(*x)))(floats)
    np.testing.assert_allclose(ours, theirs, atol=2e-2)


def test_rows_without_a_finite_score_are_0() -> None:
    *floats, _ = draw(SHAPES[3])
    floats[3] = floats[3].at[0, 1, 2].set(-jnp.inf)
    out, lse = jax.jit(lambda x: attend(*x, return_residuals=True))(floats)
    assert not np.asarray(out)[INDEX == 0, 2, 1].any()
    assert np.isneginf(np.asarray(lse)).sum() == np.sum(INDEX == 0)


def test_vmap_is_one_problem_at_a_time() -> None:
    each = [draw(SHAPES[2], seed)[:4] for seed in range(2)]
    every = [jnp.stack(x) for x in zip(*each, strict=True)]
    found = jax.jit(jax.vmap(attend))(*every)
    chex.assert_trees_all_close(found, jnp.stack([attend(*x) for x in each]), atol=1e-6)
    found = jax.jit(jax.vmap(attend, (None, None, None, 0)))(*each[0][:3], every[3])
    alone = jnp.stack([attend(*each[0][:3], x) for x in every[3]])
    chex.assert_trees_all_close(found, alone, atol=1e-6)
    found = jax.jit(jax.vmap(attend, (0, None, None, None)))(every[0], *each[0][1:])
    alone = jnp.stack([attend(x, *each[0][1:]) for x in every[0]])
    chex.assert_trees_all_close(found, alone, atol=1e-6)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["candidates", "heads"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=["one", "all"])
def test_candidates_and_heads_divide_over_devices(spec: P, shape: Any) -> None:
    *floats, d_out = draw(shape)
    arrays = [floats[0], *(jnp.repeat(x, 2, 2) for x in floats[1:3]), floats[3], d_out]
    of_keys = P(None, None, "x") if len(spec) == 3 else P()
    mesh = mesh_of("4", "auto")

    def run(query: Any, key: Any, value: Any, bias: Any, d_out: Any) -> Any:
        return both(attend, d_out, [query, key, value, bias])

    specs = [spec, of_keys, of_keys, P(), spec]
    found = jax.device_get(jax.jit(run)(*on(mesh, arrays, specs)))
    chex.assert_trees_all_close(found, jax.device_get(jax.jit(run)(*arrays)), atol=1e-5)


def test_refusals_and_the_plan() -> None:
    *floats, _ = draw()
    with pytest.raises(ValueError, match=re.escape("bias has shape (3, 2, 1, 11) but query")):
        attend(*floats[:3], jnp.zeros((U, 2, 1, S)))
    pages, table = [jnp.ones((4, 16, K, H))] * 2, jnp.zeros((U, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="do not go together"):
        attend(floats[0], *pages, jnp.ones((U, 1, 1, 16)), page_table=table)
    half = [jnp.zeros((*x.shape[:3], 64), jnp.bfloat16) for x in floats[:3]]
    (plan,) = ikbo.explain(attend, *half, floats[3]).plans
    assert plan.sizes.endswith("bfloat16 bias")
    assert "a bias runs in XLA" in plan.cuda.reason
