"""Histories that grow: only new events are computed, and scores are those of whole histories."""

import functools
import itertools
import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving_oracle

from examples.serving import growth, models
from examples.serving.__main__ import main
from examples.serving.histories import Growing, HistorySource, Sizes, Whole
from examples.serving.settings import Settings
from ikbo_jax import serving

SIZES = Sizes(items=50, layers=2, width=8, heads=2, head_dim=8, page=4, most=5)
SOURCE = HistorySource(12, SIZES, median=5)
PAGE_BYTES = 4 * 2 * 2 * (2 * 8) * 4
APPENDS = ((4, 2), (8, 1))
BUCKETS = serving.Buckets((6,), (3,), (1,))


class Log:
    """Events of the source, and the positions that were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.broken: set[int] = set()

    def __call__(self, users: list[int], starts: list[int], stops: list[int]) -> Any:
        if self.broken & set(users):
            raise KeyError(users)
        self.asked += zip(users, starts, stops, strict=True)
        return SOURCE.events_of(users, starts, stops)


def make(log: Log | None = None, pages: int = 20, **options: Any) -> serving.HistoryScorer:
    chosen = {"model": Growing(), "buckets": BUCKETS, "appends": APPENDS, "page": 4, "most": 5}
    chosen |= {"user_bytes": pages * PAGE_BYTES, **options}
    model, row = chosen.pop("model"), chosen.pop("row", SOURCE.row)
    specs = chosen.pop("event", SOURCE.event), row, SOURCE.candidate
    chosen.setdefault("events_of", log or Log())
    return serving.HistoryScorer(model, SOURCE.weights("1"), *specs, **chosen)


def request(user: Any, version: Any, items: Any = (3, 9)) -> serving.Request:
    return serving.Request(user, version, None, np.asarray(items, np.int32))


@functools.cache
def oracle(weights: str) -> Any:
    """Scores of one user's candidates, from the whole history."""
    whole, given = Whole(), jax.tree.map(jnp.asarray, SOURCE.weights(weights))

    def scores(users: Any, items: Any) -> Any:
        index = jnp.zeros(len(items), jnp.int32)
        return whole.score(given, whole.encode_users(given, users), items, index)

    return jax.jit(scores)


def assert_right(requests: Any, answers: Any, weights: str = "1") -> None:
    for one, answer in zip(requests, answers, strict=True):
        items = np.resize(one.candidates, 6)
        users = SOURCE.whole([one.user], [one.version])
        expected = oracle(weights)(users, items)
        np.testing.assert_allclose(answer.scores, expected[: one.size], atol=2e-5, rtol=2e-5)


def test_scores_are_those_of_whole_histories_while_these_grow():
    """A stream of users, of histories that are longer than every program, and of evictions."""
    log, rng = Log(), np.random.default_rng(0)
    scorer = make(log)
    versions, done = rng.integers(0, 14, 12), []
    for _ in range(40):
        requests = []
        for user in rng.integers(0, 12, rng.integers(1, 7)).tolist():
            versions[user] = min(20, versions[user] + rng.integers(0, 3))
            older = int(rng.integers(0, 2)) * int(rng.integers(0, 4))
            version = max(0, int(versions[user]) - older)
            requests.append(request(user, version, rng.integers(0, 50, rng.integers(1, 4))))
        done.append((requests, scorer.rank(requests)))
    metrics = scorer.metrics
    assert metrics.compilations == 0
    assert min(metrics.hits, metrics.misses, metrics.evictions) > 10
    assert 10 < metrics.pages_in_use <= metrics.pages == 20
    # An event is asked for again only if its history has left.
    assert len([start for _, start, _ in log.asked if start == 0]) < metrics.misses + 1
    for requests, answers in done:
        assert_right(requests, answers)


def test_only_new_events_are_computed():
    log = Log()
    scorer = make(log)
    for version in (7, 8, 8, 5, 20):
        requests = [request(1, version), request(2, 3)]
        assert_right(requests, scorer.rank(requests))
    assert log.asked == [(1, 0, 7), (2, 0, 3), (1, 7, 8), (1, 8, 20)]
    # Two versions in one call share the pages.
    requests = [request(3, 4), request(3, 9)]
    assert_right(requests, scorer.rank(requests))
    assert log.asked[4:] == [(3, 0, 9)]
    scorer.set_weights(SOURCE.weights("2"), "2")
    assert_right(requests, scorer.rank(requests), "2")
    assert log.asked[5:] == [(3, 0, 9)]
    scorer.forget_users()
    assert scorer.metrics.pages_in_use == 0


def test_one_user_s_missing_events_leave_the_others_alone():
    log = Log()
    scorer = make(log)
    requests = [request(1, 4), request(2, 4), request(3, 6)]
    log.broken = {2}
    for _ in range(2):
        answers = scorer.rank(requests)
        assert_right([requests[0], requests[2]], [answers[0], answers[2]])
        assert isinstance(answers[1], KeyError)
    log.broken = set()
    assert_right(requests, scorer.rank(requests))


def test_a_call_that_fails_leaves_no_history_that_was_not_written(monkeypatch):
    scorer, requests = make(), [request(1, 6), request(2, 2)]
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patched:
        patched.setattr(scorer, "_append", dict.fromkeys(APPENDS, interrupt))
        with pytest.raises(KeyboardInterrupt):
            scorer.rank(requests)
    assert_right(requests, scorer.rank(requests))


def test_an_append_copies_no_pages():
    """The pages are far more than what a call computes."""
    scorer = make(pages=40_000)
    for program in scorer._append.values():
        assert program.memory_analysis().temp_size_in_bytes < 1000 * PAGE_BYTES
        assert program.memory_analysis().alias_size_in_bytes >= 40_000 * PAGE_BYTES


@pytest.mark.parametrize("version", [-1, 21, 1.5, "3", None, True])
def test_a_version_is_a_number_of_events(version):
    scorer = _scorer()
    good = request(1, np.int64(3))
    answers = scorer.rank([request(2, version), good])
    assert_right([good], answers[1:])
    assert str(answers[0]).endswith("expected a number of events, 0 to 20")
    with pytest.raises(serving.BadRequestError, match="expected a number of events"):
        scorer.check(request(2, version))


_scorer = functools.cache(make)


class Shorter(Growing):
    def append(self, weights: Any, history: Any, events: Any) -> Any:
        pages = super().append(weights, history, events)
        return jax.tree.map(lambda x: x[:7], pages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages": 14}, "the pool has 14 pages but the histories of a call's 3 users may take 15"),
        ({"model": Shorter()}, r"append returns shape \(7, 4, 2, 8\)"),
        ({"events_of": None}, "events_of is None, expected a function"),
        ({"event": None}, "event is None, expected at least 1 array"),
        ({"appends": ()}, "appends is \\(\\), expected ascending"),
        ({"appends": ((8, 1), (4, 2))}, "expected ascending"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("counts", list(itertools.product((1, 5, 9, 20), repeat=2)))
def test_events_of_any_number_are_appended_once(counts):
    scorer = _scorer()
    scorer.forget_users()
    requests = [request(user, count) for user, count in enumerate(counts, 4)]
    assert_right(requests, scorer.rank(requests))


def test_a_replica_of_the_example_keeps_histories_in_pages():
    """What a request calls version n has n events more than the user had at first."""
    settings = Settings(source="histories-tiny", candidates=(8,), users=(3,), user_bytes=1 << 20)
    source = settings.load()
    replica, offline = settings.replica(source), serving_oracle.Offline(source, source.newest)
    items = [1, 5, 9]
    requests = [models.request(source, user, items, v) for v in (0, 3) for user in (7, 8)]
    answers = replica.rank(requests)
    for user, answer in zip((7, 8), answers, strict=False):
        expected = offline.scores(user, items)
        np.testing.assert_allclose(answer.scores, expected, atol=2e-5, rtol=2e-5)
    assert np.abs(answers[0].scores - answers[2].scores).max() > 1e-3
    assert replica.metrics.pages_in_use > 0


def test_the_benchmark_compares_the_same_scores(tmp_path, capsys):
    options = ["--source", "histories-tiny", "--events", "6", "--buckets", "64", "--users", "2"]
    options += ["--fewest", "2", "--most", "9", "--known", "4", "--requests", "6", "--turns", "2"]
    options += ["--user-bytes", str(1 << 22), "--out", str(tmp_path / "growth.json")]
    status = main(["growth", *options])
    (figure,) = json.loads((tmp_path / "growth.json").read_text())["figures"]
    assert status == (figure["ratio"] < growth.BAR)
    assert (figure["events"], len(figure["seconds"]["pages"])) == (8, 2)
    assert figure["apart"] < 2e-5
    assert "times as many requests" in capsys.readouterr().err
