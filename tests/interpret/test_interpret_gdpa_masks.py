"""The GDPA forward kernel with masks, interpreted on a CPU under a race detector."""

import dataclasses
import functools
from typing import Any

import interpreter
import jax
import numpy as np
import problems
import problems_gdpa
import problems_masks
import pytest
from problems_gdpa import Shape
from problems_masks import causal, intervals_case
from test_interpret_gdpa import ONE_SLOT, TWO_SLOTS, of

import ikbo_jax as ikbo
from ikbo_jax import masks
from ikbo_jax.ops import dispatch, gdpa_mask
from ikbo_jax.pallas.flash import gdpa, gdpa_masked
from ikbo_jax.pallas.worklist import by_xla, lists
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.problems import GdpaConfig
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.gdpa import Settings, out_shape

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, a mask and its rule, the kernel's configuration, and the number of CTAs."""

    shape: Shape
    mask: problems_masks.Case
    activation: Any = "silu"
    config: GdpaConfig = TWO_SLOTS
    num_sms: int = 1
    dtype: str = "bfloat16"
    logit_cap: float | None = None

    @property
    def settings(self) -> Settings:
        return problems_gdpa.make_settings(self.shape, self.activation, logit_cap=self.logit_cap)


PREFIX = of((3, 66), (70, 90), q_heads=2, kv_heads=1, before=1, after=2)
SHARED = of((40, 50, 0, 30), (60, 45), q_to_kv=(0, 0, 1, 0))
CASES = {
    # Blocks before a row's position are whole, others partial; the second tile has two CTAs' work.
    "causal": Case(of((150, 20), (150, 20)), causal()),
    # Blocks before the window are not loaded; queries continue a prefix; rows of no sequence.
    "window_h96_f16": Case(
        PREFIX._replace(head_dim=96),
        causal(9),
        ("gelu", "relu"),
        ONE_SLOT,
        num_sms=2,
        dtype="float16",
    ),
    # A consumer skips the blocks after those that its rows see: contextual tokens see more.
    "targets": Case(
        of((200, 0, 33), (200, 0, 33)),
        problems_masks.hstu_case((40, 0, 9), 3, window=20, full_tail=8),
        config=dataclasses.replace(
            TWO_SLOTS, k_stages=3, q_slots=3, late_turns=True, skip_empty=True
        ),
    ),
    # Blocks of targets that no row of a tile sees are skipped; groups of targets, both ways.
    "skipped": Case(
        of((300,), (300,)),
        problems_masks.hstu_case((230,), 3, window=20, target_group_size=3, causal=False),
    ),
    # Sequences of one tile share keys; some rows, and all rows of some tiles, see nothing.
    "intervals": Case(SHARED, intervals_case(SHARED, 2)),
    "nothing": Case(of((70, 9), (40, 50)), intervals_case(of((70, 9), (0, 0)), 1)),
    "tickets": Case(
        of((130, 5), (130, 70)),
        causal(),
        "gelu_tanh",
        dataclasses.replace(TWO_SLOTS, tickets=True),
        logit_cap=1.5,
    ),
    "pooled": Case(of(5, (40, 3)), intervals_case(of(5, (40, 3)), 2), "relu_squared"),
    # A softmax: the first blocks of a tile are hidden for some of its rows, or for all of them.
    "softmax": Case(of((150, 20), (150, 20)), causal(), "softmax"),
    "softmax_window_h96_f16": Case(
        PREFIX._replace(head_dim=96), causal(9), "softmax", ONE_SLOT, num_sms=2, dtype="float16"
    ),
    "softmax_targets": Case(
        of((140, 0, 33), (140, 0, 33)),
        problems_masks.hstu_case((70, 0, 9), 3, window=40, full_tail=8),
        "softmax",
        dataclasses.replace(TWO_SLOTS, tickets=True, k_stages=3, late_turns=True),
        logit_cap=1.5,
    ),
    "softmax_skipped": Case(
        of((300,), (300,)),
        problems_masks.hstu_case((230,), 3, window=20, target_group_size=3, causal=False),
        "softmax",
        dataclasses.replace(TWO_SLOTS, tickets=True, k_stages=3, late_turns=True, skip_empty=True),
    ),
    "softmax_intervals": Case(SHARED, intervals_case(SHARED, 2), "softmax"),
    "softmax_pooled": Case(of(5, (40, 3)), intervals_case(of(5, (40, 3)), 2), "softmax"),
}


def attend(case: Case, arrays: Any) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel on tiles that XLA lists."""
    settings = case.settings
    masked = gdpa_mask.with_intervals(case.mask.mask, arrays, settings)
    masked, settings = gdpa_mask.with_rule(case.mask.mask, masked, settings)
    block_kv, offsets, found = case.config.block_kv, Offsets.of(masked, settings), None
    if settings.rule is not None:
        tiles = by_xla.masked_tiles(offsets, size=TILE_ROWS, unit=block_kv)
    else:
        assert masked.intervals is not None
        tiles = by_xla.query_tiles(offsets, size=TILE_ROWS)
        tiles, found = gdpa_masked.mask_tiles(tiles, masked.intervals, block_kv)
    return gdpa.gdpa_forward(
        *masked[:3],
        tiles,
        settings,
        out_rows=out_shape(arrays, settings)[0],
        config=case.config,
        num_sms=case.num_sms,
        seen=found,
        return_residuals=True,
    )


def check(case: Case) -> None:
    """Runs a case, interpreted or emulated, and holds its results to the error rule."""
    arrays = problems_gdpa.make_arrays(case.shape, case.dtype)
    assert_correct(attend(case, arrays), case, arrays)


def assert_correct(results: tuple[jax.Array, jax.Array | None], case: Case, arrays: Any) -> None:
    out, lse = results
    settings = case.settings
    exact = problems_gdpa.numpy_oracle(arrays, settings, case.mask.rule)
    options = {"activation": case.activation, "logit_cap": case.logit_cap}
    plain = problems_masks.attend(arrays, case.mask.mask, **options)
    problems.assert_within_error_rule(out, exact, plain)
    if case.activation == "softmax":
        exact = problems_gdpa.numpy_lse(arrays, settings, case.mask.rule)
        assert lse is not None
        is_row = exact != 0  # rows of no sequence may have any lse
        np.testing.assert_allclose(lse[is_row], exact[is_row], atol=1e-3, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name, launches) -> None:
    check(CASES[name])
    launches.assert_no_races(1)


def test_softmax_of_scores_of_any_size(launches: interpreter.Launches) -> None:
    """Maxima grow between blocks, and are so large that they are subtracted before scaling."""
    case = CASES["softmax"]
    arrays = problems_gdpa.make_arrays(case.shape, case.dtype)
    factors = 2.0 ** (np.arange(len(arrays.query)) % 41)[:, None, None]
    arrays = arrays._replace(query=arrays.query * factors.astype(case.dtype))
    results = attend(case, arrays)
    launches.assert_no_races(1)
    assert_correct(results, case, arrays)


@pytest.mark.parametrize("reads", [False, True])
def test_blocks_that_no_row_sees_are_not_listed(reads: bool) -> None:
    shape = of((300,), (300,))
    targets = masks.hstu(np.asarray([200], np.int32), window=20)
    arrays = problems_gdpa.make_arrays(shape)
    settings = problems_gdpa.make_settings(shape)
    for mask, lengths in (
        (masks.causal(), (300, 256, 128)),
        (masks.causal(10), (138, 128, 54)),
        # The last tile, without a block of targets that no row sees.
        (targets, (176, 220 - 64, 128)),
    ):
        masked = gdpa_mask.with_intervals(mask, arrays, settings)
        if reads:
            assert masked.intervals is not None
            tiles = by_xla.query_tiles(Offsets.of(masked, settings), size=TILE_ROWS)
            tiles, _ = jax.jit(gdpa_masked.mask_tiles, static_argnums=2)(
                tiles, masked.intervals, 64
            )
        else:
            offsets = Offsets.of(*gdpa_mask.with_rule(mask, masked, settings))
            tiles = by_xla.masked_tiles(offsets, size=TILE_ROWS, unit=64)
        words = tiles.words[: int(tiles.counts[0])]
        np.testing.assert_array_equal(np.sort(words[:, lists.KV_LENGTH])[::-1], lengths)
        if mask.rule.window is None:  # rows of a consumer have all keys up to its first row's
            assert words[0, lists.TILE_WORDS + lists.CUTS + 1] == 257 // 64


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_the_op_runs_the_kernel(activation, launches, monkeypatch) -> None:
    """Kernels compute the gradient, too."""
    case = CASES["targets"]
    arrays = problems_gdpa.make_arrays(case.shape)
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(gdpa, "masked_tiles", by_xla.masked_tiles)
    run = functools.partial(problems_masks.attend, mask=case.mask.mask, activation=activation)
    (plan,) = ikbo.explain(run, arrays).plans
    assert isinstance(plan.config, GdpaConfig)
    assert plan.reason.endswith("the kernel with masks")
    assert "one kernel for queries" in plan.backward
    out = run(arrays)
    launches.assert_no_races(1)
    settings = problems_gdpa.make_settings(case.shape, activation)
    exact = problems_gdpa.numpy_oracle(arrays, settings, case.mask.rule)
    plain = run(arrays, implementation="xla")
    problems.assert_within_error_rule(out, exact, plain)
