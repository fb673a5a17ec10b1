"""What the example adds to scorer and engine, and its figures of the scorer without the engine."""

import collections
import dataclasses
import functools
import gc
import json
import pathlib
import re
import socket
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving_oracle

import ikbo_jax
from examples.serving import alone, load, local, models, offline, plans, plot, records, stream, wire
from examples.serving.__main__ import main, say
from examples.serving.settings import Settings
from ikbo_jax import serving
from ikbo_jax.serving.programs import specs_of, with_rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = Settings(
    source="tiny", candidates=(128,), users=(4,), new_users=(4,), joint=True, user_bytes=1 << 20
)
PLAN = plans.Plan(rate=200, seconds=10, users=50, items=30, fewest=64, most=2048)


def test_requests_are_those_of_the_plan():
    asked = plans.requests(PLAN)
    assert len(asked) == pytest.approx(2000, rel=0.1)
    assert all(0 <= a.at < 10 for a in asked)
    sizes = np.asarray([len(a.items) for a in asked])
    assert (sizes.min(), sizes.max()) == (64, pytest.approx(2048, rel=0.05))
    # Half of the sizes are below the geometric mean of the bounds.
    assert np.median(sizes) == pytest.approx(np.sqrt(64 * 2048), rel=0.15)
    counts = collections.Counter(a.user for a in asked)
    assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.3)
    assert [a.at for a in plans.requests(PLAN)] == [a.at for a in asked]


def test_figures_count_all_tries():
    asked = [plans.Asked(float(n), n, np.zeros(10, np.int32)) for n in range(4)]
    told = [
        load.Told(asked[0], 200, 0.1, 1, np.zeros(10, "f4"), "1", "a"),
        load.Told(asked[1], 200, 0.3, 2, np.zeros(10, "f4"), "1", "b"),
        load.Told(asked[2], 503, 0.5, 3, None, "", ""),
        load.Told(asked[3], 0, 7.0, 3, None, "", ""),
    ]
    counts = {"calls": 2, "requests": 3, "candidates": 30, "padding": 10, "hits": 1, "misses": 3}
    zero = dict.fromkeys((*load.COUNTS, "compilations"), 0)
    counts |= {"scored": 4, "wasted": 1}
    since = load.since({"a": zero}, {"a": zero | counts, "b": zero | counts})
    found = load.summary(PLAN, told, since, deadline_s=0.2)
    assert found["statuses"] == {"200": 2, "503": 1, "0": 1}
    assert (found["retried"], found["answers_of_replicas"]) == (3, [1, 1])
    assert found["throughput"] == 2 / 10
    assert found["p50_ms"] == pytest.approx(200)
    assert (found["requests_per_call"], found["hit_rate"]) == (1.5, 0.25)
    assert (found["padding_share"], found["wasted_share"]) == (0.25, 0.25)
    assert found["goodput"] == 1 / 10
    assert found["refused_p50_ms"] == pytest.approx(500)
    assert found["refused_without_retry_after"] == 1


@pytest.mark.parametrize("binary", [True, False])
def test_both_forms_keep_every_value(binary):
    items = np.arange(5, dtype=np.int32)
    body, headers = wire.ask(3, items, binary=binary, timeout_ms=20)
    read = wire.read(headers["Content-Type"] + "; charset=utf-8", body)
    assert (read.user, read.version, read.timeout_ms) == (3, 0, 20)
    np.testing.assert_array_equal(read.candidates, items)
    scores = np.asarray([1 / 3, -2e-9, 5e8], np.float32)
    content, kind = wire.write(headers["Content-Type"], scores, "w", "r")
    found, weights, replica = wire.answer(kind, content)
    np.testing.assert_array_equal(found, scores)
    assert (weights, replica) == ("w", "r")


@pytest.mark.parametrize("name", ["hopper", "hopper-long"])
def test_the_ranker_for_hopper_is_one_that_the_kernels_take(name):
    source = models.SOURCES[name]()
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), source.weights("1"))
    specs = specs_of(source.model, weights, source.user, source.candidate)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(specs.weights)}
    assert dtypes == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    batch = functools.partial(with_rows, source.candidate)
    with ikbo_jax.export_target("H200"):
        report = ikbo_jax.explain(
            source.model.score,
            specs.weights,
            with_rows(specs.state, 256),
            batch(4096),
            jax.ShapeDtypeStruct((4096,), jnp.int32),
        )
    ran = {(plan.op, plan.cuda.implementation) for plan in report.plans}
    assert ran == {
        ("attention", "mosaic_gpu"),
        ("linear_compression", "mosaic_gpu"),
        ("gdpa", "mosaic_gpu"),
    }


def test_users_and_items_out_of_range_are_refused():
    source = models.SOURCES["tiny"]()
    assert models.request(source, 99, [199, 0]).size == 2
    with pytest.raises(models.UnknownUserError, match=r"user is 100, expected one in \[0, 100\)"):
        models.request(source, 100, [1])
    for item in (-1, 200):
        with pytest.raises(ValueError, match=rf"candidates\[2\] is {item}, .* in \[0, 200\)"):
            models.candidates(source, [1, 2, item])


@pytest.mark.parametrize("joint", [False, True])
def test_ranking_offline(joint):
    source = models.SOURCES["tiny"]()
    scorer = dataclasses.replace(SMALL, joint=joint).scorer(source)
    found = offline.rank(scorer, source, 500, 40)
    assert (found["candidates"], found["users"], found["compilations"]) == (500, 40, 0)
    assert found["calls"] == 10, "users of a call are the bound"
    oracle = serving_oracle.Offline(source, "1")
    asked = offline.job(source, 500, 40)
    parts = np.split(asked.items, np.cumsum(asked.counts)[:-1])
    total = sum(
        oracle.scores(user, np.resize(items, 64))[: len(items)].sum()
        for user, items in zip(asked.users, parts, strict=True)
    )
    assert found["mean_score"] == pytest.approx(total / 500, abs=1e-6)


def test_ranking_offline_is_compared_with_the_program_alone():
    source = SMALL.load()
    found = offline.compare(SMALL.scorer(source), source, 500, 40, 3)
    # The counts are those of one turn.
    assert (found["candidates"], found["calls"], found["compilations"]) == (500, 10, 0)
    assert found["padding_share"] == pytest.approx(1 - 500 / 1280)
    assert len(found["shares"]) == 3
    assert found["share_of_bound"] == sorted(found["shares"])[1] > 0


def test_results_name_no_folder_of_the_machine():
    settings = Settings(cache="/a/cache", checkpoint="/a/run", data="/a/data", source="tiny")
    assert "/" not in json.dumps(records.recorded(settings))
    assert records.recorded(settings)["source"] == "tiny"
    found = (ROOT / "examples" / "serving" / "results").glob("*.json")
    texts = [path.read_text("utf-8") for path in found]
    assert texts
    assert not [
        text for text in texts if re.search(r'"[^"]*(/root|/home|/tmp|/Users|[.]cache)', text)
    ]


def test_the_page_holds_the_figures_of_the_results_file(tmp_path):
    results = ROOT / "examples" / "serving" / "results" / "cpu.json"
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    assert page == plot.page(page, results)
    plot.draw(results, tmp_path / "serving.svg")
    assert (tmp_path / "serving.svg").read_text("utf-8").count("<svg") == 1


# The scorer without the engine: what the measurement asks, and that its figures tell the truth.


class Clock:
    """A clock that goes on when somebody sleeps, and by 1 µs when it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def process_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the stream and of its figures: other processes have no part in them."""
    found = Clock()
    for module in (stream, records):
        monkeypatch.setattr(module, "time", found)
    return found


@dataclasses.dataclass
class Call:
    """A call that ends at a time; the device computes one call after another."""

    clock: Clock
    requests: list[serving.Request]
    end: float

    def ready(self) -> bool:
        return self.clock.perf_counter() >= self.end

    def wait(self) -> None:
        self.clock.sleep(max(0.0, self.end - self.clock.perf_counter()))

    def answers(self) -> list[Any]:
        self.wait()
        return [np.zeros(request.size) for request in self.requests]


class SlowScorer:
    """A scorer whose calls take a given time, whatever is in them."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.buckets = serving.Buckets((128,), (4,), (4,))
        self.clock, self.seconds, self.free = clock, seconds, 0.0
        self.calls: list[list[serving.Request]] = []
        self.starts: list[float] = []

    def start(self, requests: list[serving.Request]) -> Any:
        self.calls.append(requests)
        self.starts.append(self.clock.perf_counter())
        self.free = max(self.free, self.clock.perf_counter()) + self.seconds
        return Call(self.clock, requests, self.free)


def _requests(count: int, size: int = 10) -> list[serving.Request]:
    source = models.SOURCES["tiny"]()
    asked = [plans.Asked(0.0, n % 7, np.arange(size, dtype=np.int32)) for n in range(count)]
    return alone.prepared(source, asked)


def test_a_slow_call_is_part_of_every_latency(clock):
    scorer: Any = SlowScorer(clock, 0.02)
    found = stream.rank(scorer, _requests(5), [0.1 * n for n in range(5)])
    assert [len(call) for call in scorer.calls] == [1] * 5
    assert found["p50_s"] == pytest.approx(0.02, rel=0.01)
    assert found["candidates_per_second"] == pytest.approx(50 / 0.42, rel=0.01)


def test_whatever_waits_goes_into_the_next_call(clock):
    scorer: Any = SlowScorer(clock, 0.03)
    requests = _requests(40)
    found = stream.rank(scorer, requests, [0.0] * 40)
    # 40 requests of 7 users: 4 users in a call.
    assert [x.user for call in scorer.calls for x in call] == [n % 7 for n in range(40)]
    assert len(scorer.calls) == found["requests_per_call"] ** -1 * 40 == 10
    # The last answer waits for all calls; latencies count from the arrival.
    assert found["p99_s"] == pytest.approx(0.3, rel=0.01)
    assert found["candidates_per_second"] == pytest.approx(400 / 0.3, rel=0.01)


def test_the_next_call_starts_when_the_one_under_way_is_about_to_end(clock):
    """What arrives until then is part of it: nothing waits for more than one call and its own."""
    scorer: Any = SlowScorer(clock, 0.03)
    found = stream.rank(scorer, _requests(60), [0.01 * n for n in range(60)])
    # A call has the requests of 30 ms. If calls started at once, a request would wait for 15 ms,
    # and for two calls.
    assert found["p50_s"] == pytest.approx(0.05, rel=0.01)
    steps = np.diff(scorer.starts)
    assert np.median(steps) == pytest.approx(0.03, rel=0.01)
    # The device does not wait.
    assert scorer.free - scorer.starts[0] < 1.01 * 0.03 * len(scorer.calls)


def test_a_full_call_starts_at_once(clock):
    scorer: Any = SlowScorer(clock, 0.05)
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
        def features_of(self, users: Any) -> Any:
            made.update(users)
            return super().features_of(users)

    counting = Counting(100, source.sizes)
    asked = [plans.Asked(0.0, user, np.zeros(3, np.int32)) for user in (5, 6, 5)]
    requests = alone.prepared(counting, asked)
    for request, one in zip(requests, asked, strict=True):
        expected = source.features_of([one.user])
        for a, b in zip(request.features(), expected, strict=True):
            np.testing.assert_array_equal(a, b[0])
    assert made == {5: 1, 6: 1}


def test_a_request_that_fits_no_bucket_is_refused_before_anything_compiles(monkeypatch):
    monkeypatch.setattr(Settings, "scorer", None)
    message = "requests have up to 2048 candidates, but the largest bucket has 1024"
    with pytest.raises(SystemExit, match=message):
        main(["alone", "--source", "tiny", "--buckets", "512", "1024"])


@pytest.mark.parametrize("source", sorted(models.SOURCES))
def test_the_user_cache_has_room_for_the_largest_call_of_every_source(source, monkeypatch):
    """By the defaults of `alone`; the scorer refuses another size before anything compiles."""

    def checked(settings: Settings, source: models.Source) -> None:
        specs = specs_of(source.model, source.weights("1"), source.user, source.candidate)
        state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs.state))
        assert settings.users[-1] * state <= settings.user_bytes
        raise SystemExit(0)

    monkeypatch.setattr(Settings, "scorer", checked)
    with pytest.raises(SystemExit, match="0"):
        main(["alone", "--source", source])


def test_nothing_that_existed_is_collected_while_latencies_are_measured():
    with alone.objects_frozen():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_the_time_of_a_call_is_divided(clock):
    """A call waits for its scores in `wait`; nothing of that is in the other two."""
    scorer: Any = SlowScorer(clock, 0.03)
    found = alone.host_times(scorer, _requests(8))
    assert list(found) == ["start", "wait", "answers"]
    # 4 users in a call.
    assert found["wait"]["call_s"] == pytest.approx(0.03, rel=0.01)
    assert found["wait"]["request_s"] == pytest.approx(found["wait"]["call_s"] / 4)
    assert max(found["start"]["call_s"], found["answers"]["call_s"]) < 1e-4


def test_the_figures_are_judged_by_their_bars(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "SHARES", (0.05,))
    monkeypatch.setattr(alone, "LATENCY", 1000.0)
    out = tmp_path / "alone.json"
    options = ["alone", "--source", "tiny", "--buckets", "128", "--bucket-users", "2", "4"]
    options += ["--seconds", "0.1", "--user-bytes", str(1 << 22)]
    options += ["--candidates", "300", "--users", "20", "--out", str(out)]
    monkeypatch.setattr(plans, "plan_for", functools.partial(plans.plan_for, fewest=10, most=64))
    # At a twentieth of the rate, the stream is below its bar.
    assert main(options) == 1
    found = json.loads(out.read_text())
    assert 0 < found["stream"]["share"] < found["stream"]["bar"]
    assert found["offline"]["candidates"] == 300
    assert all(part["call_s"] > 0 for part in found["stream"]["full_call"].values())
    assert found["offline"]["compilations"] == 0
    assert found["hits"]["ratio"] > 0
    assert found["settings"]["users"] == [2, 4]
    assert set(found["hits"]["hit_rate"]["0%"]) == {0}
    assert min(found["hits"]["hit_rate"]["80%"]) > 0.3
    assert all(point["kept"] for point in found["stream"]["points"])


def test_haproxy_starts_with_the_settings_of_the_example(tmp_path):
    """The lines that the script changes, as Ray writes them."""
    written = """\
frontend prometheus
    bind *:9101
    acl healthcheck path -i /-/healthz
    http-request return status 200 string "success" if healthcheck backend_http-a_server_up
    use_backend http-a if is_http-a
defaults
    timeout connect 5s
    log global
    errorfile 502 /a/500.http
    errorfile 503 /a/500.http
backend default_backend
    http-request return status 404 content-type text/plain string "Not Found"
    server SERVE_REPLICA_a 127.0.0.1:30000 check observe layer4
    server SERVE_PROXY_ACTOR-fallback-b 127.0.0.1:35709 check backup
"""
    (tmp_path / "cfg").write_text(written)
    fields = {"binary": "/bin/true", "refusal": "/b/503.http", "refuse": local.REFUSE}
    script = local.HAPROXY.format(most=64, limit=2500, cut=local.CUT, **fields)
    subprocess.run(["sh", "-c", script, "sh", "-db", "-f", str(tmp_path / "cfg")], check=True)
    assert (tmp_path / "cfg").read_text().splitlines() == [
        *("frontend prometheus", "    bind 127.0.0.1:9101"),
        "    acl healthcheck path -i /-/healthz",
        *("http-request return status 404 if !{ path_beg / }", "http-request del-header Upgrade"),
        "http-response wait-for-body time 2s",
        "http-response set-var(txn.got) res.body_len",
        f"http-response return status 502 if {local.CUT}",
        '    http-request return status 200 string "success" if healthcheck '
        "backend_http-a_server_up { be_conn_free(http-a) ge 0 }",
        "http-request return status 503 default-errorfiles if { be_conn_free(http-a) eq 0 }",
        "    use_backend http-a if is_http-a",
        *("defaults", "timeout http-request 5s", "option http-buffer-request"),
        *("timeout queue 20ms", "option http-server-close", "timeout server 2500ms"),
        "    timeout connect 200ms",
        *("errorfile 503 /b/503.http", "backend default_backend"),
        "    http-request return status 503 hdr Retry-After 1",
        "    server SERVE_REPLICA_a 127.0.0.1:30000 maxconn 64 check observe layer4",
        "    server SERVE_PROXY_ACTOR-fallback-b 127.0.0.1:35709 check backup",
    ]


def test_an_address_at_which_nobody_can_listen_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already in"):
            local.check_port("127.0.0.1", port)
    with pytest.raises(OSError, match=r"cannot listen at 127.0.0.1:99999: .* 0-65535"):
        local.check_port("127.0.0.1", 99999)


def test_arguments_that_make_no_sense_are_one_sentence(capsys):
    for replicas in (["0"], ["3", "1"], ["1", "2", "3"]):
        assert main(["serve", "--source", "tiny", "--replicas", *replicas]) == 1
        assert "expected one, or least and most" in capsys.readouterr().err
    # To rich, an emoji and a style.
    say("at 127.0.0.1:-1: [red]")
    assert capsys.readouterr().err == "at 127.0.0.1:-1: [red]\n"
