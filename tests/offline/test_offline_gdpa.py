"""GDPA's forward kernels compiled for sm_90a without a GPU: no spills, no serialised WGMMAs.

Also with masks.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.flash import attention, short_gdpa
from ikbo_jax.pallas.flash import gdpa as kernel
from ikbo_jax.pallas.worklist import lists, masked
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.tiles import query_tiles
from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig, hopper
from ikbo_jax.problems import short_gdpa as short_configs
from ikbo_jax.problems.attention_tile_cost import MOST_LISTED_WORDS
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.reference.gdpa import Settings
from ikbo_jax.reference.hstu import Rule
from ikbo_jax.tuning import table_rows

pytestmark = pytest.mark.slow

ROWS = 1152 * 1024
DEFAULT = GdpaProblem(
    *(1152, 1152, ROWS, ROWS, 4, 4, 128, "bfloat16"), ("gelu_tanh",), None, False, None, None
)
NUM_SMS = 132
SCALES = (0.125, 0.5)
LOGIT_CAP = 30.0
JAGGED = {"skip_empty": True, "half_blocks": True}
RUNS = GdpaConfig(v_stages=2, q_slots=3, run=8, late_turns=True)


def is_softmax(problem: GdpaProblem) -> bool:
    return problem.activations == ("softmax",)


def launch(
    problem: GdpaProblem, config: Any, scales: tuple[float, float], rule: Rule | None = None
) -> tuple:
    """The kernel's host function, and the shapes it takes; `rule` is that of the mask."""
    options: dict[str, Any] = {"out_rows": problem.q_rows, "num_sms": NUM_SMS}
    options["return_residuals"] = is_softmax(problem)
    logit_cap = LOGIT_CAP if problem.has_logit_cap else None
    settings = Settings(problem.activations, problem.approx, *scales, logit_cap, rule=rule)
    is_found = isinstance(config, ShortGdpaConfig) and config.finds_tiles
    bounds = problem.max_seqlen_q, problem.max_seqlen_kv

    def fn(query: Any, key: Any, value: Any, *ints: Any) -> Any:
        tiles: Any = lists.TileList(*ints[:2])
        if is_found:
            sizes = query.shape[0], key.shape[0], *bounds
            tiles = Offsets(None if problem.broadcast_q else ints[0], ints[1], None, *sizes)
        operands = (query, key, value, tiles, settings)
        if isinstance(config, ShortGdpaConfig):
            return short_gdpa.short_gdpa(*operands, config=config, **options)
        if is_softmax(problem) and not problem.mask:
            softmax = {"config": config.for_softmax, **options}
            return attention.jagged_attention_kernel(*operands, **softmax)
        seen = ints[2] if len(ints) > 2 else None
        return kernel.gdpa_forward(*operands, config=config, seen=seen, **options)

    def shape(rows: int, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, heads, problem.head_dim), jnp.dtype(problem.dtype))

    keys = shape(problem.kv_rows, problem.kv_heads)
    further = lists.MASK_WORDS if rule is None else lists.mask_words(rule)
    tiles = problem.q_rows // 128, lists.TILE_WORDS + (further if problem.mask else 0)
    words = jax.ShapeDtypeStruct(tiles, jnp.int32)
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    read = [jax.ShapeDtypeStruct((tiles[0], 2, 4, 64), jnp.int32)]
    if is_found:
        words = counts = jax.ShapeDtypeStruct((problem.batch + 1,), jnp.int32)
    q_rows = problem.q_rows // (problem.batch if problem.broadcast_q else 1)
    read = read if problem.mask and rule is None else []
    return fn, shape(q_rows, problem.q_heads), keys, keys, words, counts, *read


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its configuration (None: the default one), and its scales."""

    problem: GdpaProblem
    config: GdpaConfig | ShortGdpaConfig | None = None
    scales: tuple[float, float] = (1.0, 1.0)


def of(config: Any = None, scales: tuple[float, float] = SCALES, **sizes: Any) -> Case:
    return Case(dataclasses.replace(DEFAULT, **sizes), config, scales)


# What no row of the table has.
CASES = {
    "packed": of(GdpaConfig(v_stages=2, q_slots=3, late_turns=True), approx="tanh_bf16"),
    "heads_of_their_own": of(
        scales=(1.0, 1.0), activations=("gelu", "silu", "relu", "hardswish"), kv_heads=2
    ),
    "jagged_runs": of(dataclasses.replace(RUNS, **JAGGED), approx="tanh"),
    "jagged_one_slot_f16": of(
        GdpaConfig(k_stages=3, v_stages=3, q_slots=1, **JAGGED), dtype="float16"
    ),
    "h96": of(scales=(1.0, 1.0), head_dim=96, approx="polynomial", activations=("gelu",)),
    "capped_softmax": of(activations=("softmax",), kv_heads=2, has_logit_cap=True),
    "capped_gelu_h64_f16": of(
        activations=("gelu",), head_dim=64, dtype="float16", has_logit_cap=True
    ),
    "softmax_h256_f16": of(activations=("softmax",), head_dim=256, dtype="float16", kv_heads=2),
}


def assert_fit(case: Case, compiler: offline.Compiler) -> None:
    config = case.config or case.problem.default_config()
    assert config.illegal_reason(case.problem) is None
    (compiled,) = compiler.compile_fit(*launch(case.problem, config, case.scales))
    if isinstance(config, GdpaConfig):
        sizes = config.for_softmax if is_softmax(case.problem) else config
        smem_bytes = sizes.smem_bytes(case.problem.head_dim)
    else:
        smem_bytes = config.problem_bytes(case.problem)
        allocated = -(-compiled.ptxas.registers // 8) * 8
        assert allocated <= short_configs.registers(config, case.problem)
        assert config.ctas * allocated * WARPGROUP_SIZE <= hopper.SM_REGISTERS
    assert compiled.smem_bytes == smem_bytes


def shipped_rows() -> dict[str, Case]:
    """The rows of `sm90.json`, one of those that make the same kernel but for sizes."""
    rows = (r for r in table_rows.builtin_rows() if isinstance(r.problem, GdpaProblem))
    return {
        f"{r.problem.dtype}:h{r.problem.head_dim}:{r.problem.activations}:{r.problem.approx}:"
        f"{r.config}": Case(r.problem, r.config, SCALES)
        for r in rows
        if r.config is not None
    }


CASES |= shipped_rows()


@pytest.mark.parametrize("name", CASES)
def test_offline_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    assert_fit(CASES[name], compiler)


SHORT = {
    f"h{head_dim}_{activation}_{approx}_{rows}_{block_kv}": of(
        ShortGdpaConfig(rows, block_kv, ctas=1),
        head_dim=head_dim,
        activations=(activation,),
        approx=approx,
        dtype="float16" if head_dim == 96 else "bfloat16",
    )
    for head_dim, activation, approx, rows, block_kv in (
        (64, "gelu_tanh", "tanh", 64, 64),
        (64, "gelu", None, 64, 64),
        (64, "silu", None, 32, 32),
        (64, "softmax", None, 64, 64),
        (64, "softmax", None, 16, 16),
        (64, "softmax", None, 64, 48),
        (64, "softmax", None, 64, 96),
        (96, "softmax", None, 64, 128),
        (128, "gelu_tanh", None, 64, 64),
        (128, "softmax", None, 64, 64),
    )
}
# CTAs that find their tiles: one of each sequence, or several.
SHORT |= {
    f"found_h{head_dim}_{activation}_{approx}_{bound}": of(
        ShortGdpaConfig(finds_tiles=True, ctas=1),
        head_dim=head_dim,
        activations=(activation,),
        approx=approx,
        max_seqlen_q=bound,
        max_seqlen_kv=bound,
    )
    for head_dim, activation, approx, bound in (
        (64, "gelu_tanh", "tanh", 64),
        (64, "gelu_tanh", "tanh", 96),
        (64, "gelu", None, 96),
        (64, "softmax", None, 96),
        (128, "gelu_tanh", None, 64),
        (128, "gelu_tanh", None, 96),
        (128, "softmax", None, 96),
    )
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHORT)
def test_offline_kernel_for_short_sequences_is_fit(name: str, compiler: offline.Compiler) -> None:
    """It takes no more registers than the rule for the CTAs of an SM counts on."""
    case = SHORT[name]
    config = case.config
    assert isinstance(config, ShortGdpaConfig)
    config = dataclasses.replace(config, ctas=short_configs.most_ctas(config, case.problem))
    assert_fit(dataclasses.replace(case, config=config), compiler)


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("bound", [None, 64])
def test_the_list_of_tiles_is_one_kernel(bound, is_merged, compiler) -> None:
    """Up to the largest number of sequences, whose lists fill shared memory."""

    def list_tiles(*arrays: Any) -> Any:
        return query_tiles(Offsets(*arrays, 99999, 99999, bound, bound), size=64)

    sequences = MOST_LISTED_WORDS // (3 if is_merged else 2) - 2
    offsets = jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)
    index = jax.ShapeDtypeStruct((sequences,), jnp.int32) if is_merged else None
    arrays = (offsets, offsets, index)
    lowered = jax.jit(list_tiles).trace(*arrays).lower(lowering_platforms=("cuda",))
    operations = set(re.findall(r"stablehlo\.(\w+)", lowered.as_text()))
    assert operations == {"custom_call", "optimization_barrier"}, operations
    (compiled,) = compiler.compile_fit(list_tiles, *arrays)
    assert compiled.name == "ikbo_tile_list"


# With masks.

MASKED = dataclasses.replace(DEFAULT, mask="causal")
TARGETS = Rule(None, True, window=256)
#: Masks in words, and their rules.
WORDS = {"causal": "causal", "targets": "causal+contextual+targets+window=256", "read": "intervals"}
RULES = {"causal": Rule(), "targets": TARGETS, "read": None}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("longest", "block_kv"), [(100, 64), (1024, 128)])
@pytest.mark.parametrize("mask", RULES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gelu_tanh", "softmax"])
def test_offline_masked_kernel_is_fit(activation, head_dim, mask, longest, block_kv, compiler):
    dtype = "float16" if head_dim == 96 else "bfloat16"
    changes = {"activations": (activation,), "mask": WORDS[mask], "dtype": dtype}
    bounds = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    problem = dataclasses.replace(MASKED, **changes, **bounds, head_dim=head_dim)
    config = problem.default_config()
    assert config.block_kv == block_kv
    assert config.skip_empty == (mask == "targets" and head_dim == 128)
    (compiled,) = compiler.compile_fit(*launch(problem, config, SCALES, RULES[mask]))
    assert compiled.smem_bytes == config.smem_bytes(head_dim)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("longest", [100, 1024])
@pytest.mark.parametrize(
    ("activation", "approx", "head_dim", "mask"),
    [
        ("silu", None, 128, "targets"),
        ("gelu_tanh", None, 128, "read"),
        ("gelu_tanh", "tanh", 64, "targets"),
        ("gelu", None, 96, "causal"),
    ],
)
def test_offline_masked_kernel_with_a_cap_is_fit(
    activation, approx, head_dim, mask, longest, compiler
) -> None:
    changes = {"activations": (activation,), "approx": approx, "head_dim": head_dim}
    changes |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    problem = dataclasses.replace(MASKED, **changes, mask=WORDS[mask], has_logit_cap=True)
    compiler.compile_fit(*launch(problem, problem.default_config(), SCALES, RULES[mask]))


@pytest.mark.parametrize("rule", [Rule(), TARGETS], ids=["causal", "targets"])
def test_the_list_of_masked_tiles_is_one_kernel(rule: Rule, compiler: offline.Compiler) -> None:
    def list_tiles(cu_seqlens: Any, *numbers: Any) -> Any:
        offsets = lists.Offsets(cu_seqlens, cu_seqlens, None, 65536, 65536, 1024)
        given = dict(zip(("num_targets", "contextual"), numbers, strict=False))
        return masked.masked_tiles(offsets._replace(rule=rule, **given), size=128, unit=128)

    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (65, 64, 64)]
    (compiled,) = compiler.compile_fit(list_tiles, *shapes[: 3 if rule is TARGETS else 1])
    assert compiled.name == "ikbo_masked_tile_list"
