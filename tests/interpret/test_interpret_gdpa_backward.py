"""The backward kernels of generalised dot-product attention, interpreted under a race detector."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import planted
import problems
import problems_gdpa
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from problems_gdpa import Shape

from ikbo_jax.ops import gdpa
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.pallas.gdpa_backward import softmax
from ikbo_jax.problems import GdpaBackwardConfig, gdpa_backward
from ikbo_jax.reference import gdpa_chunked, gdpa_chunked_vjp
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Blocks of 32 rows, so that few rows are several blocks.
CONFIG = GdpaBackwardConfig(block=32, stages=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and how the kernels cut it.

    `limits` are those of the lengths; with `is_wide`, gradients of keys and values stay in f32;
    `factor` multiplies the scale of the scores.
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


def gradients(arrays: Arrays, case: Any) -> tuple[jax.Array, ...]:
    """Runs both kernels of a case, which may have a mask."""
    settings = case.settings
    d_out = problems_gdpa.cotangent(arrays, settings)
    residuals = forward(arrays, settings)

    # One program instead of one for each operation.
    @jax.jit
    def run(arrays: Arrays, d_out: jax.Array, out: Any, lse: Any) -> tuple[jax.Array, ...]:
        return op.kernel_vjp(
            arrays,
            settings,
            d_out,
            out=out,
            lse=lse,
            num_sms=case.num_sms,
            query_config=case.config,
            key_config=case.config,
            dtype="float32" if case.is_wide else None,
        )

    return jax.block_until_ready(run(arrays, d_out, *residuals))


@functools.partial(jax.jit, static_argnums=1)
def forward(arrays: Arrays, settings: Settings) -> tuple[jax.Array | None, jax.Array | None]:
    """What the gradient of a softmax needs of the forward pass."""
    if "softmax" not in settings.activations:
        return None, None
    return gdpa_chunked.chunked(arrays, settings)


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
    expected = problems_gdpa.numpy_gradients(arrays, case.settings, d_out)
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
    assert_correct(gradients(arrays, case), arrays, case)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_gradients_are_right_and_free_of_races(name, launches) -> None:
    """Rows of no sequence are NaN."""
    check(CASES[name])
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
