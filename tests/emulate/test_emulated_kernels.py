"""The kernels' PTX on a CPU: the interpreted tests' cases, with what the interpreter cannot see.

Those are addresses and descriptors in inline PTX, alignment of copies, thread blocks that run side
by side, and asynchronous reads at the latest time that is allowed.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import problems_gdpa
import pytest
import test_interpret_attention as attention
import test_interpret_attention_backward as attention_backward
import test_interpret_few_queries as few_queries
import test_interpret_gdpa as gdpa
import test_interpret_gdpa_backward as gdpa_backward
import test_interpret_gdpa_masks as gdpa_masks
import test_interpret_linear_compression as linear_compression
import test_interpret_linear_compression_backward as linear_compression_backward
import test_interpret_norm_linear as norm_linear
import test_interpret_small_compression as small_compression

from ikbo_jax.problems import ShortGdpaConfig

ATTENTION_BACKWARD = attention_backward.CASES | attention_backward.ADDED_BY_LAUNCH


def check_backward(case: attention_backward.Case, *, num_sms: int = 6) -> None:
    """Runs the launches of a gradient of attention, and holds it to the error rule."""
    inputs, tensors = attention_backward.make(case)
    results = attention_backward.gradients.__wrapped__(inputs, tensors, case, num_sms)
    attention_backward.assert_correct(results, inputs, tensors, case)


#: By name: what runs a case and compares its results, and the cases.
KERNELS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "attention": (attention.check, attention.CASES),
    "few_queries": (
        functools.partial(attention.check, interpret=few_queries.interpret),
        few_queries.CASES,
    ),
    "attention_backward": (check_backward, ATTENTION_BACKWARD),
    "gdpa": (gdpa.check, gdpa.CASES),
    "gdpa_masks": (gdpa_masks.check, gdpa_masks.CASES),
    "gdpa_backward": (gdpa_backward.check, gdpa_backward.CASES),
    "gdpa_backward_masks": (gdpa_backward.check, gdpa_backward.MASKED),
    "linear_compression": (linear_compression.check, linear_compression.CASES),
    "packed_compression": (linear_compression.check, small_compression.PACKED),
    "resident_compression": (linear_compression.check, small_compression.RESIDENT),
    "linear_compression_backward": (
        linear_compression_backward.check,
        linear_compression_backward.CASES,
    ),
    "norm_linear": (norm_linear.check, norm_linear.CASES),
    "gated_linear": (norm_linear.check, norm_linear.GATED),
}
#: What the suite runs: every kernel, and every way to store and to add what it computes.
CHOSEN = {
    "attention": [
        "t1_fewer_keys_than_a_block",
        "t3_packed_gqa_lengths",
        "t100_packed_one_slot",
        "one_user_t16_gqa_lengths_own",
        "one_user_t64_ordered_lengths",
        "t3_packed_gqa_lengths_own",
    ],
    "few_queries": [
        "gqa_3_wide_own",
        "split_lengths_gqa",
        "turns",
        "packed_split",
        "listed_lengths_gqa_h96",
        "listed_bundles_split_gqa_lengths",
        "listed_bundles_wide_lengths",
        "listed_users_without_candidates",
        "neighbours_split_heads",
        "neighbours_unsorted",
        "neighbours_bundles_wide_searched",
        "h192_split_rows_70",
        "h256_listed_split_lengths",
        "h256_wide_rows_70_lengths",
        "h192_wide_gqa_one_slot",
        "large_lengths_own",
        "large_lengths_own_crowded",
        "large_h192_own",
        "turns_wide_own",
    ],
    "attention_backward": [
        "two_launches_two_slots",
        "two_launches_two_slots_h128_f16",
        "unsorted_grouped_heads",
        "two_launches",
        "stored_h128_f16",
        "stored_h96",
        "stored_grouped_heads_h192",
        "users_without_candidates_h96_f16",
        *attention_backward.ADDED_BY_LAUNCH,
    ],
    "gdpa": [
        *("softmax_gaps", "short_found", "short_found_bounded", "short_found_pma"),
        *("short_found_pffn", "short_found_pma_32"),
    ],
    "gdpa_masks": [
        *("targets", "skipped", "window_h96_f16"),
        *("softmax_window_h96_f16", "softmax_skipped"),
    ],
    "gdpa_backward": [
        "indexed_in_parts",
        "softmax_gaps",
        "softmax_indexed_grouped_heads_h128",
        "softmax_pma_h96_f16",
    ],
    "gdpa_backward_masks": [
        *("causal", "targets_h128", "intervals_shared_softmax", "stored_softmax_h64"),
        "stored_targets_f16",
    ],
    "linear_compression": ["k_steps_of_levels_differ_many_tiles_of_a_cta"],
    "packed_compression": [
        "n16_ragged_last_tile",
        "n48_three_blocks",
        "n64_two_m_tiles_many_k_steps",
        "n16_shared_ragged",
        "n64_shared_separate",
    ],
    "resident_compression": [
        "n16_three_parts_ragged_last_tile",
        "n48_three_blocks_two_ctas_odd_k",
        "gathered_n32_index_out_of_range",
        "one_user_gathered_strips",
        "k_odd_three_of_a_last_vector",
        "k_odd_two_groups_past_m",
    ],
    "linear_compression_backward": ["several_ctas"],
    "norm_linear": ["layer", "early", "rms_in_parts"],
    "gated_linear": ["by_head", "product", "wide", "plain", "plain_rms"],
}
#: With a number, every case in as many orders of events.
SEEDS = int(os.environ.get("IKBO_EMULATED_SEEDS", "0"))
RUNS = [
    (kernel, name, seed)
    for kernel, (_, cases) in KERNELS.items()
    for name in (cases if SEEDS else CHOSEN[kernel])
    for seed in range(max(1, SEEDS))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kernel", "name", "seed"), RUNS, ids=[f"{k}-{n}-{s}" for k, n, s in RUNS])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_emulated_results_are_right(kernel, name, seed, sm90) -> None:
    """Of the six thread blocks of attention's gradient, two run at a time."""
    check, cases = KERNELS[kernel]
    with sm90.emulated(seed, resident=2 if kernel == "attention_backward" else 132):
        check(cases[name])
    assert sm90.launches


@pytest.mark.parametrize("bounds", [(None, None), (40, 40)])
def test_emulated_offsets_that_fall_or_reach_outside(bounds, sm90) -> None:
    """A CTA that finds its tiles reads and writes nothing outside of the arrays."""
    config = ShortGdpaConfig(64, 32, ctas=3, finds_tiles=True)
    case = gdpa.Case(gdpa.of((60, 70), (60, 70)), config=config, num_sms=2, bounds=bounds)
    arrays = problems_gdpa.make_arrays(case.shape, case.dtype)
    for bad in ([-5, 2**31 - 1, 3], [300, 20, 10], [7, 7, 7], [90, 20, 130]):
        wild = jnp.asarray(bad, jnp.int32)
        given = arrays._replace(cu_seqlens_q=wild, cu_seqlens_kv=wild)
        with sm90.emulated(0):
            out = gdpa.attend(given, case)
        rising = jnp.asarray(np.maximum.accumulate(np.clip(bad, 0, 130)), jnp.int32)
        meant = arrays._replace(cu_seqlens_q=rising, cu_seqlens_kv=rising)
        gdpa.assert_correct(out, meant, case)


@pytest.mark.parametrize(
    ("name", "sms", "seed"),
    [("tickets", 3, 0), ("tickets", 3, 1), ("tickets", 99, 0), ("tickets_one_slot_h256", 3, 0)],
)
def test_emulated_ctas_take_items_by_a_counter(name, sms, seed, sm90) -> None:
    """Each item is one CTA's; with 99 SMs, there are at least as many CTAs as items."""
    with sm90.emulated(seed):
        gdpa.check(dataclasses.replace(gdpa.CASES[name], num_sms=sms))


def test_emulated_d_query_of_several_chunks_of_keys(sm90, monkeypatch) -> None:
    """Threads store rows in f32, in the caller's order, and XLA adds them."""
    case = attention_backward.CASES["stored_h128_f16"]
    monkeypatch.setattr(type(case.config), "stored_tiles", lambda *sizes: 1)
    with sm90.emulated(0, resident=2):
        check_backward(case)
    assert len(sm90.launches) > 3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("ks", [(37, 75), (70, 38)])
def test_emulated_non_finite_weights_reach_their_own_rows_alone(ks, sm90) -> None:
    """A weight is loaded in vectors that hold elements of the next row, too."""
    case = linear_compression.Case((2, 5), ks, 13, 16, small_compression.TWO)
    levels = case.levels()
    user, cand = (np.array(x) for x in levels.weights)
    user[3], cand[7] = np.nan, np.inf
    poisoned = levels._replace(weights=(jnp.asarray(user), jnp.asarray(cand)))
    with sm90.emulated(0):
        out = np.asarray(linear_compression.interpret(poisoned, case))
    hit = np.zeros(out.shape, bool)
    hit[:, [3, 7]] = True
    np.testing.assert_array_equal(np.isfinite(out), ~hit)
    linear_compression.assert_correct(out, levels, ~hit)
