"""The user's tuning cache: what is read, written, put aside and refused."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import socket
import stat
import warnings
from typing import Any
from unittest import mock

import pytest
from fake_tuning import ATTENTION, GDPA, other, row
from fake_tuning import LINEAR as DEFAULT

from ikbo_jax.autotuner import autotune
from ikbo_jax.problems import (
    AttentionBackwardProblem,
    LinearCompressionConfig,
    LinearCompressionProblem,
)
from ikbo_jax.tuning import table, table_rows, user_cache


def test_user_cache_wins_for_its_problem_and_near_ones(builtin, cache_dir):
    builtin(row(DEFAULT), row(dataclasses.replace(DEFAULT, batches=(15, 1009))))
    user_cache.write_user_row(row(DEFAULT, other()))
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.source, choice.exact) == (other(), "user cache", True)
    choice = table.lookup(dataclasses.replace(DEFAULT, batches=(15, 1010)))
    assert (choice.config, choice.source, choice.exact) == (other(), "user cache", False)
    assert choice.reason.startswith("user cache, nearest row at distance 0.0")
    far = dataclasses.replace(DEFAULT, batches=(15, 2048))
    assert table.lookup(far).source == "default"
    assert [path.name for path in cache_dir.iterdir() if path.suffix != ".lock"] == ["sm90.json"]


def test_written_row_is_seen_at_once_and_replaces_its_like():
    for config in (other(), None, DEFAULT.default_config()):
        path = user_cache.write_user_row(row(DEFAULT, config))
        assert table.lookup(DEFAULT).config == config
    assert len(json.loads(path.read_text())["rows"]) == 1


def _file_of(*entries: Any) -> str:
    return json.dumps({"schema": table_rows.SCHEMA, "rows": list(entries)})


def _corrupt(**changes: Any) -> str:
    return _file_of(row().to_json() | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"schema": 1, "rows": [', "Expecting value"),
        ("[]", "expected a dict"),
        ('{"schema": 2, "rows": []}', "schema 2, expected 1"),
        ('{"rows": []}', "schema None, expected 1"),
        ('{"schema": 1, "rows": {}}', "rows is {}"),
        (_corrupt(op="softmax"), "op='softmax'"),
        (_corrupt(m="433"), "m is '433'"),
        (_corrupt(m=True), "m is True"),
        (_corrupt(ms=float("nan")), "ms is nan"),
        (_corrupt(batches=[15]), "1 batches and 2 ks"),
        (_corrupt(config={"block_m": 64}), "config has keys"),
        (_corrupt(config=None), "config is None"),
        (_corrupt(extra=1), "problem has keys"),
    ],
)
def test_corrupt_or_foreign_cache_is_ignored_with_one_warning(cache_file, text, reason):
    cache_file.write_text(text)
    with pytest.warns(UserWarning, match="ignoring the tuning cache") as caught:
        choice = table.lookup(DEFAULT)
    assert len(caught) == 1
    assert str(cache_file) in str(caught[0].message)
    assert reason in str(caught[0].message)
    assert choice.source != "user cache"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.lookup(DEFAULT)
    cache_file.write_bytes(b"\xff\xfe also wrong")
    with pytest.warns(UserWarning, match="ignoring the tuning cache"):
        table.lookup(DEFAULT)


BAD_ROWS = {
    "not a row": 3,
    "negative fraction": row().to_json() | {"fraction": -0.1},
    "infinite fraction": row().to_json() | {"fraction": float("inf")},
    "future": row().to_json() | {"clusters_of_clusters": 2},
    "huge size": row().to_json() | {"m": 10**400},
    "no key heads": row(GDPA).to_json() | {"kv_heads": 0},
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_dropped_with_a_warning_and_the_others_stay(name, cache_file, builtin):
    builtin()
    half = dataclasses.replace(DEFAULT, dtype="float16")
    cache_file.write_text(
        _file_of(row(DEFAULT, other()).to_json(), BAD_ROWS[name], row(half).to_json())
    )
    with pytest.warns(UserWarning, match="ignoring the tuning cache's row 2 ") as caught:
        assert table.lookup(DEFAULT).source == "user cache"
    assert len(caught) == 1
    assert str(cache_file) in str(caught[0].message)
    assert table.lookup(half).source == "user cache"
    # A row that was read would speak for GDPA; one with no key heads used to divide by zero.
    assert table.lookup(GDPA).source == "default"
    third = dataclasses.replace(DEFAULT, m=64)
    user_cache.write_user_row(row(third))
    assert {r.problem for r in table_rows.parse(cache_file.read_text())} == {DEFAULT, half, third}
    assert not list(cache_file.parent.glob("*.ignored*"))


def test_writing_beside_a_bad_row_warns_and_keeps_the_others(cache_file):
    cache_file.write_text(_file_of(row(DEFAULT).to_json() | {"m": "433"}, row(GDPA).to_json()))
    with pytest.warns(UserWarning, match=r"row 1 \(.*linear_compression.*m is '433'"):
        user_cache.write_user_row(row(DEFAULT, other()))
    assert {r.problem for r in table_rows.parse(cache_file.read_text())} == {DEFAULT, GDPA}


def test_every_file_that_is_no_table_is_kept(cache_file, cache_dir):
    for text in ("not json", '{"schema": 9, "rows": [1]}'):
        cache_file.write_text(text)
        user_cache.write_user_row(row(DEFAULT, other()))
        assert table.lookup(DEFAULT).config == other()
    assert (cache_dir / "sm90.json.ignored").read_text() == "not json"
    assert (cache_dir / "sm90.json.ignored.1").read_text() == '{"schema": 9, "rows": [1]}'


def test_others_may_read_what_the_umask_lets_them_read(cache_dir):
    """Users may share a folder; and a file keeps the permissions that its owner gave it."""
    previous = os.umask(0o022)
    try:
        path = user_cache.write_user_row(row())
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        path.chmod(0o640)
        user_cache.write_user_row(row(DEFAULT, other()))
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(previous)


def test_cache_without_permission_is_not_said_to_be_renamed(cache_dir, monkeypatch):
    user_cache.write_user_row(row())
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    user_cache._read_user_rows.cache_clear()
    with pytest.warns(UserWarning, match="which cannot be read: Permission denied"):
        user_cache.user_rows()


def test_cached_row_that_is_illegal_by_now_is_passed_over():
    huge = LinearCompressionConfig(block_m=224, num_stages=64, epilogue_rows=56)
    user_cache.write_user_row(row(DEFAULT, huge))
    choice = table.lookup(DEFAULT)
    assert choice.source != "user cache"
    assert choice.reason.endswith(f"is ignored: {huge.illegal_reason(DEFAULT)}")
    user_cache.write_user_row(row(DEFAULT))
    assert "ignored" not in table.lookup(DEFAULT).reason


def test_rows_of_older_versions_are_left_out_if_they_mean_something_else(cache_file):
    old = row(GDPA, GDPA.default_config()).to_json()
    old["config"]["early_scores"] = False
    cache_file.write_text(_file_of(old))
    with pytest.warns(UserWarning, match="early_scores"):
        assert table.lookup(GDPA).source == "default"
    gradient = AttentionBackwardProblem.of(ATTENTION)
    summed = dataclasses.replace(gradient.default_config(), d_query="sum")
    user_cache.write_user_row(row(gradient, summed))
    assert "but is sum" in table.lookup(gradient).reason


def test_concurrent_writers_lose_nothing(cache_file):
    problems = [dataclasses.replace(DEFAULT, m=16 * (i + 1)) for i in range(24)]

    def write(mine: list[LinearCompressionProblem]) -> None:
        for problem in mine:
            user_cache.write_user_row(row(problem))
            table_rows.parse(cache_file.read_text())

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(write, (problems[i::4] for i in range(4))))
    assert {r.problem for r in table_rows.parse(cache_file.read_text())} == set(problems)


def test_unwritable_cache_is_silent_in_lookup_and_clear_when_tuning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(user_cache.CACHE_DIR_VARIABLE, str(tmp_path / "file" / "cache"))
    table.lookup(DEFAULT)

    with pytest.raises(OSError, match=r"cannot write the tuning cache .* set IKBO_JAX_CACHE_DIR"):
        autotune.tune(DEFAULT, run=pytest.fail)


def test_cache_directory_without_the_variable(monkeypatch):
    monkeypatch.delenv(user_cache.CACHE_DIR_VARIABLE)
    path = user_cache.user_cache_path()
    assert path.name == "sm90.json"
    assert path.parent.name == "ikbo-jax"


def test_home_is_expanded_in_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("~", "~/", "~/some where/cache"):
        monkeypatch.setenv(user_cache.CACHE_DIR_VARIABLE, value)
        expected = tmp_path / value.lstrip("~/") / "sm90.json"
        assert user_cache.write_user_row(row(DEFAULT, other())) == expected
        assert expected.exists()
        assert table.lookup(DEFAULT).source == "user cache"


def test_home_of_nobody_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(user_cache.CACHE_DIR_VARIABLE, "~no-such-user-here/cache")
    table.lookup(DEFAULT)
    with pytest.raises(OSError, match="~no-such-user-here is the home of no known user"):
        user_cache.check_user_cache_writable()
    assert not list(tmp_path.iterdir())


def _make_socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("name", ["sm90.json", "sm90.lock"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (_make_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_what_is_no_regular_file_is_refused_unopened(make, kind, name, tmp_path, monkeypatch):
    # A socket's path may have a hundred bytes only.
    directory = tmp_path / "c"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv(user_cache.CACHE_DIR_VARIABLE, str(directory))
    path = directory / name
    make(pathlib.Path(name))
    before = path.stat()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table.lookup(DEFAULT)
        table.lookup(DEFAULT)
    if name == "sm90.json":
        (warning,) = caught
        assert f"ignoring the tuning cache {path}: it is {kind}" in str(warning.message)
    for write in (
        lambda: user_cache.write_user_row(row()),
        lambda: autotune.tune(DEFAULT, run=pytest.fail),
    ):
        with pytest.raises(OSError, match=f"{name} is {kind}, not a regular file"):
            write()
    assert stat.S_IFMT(path.stat().st_mode) == stat.S_IFMT(before.st_mode)
    assert [entry.name for entry in directory.iterdir()] == [name]
