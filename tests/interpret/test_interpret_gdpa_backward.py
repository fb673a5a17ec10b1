"""The backward kernels of generalised dot-product attention, interpreted under a race detector.

Without masks, and with them.
"""

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import planted
import problems
import problems_gdpa
import problems_masks
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from problems_gdpa import Shape
from problems_masks import causal, hstu_case, intervals_case

from ikbo_jax.ops import gdpa, gdpa_mask
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.pallas.gdpa_backward import softmax
from ikbo_jax.pallas.worklist import by_xla
from ikbo_jax.pallas.worklist.lists import Works
from ikbo_jax.problems import GdpaBackwardConfig, gdpa_backward
from ikbo_jax.reference import gdpa_chunked_vjp, hstu
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Blocks of 32 rows, so that few rows are several blocks.
CONFIG = GdpaBackwardConfig(block=32, stages=2)


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
    """A problem, and how the kernels cut it.

    `limits` are those of the lengths; with `is_wide`, gradients of keys and values stay in f32;
    `factor` multiplies the scale of the scores; with `stores`, one launch stores the gradients of
    scores for the other.
    """

    shape: Shape
    activation: str | tuple[str, ...] = "gelu_tanh"
    dtype: str = "bfloat16"
    num_sms: int = 1
    config: GdpaBackwardConfig = CONFIG
    limits: tuple[int | None, int | None] = (None, None)
    is_wide: bool = False
    factor: float = 1.0
    logit_cap: float | None = None
    mask: problems_masks.Case | None = None
    stores: bool = False

    @property
    def settings(self) -> Settings:
        settings = problems_gdpa.make_settings(self.shape, self.activation)
        return settings._replace(
            scale=self.factor * settings.scale,
            logit_cap=self.logit_cap,
            max_seqlen_q=self.limits[0],
            max_seqlen_kv=self.limits[1],
        )


# Rows that are not a whole tile's cost the interpreter most.
CASES = {
    "no_queries_or_keys": Case(Shape((66, 0, 3), (66, 2, 0), 1, 1, 64, after=2)),
    "indexed_grouped_heads_h128": Case(
        Shape((64, 2, 0), (3, 66), 2, 1, 128, (1, 0, 1)),
        ("gelu", "relu"),
        num_sms=2,
        config=GdpaBackwardConfig(64, 3),
        is_wide=True,
    ),
    # Two tiles of keys for eight SMs: the queries that share them are divided into two parts.
    "indexed_in_parts": Case(
        Shape((20, 3, 0, 17), (40, 5), 2, 1, 64, (0, 1, 0, 0), before=1, after=3), num_sms=8
    ),
    "pma_h96_f16": Case(Shape(3, (66, 0), 1, 1, 96), "silu", "float16", logit_cap=1.5),
    # Two tiles of a CTA, of which the second sequence has no keys; the third has no queries.
    "softmax_gaps": Case(
        Shape((130, 5, 0, 2), (70, 0, 40, 3), 1, 1, 64, before=2, after=3), "softmax"
    ),
    "softmax_indexed_grouped_heads_h128": Case(
        Shape((64, 2, 0), (3, 66), 2, 1, 128, (1, 0, 1)),
        "softmax",
        num_sms=2,
        config=GdpaBackwardConfig(64, 3),
        is_wide=True,
    ),
    # Blocks of 48 rows: their statistics take 64 words.
    "softmax_indexed_in_parts": Case(
        Shape((20, 3, 0, 50), (40, 5), 2, 1, 64, (0, 1, 0, 0), before=1, after=3),
        "softmax",
        num_sms=8,
        config=GdpaBackwardConfig(48, 2),
        limits=(49, 39),
        logit_cap=1.5,
    ),
    "softmax_pma_h96_f16": Case(Shape(3, (66, 0), 1, 1, 96), "softmax", "float16"),
    # Padded keys have scores of 0, which lie above lse: weights that must stay finite, and without
    # effect.
    "softmax_large_scores": Case(Shape((30, 40), (35, 70), 1, 1, 64), "softmax", factor=-300.0),
}


def masked(shape: Shape, mask: problems_masks.Case, activation: Any = "silu", **rest: Any) -> Case:
    return Case(shape, activation, mask=mask, **{"config": GdpaBackwardConfig(64, 2), **rest})


SHARED = Shape((40, 3, 0, 70), (66, 5), 2, 1, 64, (0, 0, 1, 0), before=1, after=3)
POOLED = Shape(3, (66, 0), 1, 1, 64)
NOTHING = Shape((70,), (66,), 1, 1, 64)
STORED_INTERVALS = Shape((40, 3, 70), (66, 5, 130), 2, 1, 128, before=1, after=3)
MASKED = {
    # Key heads are shared; the second consumer has no rows in most tiles.
    "stored_grouped": masked(
        Shape((3, 200, 60), (3, 200, 60), 2, 1, 128, after=3), causal(), num_sms=3, stores=True
    ),
    "stored_softmax_h64": masked(
        Shape((3, 200), (3, 200), 2, 2, 64), causal(), "softmax", num_sms=2, stores=True
    ),
    "stored_targets_f16": masked(
        Shape((150, 40), (190, 40), 2, 1, 64),
        hstu_case((70, 9), 3, window=20, full_tail=8, target_group_size=3),
        dtype="float16",
        stores=True,
    ),
    "stored_intervals": masked(
        STORED_INTERVALS, intervals_case(STORED_INTERVALS, 2), "softmax", stores=True
    ),
    # The first consumer skips the second tile's last block, in which the other one needs its mask;
    # with two stages, the skipped block's stage must be free for the end of the tile.
    "causal": masked(Shape((150, 20), (150, 20), 1, 1, 64), causal()),
    # Blocks before the window are not loaded; queries continue a prefix.
    "window_softmax_h96_f16": masked(
        Shape((3, 66), (70, 130), 2, 1, 96, before=1, after=2),
        causal(9),
        "softmax",
        dtype="float16",
        num_sms=2,
        config=GdpaBackwardConfig(64, 3),
        stores=True,
    ),
    # Between history and targets, blocks that no row sees.
    "targets_h128": masked(
        Shape((260,), (260,), 1, 1, 128),
        hstu_case((130,), 3),
        "gelu_tanh",
        config=GdpaBackwardConfig(64, 3),
    ),
    # Some rows see nothing; sequences share keys, and eight SMs divide their queries into parts.
    "intervals_in_parts": masked(
        SHARED, intervals_case(SHARED, 2), ("relu", "silu"), num_sms=8, logit_cap=1.5
    ),
    "intervals_shared_softmax": masked(SHARED, intervals_case(SHARED, 2), "softmax", logit_cap=1.5),
    "pooled_softmax": masked(POOLED, intervals_case(POOLED, 1), "softmax"),
    "nothing": masked(NOTHING, intervals_case(NOTHING._replace(kv_lens=(0,)), 1), "identity"),
}


def gradients(arrays: Arrays, case: Case, rule: Any = None) -> tuple[jax.Array, ...]:
    """Runs both kernels of a case on arrays that have the mask's intervals, or also its rule."""
    settings = case.settings._replace(rule=rule)
    d_out = problems_gdpa.cotangent(arrays, settings)
    out, lse = forward(arrays, settings)
    options: dict[str, Any] = {"num_sms": case.num_sms, "config": case.config}
    options["dtype"] = "float32" if case.is_wide else None
    # One program instead of one for each operation.
    run = jax.jit(functools.partial(op.kernel_vjp, settings=settings, **options))
    return jax.block_until_ready(run(arrays, d_out=d_out, out=out, lse=lse))


forward = jax.jit(problems_gdpa.residuals, static_argnums=1)


# One program instead of one for each operation; its conversions round.
@functools.partial(
    jax.jit, static_argnums=1, compiler_options={"xla_allow_excess_precision": False}
)
def plain_vjp(arrays: Arrays, settings: Settings, d_out: jax.Array) -> tuple[jax.Array, ...]:
    """What plain jnp makes of the arrays in their own dtype."""
    return gdpa_chunked_vjp.chunked_vjp(arrays, settings, d_out)


def assert_correct(actual, arrays, case, where=(..., ..., ...)) -> None:
    """Holds every gradient to the error rule, against the oracle in f64."""
    d_out = problems_gdpa.cotangent(arrays, case.settings)
    rule = case.mask and case.mask.rule
    expected = problems_gdpa.numpy_gradients(arrays, case.settings, d_out, rule)
    plain = plain_vjp(arrays, case.settings, d_out)
    if case.factor != 1:
        found = problems_gdpa.numpy_gradients(arrays, case.settings, d_out, dtype=plain[0].dtype)
        plain = [jnp.asarray(x, y.dtype) for x, y in zip(found, plain, strict=True)]
    dtypes = (case.dtype, *["float32" if case.is_wide else case.dtype] * 2)
    for array, want, rounded, rows, dtype in zip(
        actual, expected, plain, where, dtypes, strict=True
    ):
        assert array.dtype == dtype
        actually, plainly = np.asarray(array.astype(case.dtype)), np.asarray(rounded)
        problems.assert_within_error_rule(actually[rows], want[rows], plainly[rows])


def check(case: Case) -> None:
    """Runs a case, interpreted or emulated, and holds its gradients to the error rule."""
    arrays = problems_gdpa.make_arrays(case.shape, case.dtype)
    problem = gdpa._OP.problem(gdpa._Call(None, case.settings), arrays)
    assert gdpa_backward.illegal_reason(problem) is None
    settings = case.settings
    if case.mask is not None:
        arrays = gdpa_mask.with_intervals(case.mask.mask, arrays, settings)
        arrays, settings = gdpa_mask.with_rule(case.mask.mask, arrays, settings)
    least = 0 if case.stores else math.inf
    with mock.patch.object(gdpa_backward, "LEAST_STORED_KEYS", least):
        found = gradients(arrays, case, settings.rule)
    assert_correct(found, arrays, case)


@pytest.mark.parametrize("name", CASES | MASKED)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_gradients_are_right_and_free_of_races(name, launches) -> None:
    """Rows of no sequence are NaN."""
    check((CASES | MASKED)[name])
    launches.assert_no_races(2)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_nan_of_one_sequence_stays_there(activation, launches) -> None:
    """Nor does it matter that lengths have limits: rows past them are in no sequence, although
    their tiles of queries read the first sequence's lse and delta."""
    case = Case(Shape((3, 63, 2), (40, 34, 3), 1, 1, 64), activation, limits=(62, 33))
    clean = problems_gdpa.make_arrays(case.shape)
    query, key = (np.array(x) for x in clean[:2])
    query[:3], key[:40] = np.nan, np.nan
    spoiled = clean._replace(query=jnp.asarray(query), key=jnp.asarray(key))
    results = gradients(spoiled, case)
    launches.assert_no_races(2)
    ranges = ((0, 3), (0, 40), (0, 40))
    others = [np.r_[0:begin, end : len(x)] for x, (begin, end) in zip(results, ranges, strict=True)]
    assert_correct(results, clean, case, others)


@pytest.mark.parametrize(
    ("shape", "num_sms", "expected"),
    [
        (Shape((64,) * 100, (128,) * 15, 2, 2, 64, (0,) * 100), 132, 4),
        (Shape((64,) * 100, (129,) * 15, 2, 2, 64, (0,) * 100), 132, 2),
        (Shape((64,) * 15, (128,) * 15, 2, 2, 64, tuple(range(15))), 132, 1),
        (Shape((64,) * 15, (128,) * 15, 2, 2, 64), 132, 1),
        (Shape((64,) * 100, (3,), 1, 1, 64, (0,) * 100), 132, 8),
    ],
)
def test_few_tiles_of_keys_divide_their_queries(shape: Shape, num_sms: int, expected: int) -> None:
    arrays = problems_gdpa.make_arrays(shape)
    settings = problems_gdpa.make_settings(shape)._replace(max_seqlen_kv=max(shape.kv_lens))
    assert op._parts(arrays, settings, num_sms) == expected


@pytest.mark.parametrize(
    ("batch", "length", "changes", "is_stored"),
    [
        (64, 1024, {}, True),
        (64, 256, {}, True),
        (64, 254, {}, False),
        (64, 256, {"rule": hstu.Rule(window=127)}, False),
        (64, 1024, {"logit_cap": 1.0}, False),
        (64, 1024, {"activations": ("silu", "relu")}, False),
        (32, 8192, {}, False),  # 8.4 GiB
        (4500, 256, {}, True),
        (5500, 256, {}, False),  # 16,500 tiles
    ],
)
def test_gradients_of_scores_are_stored_within_bounds(batch, length, changes, is_stored) -> None:
    heads = 4 if batch < 1000 else 1
    rows = jax.ShapeDtypeStruct((batch * length, heads, 64), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((batch + 1,), jnp.int32)
    settings = problems_gdpa.make_settings(NOTHING, "silu")._replace(
        **{"rule": hstu.Rule(), "max_seqlen_q": length, "max_seqlen_kv": length, **changes}
    )
    assert bool(op._stored_rows(Arrays(rows, rows, rows, offsets, offsets), settings)) == is_stored


# The check itself must be able to fail.


def test_interpreted_statistics_freed_before_they_are_read_are_found(monkeypatch, launches) -> None:
    """The producer then loads the next tile's lse and delta over those of this tile."""
    receive, arrive = softmax.receive_rows, plgpu.barrier_arrive

    def free_then_receive(ctx: Any) -> Any:
        if ctx.shared.statistics_free is None:
            return receive(ctx)
        arrive(ctx.shared.statistics_free.at[0])
        with monkeypatch.context() as patch:
            patch.setattr(plgpu, "barrier_arrive", lambda barrier: None)
            return receive(ctx)

    monkeypatch.setattr(softmax, "receive_rows", free_then_receive)
    # The blocks of the first tile fit the ring, so the producer need not wait for them.
    case = Case(Shape((130,), (40,), 1, 1, 64), "softmax")
    arrays = problems_gdpa.make_arrays(case.shape)
    planted.assert_found(lambda: gradients(arrays, case), launches, expected=2)
