"""The backward kernels of gdpa with masks, interpreted under a race detector."""

import dataclasses
import math
from typing import Any
from unittest import mock

import jax.numpy as jnp
import problems
import problems_gdpa
import problems_masks
import pytest
from problems_gdpa import Shape
from problems_masks import causal, hstu_case, intervals_case
from test_interpret_gdpa_backward import gradients, plain_vjp

from ikbo_jax.ops import gdpa_mask
from ikbo_jax.pallas.worklist import by_xla
from ikbo_jax.pallas.worklist.lists import Works
from ikbo_jax.problems import GdpaBackwardConfig
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.reference.gdpa import Settings

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

TWO_STAGES = GdpaBackwardConfig(64, 2)


@pytest.fixture(autouse=True)
def _listed_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills lists of tiles past their last entry, which is arbitrary, with their first tile."""
    works = by_xla.works

    def filled(*args: Any, **options: Any) -> Works:
        found = works(*args, **options)
        of_rows = []
        for work in (found.queries, found.keys):
            is_tile = jnp.arange(work.tiles.shape[0]) < work.counts[1]
            tiles = jnp.where(is_tile[:, None], work.tiles, work.tiles[:1])
            of_rows.append(work._replace(tiles=tiles))
        return found._replace(queries=of_rows[0], keys=of_rows[1])

    monkeypatch.setattr(by_xla, "works", filled)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, a mask and its rule, and how the kernels cut the problem."""

    shape: Shape
    mask: problems_masks.Case
    activation: Any = "silu"
    dtype: str = "bfloat16"
    num_sms: int = 1
    config: GdpaBackwardConfig = TWO_STAGES
    is_wide: bool = False
    logit_cap: float | None = None
    stores: bool = False

    @property
    def settings(self) -> Settings:
        return problems_gdpa.make_settings(self.shape, self.activation, logit_cap=self.logit_cap)


SHARED = Shape((40, 3, 0, 70), (66, 5), 2, 1, 64, (0, 0, 1, 0), before=1, after=3)
POOLED = Shape(3, (66, 0), 1, 1, 64)
NOTHING = Shape((70,), (66,), 1, 1, 64)
CASES = {
    # Key heads are shared; the second consumer has no rows in most tiles.
    "stored_grouped": Case(
        Shape((3, 200, 60), (3, 200, 60), 2, 1, 128, after=3), causal(), num_sms=3, stores=True
    ),
    "stored_softmax_h64": Case(
        Shape((3, 200), (3, 200), 2, 2, 64), causal(), "softmax", num_sms=2, stores=True
    ),
    # The first consumer skips the second tile's last block, in which the other one needs its mask;
    # with two stages, the skipped block's stage must be free for the end of the tile.
    "causal": Case(Shape((150, 20), (150, 20), 1, 1, 64), causal()),
    # Blocks before the window are not loaded; queries continue a prefix.
    "window_softmax_h96_f16": Case(
        Shape((3, 66), (70, 130), 2, 1, 96, before=1, after=2),
        causal(9),
        "softmax",
        "float16",
        2,
        GdpaBackwardConfig(64, 3),
        stores=True,
    ),
    # Between history and targets, blocks that no row sees.
    "targets_h128": Case(
        Shape((260,), (260,), 1, 1, 128),
        hstu_case((130,), 3),
        "gelu_tanh",
        config=GdpaBackwardConfig(64, 3),
    ),
    # Some rows see nothing; sequences share keys, and eight SMs divide their queries into parts.
    "intervals_in_parts": Case(
        SHARED, intervals_case(SHARED, 2), ("relu", "silu"), num_sms=8, logit_cap=1.5
    ),
    "intervals_shared_softmax": Case(SHARED, intervals_case(SHARED, 2), "softmax", logit_cap=1.5),
    "pooled_softmax": Case(POOLED, intervals_case(POOLED, 1), "softmax"),
    "nothing": Case(NOTHING, intervals_case(NOTHING._replace(kv_lens=(0,)), 1), "identity"),
}


def check(case: Case) -> None:
    """Runs a case, interpreted or emulated.

    Holds every gradient to the error rule, against the oracle in f64.
    """
    arrays, settings = problems_gdpa.make_arrays(case.shape, case.dtype), case.settings
    arrays = gdpa_mask.with_intervals(case.mask.mask, arrays, settings)
    least = (0, 0) if case.stores else (math.inf, math.inf)
    with mock.patch.multiple(configs, LEAST_STORED_KEYS=least, LEAST_STORED_BYTES=least):
        found = gradients(arrays, case)
    d_out = problems_gdpa.cotangent(arrays, settings)
    exact = problems_gdpa.numpy_gradients(arrays, settings, d_out, case.mask.rule)
    plain = plain_vjp(arrays, settings, d_out)
    for array, want, rounded in zip(found, exact, plain, strict=True):
        assert array.dtype == case.dtype
        problems.assert_within_error_rule(array, want, rounded)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_masked_gradients_are_right_and_free_of_races(name, launches):
    check(CASES[name])
    launches.assert_no_races(2)
