"""Rows of several cards: those of the card at hand count."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fake_tuning import Bench

import ikbo_jax as ikbo
from ikbo_jax.autotuner import contest
from ikbo_jax.problems import LinearCompressionProblem
from ikbo_jax.tuning import table, table_rows, user_cache

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
DEFAULT = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
#: Within the distance of a row that speaks for it.
FAR = dataclasses.replace(DEFAULT, batches=(18, 1200))
CANDIDATES = list(DEFAULT.configs())
OF_H100, OF_H200 = CANDIDATES[1], CANDIDATES[2]


def row(device: str, config: Any, problem: Any = DEFAULT) -> table_rows.Row:
    return table_rows.Row(problem, config, device, "2026-01-02", "0.11.2", 0.35, 0.8, 1.0)


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
    builtin(row(H200, OF_H200), row(H100, OF_H100))
    for problem in (DEFAULT, FAR):
        assert table.lookup(problem, device=device).config == expected


def test_the_card_comes_before_the_distance(builtin):
    near = dataclasses.replace(DEFAULT, batches=(15, 1100))
    builtin(row(H200, OF_H200, near), row(H100, OF_H100))
    assert table.lookup(near, device=H200).config == OF_H200
    assert table.lookup(near, device=H100).config == OF_H100


def test_another_cards_row_in_the_users_cache_is_ignored_aloud(builtin):
    builtin()
    user_cache.write_user_row(row(H200, OF_H200))
    choice = table.lookup(DEFAULT, device=H100)
    assert choice.config == CANDIDATES[0]
    assert f"is ignored: an {H200} measured it" in choice.reason


def test_the_tuning_cache_keeps_a_row_for_each_card(builtin):
    builtin()
    user_cache.write_user_row(row(H200, OF_H200))
    user_cache.write_user_row(row(H100, CANDIDATES[3]))
    path = user_cache.write_user_row(row(H100, OF_H100))
    assert len(json.loads(path.read_text())["rows"]) == 2
    assert table.lookup(DEFAULT, device=H100).config == OF_H100
    assert table.lookup(DEFAULT, device=H200).config == OF_H200


def test_programs_for_a_card_take_its_rows(builtin):
    builtin(row(H200, OF_H200), row(H100, OF_H100))

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
    builtin(row(H200, OF_H200), row(H100, OF_H100))
    played = contest.Contest(DEFAULT, 1, lambda *_: None)
    assert {OF_H100, OF_H200} <= set(played.contenders)
    played.play(Bench({OF_H100: 0.5, OF_H200: 0.4}, 0.6, device=H100))
    verdict = played.verdict()
    assert verdict.is_better
    assert verdict.row.config == OF_H200
    assert contest.brief(OF_H100) in verdict.text
