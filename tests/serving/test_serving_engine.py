"""The service on Ray Serve, from HTTP to the scorer, in a process of its own.

The session is a program of its own, `serving_session.py`: Ray's processes, threads and warnings
stay out of the test suite's process.
"""

import json
import os
import secrets
import signal
import subprocess
import sys

import pytest
from processes import ROOT, child_environment, processes_with

#: Seconds for a session; two busy cores take 60 to 230.
LIMIT = 600
MARK = "IKBO_SERVING_SESSION"


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> dict:
    """What happened in one session; processes that it leaves behind are an error."""
    folder = tmp_path_factory.mktemp("session")
    mark = secrets.token_hex(8)
    home = folder / "home"
    home.mkdir()
    environment = child_environment(
        *(ROOT, ROOT / "tests" / "support"),
        **{MARK: mark, "HOME": str(home), "JAX_PLATFORMS": "cpu"},
    )
    command = [
        sys.executable,
        str(ROOT / "tests/support/serving_session.py"),
        str(folder / "cache"),
    ]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=folder)
        try:
            status = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            left = processes_with(MARK, mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        assert status == 0, f"status {status} after at most {LIMIT} s:\n{err.read()[-6000:]}"
        found = json.loads(out.read().splitlines()[-1])
    return found | {"left": left, "home": [str(path) for path in home.rglob("*")]}


# JAX's version matters little to a session, which is mostly the engine's.
pytestmark = [pytest.mark.time_limit(LIMIT + 60), pytest.mark.slow]


def test_nothing_is_left_behind(session):
    assert session["left"] == {}
    assert session["home"] == []


@pytest.mark.parametrize("form", ["json", "binary"])
def test_every_answer_is_right_and_a_user_s_requests_go_to_one_replica(session, form):
    found = session["forms"][form]
    assert found["asked"] > 10
    assert found["statuses"] == {"200": found["asked"]}
    assert (found["wrong"], found["weights"]) == (0, ["1"])
    assert session["forms"]["json"]["replicas"] == 2
    assert found["replicas_of_users"] == found["users"] > 1


def test_other_weights_fail_no_request(session):
    found = session["swap"]
    assert found["statuses"] == {"200": found["asked"]}
    assert found["retried"] == 0
    assert found["wrong"] == 0
    assert found["weights"] == ["1", "2"]
    assert found["after"] == ["2"]
    # Weights that cannot be used are refused, and no replica hears of them.
    found = found["wrong_version"]
    assert found["statuses"] == {"200": found["asked"]}
    assert (found["wrong"], found["weights"]) == (0, ["2"])
    assert found["refused"].startswith("weights no version are refused: invalid literal")


def test_overload_is_refused_not_queued(session):
    found = session["overload"]
    assert set(found["statuses"]) == {"200", "503"}
    assert found["wrong"] == 0


def test_a_killed_replica_loses_no_request(session):
    """A client that asks again gets its scores; the engine starts another replica."""
    found = session["kill"]
    assert found["statuses"] == {"200": found["asked"]}
    assert found["wrong"] == 0
    assert (found["replicas_after"], found["same"]) == (2, 1)
    # The replacement starts on the weights that were given to running replicas.
    assert (found["weights"], found["current"]) == (["2"], ["2", "2"])


def test_requests_have_a_status_where_all_replicas_are_killed(session):
    """HAProxy sends what the replicas had to Ray's proxy, which gives up after the deadline.

    An answer that a dying replica has begun is 502. `test_serving_front_end.py` has these in turn.
    """
    found = session["kill_all"]
    documented = {"200", "408", "502", "503"}
    assert found["statuses"].keys() <= documented, (found["statuses"], found["errors"])
    assert (found["replicas_after"], found["same"]) == (2, 0)
    assert (found["wrong"], found["current"]) == (0, ["2", "2"])


def test_strangers_get_a_status_and_leave_the_others_alone(session):
    found = session["strangers"]
    assert found["statuses"].keys() == {"200"}
    # HAProxy's, since no replica hears of a request whose body is not there.
    assert found["slow"] == [[408, True]]
    assert (found["upgrade"], found["no_path"]) == (405, 404)


def test_haproxy_is_replaced(session):
    found = session["front_end"]
    # Nobody listens, or no replica is known yet; then all is well.
    assert found["statuses"].keys() <= {"0", "200", "503"}
    assert found["wrong"] == 0
    assert found["seconds"] < 100


def test_requests_under_way_are_answered_at_the_end(session):
    """A status of 0 is a connection that nobody accepted."""
    found = session["drain"]
    assert found["statuses"].keys() <= {"0", "200", "503"}
    assert found["statuses"]["200"] > 0
    assert found["wrong"] == 0


def test_no_replica_compiles_while_serving(session):
    assert len(session["metrics"]) == len(session["metrics_of_replacement"]) == 2
    for counts in (session["metrics"] | session["metrics_of_replacement"]).values():
        assert counts["compilations"] == 0
    counts = max(session["metrics"].values(), key=lambda counts: counts["calls"])
    assert counts["hits"] > 0
    # Requests were merged: the overload alone is enough for that.
    assert counts["requests"] > counts["calls"]
