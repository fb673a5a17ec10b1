"""What JAX traces after a call: settings hold for it, forward mode says what works."""

import concurrent.futures
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_array
from sharded_calls import KINDS, LAYOUTS, drawn, floats, mesh_of, on

import ikbo_jax as ikbo
from ikbo_jax.ops import sharded


def high(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op as a layer with precision="highest" calls it."""

    def called(*arrays: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return op(*arrays)

    return called


def divided(kind: str | None, name: str) -> tuple[Callable[..., Any], list[Any]]:
    """An op in `high`, and its arrays, on a mesh of two devices if `kind` is not None."""
    op, arrays = drawn(name)
    specs = LAYOUTS[name] if kind else [None] * len(arrays)
    return high(op), on(mesh_of("2", kind) if kind else None, arrays, specs)


def check(fn: Callable[..., Any], arrays: list[Any], kind: str | None) -> None:
    """All products of a program have the highest precision.

    On Auto axes, XLA asks for the op's part while it compiles.
    """
    lowered = jax.jit(fn).lower(*arrays)
    if kind == "auto":
        check_compiled(lowered.compile().as_text())
    else:
        products = [x for x in lowered.as_text().splitlines() if "dot_general" in x]
        assert products
        assert not [x for x in products if "precision = [HIGHEST, HIGHEST]" not in x]


def check_compiled(text: str) -> None:
    products = [x for x in text.splitlines() if re.search(r" dot\(", x)]
    assert products
    assert not [x for x in products if "operand_precision={highest,highest}" not in x]


def slopes(op: Callable[..., Any], arrays: list[Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), floats(arrays))


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_have_the_precision_of_the_call(name: str, kind: str | None) -> None:
    """The result, and gradients of the call and of the jitted call."""
    op, arrays = divided(kind, name)
    check(op, arrays, kind)
    check(slopes(op, arrays), arrays, kind)
    check(slopes(jax.jit(op), arrays), arrays, kind)


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_have_the_default_precision(name: str) -> None:
    op, arrays = drawn(name)
    text = jax.jit(op).lower(*arrays).as_text()
    precisions = re.findall(r"dot_general .*precision = \[(\w+, \w+)\]", text)
    assert set(precisions) == {"DEFAULT, DEFAULT"}


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", ["linear", "jagged"])
def test_products_of_second_derivatives(name: str, kind: str | None) -> None:
    op, arrays = divided(kind, name)

    def bent(*arrays: Any) -> Any:
        return sum(jnp.sum(jnp.cos(x)) for x in slopes(op, list(arrays))(*arrays))

    check(jax.grad(bent, floats(arrays)), arrays, kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_products_of_vmap_after_the_call_was_traced(kind: str | None) -> None:
    op, arrays = divided(kind, "grouped_heads")
    arrays[1] = jnp.stack([arrays[1]] * 2)
    check(jax.vmap(jax.jit(op), (None, 0, None, None)), arrays, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_another_thread(kind: str) -> None:
    op, arrays = divided(kind, "linear")
    lowered = jax.jit(op).lower(*arrays)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        check_compiled(threads.submit(lowered.compile).result().as_text())


def test_reports_collected_side_by_side() -> None:
    """As two threads do that explain two functions: empty reports are equal, but not the same."""
    first, second = sharded.reports(), sharded.reports()
    of_first, of_second = first.__enter__(), second.__enter__()
    second.__exit__(None, None, None)
    sharded.report("call", "plan")
    assert (of_first, of_second) == ({"call": "plan"}, {})
    first.__exit__(None, None, None)


INDEX = jnp.asarray([1, 0, 1], jnp.int32)


def array(*shape: int) -> jax.Array:
    return random_array(np.random.default_rng(len(shape)), shape, jnp.float32)


def attention(x: jax.Array) -> jax.Array:
    key, value = x[3:].reshape(2, 2, 5, 1, 4)
    lengths = jnp.asarray([5, 2], jnp.int32)
    out, lse = ikbo.attention(
        x[:3, None], key, value, INDEX, key_value_seq_lengths=lengths, return_residuals=True
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


def gdpa(x: jax.Array) -> jax.Array:
    q_offsets, kv_offsets = (jnp.asarray(n, jnp.int32) for n in ([0, 1, 3], [0, 4, 6]))
    options = {"activation": "gelu", "output_scale": 1 + x[0, 0, :2] / 8}
    out = ikbo.gdpa(x[:3], x[3:9], x[9:], q_offsets, kv_offsets, **options)
    return jnp.sum(jnp.sin(out))


def linear_compression(x: jax.Array) -> jax.Array:
    w_cand, w_user = x[5].T.reshape(2, 2, 3)
    return jnp.sum(jnp.sin(ikbo.linear_compression(w_cand, w_user, x[:3], x[3:5], INDEX)))


def multilevel_linear_compression(x: jax.Array) -> jax.Array:
    w_cand, w_user = x[5].T.reshape(2, 2, 3)
    terms = [ikbo.Term(w_user, x[3:5]), ikbo.Term(w_cand, x[:3], INDEX)]
    return jnp.sum(jnp.sin(ikbo.multilevel_linear_compression(terms)))


#: Functions of one array, of which all arrays of an op are made, and its shape.
OPS = {
    attention: (13, 2, 4),
    gdpa: (15, 1, 4),
    linear_compression: (6, 3, 4),
    multilevel_linear_compression: (6, 3, 4),
}


def jvp(fn: Callable) -> Callable:
    return lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),))


def in_scan(fn: Callable) -> Callable:
    return lambda x: jax.lax.scan(lambda sum_, _: (sum_ + fn(x), None), 0.0, None, length=2)[0]


FORWARD = {
    "jvp": jvp,
    "jit of jvp": lambda fn: jax.jit(jvp(fn)),
    "jvp of jit": lambda fn: jvp(jax.jit(fn)),
    "jvp in a scan": lambda fn: jvp(in_scan(fn)),
    "jvp of checkpoint": lambda fn: jvp(jax.checkpoint(fn)),
    "vmap of jvp": lambda fn: lambda x: jax.vmap(jvp(fn))(x[None]),
    "jvp of vmap": lambda fn: lambda x: jvp(jax.vmap(fn))(x[None]),
    "gradient of jvp": lambda fn: jax.grad(lambda x: jvp(fn)(x)[1]),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "jit of hessian": lambda fn: jax.jit(jax.hessian(fn)),
    "linearize": lambda fn: lambda x: jax.linearize(fn, x)[1](x),
    "linearize of jit": lambda fn: lambda x: jax.linearize(jax.jit(fn), x)[1](x),
}


@pytest.mark.parametrize("forward", FORWARD)
@pytest.mark.parametrize("fn", OPS, ids=lambda fn: fn.__name__)
def test_forward_mode_names_the_op_and_what_works(fn: Callable, forward: str) -> None:
    words = f"^{fn.__name__} has no forward-mode derivative.*reverse mode works .jax.grad"
    with pytest.raises(NotImplementedError, match=words) as error:
        FORWARD[forward](fn)(array(*OPS[fn]))
    assert "jax.jacrev(jax.grad(f))" in str(error.value)


@functools.cache
def gradient_of(fn: Callable) -> Callable:
    """The jitted gradient, one function for all tests of an op."""
    return jax.jit(jax.grad(fn))


def look_up(x: jax.Array) -> jax.Array:
    return jnp.sum(ikbo.segment_sum(jnp.sin(ikbo.look_up(x, INDEX)), INDEX, 2) ** 2)


SECOND = OPS | {look_up: (2, 3)}
SEEDS = {"q_to_kv": INDEX, "activation": ("silu", "softmax"), "broadcast_q": True}
TO_ITSELF = np.asarray([0, 2, 5], np.int32), np.asarray([0, 2, 5], np.int32)
SELF = {"activation": ("silu", "softmax"), "scale": 0.5}
MASK = ikbo.masks.hstu(np.asarray([1, 0], np.int32), contextual=1)
NORMED = {"activations": ["silu"], "eps": 0.1}
#: Functions of several arrays, and their shapes.
SEVERAL: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "gdpa_of_seeds": (
        lambda q, k, v: ikbo.gdpa(q, k, v, None, TO_ITSELF[1], **SEEDS),
        [(2, 2, 3), (5, 1, 3), (5, 1, 3)],
    ),
    "gdpa_capped": (
        lambda *x: ikbo.gdpa(*x, *TO_ITSELF, logit_cap=0.6, **SELF),
        [(5, 2, 3), (5, 1, 3), (5, 1, 3)],
    ),
    "gdpa_masked": (
        lambda *x: ikbo.gdpa(*x, *TO_ITSELF, mask=MASK, **SELF),
        [(5, 2, 3), (5, 1, 3), (5, 1, 3)],
    ),
    "padded_weights": (
        lambda w_cand, w_user, e_cand, e_user: ikbo.linear_compression(
            ikbo.pad_weight(w_cand), ikbo.pad_weight(w_user), e_cand, e_user, INDEX
        ),
        [(2, 3), (2, 2), (3, 3, 2), (2, 2, 2)],
    ),
    "norm_linear": (
        lambda x, w, b, scale: ikbo.norm_linear(x, [w], [b], norm_scale=scale, **NORMED),
        [(3, 4), (4, 2, 2), (2, 2), (4,)],
    ),
    "norm_linear_recomputed": (
        lambda x, w, b, bias: ikbo.norm_linear(
            x, [w], [b], norm_bias=bias, recompute=("norm", "projection"), **NORMED
        ),
        [(3, 4), (4, 2, 2), (2, 2), (4,)],
    ),
    "gated_linear": (
        lambda u, a, w, residual, scale: ikbo.gated_linear(
            u, a, w, residual, norm_scale=scale, by_head=True, concat=True, eps=1.0
        ),
        [(2, 2, 3), (2, 2, 3), (18, 2), (2, 2), (2,)],
    ),
}


def of_one_array(name: str) -> tuple[Callable, tuple[int, ...]]:
    """One of `SEVERAL` as a function of one array, and its shape."""
    run, shapes = SEVERAL[name]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def fn(x: jax.Array) -> jax.Array:
        arrays = (y.reshape(s) for y, s in zip(jnp.split(x, ends[:-1]), shapes, strict=True))
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(run(*arrays)))

    return fn, (int(ends[-1]),)


@pytest.mark.parametrize("case", [*SECOND, *SEVERAL], ids=lambda x: getattr(x, "__name__", x))
def test_second_derivatives_by_reverse_mode(case: Callable | str) -> None:
    """Also of derivatives that `vmap` maps, as `jax.jacrev` does."""
    fn, shape = of_one_array(case) if isinstance(case, str) else (case, SECOND[case])
    x = array(*shape)
    both = jax.jit(lambda x: [jax.jacrev(first(fn))(x) for first in (jax.grad, jax.jacrev)])(x)
    hessian, mapped = (y.reshape(x.size, x.size) for y in both)
    np.testing.assert_allclose(hessian, mapped, atol=1e-4)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-4)
    step = 2e-3 * array(x.size).reshape(x.shape)
    difference = (gradient_of(fn)(x + step) - gradient_of(fn)(x - step)) / 2
    np.testing.assert_allclose(hessian @ step.ravel(), difference.ravel(), atol=1e-5)


@pytest.mark.parametrize("fn", [gdpa, linear_compression, look_up], ids=lambda fn: fn.__name__)
def test_no_gradient_on_a_gpu_is_added_up_in_any_order(fn: Callable) -> None:
    """As XLA's scatters of floats there are; nor is a second derivative."""

    def bent(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(jax.grad(fn)(x)))

    def scatters_of_floats(differentiated: Callable) -> list[str]:
        traced = jax.jit(jax.value_and_grad(differentiated)).trace(array(*SECOND[fn]))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        scatters = re.findall(r'"stablehlo.scatter".*?stablehlo.return', text, re.DOTALL)
        return [x for x in scatters if re.search(r"stablehlo.add .*: tensor<f32>", x)]

    assert not scatters_of_floats(bent)
    # XLA's own gradient of rows that are looked up.
    assert scatters_of_floats(lambda x: jnp.sum(jnp.cos(x.ravel()[jnp.array([0, 0, 1])])))


REVERSE = {
    "jit": jax.jit,
    "scan": lambda fn: lambda x: in_scan(fn)(x) / 2,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda fn: jax.jit(jax.checkpoint(fn)),
    "vmap": lambda fn: lambda x: jax.vmap(fn)(x[None])[0],
}


@pytest.mark.parametrize("fn", [attention, gdpa, linear_compression], ids=lambda fn: fn.__name__)
def test_reverse_mode_is_the_same_under_transformations(fn: Callable) -> None:
    """All of them in one program."""
    x = array(*OPS[fn])
    gradients = {name: jax.grad(transform(fn)) for name, transform in REVERSE.items()}
    found = jax.jit(lambda x: {name: gradient(x) for name, gradient in gradients.items()})(x)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, gradient_of(fn)(x), atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_program_with_constants_runs_without_jit() -> None:
    rows, offsets = array(9, 1, 4), jnp.asarray([0, 4, 9], jnp.int32)
    run = functools.partial(ikbo.gdpa, rows, rows, rows, offsets, offsets, activation="softmax")
    with jax.disable_jit():
        found = run()
    np.testing.assert_allclose(found, run(), atol=1e-5)


def test_forward_mode_by_arrays_that_a_custom_vjp_does_not_take_works() -> None:
    query, key, own = array(3, 1, 1, 4), array(2, 5, 1, 4), array(3, 2, 1, 4)

    def of_own(own: jax.Array) -> jax.Array:
        out = ikbo.attention(query, key, key, INDEX, self_key=own, self_value=own)
        assert isinstance(out, jax.Array)
        return jnp.sum(jnp.sin(out))

    expected = jnp.sum(jax.grad(of_own)(own))
    np.testing.assert_allclose(jvp(of_own)(own)[1], expected, atol=1e-5)
    constant = array(*OPS[attention])
    np.testing.assert_allclose(jvp(lambda x: attention(constant) + x)(1.0)[1], 1.0)


@pytest.mark.parametrize(("activation", "wrap"), [("gelu", lambda fn: fn), ("softmax", jax.jit)])
def test_gdpa_refuses_a_third_derivative(activation: str, wrap) -> None:
    offsets = jnp.asarray([0, 2, 3], jnp.int32)

    def once(rows):
        out = ikbo.gdpa(rows, rows, rows, offsets, offsets, activation=activation, scale=0.1)
        return jnp.sum(jnp.sin(out))

    def thrice(rows):
        return jnp.sum(jnp.sin(jax.grad(lambda rows: jnp.sum(jnp.sin(jax.grad(once)(rows))))(rows)))

    with pytest.raises(NotImplementedError, match="gdpa has no third derivative"):
        wrap(jax.grad(thrice))(jnp.ones((3, 1, 4)))
