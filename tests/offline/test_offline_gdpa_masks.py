"""GDPA's forward kernel with masks, compiled for sm_90a: no spills, no serialised WGMMAs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
from test_offline_gdpa import DEFAULT, LOGIT_CAP, NUM_SMS, SCALES

from ikbo_jax.pallas.flash import gdpa
from ikbo_jax.pallas.worklist import lists, masked
from ikbo_jax.problems import GdpaConfig, GdpaProblem
from ikbo_jax.reference.gdpa import Settings
from ikbo_jax.reference.hstu import Rule

pytestmark = pytest.mark.slow

MASKED = dataclasses.replace(DEFAULT, mask="causal")
TARGETS = Rule(None, True, window=256)
#: Masks in words, and their rules.
WORDS = {"causal": "causal", "targets": "causal+contextual+targets+window=256", "read": "intervals"}
RULES = {"causal": Rule(), "targets": TARGETS, "read": None}


def launch(problem: GdpaProblem, config: GdpaConfig, rule: Rule | None) -> tuple:
    """The kernel's host function, and the shapes that it takes."""

    def fn(query: Any, key: Any, value: Any, words: Any, counts: Any, seen: Any = None) -> Any:
        logit_cap = LOGIT_CAP if problem.has_logit_cap else None
        settings = Settings(problem.activations, problem.approx, *SCALES, logit_cap, rule=rule)
        return gdpa.gdpa_forward(
            *(query, key, value, lists.TileList(words, counts), settings),
            out_rows=problem.q_rows,
            config=config,
            num_sms=NUM_SMS,
            seen=seen,
            return_residuals=True,
        )

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    dtype, tiles = jnp.dtype(problem.dtype), problem.q_rows // 128
    rows = jax.ShapeDtypeStruct((problem.q_rows, problem.q_heads, problem.head_dim), dtype)
    further = lists.MASK_WORDS if rule is None else lists.mask_words(rule)
    words = integers(tiles, lists.TILE_WORDS + further), integers(2)
    return fn, rows, rows, rows, *words, *([integers(tiles, 2, 4, 64)] if rule is None else [])


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
    (compiled,) = compiler.compile_fit(*launch(problem, config, RULES[mask]))
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
    compiler.compile_fit(*launch(problem, problem.default_config(), RULES[mask]))


@pytest.mark.parametrize("rule", [Rule(), TARGETS], ids=["causal", "targets"])
def test_the_list_of_masked_tiles_is_one_kernel(rule: Rule, compiler: offline.Compiler) -> None:
    def list_tiles(cu_seqlens: Any, *numbers: Any) -> Any:
        offsets = lists.Offsets(cu_seqlens, cu_seqlens, None, 65536, 65536, 1024)
        given = dict(zip(("num_targets", "contextual"), numbers, strict=False))
        return masked.masked_tiles(offsets._replace(rule=rule, **given), size=128, unit=128)

    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (65, 64, 64)]
    (compiled,) = compiler.compile_fit(list_tiles, *shapes[: 3 if rule is TARGETS else 1])
    assert compiled.name == "ikbo_masked_tile_list"
