"""The GDPA forward kernel's own body, interpreted on a CPU under a race detector, through the op.

The interpreter runs one CTA after another.  Memory starts as NaN, reads outside of an array raise.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import planted
import problems
import problems_gdpa
import pytest
from problems_gdpa import Shape

from ikbo_jax.cases import gdpa as cases
from ikbo_jax.ops import dispatch
from ikbo_jax.ops import gdpa as op
from ikbo_jax.pallas.flash import attention, gdpa, gdpa_consumer, short_gdpa
from ikbo_jax.pallas.worklist import by_xla
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.problems import GdpaConfig, ShortGdpaConfig
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Blocks of 32 keys, so that few keys are several blocks.
TWO_SLOTS = GdpaConfig(block_kv=32, k_stages=2, v_stages=2, q_slots=2)
ONE_SLOT = dataclasses.replace(TWO_SLOTS, q_slots=1, v_stages=3)
DEEP = dataclasses.replace(TWO_SLOTS, k_stages=3, v_stages=4, q_slots=3)
RUNS = dataclasses.replace(TWO_SLOTS, q_slots=3, run=3, late_turns=True)
JAGGED = {"skip_empty": True, "half_blocks": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its config, and how many CTAs there are."""

    shape: Shape
    activation: str | tuple[str, ...] = "relu"
    config: GdpaConfig | ShortGdpaConfig = TWO_SLOTS
    num_sms: int = 1
    dtype: str = "bfloat16"
    approx: str | None = None
    bounds: tuple[int | None, int | None] = (None, None)
    logit_cap: float | None = None

    @property
    def settings(self) -> Settings:
        settings = problems_gdpa.make_settings(self.shape, self.activation, approx=self.approx)
        limits = {"max_seqlen_q": self.bounds[0], "max_seqlen_kv": self.bounds[1]}
        return settings._replace(**limits, logit_cap=self.logit_cap)


def of(q_lens: Any, kv_lens: tuple[int, ...], **rest: Any) -> Shape:
    heads = {"q_heads": 1, "kv_heads": 1, "head_dim": 64}
    return Shape(q_lens, kv_lens, **(heads | rest))


CASES = {
    # Blocks of keys that are whole or not; tiles that meet the blocks of the one before, or others.
    "runs": Case(
        of((260, 130), (33, 20), q_heads=2, kv_heads=1), ("leaky_relu", "gelu"), config=RUNS
    ),
    # Empty sequences, rows of none; CTAs with two items, one, and none; capped scores.
    "gaps_h96_f16": Case(
        of((0, 70, 0, 5), (40, 3, 0, 0), before=2, after=131, q_heads=2, head_dim=96),
        "silu",
        num_sms=3,
        dtype="float16",
        logit_cap=1.5,
    ),
    # Consumer 1 works, rests twice, works, and rests to the end; or rests first and works last.
    # Last blocks hold half of their keys or less, or more (gelu's would be serialised: `adapt`).
    "jagged": Case(
        of((70, 5, 64, 130), (100, 80, 50, 33)),
        "silu",
        config=dataclasses.replace(TWO_SLOTS, **JAGGED),
    ),
    "jagged_runs": Case(
        of((70, 5, 130, 3), (100, 50, 33, 10)), config=dataclasses.replace(RUNS, **JAGGED)
    ),
    "jagged_one_slot_h256": Case(
        of((3, 66), (70, 40), head_dim=256),
        "relu_squared",
        config=dataclasses.replace(ONE_SLOT, **JAGGED),
    ),
    # CTAs take runs by a counter; the interpreter has one CTA.
    "tickets": Case(
        of((70, 5, 64, 130), (100, 80, 0, 33), before=3, q_heads=2),
        "gelu",
        dataclasses.replace(TWO_SLOTS, tickets=True),
    ),
    "tickets_runs": Case(of((260, 130), (33, 20)), config=dataclasses.replace(RUNS, tickets=True)),
    # The default of long-tailed lengths at H = 256: one slot of queries.
    "tickets_one_slot_h256": Case(
        of((70, 5, 0, 130), (100, 80, 9, 33), before=3, q_heads=2, kv_heads=1, head_dim=256),
        "gelu_tanh",
        dataclasses.replace(ONE_SLOT, v_stages=2, late_turns=True, tickets=True, **JAGGED),
        approx="tanh",
    ),
    # Queries of all sequences; without options, consumer 1 multiplies rows that it has not got.
    "pma_one_slot": Case(
        of(3, (33, 0, 1)), "gelu_tanh", ONE_SLOT, approx="tanh_bf16", logit_cap=1.5
    ),
    # The kernel for short sequences: several items of a CTA, one, none; several blocks of keys, and
    # none; rows of no sequence; keys that heads share.
    "short": Case(
        of((30, 0, 64, 70, 5), (30, 3, 64, 50, 0), after=9, q_heads=2, kv_heads=1),
        ("gelu_tanh", "silu"),
        ShortGdpaConfig(block_kv=32),
        num_sms=1,
    ),
    "short_softmax_h96_f16": Case(
        of((3, 20, 1, 7), (40, 16, 0, 17), before=2, after=3, head_dim=96),
        "softmax",
        ShortGdpaConfig(16, 16, slots=3, ctas=2),
        dtype="float16",
    ),
    "short_pma": Case(of(3, (33, 0, 1), head_dim=128), "relu", ShortGdpaConfig(16, 64, ctas=1)),
    # CTAs find their tiles: sequences have one tile or several, are empty, or are longer than their
    # bounds; rows of none before, between and after them; CTAs without an item.
    "short_found": Case(
        of((30, 0, 64, 70, 5), (30, 3, 64, 50, 0), before=70, after=139, q_heads=2, kv_heads=1),
        ("gelu_tanh", "silu"),
        ShortGdpaConfig(block_kv=32, finds_tiles=True),
        num_sms=1,
    ),
    "short_found_bounded": Case(
        of((9, 40, 0, 16, 60), (30, 3, 64, 50, 70), after=5, head_dim=96),
        "softmax",
        ShortGdpaConfig(16, 32, slots=3, ctas=2, finds_tiles=True),
        dtype="float16",
        bounds=(16, 40),
    ),
    "short_found_pma": Case(
        of(19, (33, 0, 1), head_dim=128, q_heads=2),
        "relu",
        ShortGdpaConfig(16, 64, ctas=1, finds_tiles=True),
        num_sms=5,
    ),
    # Defaults beyond one tile. PFFN: few keys for several tiles of a sequence; more keys than a
    # block; none. Offsets that begin and end within the rows, keys that heads share.
    "short_pffn": Case(
        of((130, 5, 0, 70), (31,) * 4, before=3, after=2, q_heads=2, kv_heads=1, head_dim=128),
        "softmax",
        ShortGdpaConfig(block_kv=32, ctas=3),
        dtype="float16",
    ),
    "short_found_pffn": Case(
        of((130, 5, 0, 70, 64), (94, 94, 94, 0, 94), before=3, after=70, q_heads=2, head_dim=128),
        "softmax",
        ShortGdpaConfig(block_kv=48, finds_tiles=True),
        bounds=(200, 94),
    ),
    "short_found_pffn_gelu_h96_f16": Case(
        of((129, 64, 1), (94, 7, 33), after=1, q_heads=2, kv_heads=1, head_dim=96),
        ("gelu", "leaky_relu"),
        ShortGdpaConfig(block_kv=48, finds_tiles=True),
        dtype="float16",
        num_sms=2,
    ),
    # PMA: tiles of 32 rows, or several of a sequence; several blocks of keys, and none.
    "short_found_pma_32": Case(
        of(23, (150, 0, 257), before=5, after=3, q_heads=2, kv_heads=1),
        "gelu_tanh",
        ShortGdpaConfig(32, 128, finds_tiles=True),
        approx="tanh",
        bounds=(None, 256),
    ),
    "short_found_pma_32_softmax_f16": Case(
        of(32, (0, 129, 40)), "softmax", ShortGdpaConfig(32, 128, finds_tiles=True), dtype="float16"
    ),
    "short_pma_64": Case(
        of(64, (97, 0, 1), q_to_kv=(1, 0, 2)), "gelu", ShortGdpaConfig(64, 96, finds_tiles=True)
    ),
    "short_found_long_softmax": Case(
        of((130, 3), (130, 300), before=2, q_heads=2, kv_heads=1),
        "softmax",
        ShortGdpaConfig(block_kv=128, finds_tiles=True),
        dtype="float16",
    ),
    # The attention kernel: CTAs with an item or none.
    "softmax_gaps": Case(
        of((0, 70, 0, 5), (65, 3, 0, 0), after=131), "softmax", num_sms=99, logit_cap=1.5
    ),
}


def attend(arrays: Arrays, case: Case) -> jax.Array:
    """`ikbo.gdpa`, down to its interpreted kernel."""
    op._OP.jitted.clear_cache()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
        patched.setattr(dispatch, "num_sms", lambda: case.num_sms)
        # `test_emulated_tiles` runs the kernel that makes the list.
        patched.setattr(gdpa, "query_tiles", by_xla.query_tiles)
        options = {"implementation": "mosaic_gpu", "config": case.config}
        out = problems_gdpa.attend(arrays, **case.settings.options, **options)
    op._OP.jitted.clear_cache()
    return jax.block_until_ready(out)


def assert_correct(out: Any, arrays: Arrays, case: Case) -> None:
    """Holds the result to the error rule, against the oracle in f64; one that knows approximations
    is the materialised one in f32."""
    oracle: Any = problems_gdpa.numpy_oracle(arrays, case.settings)
    if case.approx is not None:
        wide = arrays._replace(query=arrays.query.astype(jnp.float32))
        oracle = problems_gdpa.materialised(wide, case.settings)
    plain = problems_gdpa.materialised(arrays, case.settings)
    problems.assert_within_error_rule(out, oracle, plain)


def check(case: Case) -> None:
    """Runs a case, interpreted or emulated, and holds its result to the error rule."""
    arrays = problems_gdpa.make_arrays(case.shape, case.dtype)
    assert_correct(attend(arrays, case), arrays, case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name, launches) -> None:
    check(CASES[name])
    launches.assert_no_races(1)


def test_interpreted_trial_of_the_autotuner(launches, monkeypatch) -> None:
    of_arrays = Case(of((3, 2, 1), (40, 10), q_to_kv=(0, 1, 1)), bounds=(3, 40))
    arrays = problems_gdpa.make_arrays(of_arrays.shape)
    problem = op._OP.problem(op._Call(None, of_arrays.settings), arrays)
    monkeypatch.setattr(gdpa, "query_tiles", by_xla.query_tiles)
    case = cases.Case(problem)
    operands = case.inputs()
    out = jax.block_until_ready(case.runner(TWO_SLOTS)(*operands))
    launches.assert_no_races(1)
    xla = case.runner(None)(*operands)
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (out, xla)), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("activation", "config"),
    [
        ("gelu_tanh", DEEP),
        ("gelu_tanh", ShortGdpaConfig(32, 32)),
        ("softmax", ShortGdpaConfig(64, 64)),
    ],
    ids=["long", "short", "short_softmax"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_nan_of_one_sequence_stays_there(activation, config, launches) -> None:
    """Blocks of the sequences beside it, and tiles, reach into it; an index says which queries meet
    which keys."""
    shape = of((3, 66, 0, 2, 4), (40, 5, 100), q_to_kv=(2, 1, 2, 2, 0))
    case = Case(shape, activation, config=config)
    clean = problems_gdpa.make_arrays(case.shape)
    query, key, value = (np.array(x) for x in clean[:3])
    query[3:69], key[40:45], value[40:45] = np.nan, np.inf, np.nan
    spoiled = clean._replace(
        query=jnp.asarray(query), key=jnp.asarray(key), value=jnp.asarray(value)
    )
    out = np.array(attend(spoiled, case))
    launches.assert_no_races(1)
    assert np.all(np.isnan(out[3:69].astype(np.float32)))
    query[3:69] = out[3:69] = value[40:45] = 0
    replaced = clean._replace(query=jnp.asarray(query), value=jnp.asarray(value))
    assert_correct(out, replaced, case)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_softmax_is_exact_where_the_first_maximum_does_not_do(launches) -> None:
    """Scores that grow by far in a sequence's second block, and another sequence's NaN behind it;
    lse as well.  Queries of all sequences, of which one has no keys."""
    shape = of(3, (40, 70, 5, 60, 0), q_to_kv=(0, 4, 2, 1, 3))
    case = Case(shape, "softmax", ONE_SLOT, dtype="float16")
    arrays = problems_gdpa.make_arrays(case.shape, case.dtype)
    key, value = (np.array(x) for x in arrays[1:3])
    key[40 + 50] *= 50
    value[110:115] = 0
    arrays = arrays._replace(key=jnp.asarray(key), value=jnp.asarray(value))
    key[110:115], value[110:115] = np.nan, np.inf
    spoiled = arrays._replace(key=jnp.asarray(key), value=jnp.asarray(value))
    tiles = by_xla.query_tiles(Offsets.of(spoiled, case.settings), size=TILE_ROWS)
    results = attention.jagged_attention_kernel(
        *spoiled[:3],
        tiles,
        case.settings,
        out_rows=15,
        return_residuals=True,
        config=case.config.for_softmax,
        num_sms=1,
    )
    launches.assert_no_races(1)
    out, lse = map(np.array, results)
    assert np.all(np.isnan(out[6:9].astype(np.float32)))
    out[6:9] = 0
    assert_correct(out, arrays, case)
    expected = problems_gdpa.numpy_lse(arrays, case.settings)
    others = np.r_[0:6, 9:15]
    np.testing.assert_allclose(lse[others], expected[others], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("finds_tiles", [False, True])
def test_interpreted_short_softmax_returns_lse(finds_tiles, launches) -> None:
    """Of several blocks, of several tiles, and of sequences without keys; a negative scale."""
    shape = of((3, 5, 20), (20, 0, 40))
    arrays = problems_gdpa.make_arrays(shape)
    tiles: Any = Offsets(*arrays[3:6], 28, 60)
    if not finds_tiles:
        tiles = by_xla.query_tiles(tiles, size=16)
    settings = problems_gdpa.make_settings(shape, "softmax", scale=-0.3)
    out, lse = short_gdpa.short_gdpa(
        *arrays[:3],
        tiles,
        settings,
        out_rows=28,
        return_residuals=True,
        config=ShortGdpaConfig(16, 16, finds_tiles=finds_tiles),
        num_sms=1,
    )
    launches.assert_no_races(1)
    plain = problems_gdpa.materialised(arrays, settings)
    oracle = problems_gdpa.numpy_oracle(arrays, settings)
    problems.assert_within_error_rule(out, oracle, plain)
    expected = problems_gdpa.numpy_lse(arrays, settings)
    assert np.all(np.isneginf(expected[3:8]))
    np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-4)


# The checks themselves: each of them must be able to fail.


def test_interpreted_block_zeroed_too_late_is_found(launches, monkeypatch) -> None:
    """Consumer 1 zeroes a stage that consumer 0 reads first."""
    await_block = gdpa_consumer._await_block

    def swapped(ctx: Any, *rest: Any) -> None:
        await_block(ctx.replace(consumer=NUM_CONSUMERS - 1 - ctx.consumer), *rest)

    monkeypatch.setattr(gdpa_consumer, "_await_block", swapped)
    case = Case(of((128,) * 4, (33,) * 4))
    arrays = problems_gdpa.make_arrays(case.shape)
    planted.assert_found(lambda: attend(arrays, case), launches)
