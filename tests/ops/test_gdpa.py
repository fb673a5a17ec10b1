"""`gdpa` on the XLA path: values and gradients in its three regimes, transformations, memory."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import problems_gdpa
import pytest
from problems_gdpa import OUTPUT_SCALE, SHAPES, Shape, attend, value_and_gradients

import ikbo_jax as ikbo
from ikbo_jax.ops import gdpa_backward
from ikbo_jax.pallas.flash import gdpa as gdpa_kernel
from ikbo_jax.reference import gdpa as gdpa_reference
from ikbo_jax.reference import gdpa_chunked
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = pytest.mark.slow

SMALL = Shape((3, 0, 6), (4, 2, 5), 4, 2, 8, before=1, after=3)
#: What the paths may differ by through the order of f32 sums alone.
ATOL = 1e-5


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("self_empty_and_padded", "float32"),
        ("pffn", "bfloat16"),
        ("pma_indexed", "float32"),
        ("pma_indexed", "float16"),
    ],
)
def test_value_and_gradients_are_within_the_error_rule(name: str, dtype: str) -> None:
    """Each key head belongs to heads of one activation; rows of no sequence are zero."""
    shape = SHAPES[name]
    arrays = problems_gdpa.make_arrays(shape, dtype)
    names = ("gelu_tanh",) * (shape.q_heads // 2) + ("softmax",) * (shape.q_heads // 2)
    settings = problems_gdpa.make_settings(shape, names)
    d_out = problems_gdpa.cotangent(arrays, settings)
    runs = [functools.partial(attend, activation=names)]
    exact = problems_gdpa.exactly(arrays, settings, d_out)
    if dtype != "float32":
        runs.append(lambda x: problems_gdpa.materialised(x, settings))
    found, *plain = jax.jit(lambda x: [value_and_gradients(run, x, d_out) for run in runs])(arrays)
    if dtype == "float32":
        chex.assert_trees_all_close(found, jax.tree.map(np.float32, exact), atol=ATOL)
    else:
        jax.tree.map(problems.assert_within_error_rule, found, exact, *plain)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        is_zero = np.all(y == 0, axis=(1, 2))
        np.testing.assert_array_equal(np.any(np.asarray(x) != 0, axis=(1, 2)), ~is_zero)
        assert is_zero.any() or name != "self_empty_and_padded"


def test_defaults_are_gelu_and_no_scales() -> None:
    arrays = problems_gdpa.make_arrays(SMALL, "float32")
    exact = problems_gdpa.numpy_oracle(arrays, Settings(("gelu",) * 4))
    np.testing.assert_allclose(ikbo.gdpa(*arrays[:5]), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("approx", "activation"), [("polynomial", "gelu"), ("tanh", "silu")])
def test_approximation_reaches_its_heads_alone(approx: str, activation: str) -> None:
    arrays = problems_gdpa.make_arrays(SMALL, "float32")
    names = (activation, "relu", "softmax", activation)
    run = jax.jit(lambda x: [attend(x, activation=names, approx=a) for a in (approx, None)])
    found, exact = map(np.asarray, run(arrays))
    np.testing.assert_array_equal(found[:, 1:3], exact[:, 1:3])
    difference = np.max(np.abs(found - exact)[:, [0, 3]])
    if approx == "tanh":
        # Off the GPU there is no other tanh than the exact one.
        assert difference == 0
    else:
        longest = max(SMALL.kv_lens)
        bound = OUTPUT_SCALE * longest * 5e-4 * np.nanmax(np.abs(arrays.value))
        assert 0 < difference <= bound


def test_broadcast_over_no_sequences() -> None:
    query = jnp.ones((3, 2, 8), jnp.float32)
    out = ikbo.gdpa(query, query, query, None, jnp.zeros(1, jnp.int32), broadcast_q=True)
    chex.assert_shape(out, (0, 2, 8))


def test_numpy_arrays_and_numbers_are_welcome() -> None:
    arrays = problems_gdpa.make_arrays(SMALL, "float32")
    out = attend(arrays, scale=np.float32(0.5), max_seqlen_q=np.int64(6), activation=["relu"] * 4)
    again = attend(Arrays(*(None if x is None else np.asarray(x) for x in arrays)), scale=0.5,
                   activation="relu", max_seqlen_q=6)  # fmt: skip
    assert isinstance(again, jax.Array)
    np.testing.assert_array_equal(out, again)
    # Kernels add the bound to offsets.
    (plan,) = ikbo.explain(functools.partial(attend, max_seqlen_q=2**31 - 1), arrays).plans
    assert plan.problem.max_seqlen_q == arrays.query.shape[0]


@pytest.mark.parametrize(
    ("shape", "max_q", "max_kv"), [(SHAPES["pma_indexed"], 3, 12), (SMALL, 2**40, 2**31)], ids=str
)
def test_bounds_that_cut_nothing(shape: Shape, max_q: int, max_kv: int) -> None:
    """The largest lengths, of broadcast queries too, and more than any int32."""
    arrays = problems_gdpa.make_arrays(shape, "float32")
    out = attend(arrays, activation="relu", max_seqlen_q=max_q, max_seqlen_kv=max_kv)
    exact = problems_gdpa.numpy_oracle(arrays, problems_gdpa.make_settings(shape, "relu"))
    np.testing.assert_allclose(out, exact, atol=ATOL)


def test_second_derivatives_at_a_kink() -> None:
    """A query of zeros, as in padding, has scores of 0; the gradient's weights count here, too."""
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 1, 3)), jnp.float32)
    query = keys[0].at[0].set(0)
    cu = jnp.asarray([0, 2, 4], jnp.int32)

    def of(attention):
        def gradients(query, weights):
            return jax.grad(lambda q: jnp.sum(attention(q) * weights))(query)

        weights = jnp.cos(query)
        _, pull_back = jax.vjp(gradients, query, weights)
        return pull_back(jnp.sin(query) + 1)

    def ours(name):
        return of(lambda q: ikbo.gdpa(q, *keys, cu, cu, activation=name))

    def exact(name):
        settings = Settings((name,))
        return of(lambda q: gdpa_reference.materialised(Arrays(q, *keys, cu, cu), settings))

    names = "relu", "relu_squared", "hardswish"
    both = jax.jit(lambda: {name: (ours(name), exact(name)) for name in names})
    for found, expected in both().values():
        chex.assert_trees_all_close(found, expected, atol=1e-4)


@pytest.mark.parametrize("is_pma", [False, True], ids=["self", "pma"])
def test_memory_holds_no_more_than_a_step(is_pma: bool) -> None:
    """At sizes as they are in earnest: compiled, never run."""
    batch, longest, heads, width = 1152, 512, 4, 128
    rows, seeds = batch * longest, 32
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    query, keys = array((seeds if is_pma else rows, heads, width)), array((rows, heads, width))
    offsets = jax.ShapeDtypeStruct((batch + 1,), jnp.int32)

    def value(query, key, value, cu):
        options = {"activation": "softmax", "broadcast_q": is_pma, "implementation": "xla"}
        return ikbo.gdpa(query, key, value, None if is_pma else cu, cu, **options)

    def total(*arrays):
        return jnp.sum(value(*arrays), dtype=jnp.float32)

    of_value, of_gradient = (
        jax.jit(fn).lower(query, keys, keys, offsets).compile().memory_analysis()
        for fn in (value, jax.grad(total, (0, 1, 2)))
    )
    # Scores, weights and their gradients, and the rows of a step in the inputs' dtype and f32.
    step = 4 * 4 * gdpa_chunked.MAX_SCORES + 24 * gdpa_chunked.MAX_ELEMENTS
    assert of_value.temp_size_in_bytes < step
    rowwise = 2 * 4 * (batch * seeds if is_pma else rows) * heads
    # The gradients of all sequences' copies of the broadcast queries, in f32.
    rowwise += 4 * batch * seeds * heads * width if is_pma else 0
    assert of_gradient.temp_size_in_bytes < step + rowwise + 2 * 2 * rows * heads * width
    assert step < 4 * batch * longest * longest * heads / 5


# Which path runs.


def test_explain_tells_sizes_and_reason() -> None:
    arrays = problems_gdpa.make_arrays(SHAPES["indexed"])
    run = functools.partial(attend, activation=("gelu", "softmax"), max_seqlen_q=8)
    assert str(ikbo.explain(run, arrays)) == (
        "1. gdpa: batch=5,4 rows=21,22 N=2 K=1 H=8 max_seqlen_q=8 gelu+softmax bfloat16\n"
        "  implementation: xla\n"
        "  reason: the Mosaic GPU kernels need a Hopper GPU, but the default device is a cpu\n"
        "  gradient: XLA, a few tiles at a time\n"
        "  lowered for CUDA, H100 (132 SMs):\n"
        "    implementation: xla\n"
        "    reason: no legal configuration of the kernel: the kernel takes head widths "
        "64, 96, 128, 256, but H=8\n"
        "    gradient: XLA, a few tiles at a time"
    )
    run = functools.partial(attend, approx="polynomial", implementation="xla")
    (plan,) = ikbo.explain(jax.grad(lambda x: run(x).sum(), allow_int=True), arrays).plans
    assert plan.reason == "requested by the caller"
    assert "gelu approx=polynomial" in plan.sizes
    assert plan.problem.useful_flops(100) == 4 * 100 * 2 * 8
    (plan,) = ikbo.explain(attend, problems_gdpa.make_arrays(SHAPES["pma"])).plans
    assert plan.sizes == "batch=4,4 rows=16,55 N=2 K=2 H=8 gelu broadcast_q bfloat16"


@pytest.fixture
def kernel_calls(seems_hopper, monkeypatch) -> list[tuple[int, bool]]:
    """A machine that seems to have a Hopper GPU; for each call of the backward, its multiprocessors
    and whether it has lse.

    The forward is XLA's, the backward's gradients are those of nobody else.
    """
    calls = []

    def result(arrays: Arrays, settings: Settings, **rest: Any) -> tuple:
        return gdpa_chunked.chunked(arrays, settings)

    def gradients(arrays: Arrays, settings: Settings, d_out: jax.Array, **options: Any) -> tuple:
        assert (options["out"] is None) == (options["lse"] is None)
        calls.append((options["num_sms"], options["lse"] is not None))
        return tuple(jnp.full_like(x, n) for n, x in enumerate(arrays[:3]))

    monkeypatch.setattr(gdpa_kernel, "gdpa_kernel", result)
    monkeypatch.setattr(gdpa_backward, "kernel_vjp", gradients)
    return calls


def on_path(arrays: Arrays, activation: str, implementation: str) -> tuple:
    d_out = problems_gdpa.cotangent(arrays, problems_gdpa.make_settings(SMALL))
    run = functools.partial(attend, activation=activation, implementation=implementation)
    return value_and_gradients(run, arrays, d_out)


def test_gradients_come_from_kernels_where_one_made_the_result(kernel_calls) -> None:
    arrays = problems_gdpa.make_arrays(SMALL._replace(head_dim=64), "bfloat16")
    paths = ("relu", "softmax")
    both = jax.jit(lambda x: [on_path(x, activation, "mosaic_gpu")[1] for activation in paths])
    for gradients in both(arrays):
        for n, x in enumerate(gradients):
            np.testing.assert_array_equal(np.asarray(x, np.float32), n)
    assert kernel_calls == [(132, False), (132, True)]


@pytest.mark.parametrize(("head_dim", "activation"), [(256, "relu"), (256, "softmax")])
def test_gradients_without_a_kernel_are_those_of_xla(head_dim, activation, kernel_calls) -> None:
    """At H = 256, the forward has a kernel and the backward has none: XLA's."""
    arrays = problems_gdpa.make_arrays(SMALL._replace(head_dim=head_dim), "bfloat16")
    paths = ("mosaic_gpu", "xla")
    both = jax.jit(lambda x: [on_path(x, activation, path) for path in paths])
    chex.assert_trees_all_equal(*both(arrays))
    assert kernel_calls == []
