"""The scorer without the engine: what the measurement asks, and that its figures tell the truth."""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import time
from typing import Any

import numpy as np
import pytest

from examples.serving import alone, models, plans, stream
from examples.serving.settings import Settings
from ikbo_jax import serving

SETTINGS = Settings(source="tiny", candidates=(128,), users=4, new_users=(4,))


@dataclasses.dataclass
class Call:
    """A call that ends at a time; the device computes one call after another."""

    requests: list[serving.Request]
    end: float

    def ready(self) -> bool:
        return time.perf_counter() >= self.end

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))

    def answers(self) -> list[Any]:
        self.wait()
        return [np.zeros(request.size) for request in self.requests]


class SlowScorer:
    """A scorer whose calls take a given time, whatever is in them."""

    def __init__(self, seconds: float) -> None:
        self.buckets = serving.Buckets((128,), (4,), (4,))
        self.seconds, self.free = seconds, 0.0
        self.calls: list[list[serving.Request]] = []
        self.starts: list[float] = []

    def start(self, requests: list[serving.Request]) -> Any:
        self.calls.append(requests)
        self.starts.append(time.perf_counter())
        self.free = max(self.free, time.perf_counter()) + self.seconds
        return Call(requests, self.free)


def _requests(count: int, size: int = 10) -> list[serving.Request]:
    source = models.SOURCES["tiny"]()
    asked = [plans.Asked(0.0, n % 7, np.arange(size, dtype=np.int32)) for n in range(count)]
    return alone.prepared(source, asked)


def test_a_slow_call_is_part_of_every_latency():
    scorer: Any = SlowScorer(0.02)
    found = stream.rank(scorer, _requests(5), [0.1 * n for n in range(5)])
    assert [len(call) for call in scorer.calls] == [1] * 5
    assert 0.02 <= found["p50_s"] < 0.06
    assert found["candidates_per_second"] == pytest.approx(50 / 0.42, rel=0.2)


def test_whatever_waits_goes_into_the_next_call():
    scorer: Any = SlowScorer(0.03)
    requests = _requests(40)
    found = stream.rank(scorer, requests, [0.0] * 40)
    # 40 requests of 7 users: 4 users in a call.
    assert [x.user for call in scorer.calls for x in call] == [n % 7 for n in range(40)]
    assert len(scorer.calls) == found["requests_per_call"] ** -1 * 40 == 10
    # The last answer waits for all calls; latencies count from the arrival.
    assert found["p99_s"] >= 0.29
    assert found["candidates_per_second"] <= 400 / 0.3


def test_the_next_call_starts_when_the_one_under_way_is_about_to_end():
    """What arrives until then is part of it: nothing waits for more than one call and its own."""
    scorer: Any = SlowScorer(0.03)
    found = stream.rank(scorer, _requests(60), [0.01 * n for n in range(60)])
    # A call has the requests of 30 ms. If calls started at once, a request would wait for 15 ms,
    # and for two calls.
    assert found["p50_s"] < 0.06
    steps = np.diff(scorer.starts)
    assert np.median(steps) == pytest.approx(0.03, rel=0.15)
    # The device does not wait.
    assert scorer.free - scorer.starts[0] < 1.2 * 0.03 * len(scorer.calls)


def test_a_full_call_starts_at_once():
    scorer: Any = SlowScorer(0.05)
    stream.rank(scorer, _requests(8, size=64), [0.0] * 8)
    assert [len(call) for call in scorer.calls] == [2] * 4
    # The third call starts when the first one has ended, long before the second one does.
    assert scorer.starts[1] - scorer.starts[0] < 0.03
    assert scorer.starts[2] - scorer.starts[0] < 0.08


def test_estimates_follow_the_calls():
    estimates = stream.Estimates()
    assert estimates.device(128) == 0
    estimates.ended(128, 3.0, is_bound=True)
    estimates.ended(128, 5.0, is_bound=True)
    assert estimates.device(128) == 3
    estimates.ended(128, 5.0, is_bound=False)
    assert estimates.device(128) == pytest.approx(3.4)
    estimates.ended(128, 1.0, is_bound=True)
    assert (estimates.device(128), estimates.device(64)) == (1, 0)


def test_users_features_are_made_once_and_are_those_of_the_source():
    source = models.SOURCES["tiny"]()
    made = collections.Counter[int]()

    class Counting(type(source)):  # type: ignore[misc]
        def features(self, user: int) -> Any:
            made[user] += 1
            return super().features(user)

    counting = Counting(100, source.sizes)
    asked = [plans.Asked(0.0, user, np.zeros(3, np.int32)) for user in (5, 6, 5)]
    requests = alone.prepared(counting, asked)
    for request, one in zip(requests, asked, strict=True):
        expected = source.features(one.user)
        for a, b in zip(request.features(), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert made == {5: 1, 6: 1}


def test_a_request_that_fits_no_bucket_is_refused_before_anything_compiles(capsys, monkeypatch):
    monkeypatch.setattr(Settings, "scorer", None)
    with pytest.raises(SystemExit, match="2"):
        alone.main(["--source", "tiny", "--buckets", "512", "1024"])
    message = "requests have up to 2048 candidates, but the largest bucket has 1024"
    assert message in capsys.readouterr().err


def test_nothing_that_existed_is_collected_while_latencies_are_measured():
    with alone.objects_frozen():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_the_time_of_a_call_is_divided():
    """A call waits for its scores in `wait`; nothing of that is in the other two."""
    scorer: Any = SlowScorer(0.03)
    found = alone.host_times(scorer, _requests(8))
    assert list(found) == ["start", "wait", "answers"]
    # 4 users in a call.
    assert 0.03 <= found["wait"]["call_s"] < 0.06
    assert found["wait"]["request_s"] == pytest.approx(found["wait"]["call_s"] / 4)
    assert max(found["start"]["call_s"], found["answers"]["call_s"]) < 0.01


def test_the_figures_are_judged_by_their_bars(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "SHARES", (0.05,))
    monkeypatch.setattr(alone, "LATENCY", 1000.0)
    out = tmp_path / "alone.json"
    options = ["--source", "tiny", "--buckets", "128", "--bucket-users", "2", "4"]
    options += ["--seconds", "0.1"]
    options += ["--candidates", "300", "--users", "20", "--out", str(out)]
    monkeypatch.setattr(plans, "plan_for", _small(plans.plan_for))
    # At a twentieth of the rate, the stream is below its bar.
    assert alone.main(options) == 1
    found = json.loads(out.read_text())
    assert 0 < found["stream"]["share"] < found["stream"]["bar"]
    assert found["offline"]["candidates"] == 300
    assert all(part["call_s"] > 0 for part in found["stream"]["full_call"].values())
    assert found["offline"]["compilations"] == 0
    assert found["hits"]["ratio"] > 0
    assert (found["settings"]["fewer_users"], found["settings"]["users"]) == ([2], 4)
    assert set(found["hits"]["hit_rate"]["0%"]) == {0}
    assert min(found["hits"]["hit_rate"]["80%"]) > 0.3
    assert all(point["kept"] for point in found["stream"]["points"])


def _small(plan_for: Any) -> Any:
    return lambda source, **fields: plan_for(source, fewest=10, most=64, **fields)
