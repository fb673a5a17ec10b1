"""The HSTU layer against its formula in NumPy's f64, its cached prefix, and Flax's interfaces."""

import functools
from typing import Any

import complex_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from problems_masks import sees
from sharded_calls import close
from test_norm_linear import ACTS, normed

import ikbo_jax as ikbo
from ikbo_jax.layers import HstuCache, hstu_layer, linen, nnx
from ikbo_jax.layers.hstu import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("on_cpu")

F, N = 5, 2
LENGTHS, TARGETS = (6, 0, 9), (2, 0, 3)
CU = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32)
TOTAL, LONGEST = sum(LENGTHS), max(LENGTHS)


def shapes(d: int, h: int, parts: int, normed: int | None) -> dict[str, tuple[int, ...]]:
    columns = 2 * N * (h + d)
    return {"uvqk_weight": (F, columns), "output_weight": (parts * N * h, F)} | (
        {} if normed is None else {
            "uvqk_beta": (columns,), "input_norm_weight": (F,), "input_norm_bias": (F,),
            "output_norm_weight": (normed,), "output_norm_bias": (normed,),
        }
    )  # fmt: skip


def norm(x: np.ndarray, weight: Any, bias: Any) -> np.ndarray:
    return normed("layer", x, 1e-6) * weight + bias


def formula(d, h, activations, group_norm, mask, **p) -> np.ndarray:
    """The layer as it is published, sequence by sequence."""
    x, ends = p["x"], np.cumsum(LENGTHS)
    rows = norm(x, p.get("input_norm_weight", 1), p.get("input_norm_bias", 0))
    uvqk = rows @ p["uvqk_weight"] + p.get("uvqk_beta", 0)
    groups = np.split(uvqk, [N * h, 2 * N * h, N * (2 * h + d)], axis=1)
    u, v, q, k = (
        ACTS[name](z).reshape(TOTAL, N, -1) for z, name in zip(groups, activations, strict=True)
    )
    a = np.zeros_like(v)
    for end, length, targets in zip(ends, LENGTHS, TARGETS, strict=True):
        part = slice(end - length, end)
        seen = sees(length, length, targets=targets, **mask)
        scores = ACTS["silu"](np.einsum("inh,jnh->nij", q[part], k[part]) / np.sqrt(d)) * seen
        a[part] = np.einsum("nij,jnh->inh", scores, v[part]) / LONGEST
    weight, bias = (p.get(f"output_norm_{w}", c) for w, c in (("weight", 1), ("bias", 0)))
    if group_norm:
        normed = norm(a, *(np.reshape(y, (-1, 1)) for y in (weight, bias)))
    else:
        normed = norm(a.reshape(TOTAL, -1), weight, bias).reshape(a.shape)
    both = [y.reshape(TOTAL, -1) for y in (u, a, u * normed)]
    both = both if len(p["output_weight"]) == 3 * N * h else both[2:]
    return x + np.concatenate(both, axis=1) @ p["output_weight"]


def mask_of(**options: Any) -> Any:
    return ikbo.masks.hstu(jnp.asarray(TARGETS, jnp.int32), **options)


CASES = {
    "meta": (3, 3, ACTIVATIONS, False, True, {"contextual": 2}, ("norm",)),
    "group_norm_wide_values": (2, 4, ACTIVATIONS, True, True, {"window": 2}, ()),
    "paper_wide_keys": (4, 2, ("silu",) * 4, False, False, {"window": 3, "full_tail": 2},
                        ("norm", "projection")),
}  # fmt: skip


def problem(name: str) -> tuple[Any, Any, dict[str, jax.Array]]:
    """The formula and the layer as functions of named arrays, and these in f32."""
    d, h, activations, group_norm, concat, mask, recompute = CASES[name]
    normed = None if name.startswith("paper") else N if group_norm else N * h
    rng = np.random.default_rng(0)
    named = {"x": (TOTAL, F), **shapes(d, h, 3 if concat else 1, normed)}
    held = {key: jnp.asarray(rng.normal(size=s), jnp.float32) for key, s in named.items()}

    def layer(p: dict[str, jax.Array], **options: Any) -> Any:
        params = {key: value for key, value in p.items() if key != "x"}
        return hstu_layer(params, p["x"], CU, **{
            "num_heads": N, "mask": mask_of(**mask), "max_seqlen": LONGEST, "concat": concat,
            "group_norm": group_norm, "activations": activations, "recompute": recompute, **options,
        })  # fmt: skip

    return functools.partial(formula, d, h, activations, group_norm, mask), layer, held


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_formula_s(name: str) -> None:
    expected, layer, held = problem(name)
    exact = {key: np.asarray(x, np.float64) for key, x in held.items()}
    d_out = np.random.default_rng(1).normal(size=(TOTAL, F))

    @jax.jit
    def run(held: Any) -> Any:
        out, pull_back = jax.vjp(layer, held)
        return out, pull_back(jnp.asarray(d_out, jnp.float32))[0]

    out, gradients = run(held)
    np.testing.assert_allclose(out, expected(**exact), rtol=1e-5, atol=1e-5)
    of_formula = complex_step.gradients(lambda **p: np.sum(expected(**p) * d_out), exact)
    for key, gradient in of_formula.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(gradients[key] / largest, gradient / largest, atol=5e-5)


def kept_residuals(layer: Any, held: Any) -> int:
    """Numbers that the gradient keeps besides its arguments."""
    _, pull_back = jax.eval_shape(lambda p: jax.vjp(layer, p), held)
    arguments = sum(x.size for x in jax.tree.leaves(held))
    return sum(x.size for x in jax.tree.leaves(pull_back)) - arguments


def test_recomputing_keeps_the_result_of_attention_alone() -> None:
    _, layer, held = problem("meta")
    every = [
        kept_residuals(functools.partial(layer, recompute=names), held)
        for names in ((), ("norm",), ("projection",), ("norm", "projection"))
    ]
    assert (every[0], every[2]) == (every[1], every[3])
    # With the projection, the gradient keeps u, v, q and k, and u before its activation.
    assert every[0] - every[2] >= 5 * TOTAL * N * 3


def test_a_cached_prefix_continues_as_the_whole() -> None:
    """Prefill of the history, then targets as queries; each sequence has other numbers of rows."""
    _, layer, held = problem("group_norm_wide_values")
    prefixes, ends = np.subtract(LENGTHS, TARGETS), np.cumsum(LENGTHS)
    is_prefix = np.concatenate([
        np.arange(length) < prefix for length, prefix in zip(LENGTHS, prefixes, strict=True)
    ])  # fmt: skip
    cu_prefix, cu_delta = (
        jnp.asarray(np.cumsum([0, *lengths]), jnp.int32) for lengths in (prefixes, TARGETS)
    )

    def part(rows: Any, cu: Any, **options: Any) -> Any:
        params = {key: x for key, x in held.items() if key != "x"}
        common = {"num_heads": N, "max_seqlen": LONGEST, "group_norm": True, "return_cache": True}
        return hstu_layer(params, rows, cu, **common, **options)

    def run(x: jax.Array) -> Any:
        whole, seen = layer({**held, "x": x}, return_cache=True)
        of_history = ikbo.masks.hstu(window=2)
        head, cache = part(x[is_prefix], cu_prefix, mask=of_history)
        options = {"mask": mask_of(window=2), "cache": cache}
        tail, appended = part(x[~is_prefix], cu_delta, **options)
        return whole, seen, head, tail, appended

    def losses(x: jax.Array) -> tuple[jax.Array, Any]:
        found = run(x)
        whole, head, tail = (jnp.sum(jnp.sin(found[i])) for i in (0, 2, 3))
        return jnp.stack([whole, head + tail]), found

    step = jax.jit(jax.jacrev(losses, has_aux=True))
    gradients, (whole, seen, head, tail, appended) = step(held["x"])
    of_whole, of_parts = gradients / jnp.max(jnp.abs(gradients))
    close(of_parts, of_whole, 2e-5)
    assert isinstance(appended, HstuCache)
    close((head, tail), (whole[is_prefix], whole[~is_prefix]), 1e-5)
    close(appended, seen, 1e-5)
    assert ends[-1] == appended.cu_seqlens[-1]


def test_dropout_needs_a_key_and_is_the_same_in_every_call() -> None:
    _, layer, held = problem("meta")

    @jax.jit
    def run(held: Any) -> Any:
        dropped = functools.partial(layer, held, dropout_rate=0.5, recompute=())
        keys = [None, jax.random.key(1), jax.random.key(1), jax.random.key(2)]
        return layer(held), *(dropped(dropout_key=key) for key in keys)

    plain, no_key, one, same, other = run(held)
    np.testing.assert_array_equal(plain, no_key)
    np.testing.assert_array_equal(one, same)
    assert (np.asarray(one) != np.asarray(other)).all(1).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {"hidden_dim": 4, "concat": False, "group_norm": True}])
def test_nnx_and_linen_have_meta_s_parameters(options: dict[str, Any]) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(TOTAL, F)), jnp.float32)
    layer = nnx.HSTU(F, N, 3, **options, rngs=flax_nnx.Rngs(0))
    module = linen.HSTU(num_heads=N, attention_dim=3, **options)
    params = flax_nnx.to_pure_dict(flax_nnx.state(layer, flax_nnx.Param))
    init = functools.partial(module.init, max_seqlen=LONGEST)
    made = jax.eval_shape(init, jax.random.key(0), x, CU)["params"]
    h, parts = options.get("hidden_dim", 3), 3 if options.get("concat", True) else 1
    normed = N if options.get("group_norm") else N * h
    assert jax.tree.map(jnp.shape, params) == shapes(3, h, parts, normed)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)
    np.testing.assert_array_equal(params["output_norm_weight"], 1)
    np.testing.assert_array_equal(params["uvqk_beta"], 0)

    @jax.jit
    def run(params: Any, x: jax.Array) -> Any:
        call = {"mask": mask_of(contextual=1), "max_seqlen": LONGEST}
        others = {key: value for key, value in options.items() if key != "hidden_dim"}
        return (
            hstu_layer(params, x, CU, num_heads=N, **others, **call),
            layer(x, CU, **call),
            module.apply({"params": params}, x, CU, **call),
        )

    expected, of_nnx, of_linen = run(params, x)
    close((of_nnx, of_linen), (expected, expected), 1e-6)
    with flax_nnx.use_eager_sharding(False):
        init = flax_nnx.with_partitioning(flax_nnx.initializers.lecun_normal(), ("a", "b"))
        named = nnx.HSTU(F, N, 3, kernel_init=init, rngs=flax_nnx.Rngs(0))
    for key, names in (("uvqk_weight", ("a", "b")), ("uvqk_beta", ("b",)),
                       ("output_norm_bias", ("a",))):  # fmt: skip
        assert getattr(named, key).get_metadata("out_sharding") == names


def test_the_layer_is_three_ops() -> None:
    layer = nnx.HSTU(F, N, 3, dtype=jnp.bfloat16, rngs=flax_nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((TOTAL, F), jnp.float32)
    plans = ikbo.explain(lambda x: layer(x, CU, max_seqlen=LONGEST), x).plans
    assert [plan.op for plan in plans] == ["norm_linear", "gdpa", "gated_linear"]
    assert {plan.problem.dtype for plan in plans} == {"bfloat16"}
    assert plans[1].problem.mask == "causal"


def test_wrong_arguments_are_named_with_both_values() -> None:
    _, layer, held = problem("meta")
    without = {key: x for key, x in held.items() if key != "uvqk_weight"}
    head, offsets = jnp.ones((4, N, 3)), jnp.asarray([0, 2, 4, 4], jnp.int32)

    rounded = head.astype("bfloat16")
    for cache, message in (
        (HstuCache(head, head, offsets[:2]), "cache.cu_seqlens has batch=1 but cu_seqlens h"),
        (HstuCache(head, head[:3], offsets), "cache.key has total=4 but cache.value has total"),
        (HstuCache(head[:, :1], head, offsets), r"cache.key is float32\[4, 1, 3\] but the laye"),
        (HstuCache(head, rounded, offsets), r"cache.value is bfloat16\[4, 2, "),
        (HstuCache(None, head, offsets), r"cache.key must be an array of shape \[total, N, H"),
        ((head, head, offsets), "cache must be an HstuCache, but is a tu"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(held, cache=cache)
    for call, message in (
        (lambda: layer(held, return_cache="no"), "return_cache must be a bool known while tracing"),
        (lambda: layer(held | {"uvqk_bias": head}), "HSTU takes no parameter 'uvqk_bias'; known:"),
        (lambda: hstu_layer(None, head, CU, num_heads=N), "params must be a mapping from names to"),
        (lambda: layer(held, activations="silu"), "activations must be a sequence with an entry a"),
        (lambda: layer(held, num_heads=5), "output_weight has 18 rows and uvqk_weight has 24 col"),
        (lambda: layer(held, concat=False), "uvqk_weight has 24 columns, but with num_heads=2 and"),
        (lambda: layer(held, group_norm=True), r"output_norm_weight has shape \(6,\) but group_no"),
        (lambda: layer(held, num_heads=0), "num_heads of HSTU must be an integer of at least 1"),
        (lambda: layer(held, max_seqlen=None), "needs max_seqlen or output_scale, but both"),
        (lambda: layer(held, max_seqlen=2.0), "max_seqlen must be an integer of at least 0, known"),
        (lambda: layer(held, recompute=("gate",)), "recompute has the unknown name 'gate'"),
        (lambda: layer(without), "HSTU has no parameter 'uvqk_weight', only"),
        (lambda: layer(held | {"x": held["x"][:, :2]}), "HSTU expects features=5, but x has shape"),
        (lambda: layer(held | {"uvqk_beta": held["uvqk_beta"][:4]}), "uvqk_weight has C=24 but"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="hidden_dim of HSTU must be an integer of at least 1"):
        nnx.HSTU(F, N, 3, 0, rngs=flax_nnx.Rngs(0))
