"""GDPA's forward kernels on a Hopper GPU: numerics, determinism, isolation."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import problems_gdpa
import pytest
from problems_gdpa import Shape

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch, gdpa_backward
from ikbo_jax.problems import GdpaConfig, ShortGdpaConfig
from ikbo_jax.problems.gdpa import MAX_BLOCK_KV
from ikbo_jax.reference import activations as reference_activations
from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference import gdpa_chunked

pytestmark = pytest.mark.gpu

NAMES = [name for name in reference_activations.ACTIVATIONS if name != "softmax"]
DTYPES = ["bfloat16", "float16"]
CONFIGS = {
    "default": GdpaConfig(),
    "one_slot": GdpaConfig(k_stages=3, v_stages=3, q_slots=1),
    "three_slots": GdpaConfig(v_stages=2, q_slots=3),
    "narrow": GdpaConfig(block_kv=64, k_stages=4, v_stages=4),
    "odd_block": GdpaConfig(block_kv=48, k_stages=3, v_stages=4),
    "late_turns": GdpaConfig(late_turns=True),
    "runs": GdpaConfig(v_stages=2, q_slots=3, run=3),
    "runs_late": GdpaConfig(128, 2, 2, 3, run=8, late_turns=True),
    "skip_empty": GdpaConfig(skip_empty=True),
    "half_blocks": GdpaConfig(half_blocks=True),
    "jagged": GdpaConfig(skip_empty=True, half_blocks=True),
    "jagged_late": GdpaConfig(late_turns=True, skip_empty=True, half_blocks=True),
    "jagged_narrow": GdpaConfig(64, 4, 4, skip_empty=True, half_blocks=True),
    "jagged_one_slot": GdpaConfig(128, 3, 3, 1, skip_empty=True, half_blocks=True),
    "jagged_runs": GdpaConfig(128, 2, 2, 3, 8, True, skip_empty=True, half_blocks=True),
    "tickets": GdpaConfig(late_turns=True, skip_empty=True, half_blocks=True, tickets=True),
    "tickets_runs": GdpaConfig(v_stages=2, q_slots=3, run=3, tickets=True),
    "short": ShortGdpaConfig(),
    "short_rows_16": ShortGdpaConfig(16, 16, 3, 1),
    "short_wide": ShortGdpaConfig(32, 128, 2, 1),
    "short_found": ShortGdpaConfig(finds_tiles=True),
    "short_found_rows_16": ShortGdpaConfig(16, 32, 3, 1, finds_tiles=True),
    "short_found_wide": ShortGdpaConfig(32, 128, 2, 1, finds_tiles=True),
    "short_found_narrow": ShortGdpaConfig(64, 48, 2, 2, finds_tiles=True),
}


def of(q_lens, kv_lens, **rest) -> Shape:
    return Shape(q_lens, kv_lens, **({"q_heads": 2, "kv_heads": 2, "head_dim": 128} | rest))


def drawn(seed: int, count: int, longest: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(0, longest + 1, count))


SHAPES = {
    "one_row": of((1,), (1,)),
    "one_token_each": of((1,) * 40, (1,) * 40),
    "self": of(drawn(0, 20, 400), drawn(0, 20, 400), before=5, after=300),
    "empty": of((0, 300, 0, 1, 129, 0), (40, 0, 0, 1, 257, 5), before=2, after=70),
    "dense": of((256,) * 20, (128,) * 20),
    "pffn": of(drawn(1, 30, 500), (128,) * 30),
    "long": of((700, 3), (3000, 1)),
    "many_short": of(drawn(2, 1000, 3), drawn(3, 1000, 9), q_heads=1, kv_heads=1),
    "gqa": of(drawn(4, 20, 300), drawn(5, 20, 300), q_heads=6, kv_heads=2),
    "indexed": of(drawn(6, 30, 200), drawn(7, 4, 300), q_to_kv=drawn(8, 30, 3), after=9),
    "pma": of(32, drawn(9, 40, 700), after=2),
    "pma_indexed": of(70, drawn(10, 5, 300), q_heads=4, q_to_kv=drawn(11, 50, 4)),
} | {f"h{h}": of(drawn(12, 20, 300), drawn(13, 20, 300), head_dim=h, after=7) for h in MAX_BLOCK_KV}


def run(arrays: reference.Arrays, settings: reference.Settings, **options) -> jax.Array:
    options = {**settings.options, "implementation": "mosaic_gpu", **options}
    return problems_gdpa.attend(arrays, **options)


# Compiled whole: operation by operation, a GPU takes half a minute for every new shape.
@functools.partial(jax.jit, static_argnums=1)
def oracle_and_plain(arrays: reference.Arrays, settings: reference.Settings) -> tuple:
    wide = arrays._replace(query=arrays.query.astype(jnp.float32))
    return reference.materialised(wide, settings), gdpa_chunked.chunked(arrays, settings)[0]


def check(actual, arrays: reference.Arrays, settings: reference.Settings) -> None:
    """Holds the result to the error rule against the f32 oracle; plain jnp is the XLA path.

    An approximation may add its own error, times the values that it is multiplied by.
    """
    oracle, plain = oracle_and_plain(arrays, settings)
    if settings.approx is None:
        problems.assert_within_error_rule(actual, oracle, plain)
        return
    error = jnp.max(jnp.abs(plain.astype(jnp.float32) - oracle))
    values = jnp.nan_to_num(arrays.value.astype(jnp.float32))
    offsets = arrays.cu_seqlens_kv
    longest = int(jnp.max(offsets[1:] - offsets[:-1]))
    # Of scores around 4, and of the roundings that "tanh_bf16" has each a third of its bound.
    each = {"polynomial": 5e-4, "tanh": 2.0**-12 * 8, "tanh_bf16": 2.0**-6}[settings.approx]
    # Errors of a sum of independent terms grow like its root; six of those are never reached.
    extra = 6 * each * settings.output_scale * longest**0.5 * float(jnp.std(values))
    difference = jnp.max(jnp.abs(actual.astype(jnp.float32) - oracle))
    assert float(difference) <= 2 * float(error) + extra


def make(shape: Shape, activation, dtype="bfloat16", seed=0, **options) -> tuple:
    """Makes arrays and settings."""
    settings = problems_gdpa.make_settings(shape, activation, **options)
    return problems_gdpa.make_arrays(shape, dtype, seed), settings


def check_shape(shape: Shape, activation, dtype="bfloat16", config=None, **options) -> None:
    arrays, settings = make(shape, activation, dtype, **options)
    check(run(arrays, settings, config=config), arrays, settings)


@pytest.mark.parametrize("activation", ["gelu_tanh", "softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_gdpa_every_shape_and_dtype(name, dtype, activation):
    check_shape(SHAPES[name], activation, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("approx", "name"),
    [
        *((None, name) for name in NAMES),
        *((a, n) for a, names in reference_activations.APPROXIMATIONS.items() for n in names),
    ],
)
def test_gdpa_every_activation(approx, name, dtype):
    check_shape(SHAPES["self"], name, dtype, approx=approx)


@pytest.mark.parametrize("approx", [None, "tanh"])
def test_gdpa_heads_of_their_own(approx):
    shape = of(drawn(0, 20, 300), drawn(1, 20, 300), q_heads=8, kv_heads=4)
    check_shape(shape, tuple(NAMES), approx=approx)


@pytest.mark.parametrize(
    ("activation", "name"),
    [("silu", name) for name in CONFIGS]
    + [("softmax", name) for name in ("one_slot", "three_slots", "narrow", "odd_block")],
)
@pytest.mark.parametrize("shape", ["self", "dense", "empty", "pffn"])
def test_gdpa_every_kind_of_config(activation, name, shape):
    check_shape(SHAPES[shape], activation, config=CONFIGS[name])


@pytest.mark.parametrize("activation", ["gelu", "softmax"])
@pytest.mark.parametrize(("scale", "output_scale"), [(1.0, 1.0), (-0.2, 3.0), (0.0, 1.0)])
def test_gdpa_scales(scale, output_scale, activation):
    check_shape(SHAPES["gqa"], activation, scale=scale, output_scale=output_scale)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_gdpa_scales_of_sequences(activation):
    """The kernel's result, and its cotangent, are rounded once more."""
    shape = of((300, 1, 129), (300, 1, 129), before=3, after=70)
    arrays, settings = make(shape, activation, output_scale=1.0)
    scales = np.asarray([0.01, 3, -1], np.float32)
    d_out = problems_gdpa.cotangent(arrays, settings)
    factor = np.zeros((len(d_out), 1, 1))
    factor[3:433, 0, 0] = np.repeat(scales, shape.q_lens)
    wide, wide_d_out = problems_gdpa.numpy_oracle(arrays, settings), np.asarray(d_out, np.float64)
    exact, upstream = factor * wide, factor * wide_d_out
    gradients = problems_gdpa.numpy_gradients(arrays, settings, upstream)

    def run(implementation):
        options = {"activation": activation, "scale": settings.scale}

        def attend(scales, *x):
            return ikbo.gdpa(
                *(*x, *arrays[3:5]), output_scale=scales, implementation=implementation, **options
            )

        def both(scales, *x):
            out, pull_back = jax.vjp(attend, scales, *x)
            return out, *pull_back(d_out)

        return jax.jit(both)(scales, *arrays[:3])

    (ours, d_scales, *found), (plain, _, *others) = run(None), run("xla")
    # The terms of a sum cancel: with silu, 4,608 remains of 2.0e6. Each has a rounding of its own.
    terms = np.split((wide * wide_d_out)[3:433], np.cumsum(shape.q_lens)[:-1])
    for x, of_sequence in zip(d_scales, terms, strict=True):
        noise = 2**-8 * np.linalg.norm(of_sequence)
        np.testing.assert_allclose(x, of_sequence.sum(), rtol=1e-5, atol=2 * noise)
    for x, y, z in zip((ours, *found), (exact, *gradients), (plain, *others), strict=True):
        problems.assert_within_error_rule(x, y, z)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("longest", [1, 130])
def test_gdpa_bounds_cut_sequences_off(longest, activation):
    check_shape(SHAPES["self"], activation, max_seqlen_q=longest, max_seqlen_kv=longest)


lengths = st.lists(
    st.sampled_from((0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 300)), min_size=6, max_size=6
)


@on_gpu.drawn
@hypothesis.given(
    q_lens=lengths,
    kv_lens=lengths,
    before=st.sampled_from((0, 3)),
    seed=st.integers(0, 99),
    how=st.sampled_from(
        [("gelu_tanh", "default"), ("gelu_tanh", "jagged"), ("gelu_tanh", "jagged_runs")]
        + [("softmax", "default")]
    ),
)
def test_gdpa_drawn_lengths(q_lens, kv_lens, before, seed, how):
    activation, config = how
    totals = (sum(q_lens), sum(kv_lens))
    shape = of(tuple(q_lens), tuple(kv_lens), before=before, after=1)
    arrays, settings = make(shape, activation, seed=seed)
    assert totals[0] + before + 1 == arrays.query.shape[0]
    check(run(arrays, settings, config=CONFIGS[config]), arrays, settings)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("bad", [[-5, 2**31 - 1, 3], [300, 20, 10], [7, 7, 7]])
def test_gdpa_bad_offsets_read_nothing_outside(bad, activation):
    (arrays, settings), wild = make(of((60, 70), (60, 70)), activation), jnp.asarray(bad, jnp.int32)
    arrays = arrays._replace(cu_seqlens_q=wild, cu_seqlens_kv=wild)
    for config in (None, ShortGdpaConfig(ctas=1, finds_tiles=True)):
        check(run(arrays, settings, config=config), arrays, settings)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("name", ["self", "empty", "many_short", "gqa", "pma"])
@pytest.mark.parametrize("longest", [None, 1, 50, 130])
def test_gdpa_ctas_find_their_tiles(longest, name, activation):
    """Rows past the bounds, and of no sequence, become zeros."""
    arrays, settings = make(SHAPES[name], activation, max_seqlen_kv=longest)
    if not settings.broadcast_q:
        settings = settings._replace(max_seqlen_q=longest)
    config = ShortGdpaConfig(32, 64, 2, 1, finds_tiles=True)
    check(run(arrays, settings, config=config), arrays, settings)


# Sizes for which the kernel for short sequences is the default, and their bounds.
PREFERRED = {
    "pffn_h128": (of(drawn(14, 30, 400), (94,) * 30, before=3, after=70), (400, 94)),
    "pffn_h96": (of(drawn(14, 99, 400), (31,) * 99, kv_heads=1, head_dim=96), (400, 31)),
    "pma": (of(23, drawn(15, 40, 700), head_dim=64, q_heads=4, after=3), (None, 700)),
    "pma_64": (of(64, drawn(15, 9, 300), head_dim=64, before=2), (None, 257)),
    "few": (
        of(drawn(16, 40, 270), drawn(16, 40, 270), head_dim=64, before=1, after=66),
        (270,) * 2,
    ),
    "few_long": (of((2000, 3, 0, 129), (1900, 3, 65, 0), kv_heads=1, head_dim=64), (2048,) * 2),
    "few_cut": (of(drawn(17, 60, 300), drawn(17, 60, 300), head_dim=64, after=5), (200, 210)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "softmax"])
@pytest.mark.parametrize("name", PREFERRED)
def test_gdpa_where_the_kernel_for_short_sequences_is_the_default(name, activation, dtype):
    shape, (max_seqlen_q, max_seqlen_kv) = PREFERRED[name]
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    arrays, settings = make(shape, activation, dtype, **bounds)
    (plan,) = ikbo.explain(functools.partial(run, settings=settings), arrays).plans
    assert isinstance(plan.config, ShortGdpaConfig)
    check(run(arrays, settings), arrays, settings)


def spoil(arrays: reference.Arrays, bad: float, row: int = 200) -> reference.Arrays:
    """Replaces three rows of queries, keys and values, by default from row 200 on."""
    floats = [array.at[row : row + 3].set(bad) for array in arrays[:3]]
    return reference.Arrays(*floats, *arrays[3:])


@pytest.mark.parametrize(
    ("activation", "bad", "rows", "config"),
    [
        ("gelu_tanh", np.nan, (200, 130), None),
        ("gelu_tanh", np.inf, (200, 130), None),
        ("gelu_tanh", np.nan, (60, 30), ShortGdpaConfig(64, 64, 2, 1)),
        ("softmax", np.nan, (60, 30), ShortGdpaConfig(64, 64, 2, 1)),
    ],
)
def test_gdpa_bad_values_stay_in_their_sequence(activation, bad, rows, config):
    first, third = rows
    shape = of((first, 3, third, 64), (first, 3, third, 5))
    clean, settings = make(shape, activation)
    out, expected = (
        run(arrays, settings, config=config) for arrays in (spoil(clean, bad, first), clean)
    )
    spoiled = slice(first, first + 3)
    assert not np.any(np.isfinite(out[spoiled].astype(jnp.float32)))
    np.testing.assert_array_equal(out.at[spoiled].set(0), expected.at[spoiled].set(0))


@pytest.mark.parametrize("activation", ["gelu", "softmax"])
def test_gdpa_a_hundred_repeats_are_bitwise_equal(activation):
    arrays, settings = make(SHAPES["self"], activation)
    on_gpu.assert_repeats(jax.jit(functools.partial(run, settings=settings)), (arrays,), 100)


@on_gpu.soaks
def test_gdpa_soak():
    """Alternating shapes: results, those of a softmax, and gradients by kernels."""
    cases = []
    for name in ("self", "empty", "pffn", "gqa", "indexed", "pma_indexed", "h64", "h96"):
        settings = problems_gdpa.make_settings(SHAPES[name], "gelu_tanh")
        softmax = problems_gdpa.make_settings(SHAPES[name], "softmax")

        def everything(inputs, settings=settings, softmax=softmax):
            arrays, d_out = inputs
            gradients = gdpa_backward.kernel_vjp(
                arrays, settings, d_out, num_sms=dispatch.num_sms()
            )
            return run(arrays, settings), run(arrays, softmax), gradients

        compiled = jax.jit(everything)
        for seed in (0, 1):
            arrays = problems_gdpa.make_arrays(SHAPES[name], seed=seed)
            inputs = (arrays, problems_gdpa.cotangent(arrays, settings))
            expected = compiled(inputs)
            check(expected[0], arrays, settings)
            check(expected[1], arrays, softmax)
            cases.append((compiled, inputs, expected))
    on_gpu.soak(cases)


SANITIZED = """
import jax, problems_gdpa, ikbo_jax as ikbo
from ikbo_jax.problems import GdpaConfig, ShortGdpaConfig
shape = problems_gdpa.Shape((0, 70, 5, 130), (40, 0, 129, 65), 2, 1, 128, before=3, after=140)
arrays = problems_gdpa.make_arrays(shape)
indices = (None, arrays.cu_seqlens_q[:4] * 0 + 99)
def run(activation, q_slots, index, *operands):
    short = ShortGdpaConfig(16, 64, 2, 1, finds_tiles=not index)
    config = GdpaConfig(block_kv=64, q_slots=q_slots) if q_slots else short
    return ikbo.gdpa(
        *operands, *arrays[3:5], q_to_kv=indices[index], activation=activation,
        implementation="mosaic_gpu", config=config,
    )
for arguments in {runs}:
    jax.block_until_ready(run(*arguments, *arrays[:3]))
for activation, index in {gradients}:
    out, pull_back = jax.vjp(lambda *qkv: run(activation, 2, index, *qkv), *arrays[:3])
    jax.block_until_ready(pull_back(out))
print("FINISHED")
"""


@on_gpu.sanitizes
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(
    ("runs", "gradients"),
    [
        ((("gelu_tanh", 1, 0), ("gelu_tanh", 2, 1)), ()),
        ((("softmax", 1, 0), ("softmax", 2, 1)), ()),
        # No slots of queries: the kernel for short sequences.
        ((("gelu_tanh", 0, 0), ("gelu_tanh", 0, 1), ("softmax", 0, 0), ("softmax", 0, 1)), ()),
        ((), (("gelu_tanh", 0), ("gelu_tanh", 1))),
        ((), (("softmax", 0), ("softmax", 1))),
    ],
    ids=["forward", "softmax", "short", "backward", "softmax_backward"],
)
def test_gdpa_sanitizer(runs, gradients, tool):
    script = SANITIZED.replace("{runs}", str(runs)).replace("{gradients}", str(gradients))
    on_gpu.assert_sanitized(tool, script)
