"""The example's metrics against values computed by hand, and its progress as text."""

import io
import math
import re

import numpy as np
import pytest

from examples.movielens import evaluate
from examples.movielens.progress import Progress


@pytest.mark.parametrize(
    ("score", "label", "expected"),
    [
        ([3, 2, 1, 0], [1, 1, 0, 0], 1.0),
        ([0, 1, 2, 3], [1, 1, 0, 0], 0.0),
        # Of the pairs (3, 2), (3, 0), (1, 2), (1, 0) all but the third are in order.
        ([3, 2, 1, 0], [1, 0, 1, 0], 0.75),
        # Equal scores count half: of six pairs, five are in order and one is equal.
        ([5, 4, 4, 1, 0], [1, 1, 0, 0, 0], (5 + 0.5) / 6),
        ([1, 1, 1], [0, 1, 0], 0.5),
    ],
)
def test_auc(score, label, expected):
    found = evaluate.auc(np.array([score], float), np.array([label], np.float32))
    assert found.tolist() == pytest.approx([expected])


def test_auc_of_equal_labels_is_nan():
    assert np.isnan(evaluate.auc(np.ones((2, 3)), np.array([[1, 1, 1], [0, 0, 0]]))).all()


def gain(*positions):
    """The sum of the discounts of positions, from 1."""
    return sum(1 / math.log2(position + 1) for position in positions)


@pytest.mark.parametrize(
    ("score", "label", "top", "expected"),
    [
        ([3, 2, 1, 0], [1, 1, 0, 0], 10, 1.0),
        ([3, 2, 1, 0], [0, 1, 0, 1], 10, gain(2, 4) / gain(1, 2)),
        ([3, 2, 1, 0], [0, 1, 0, 1], 2, gain(2) / gain(1, 2)),
        ([3, 2, 1, 0], [0, 0, 0, 1], 2, 0.0),
        # At most `top` watched movies count in the best order.
        ([3, 2, 1, 0], [1, 1, 1, 0], 2, 1.0),
        # The second and third are equal, so the watched one is at either with the same odds.
        ([3, 2, 2, 0], [0, 1, 0, 0], 10, gain(2, 3) / 2 / gain(1)),
        ([3, 2, 2, 0], [0, 0, 1, 0], 2, gain(2) / 2 / gain(1)),
    ],
)
def test_ndcg(score, label, top, expected):
    found = evaluate.ndcg(np.array([score], float), np.array([label], np.float32), top)
    assert found.tolist() == pytest.approx([expected])


def test_intervals_over_users_hold_requests_of_a_user_together():
    user = np.repeat(np.arange(50), 20)
    by_user = np.random.default_rng(0).normal(size=50)
    found = evaluate.over_users(by_user[user], user)
    assert found.mean == pytest.approx(by_user.mean())
    # As wide as for 50 values; a bootstrap over 1,000 requests would be 4.5 times as narrow.
    half = 1.96 * by_user.std() / 50**0.5
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert found.low < found.mean < found.high


def test_intervals_over_seeds_are_student_s():
    # Mean 3, deviation sqrt(2.5); the 97.5 % point of Student's t for 4 degrees is 2.776445.
    found = evaluate.over_seeds([1, 2, 3, 4, 5])
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert list(found) == pytest.approx([3, 3 - half, 3 + half])
    assert evaluate.over_seeds([2.0]) == (2.0, -math.inf, math.inf)


class Terminal(io.StringIO):
    """A file that is a terminal."""

    def isatty(self):
        return True


def run(file, **options):
    progress = Progress(file=file, **options)
    with progress.bar("a run", 2, 5) as advance:
        advance(loss=0.5)
        progress.note("a note")
        advance(loss=0.25)
        advance(loss=0.125)
    return file.getvalue()


def test_progress_in_a_pipe_is_plain_lines():
    lines = run(io.StringIO(), every_s=0).splitlines()
    # The first step compiles: it says nothing about the others, and is not written.
    assert lines[0] == "a note"
    assert re.fullmatch(r"a run: step 4/5, loss 0.2500, [\d.]+ steps/s, \d+ s left", lines[1])
    assert lines[2].startswith("a run: step 5/5, loss 0.1250")
    # By default a line appears every ten seconds, and at the end.
    assert [line.split(",")[0] for line in run(io.StringIO()).splitlines()] == [
        "a note",
        "a run: step 5/5",
    ]
    assert run(io.StringIO(), quiet=True) == ""


def test_progress_of_one_step_has_no_speed():
    file = io.StringIO()
    with Progress(file=file).bar("a run", 4, 5) as advance:
        advance(loss=0.5)
    assert file.getvalue() == "a run: step 5/5, loss 0.5000\n"


def test_progress_on_a_terminal_is_a_bar():
    text = run(Terminal())
    assert "5/5" in text
    assert "\x1b[" in text
    assert "a note" in text
