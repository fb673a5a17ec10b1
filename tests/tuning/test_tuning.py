"""The dispatch table, with rows of several cards, and the autotuner."""

import dataclasses
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fake_tuning import ATTENTION, Bench, other, row
from fake_tuning import LINEAR as DEFAULT
from hypothesis import given
from hypothesis import strategies as st

import ikbo_jax as ikbo
from ikbo_jax.autotuner import autotune
from ikbo_jax.autotuner.bench import Task
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.tuning import table, table_rows, user_cache

# The configurations that may run.


def test_candidates_are_legal_and_differ():
    candidates = list(DEFAULT.configs())
    assert len(candidates) == len(set(candidates)) > 10
    assert all(config.illegal_reason(DEFAULT) is None for config in candidates)
    assert {config.single_launch for config in candidates} == {True, False}
    one_level = LinearCompressionProblem((1024,), (866,), 433, 256, "bfloat16")
    assert {config.single_launch for config in one_level.configs()} == {False}


@pytest.mark.parametrize(
    ("m", "block_m"), [(433, 224), (128, 128), (256, 128), (512, 176), (1024, 208), (1, 16)]
)
def test_default_tile_wastes_little_of_m(m, block_m):
    config = dataclasses.replace(DEFAULT, m=m).default_config()
    assert config is not None
    assert config.block_m == block_m


@given(
    m=st.integers(1, 2100),
    n=st.sampled_from([8, 64, 128, 200, 256, 512]),
    k=st.integers(1, 3000),
    batch=st.integers(1, 20_000),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_default_config_is_legal_everywhere(m, n, k, batch, dtype):
    problem = LinearCompressionProblem((max(1, batch // 70), batch), (k, k), m, n, dtype)
    config = problem.default_config()
    assert config is not None
    assert config.illegal_reason(problem) is None
    padded = -(-m // config.block_m) * config.block_m
    assert padded - m < max(64, m)


# Lookup.


def test_shipped_table_is_sound():
    rows = table_rows.builtin_rows()
    assert len(rows) == len({(r.problem, r.device) for r in rows}), "one row a problem and card"
    for r in rows:
        assert r.config is None or r.config.illegal_reason(r.problem) is None
        choice = table.lookup(r.problem, device=r.device)
        assert choice.exact
        assert choice.config == r.config
        assert r.device in choice.reason


def test_own_row_before_nearest(builtin):
    near = dataclasses.replace(DEFAULT, batches=(16, 1100))
    builtin(row(near), row(DEFAULT, other()))
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.source, choice.exact) == (other(), "sm90.json", True)
    assert "NVIDIA H200" in choice.reason


def test_nearest_row_is_taken_and_named(builtin):
    near = dataclasses.replace(DEFAULT, batches=(19, 1300))
    builtin(row(dataclasses.replace(DEFAULT, batches=(21, 1400))), row(near, other()))
    choice = table.lookup(DEFAULT)
    assert choice.config == other()
    assert not choice.exact
    assert "nearest row at distance 0.34" in choice.reason
    assert near.describe() in choice.reason


def test_illegal_row_gives_way_to_the_next(builtin):
    huge = LinearCompressionConfig(block_m=224, num_stages=64, epilogue_rows=56)
    assert huge.illegal_reason(DEFAULT) is not None
    builtin(row(DEFAULT, huge), row(dataclasses.replace(DEFAULT, batches=(16, 1024)), other()))
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.exact) == (other(), False)


def test_xla_row_reaches_a_short_way_only(builtin):
    builtin(row(DEFAULT, None))
    assert table.lookup(DEFAULT).config is None
    assert table.lookup(DEFAULT).exact
    near = dataclasses.replace(DEFAULT, batches=(15, 1200))
    assert table.lookup(near).config is None
    assert not table.lookup(near).exact
    assert table.lookup(dataclasses.replace(near, dtype="float16")).source == "default"
    assert table.lookup(dataclasses.replace(DEFAULT, batches=(15, 1500))).source == "default"


@pytest.mark.parametrize("batches", [(1, 10_000), (0, 0), (1, 0), (7,), (2, 15, 15, 1024)])
def test_unusual_batches_find_something(builtin, batches):
    builtin(row(DEFAULT))
    problem = dataclasses.replace(DEFAULT, batches=batches, ks=(64,) * len(batches))
    choice = table.lookup(problem)
    assert (choice.config is None) == ("XLA by a cost model" in choice.reason)
    assert choice.config is not None or batches == (1, 0)


def test_distance_is_that_of_the_size_that_differs_most():
    twice = dataclasses.replace(DEFAULT, batches=(16, 2048))
    assert DEFAULT.distance(DEFAULT) == 0
    assert DEFAULT.distance(twice) == twice.distance(DEFAULT) == 1
    levels = LinearCompressionProblem((3, 15, 1024), (5, 1178, 866), 433, 256, "bfloat16")
    one_level = dataclasses.replace(DEFAULT, batches=DEFAULT.batches[-1:])
    for far in (levels, one_level, dataclasses.replace(DEFAULT, m=434), ATTENTION):
        assert DEFAULT.distance(far) == far.distance(DEFAULT) == float("inf")
    nobody = dataclasses.replace(ATTENTION, users=0, is_sorted=False)
    assert ATTENTION.distance(nobody) == math.log2(ATTENTION.users)
    assert ATTENTION.distance(dataclasses.replace(ATTENTION, q_heads=8)) == float("inf")


# The autotuner.


@pytest.mark.parametrize(
    ("kernel_ms", "is_xla"), [(1.0, False), (1.019, False), (1.021, True), ("fails", True)]
)
def test_xla_wins_beyond_two_percent_only(kernel_ms, is_xla):
    bench = Bench({None: 1.0}, kernel_ms)
    found = autotune.tune(DEFAULT, run=bench, limit=2)
    assert (found["config"] == {"implementation": "xla"}) == is_xla
    assert (table.lookup(DEFAULT).source == "user cache") == is_xla


def test_final_that_fails_leaves_the_heats_to_decide():
    bench = Bench({None: 1.0}, 0.5)

    def run(task: Task) -> dict[str, Any]:
        is_final = None in task.contenders and len(task.contenders) > 1
        return {"failure": "killed"} if is_final else bench(task)

    assert autotune.tune(DEFAULT, run=run)["ms"] == 0.5
    with pytest.raises(RuntimeError, match="no round could be measured"):
        autotune.tune(DEFAULT, run=run, limit=2)


def test_tuning_off_hopper_is_refused(cache_dir):
    with pytest.raises(RuntimeError, match="needs a Hopper GPU"):
        autotune.tune(DEFAULT, run=Bench({}, 1.0, capability="8.0"))
    with pytest.raises(RuntimeError, match="out of memory"):
        autotune.tune(DEFAULT, run=lambda task: {"failure": "out of memory"})
    assert not (cache_dir / "sm90.json").exists()


def test_progress_is_plain_lines_when_piped(capsys):
    with autotune.console_progress("tune") as progress:
        progress(1, 4, "XLA: 1 ms")
    elapsed, text = capsys.readouterr().out.split("] ", 1)
    assert elapsed.startswith("[")
    assert elapsed.endswith(" s")
    assert text == "tune 1/4 XLA: 1 ms\n"


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with autotune.console_progress("tune") as progress:
        progress(1, 4, "XLA: 1 ms")
    out = capsys.readouterr().out
    assert "s] XLA: 1 ms" in out
    assert "25%" in out


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
#: Within the distance of a row that speaks for it.
FAR = dataclasses.replace(DEFAULT, batches=(18, 1200))
CANDIDATES = list(DEFAULT.configs())
OF_H100, OF_H200 = CANDIDATES[1], CANDIDATES[2]


def of(device: str, config: Any, problem: Any = DEFAULT) -> table_rows.Row:
    return row(problem, config, device=device)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (H100, OF_H100),
        ("H100", OF_H100),
        ("NVIDIA H100 NVL", OF_H100),
        (H200, OF_H200),
        ("H200", OF_H200),
        ("NVIDIA GH200 480GB", CANDIDATES[0]),  # no card of the rows: the ranking
        ("", OF_H200),
    ],
)
def test_rows_of_the_card_at_hand_count(builtin, device, expected):
    builtin(of(H200, OF_H200), of(H100, OF_H100))
    for problem in (DEFAULT, FAR):
        assert table.lookup(problem, device=device).config == expected


def test_the_card_comes_before_the_distance(builtin):
    near = dataclasses.replace(DEFAULT, batches=(15, 1100))
    builtin(of(H200, OF_H200, near), of(H100, OF_H100))
    assert table.lookup(near, device=H200).config == OF_H200
    assert table.lookup(near, device=H100).config == OF_H100


def test_another_cards_row_in_the_users_cache_is_ignored_aloud(builtin):
    builtin()
    user_cache.write_user_row(of(H200, OF_H200))
    choice = table.lookup(DEFAULT, device=H100)
    assert choice.config == CANDIDATES[0]
    assert f"is ignored: an {H200} measured it" in choice.reason


def test_the_tuning_cache_keeps_a_row_for_each_card(builtin):
    builtin()
    user_cache.write_user_row(of(H200, OF_H200))
    user_cache.write_user_row(of(H100, CANDIDATES[3]))
    path = user_cache.write_user_row(of(H100, OF_H100))
    assert len(json.loads(path.read_text())["rows"]) == 2
    assert table.lookup(DEFAULT, device=H100).config == OF_H100
    assert table.lookup(DEFAULT, device=H200).config == OF_H200


def test_programs_for_a_card_take_its_rows(builtin):
    builtin(of(H200, OF_H200), of(H100, OF_H100))

    def op(*arrays: Any) -> jax.Array:
        return ikbo.linear_compression(*arrays)

    weights = [jax.ShapeDtypeStruct((433, k), jnp.bfloat16) for k in (866, 1178)]
    embeddings = [
        jax.ShapeDtypeStruct((n, k, 256), jnp.bfloat16) for n, k in ((1024, 866), (15, 1178))
    ]
    index = jax.ShapeDtypeStruct((1024,), jnp.int32)
    for card, expected in (("H100", OF_H100), ("H200", OF_H200)):
        with ikbo.export_target(card):
            (plan,) = ikbo.explain(op, *weights, *embeddings, index).plans
        assert plan.cuda.config == expected


def test_the_tuner_must_beat_the_choice_of_the_card_at_hand(builtin):
    """It does not know the card until a process that holds the device answers."""
    builtin(of(H200, OF_H200), of(H100, OF_H100))
    played = autotune.Contest(DEFAULT, 1, lambda *_: None)
    assert {OF_H100, OF_H200} <= set(played.contenders)
    played.play(Bench({OF_H100: 0.5, OF_H200: 0.4}, 0.6, device=H100))
    verdict = played.verdict()
    assert verdict.is_better
    assert verdict.row.config == OF_H200
    assert autotune.brief(OF_H100) in verdict.text
