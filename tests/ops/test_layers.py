"""The layers against materialised twins, and NNX against Linen."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from problems import random_array
from refusals import ones
from sharded_calls import close

import ikbo_jax as ikbo
from ikbo_jax.layers import HstuCache, functional, hstu_layer, linen, nnx

pytestmark = pytest.mark.slow

B, U, T, S, HEADS, H = 7, 3, 2, 5, 2, 4
F_CAND, F_USER, SEEDS = 6, 8, 3
INDEX = jnp.asarray([2, 0, 2, 1, 2, 0, 2], jnp.int32)
LOOKED_UP = INDEX[:6].reshape(2, 3)
LENGTHS = (5, 0, 3)


def rows(*shape: int) -> jax.Array:
    return random_array(np.random.default_rng(sum(shape)), shape, jnp.float32)


def offsets(*lengths: int) -> jax.Array:
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def heads(x, weight):
    return jnp.einsum("...tf,fnh->...nth", x, weight)


def attended(p, query, memory, act):
    """Attention of [..., T, F] to [..., S, F], spelled out; keys past a length are 0."""
    scores = heads(query, p["w_query"]) @ jnp.swapaxes(heads(memory, p["w_key"]), -1, -2)
    out = act(scores * jnp.float32(H**-0.5)) @ heads(memory, p["w_value"])
    return jnp.einsum("...nth,nhf->...tf", out, p["w_out"])


def capped_softmax(scores):
    return jax.nn.softmax(0.5 * jnp.tanh(scores / 0.5))


def of_attention(p, x_cand, x_user):
    return attended(p, x_cand, x_user[INDEX], capped_softmax)


def of_pma(p, x):
    pooled = [
        attended(p, p["seeds"], x[begin:end], capped_softmax) if end > begin else None
        for begin, end in itertools.pairwise(np.cumsum([0, *LENGTHS]))
    ]
    return jnp.stack([jnp.zeros((SEEDS, F_USER)) if x is None else x for x in pooled])


def of_pffn(p, x, memory):
    def act(scores):
        return 0.5 * jax.nn.gelu(scores, approximate=False)

    out = attended(p, x.reshape(B, T, -1), memory.reshape(U, S, -1)[INDEX], act)
    return out.reshape(x.shape)


def of_compression(p, e_user, e_cand):
    """One dense layer over copied users."""
    weight = jnp.concatenate([p["w_user"], p["w_cand"]], axis=1)
    return weight @ jnp.concatenate([e_user[INDEX], e_cand], axis=1)


LAYERS = {
    "LinearCompression": (
        ((S, T, 9), {}),
        of_compression,
        (rows(U, S, F_USER), rows(B, T, F_USER), INDEX),
    ),
    "LookUp": (((7, 4), {}), lambda p: p["table"][LOOKED_UP], (LOOKED_UP,)),
    "CandidateAttention": (
        ((F_CAND, F_USER, HEADS, H), {"logit_cap": 0.5}),
        of_attention,
        (rows(B, T, F_CAND), rows(U, S, F_USER), INDEX),
    ),
    "PMA": (
        ((F_USER, SEEDS, HEADS, H), {"logit_cap": 0.5}),
        of_pma,
        (rows(sum(LENGTHS), F_USER), offsets(*LENGTHS)),
    ),
    "PFFN": (
        ((F_CAND, F_USER, HEADS, H), {"activation": "gelu", "output_scale": 0.5}),
        of_pffn,
        (rows(B * T, F_CAND), rows(U * S, F_USER), offsets(*[T] * B), offsets(*[S] * U), INDEX),
    ),
}


def made(name: str, flax: Any, **options: Any) -> Any:
    """One of `LAYERS`, of NNX or of Linen."""
    options = LAYERS[name][0][1] | options
    rngs = {"rngs": flax_nnx.Rngs(0)} if flax is nnx else {}
    return flax.__dict__[name](*LAYERS[name][0][0], **options, **rngs)


#: Largest errors of gradients and of results; twins of attention add in another order.
ERRORS = {"LinearCompression": (1e-4, 1e-5)}


@pytest.mark.parametrize("name", LAYERS)
def test_twin_gradients_and_both_flax_interfaces(name: str) -> None:
    _, twin, inputs = LAYERS[name]
    arrays = [x for x in inputs if x.dtype == jnp.float32]
    module = flax_nnx.eval_shape(lambda: made(name, nnx))
    graph, state = flax_nnx.split(module)
    rng = np.random.default_rng(1)
    # Near what they are initialised to, without a program for each.
    params = jax.tree.map(
        lambda x: np.asarray(random_array(rng, x.shape, x.dtype)) * np.float32(0.4),
        flax_nnx.to_pure_dict(state),
    )

    def of_nnx(p, *arrays):
        held = flax_nnx.state(module)
        flax_nnx.replace_by_pure_dict(held, p)
        return flax_nnx.merge(graph, held)(*arrays, *inputs[len(arrays) :])

    def with_gradients(fn):
        def loss(p, *arrays):
            out = fn(p, *arrays)
            return jnp.sum(jnp.sin(out)), out

        if name == "PFFN":  # Its gradient is held to its slope as a part of the ranking network.
            return lambda *args: (None, fn(*args))
        numbers = tuple(range(1 + len(arrays)))
        return jax.grad(loss, argnums=numbers, has_aux=True)

    layer = made(name, linen)
    of_linen = jax.eval_shape(layer.init, jax.random.key(0), *inputs)["params"]
    assert jax.tree.map(jnp.shape, of_linen) == jax.tree.map(jnp.shape, params)

    @jax.jit
    def every(params, *arrays):
        of_linen = layer.apply({"params": params}, *arrays, *inputs[len(arrays) :])
        return *(with_gradients(fn)(params, *arrays) for fn in (of_nnx, twin)), of_linen

    ours, expected, of_linen = every(params, *arrays)
    of_gradients, of_results = ERRORS.get(name, (2e-4, 2e-4))
    close(ours[0], expected[0], of_gradients)
    close(ours[1], expected[1], of_results)
    close(of_linen, ours[1], of_results)


def test_ranges_and_masks_hide_rows() -> None:
    """As lengths do; layers of both interfaces share the call."""
    lengths, begin = jnp.asarray([5, 2, 1], jnp.int32), jnp.zeros(B, jnp.int32)
    ranges = jnp.stack((begin, lengths[INDEX]), axis=1)
    end = jnp.full((SEEDS * U, 1), 2, jnp.int32)

    @jax.jit
    def every(of_attention, of_pma):
        attend, pool = (
            nnx.__dict__[name](*LAYERS[name][0][0], rngs=flax_nnx.Rngs(0))
            for name in ("CandidateAttention", "PMA")
        )
        return (
            attend(*of_attention, key_value_ranges=ranges),
            pool(*of_pma, mask=ikbo.masks.intervals(0 * end, end)),
            attend(*of_attention, key_value_seq_lengths=lengths),
            pool(*of_pma, max_seqlen=2),
        )

    *found, attended_of, pooled = every(LAYERS["CandidateAttention"][2], LAYERS["PMA"][2])
    close(found, [attended_of, pooled], 1e-5)


def test_a_fresh_layer_is_a_fresh_dense_layer() -> None:
    layer = nnx.LinearCompression(400, 600, 300, rngs=flax_nnx.Rngs(0))
    together = np.concatenate([layer.w_user[...], layer.w_cand[...]], axis=1)
    assert together.shape == (300, 1000)
    np.testing.assert_allclose(together.std(), 1000**-0.5, rtol=0.02)


def test_linen_draws_one_weight() -> None:
    layer = linen.LinearCompression(S, T, 4, kernel_init=flax_linen.initializers.orthogonal())
    variables = layer.init(jax.random.key(0), *LAYERS["LinearCompression"][2])
    together = jnp.concatenate([variables["params"][n] for n in ("w_user", "w_cand")], axis=1)
    np.testing.assert_allclose(together @ together.T, jnp.eye(4), atol=1e-5)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_dtypes(dtype, param_dtype: str) -> None:
    sizes, arrays = (S, T, 9), LAYERS["LinearCompression"][2]

    def run():
        layer = nnx.LinearCompression(
            *sizes, dtype=dtype, param_dtype=param_dtype, rngs=flax_nnx.Rngs(0)
        )
        twin = linen.LinearCompression(*sizes, dtype=dtype, param_dtype=param_dtype)
        out, variables = twin.init_with_output(jax.random.key(0), *arrays)
        return layer(*arrays), out, layer.w_user[...], variables["params"]["w_cand"]

    with jax.numpy_dtype_promotion("standard"):
        ours, out, w_user, w_cand = jax.eval_shape(run)
    assert ours.dtype == out.dtype == (dtype or jnp.float32)
    assert w_user.dtype == w_cand.dtype == param_dtype


def test_heads_are_initialised_as_one_matrix() -> None:

    @jax.jit
    def init():
        layer = nnx.PFFN(64, 128, 8, 16, rngs=flax_nnx.Rngs(0))
        return flax_nnx.to_pure_dict(flax_nnx.state(layer))

    params = init()
    for name, inputs in (("w_query", 64), ("w_key", 128), ("w_out", 128)):
        np.testing.assert_allclose(params[name].std(), inputs**-0.5, rtol=0.1)


def test_they_run_the_ops_in_their_dtype() -> None:
    sizes, _ = LAYERS["CandidateAttention"][0]
    x_cand, x_user, index = LAYERS["CandidateAttention"][2]
    lengths = jnp.asarray([5, 2, 1], jnp.int32)

    def run(x_cand, x_user, index, lengths):
        layer = nnx.CandidateAttention(*sizes, 9, dtype=jnp.bfloat16, rngs=flax_nnx.Rngs(0))
        return layer(x_cand, x_user, index, key_value_seq_lengths=lengths)

    assert jax.eval_shape(run, x_cand, x_user, index, lengths).shape == (B, T, 9)
    (plan,) = ikbo.explain(run, x_cand, x_user, index, lengths).plans
    assert (plan.op, plan.problem.dtype) == ("attention", "bfloat16")

    for name, op in (("LinearCompression", "linear_compression"), ("PMA", "gdpa")):
        layer = made(name, nnx, precision="highest")
        assert [plan.op for plan in ikbo.explain(layer, *LAYERS[name][2]).plans] == [op]
        assert "HIGHEST" in str(jax.make_jaxpr(lambda *x, layer=layer: layer(*x))(*LAYERS[name][2]))


#: The sizes by name that a Linen layer does not take from its inputs.
NOT_INFERRED = {
    "LinearCompression": {"features": 9},
    "CandidateAttention": {"num_heads": HEADS, "head_dim": H},
    "PMA": {"num_seeds": SEEDS, "num_heads": HEADS, "head_dim": H},
    "PFFN": {"num_heads": HEADS, "head_dim": H},
}


@pytest.mark.parametrize("name", NOT_INFERRED)
def test_linen_takes_the_widths_of_its_inputs(name: str) -> None:
    """All interfaces name a wrong width."""
    (sizes, options), _, inputs = LAYERS[name]
    layer = linen.__dict__[name](**NOT_INFERRED[name], **options)
    of_nnx, twin = made(name, nnx), made(name, linen)
    key = jax.random.key(0)
    variables = layer.init(key, *inputs)
    jax.tree.map(np.testing.assert_array_equal, variables, twin.init(key, *inputs))
    np.testing.assert_array_equal(layer.apply(variables, *inputs), twin.apply(variables, *inputs))
    is_compression = name == "LinearCompression"
    wide = jnp.concatenate([inputs[0]] * 2, axis=1 if is_compression else -1)
    words = rf"{name} expects \w*features={sizes[0]}, but x\w* has shape .*{2 * sizes[0]}\)"
    if is_compression:
        words = rf"{name} expects user_rows={S} .*but e_user has .*, {2 * S}, {F_USER}\)"
    of_linen = [functools.partial(x.apply, variables) for x in (layer, twin)]
    for call in (of_nnx, *of_linen):
        with pytest.raises(ValueError, match=words):
            call(wide, *inputs[1:])
        if is_compression:
            with pytest.raises(ValueError, match=rf"expects cand_rows={T} .*but e_cand has"):
                call(inputs[0], inputs[1][:, :1], INDEX)
    words = r"x\w* must have shape \[.*features\], but has"
    words = r"e_user must have shape \[U, user_rows, N\], but" if is_compression else words
    with pytest.raises(ValueError, match=f"{name}: {words}"):
        layer.init(key, inputs[0][0], *inputs[1:])


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("CandidateAttention", 2, rf"cand_to_user has shape \({B - 1},\) but x_cand has B={B}"),
        ("PMA", 1, r"cu_seqlens must have shape \[batch \+ 1\], but has shape \(0,\)"),
        ("PFFN", 3, r"cu_seqlens_memory must have shape \[batch_memory \+ 1\], but has"),
        ("PFFN", 4, rf"x_to_memory has shape \({B - 1},\) but cu_seqlens has batch={B}"),
    ],
)
def test_wrong_indices_have_the_names_of_the_layer(name: str, place: int, words: str) -> None:
    inputs, layer = LAYERS[name][2], made(name, nnx)
    wrong = [*inputs]
    wrong[place] = jnp.zeros(0, jnp.int32) if "must have" in words else inputs[place][:-1]
    with pytest.raises(ValueError, match=words):
        layer(*wrong)
    if place == 4:
        with pytest.raises(ValueError, match=rf"cu_seqlens has batch={B} .* pass x_to_memory, the"):
            layer(*inputs[:4])


#: The layers' options, and the names of the axes of every parameter if "a" and "b" are those of
#: the matrix.
HEADS_NAMES = {"w_query": ("a", "b", None), "w_key": ("a", "b", None), "w_value": ("a", "b", None)}
NAMES = {
    "LinearCompression": (
        {"user_rows": S, "cand_rows": T, "features": 9},
        {"w_user": ("b", "a"), "w_cand": ("b", "a")},
    ),
    "CandidateAttention": (
        {"cand_features": F_CAND, "user_features": F_USER, **NOT_INFERRED["CandidateAttention"]},
        {**HEADS_NAMES, "w_out": ("a", None, "b")},
    ),
    "PMA": (
        {"in_features": F_USER, **NOT_INFERRED["PMA"]},
        {**HEADS_NAMES, "w_out": ("a", None, "b"), "seeds": ("a", "b")},
    ),
    "PFFN": (
        {"features": F_CAND, "memory_features": F_USER, **NOT_INFERRED["PFFN"]},
        {**HEADS_NAMES, "w_out": ("a", None, "b")},
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_positive(name: str) -> None:
    """Both interfaces name the layer and the size."""
    sizes, _ = NAMES[name]
    for size, value in itertools.product(sizes, (0, -1, True, None)):
        wrong = sizes | {size: value}
        words = f"{size} of {name} must be an integer of at least 1.*is {value}"
        if value is not True and value is not None:
            with pytest.raises(ValueError, match=words):
                getattr(nnx, name)(**wrong, rngs=flax_nnx.Rngs(0))
        if value is not None or size in NOT_INFERRED[name]:
            layer = getattr(linen, name)(**wrong)
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(layer.init, jax.random.key(0), *LAYERS[name][2])


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_matrix_s_axes_reach_the_parameters(name: str) -> None:
    sizes, expected = NAMES[name]
    plain = flax_nnx.initializers.lecun_normal()
    named = flax_nnx.with_partitioning(plain, ("a", "b"))
    with flax_nnx.use_eager_sharding(False):  # there is no mesh
        layer = getattr(nnx, name)(**sizes, kernel_init=named, rngs=flax_nnx.Rngs(0))
    bare = getattr(nnx, name)(**sizes, kernel_init=plain, rngs=flax_nnx.Rngs(0))
    for param, names in expected.items():
        found = getattr(layer, param)
        assert found.get_metadata("out_sharding") == names
        np.testing.assert_array_equal(found[...], getattr(bare, param)[...])

    inputs = LAYERS[name][2]
    required = NOT_INFERRED[name]
    boxing = flax_linen.with_partitioning(plain, ("a", "b"))
    module = getattr(linen, name)(**required, kernel_init=boxing)
    variables = module.init(jax.random.key(0), *inputs)
    found = {param: box.names for param, box in variables["params"].items()}
    assert found == expected
    bare = getattr(linen, name)(**required, kernel_init=plain).init(jax.random.key(0), *inputs)
    jax.tree.map(np.testing.assert_array_equal, flax_linen.meta.unbox(variables), bare)
    np.testing.assert_array_equal(module.apply(variables, *inputs), module.apply(bare, *inputs))


def test_names_of_other_axes_and_lists_are_refused() -> None:
    init = flax_nnx.with_partitioning(flax_nnx.initializers.lecun_normal(), ("a", "b", "c"))
    with pytest.raises(ValueError, match=r"names the axes \('a', 'b', 'c'\), but .* have 2 axes"):
        nnx.PFFN(4, 6, 2, 4, kernel_init=init, rngs=flax_nnx.Rngs(0))
    layer = nnx.PFFN(4, 6, 2, 4, rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"PFFN: x must be an array of shape .*, but is a list"):
        layer([[1.0] * 4], jnp.ones((1, 6)), *[jnp.array([0, 1], jnp.int32)] * 2)
    params = {"w_user": [[1.0]], "w_cand": jnp.ones((1, 1))}
    with pytest.raises(ValueError, match=r"w_user must be an array of shape .*, but is a list"):
        functional.compress(params, *[jnp.ones((1, 1, 8))] * 2, INDEX[:1])


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("w_key", (8, 4, 4), "w_key has K=4 but w_value has K=2"),
        ("w_query", (6, 4, 4), "w_query has N=4 but w_out has N=2"),
        ("w_value", (7, 2, 4), "w_key has G=8 but w_value has G=7"),
        ("w_query", (6, 8), r"w_query must have shape \[F, N, H\], but has shape \(6, 8\)"),
        ("w_out", None, "no parameter 'w_out', only "),
    ],
)
def test_parameters_that_do_not_fit_are_named(name: str, shape, words: str) -> None:
    shapes = {"w_query": (6, 2, 4), "w_key": (8, 2, 4), "w_value": (8, 2, 4), "w_out": (2, 4, 6)}
    shapes = {key: x for key, x in {**shapes, name: shape}.items() if x is not None}
    params = {key: jnp.ones(x) for key, x in shapes.items()}
    rows, offsets = jnp.ones((3, 6)), jnp.array([0, 3], jnp.int32)
    with pytest.raises(ValueError, match=f"^CandidateAttention.*{words}"):
        functional.attend(params, rows[None], jnp.ones((1, 3, 8)), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=f"^PFFN.*{words}"):
        functional.pffn(params, rows, jnp.ones((3, 8)), offsets, offsets)
    with pytest.raises(ValueError, match=f"^PMA.*{words}"):
        functional.pma(params | {"seeds": jnp.ones((2, 6))}, jnp.ones((3, 8)), offsets)


def test_what_is_empty_has_a_result() -> None:
    """Lookups of nothing, attention without heads, and a cache of no sequences."""
    index = jnp.zeros(7, jnp.int32)
    for shape in ((0,), (2, 0)):
        rows = functional.look_up({"table": ones(5, 3)}, jnp.zeros(shape, jnp.int32))
        assert rows.shape == (*shape, 3)
    for options in ({}, {"is_causal": True}):
        arrays = ones(7, 2, 0, 8), ones(3, 5, 2, 8), ones(3, 5, 2, 8)
        out = ikbo.dot_product_attention(*arrays, cand_to_user=index, **options)
        assert out.shape == (7, 2, 0, 8)
    params = {"uvqk_weight": ones(6, 8), "output_weight": ones(6, 6)}
    offsets = jnp.zeros(1, jnp.int32)
    cache = HstuCache(ones(3, 1, 2), ones(3, 1, 2), offsets)
    options = {"num_heads": 1, "max_seqlen": 4, "cache": cache, "return_cache": True}
    out, seen = hstu_layer(params, ones(2, 6), offsets, **options)
    assert (out.shape, seen.key.shape) == ((2, 6), (5, 1, 2))
    np.testing.assert_array_equal(seen.cu_seqlens, [0])
