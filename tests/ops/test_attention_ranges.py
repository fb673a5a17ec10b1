"""`attention` with a range of keys for every candidate, and with a cap of its scores."""

import functools
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
from ikbo_jax.problems import AttentionConfig, FewQueriesConfig
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped

pytestmark = pytest.mark.slow

B, U, T, S, N, K, H = 8, 3, 2, 11, 4, 2, 8
SCALE = H**-0.5
#: All keys; some; none, in three ways; beyond the user's length; out of bounds.
RANGES = np.asarray(
    [[0, 11], [2, 7], [5, 5], [6, 3], [9, 11], [-4, 5], [3, 2**31 - 1], [12, 15]], np.int32
)
INDEX = np.asarray([2, 0, 1, 0, 1, 1, 0, 2], np.int32)
LENGTHS = np.asarray([11, 8, 6], np.int32)


def draw(dtype: str = "float32", seed: int = 0, own: int = 0) -> list[jax.Array]:
    """Query, key and value; keys and values of `own` tokens; cotangents of out and lse."""
    rng = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (U, S, K, H), (U, S, K, H), *[(B, own, K, H)] * (2 * (own > 0))]
    found = [problems.random_array(rng, shape, dtype) for shape in shapes]
    return [*found, problems.random_array(rng, (B, T, N, H), "float32")]


def attend(query: Any, key: Any, value: Any, *own: Any, **options: Any) -> tuple:
    tokens = dict(zip(("self_key", "self_value"), own, strict=False))
    options = {"key_value_ranges": RANGES, "key_value_seq_lengths": LENGTHS, **tokens, **options}
    return ikbo.attention(query, key, value, INDEX, return_residuals=True, **options)


def exactly(query: Any, key: Any, value: Any, *own: Any, logit_cap: float | None = None) -> tuple:
    """The same in NumPy's f64, one row after another."""
    query, key, value, *own = (np.asarray(x).astype(np.float64) for x in (query, key, value, *own))
    out, lse = np.zeros(query.shape), np.full(query.shape[:3], -np.inf)
    for b, t, n in np.ndindex(lse.shape):
        user, head = INDEX[b], n // (N // K)
        begin, end = max(RANGES[b, 0], 0), min(RANGES[b, 1], LENGTHS[user])
        seen = slice(begin, max(begin, end))
        keys, values = key[user, seen, head], value[user, seen, head]
        if own:
            keys, values = (
                np.append(keys, own[0][b, :, head], 0),
                np.append(values, own[1][b, :, head], 0),
            )
        if len(keys):
            scores = SCALE * keys @ query[b, t, n]
            if logit_cap:
                scores = logit_cap * np.tanh(scores / logit_cap)
            lse[b, t, n] = np.logaddexp.reduce(scores)
            out[b, t, n] = np.exp(scores - lse[b, t, n]) @ values
    return out, lse


def loss(run: Any, d_out: Any, *floats: Any) -> Any:
    out, lse = run(*floats)
    return jnp.sum(out.astype(jnp.float32) * d_out) + jnp.sum(jnp.where(lse > -99, lse, 0.0))


def gradients(run: Any, d_out: Any, floats: list[Any]) -> tuple:
    return jax.grad(functools.partial(loss, run, d_out), tuple(range(len(floats))))(*floats)


def oracle(*floats: Any, logit_cap: float | None = None) -> tuple:
    own = dict(zip(("self_key", "self_value"), floats[3:], strict=False))
    options = {"scale": SCALE, "ranges": jnp.asarray(RANGES), "logit_cap": logit_cap, **own}
    return reference.materialised(*floats[:3], *map(jnp.asarray, (INDEX, LENGTHS)), **options)


@pytest.mark.parametrize(
    ("own", "cap"),
    [(0, None), (2, None), (0, 0.4), (2, 0.4)],
    ids=["0", "2", "0-capped", "2-capped"],
)
def test_values_are_numpys_and_gradients_the_oracles(own: int, cap: float | None) -> None:
    *floats, d_out = draw(own=own)
    out, lse = exactly(*floats, logit_cap=cap)
    assert np.isneginf(lse).any() == (own == 0)
    runs = [functools.partial(run, logit_cap=cap) for run in (attend, oracle)]
    for run in runs:
        found = jax.jit(run)(*floats)
        np.testing.assert_allclose(found[0], out, atol=1e-5)
        np.testing.assert_allclose(found[1], lse, atol=1e-5)
    ours, theirs = jax.jit(lambda x: [gradients(f, d_out, x) for f in runs])(floats)
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)
    assert not np.asarray(ours[0])[2].any() or own


def test_gradients_are_differences_of_numpys() -> None:
    *floats, d_out = draw()
    found = jax.jit(lambda x: gradients(attend, d_out, x))(floats)
    rng, step = np.random.default_rng(1), 1e-6
    wide = [np.asarray(x, np.float64) for x in floats]
    for number, x in enumerate(wide):
        towards = rng.normal(size=x.shape)

        def moved(by: float, number: int = number, towards: Any = towards) -> float:
            out, lse = exactly(*wide[:number], wide[number] + by * towards, *wide[number + 1 :])
            return float(np.sum(out * np.asarray(d_out)) + np.sum(lse[lse > -99]))

        slope = (moved(step) - moved(-step)) / (2 * step)
        np.testing.assert_allclose(np.sum(np.asarray(found[number]) * towards), slope, rtol=1e-4)


@pytest.mark.parametrize(("keys", "cap"), [(4, None), (5, 0.4)], ids=["4", "5-capped"])
def test_chunks_of_keys(keys: int, cap: float | None) -> None:
    """The last chunk holds keys of the one before; groups are not full."""
    *floats, d_out = draw()
    blocks = attention_grouped.Blocking(group=2, groups=2, keys=keys)
    options: Any = {"scale": SCALE, "ranges": jnp.asarray(RANGES), "logit_cap": cap}
    options["blocks"] = blocks
    users = jnp.asarray(INDEX), jnp.asarray(LENGTHS)

    def pull_back(*x: Any) -> tuple:
        return attention_grouped.decomposed_vjp(*x, *users, d_out, None, **options)

    def run(*x: Any) -> tuple:
        return attention_grouped.decomposed(*x, *users, **options)

    (out, lse), ours = jax.jit(lambda x: (run(*x), pull_back(*x)))(floats)
    exact, exact_lse = exactly(*floats, logit_cap=cap)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
    _, pull = jax.vjp(lambda *x: oracle(*x, logit_cap=cap)[0], *floats)
    chex.assert_trees_all_close(ours, pull(d_out), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_within_the_error_rule(dtype: str) -> None:
    *floats, _ = draw(dtype)
    out, _ = attend(*floats)

    def plain(query: Any, key: Any, value: Any) -> jax.Array:
        key, value = (jnp.repeat(x[INDEX], N // K, axis=2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        place = np.arange(S)
        seen = (place >= RANGES[:, :1]) & (place < np.minimum(RANGES[:, 1:], LENGTHS[INDEX, None]))
        some = seen.any(1)[:, None, None, None]
        scores = jnp.where(seen[:, None, None] | ~some, scores * jnp.float32(SCALE), -jnp.inf)
        weights = jnp.where(some, jax.nn.softmax(scores), 0).astype(query.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    problems.assert_within_error_rule(out, exactly(*floats)[0], plain(*floats))


def test_rows_that_see_nothing_ignore_nan() -> None:
    *floats, d_out = draw()
    dead = np.asarray([2, 3, 7])
    floats[0] = floats[0].at[dead].set(jnp.nan)
    d_out = d_out.at[dead].set(jnp.nan)
    found = jax.jit(lambda x: (attend(*x)[0], gradients(lambda *y: attend(*y), d_out, x)))(floats)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    np.testing.assert_array_equal(found[0][dead], 0)


def test_vmap_of_ranges_and_of_everything() -> None:
    *floats, _ = draw()
    several = np.stack([RANGES, RANGES[::-1]])
    found, _ = jax.jit(jax.vmap(lambda x: attend(*floats, key_value_ranges=x)))(several)
    alone = [attend(*floats, key_value_ranges=x)[0] for x in several]
    chex.assert_trees_all_close(found, jnp.stack(alone), atol=1e-6)
    each = [draw(seed=seed)[:3] for seed in range(2)]
    every = [jnp.stack(x) for x in zip(*each, strict=True)]
    found, _ = jax.jit(jax.vmap(attend))(*every)
    chex.assert_trees_all_close(found, jnp.stack([attend(*x)[0] for x in each]), atol=1e-6)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_candidates_divide_over_devices(kind: str) -> None:
    *floats, d_out = draw()
    mesh = mesh_of("8", kind)

    def run(query: Any, key: Any, value: Any, ranges: Any, d_out: Any) -> tuple:
        ours = functools.partial(attend, key_value_ranges=ranges)
        return ours(query, key, value)[0], gradients(ours, d_out, [query, key, value])

    arrays = [*floats, RANGES, d_out]
    specs = [P("x"), P(), P(), P("x"), P("x")]
    found = jax.device_get(jax.jit(run)(*on(mesh, arrays, specs)))
    chex.assert_trees_all_close(found, jax.device_get(jax.jit(run)(*arrays)), atol=1e-5)


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


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (
            RANGES.astype(np.float32),
            "key_value_ranges must be an int32 array, but is float32[8, 2]",
        ),
        (RANGES[:7], "key_value_ranges has shape (7, 2) but query has B=8"),
        (RANGES[:, 0], "key_value_ranges has shape (8,) but query has B=8"),
    ],
)
def test_bad_ranges_are_refused(ranges: Any, message: str) -> None:
    *floats, _ = draw()
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(*floats, key_value_ranges=ranges)
