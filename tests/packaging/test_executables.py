"""Compiled programs that a second demo finds without lowering them."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax._timing import executables
from ikbo_jax._timing.programs import Programs


@pytest.fixture
def lowered(monkeypatch):
    """The names of what has been lowered."""
    names: list[str] = []
    real = jax.stages.Traced.lower

    def lower(self, *args, **kwargs):
        names.append(self.fun_name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    return names


def triple(x):
    return {"tripled": x * 3}


def run_once(
    folder: pathlib.Path,
    *,
    identity: str = "part",
    size: int = 4,
    table: pathlib.Path | None = None,
) -> list[str]:
    """Runs a part with one program; returns what it said."""
    said: list[str] = []
    with executables.use_store(folder, [] if table is None else [table]):
        mine = Programs(said.append, identity=identity)
        shapes = mine.add("triple", triple, jax.ShapeDtypeStruct((size,), jnp.float32))
        assert shapes["tripled"].shape == (size,)
        found = mine.compiled()["triple"](jnp.ones(size))
    np.testing.assert_array_equal(found["tripled"], np.full(size, 3.0))
    return said


def test_without_an_identity_nothing_is_kept(tmp_path, lowered):
    for _ in range(2):
        run_once(tmp_path, identity="")
    assert len(lowered) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "what", ["identity", "shape", "user table", "variable", "setting", "source", "driver"]
)
def test_a_changed_key_compiles_again(what, tmp_path, lowered, monkeypatch, request):
    folder, table = tmp_path / "kept", tmp_path / "sm90.json"
    run_once(folder, table=table)
    arguments = {"identity": {"identity": "other"}, "shape": {"size": 5}}.get(what, {})
    if what == "user table":
        table.write_text("{}")
    elif what == "variable":
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    elif what == "setting":
        request.addfinalizer(lambda: jax.config.update("jax_default_matmul_precision", None))
        jax.config.update("jax_default_matmul_precision", "highest")
    elif what in ("source", "driver"):
        ending = "rewrite/jit.py" if what == "source" else "driver/nvidia/version"
        real_read, real_is = pathlib.Path.read_bytes, pathlib.Path.is_file
        monkeypatch.setattr(
            pathlib.Path,
            "read_bytes",
            lambda p: b"changed" if str(p).endswith(ending) else real_read(p),
        )
        monkeypatch.setattr(
            pathlib.Path, "is_file", lambda p: str(p).endswith(ending) or real_is(p)
        )
    run_once(folder, table=table, **arguments)
    assert len(lowered) == 2


def break_content(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def unloadable(path: pathlib.Path) -> None:
    """An entry that reads well and whose program no loader takes."""
    store = executables.Store(path.parent, b"")
    shapes, (_, *trees) = store.get(path.name)
    store.put(path.name, (shapes, (b"no program", *trees)))


@pytest.mark.parametrize("spoil", [break_content, empty, unloadable])
def test_a_broken_file_is_compiled_again_and_mended(spoil, tmp_path, lowered):
    assert run_once(tmp_path) == ["compiling triple"]
    assert lowered == ["triple"]
    (kept,) = tmp_path.iterdir()
    spoil(kept)
    run_once(tmp_path)
    assert len(lowered) == 2
    assert run_once(tmp_path) == ["loading triple"]
    assert len(lowered) == 2


def test_a_folder_that_cannot_be_written_is_not_fatal(tmp_path):
    (tmp_path / "file").touch()
    assert run_once(tmp_path / "file" / "kept") == ["compiling triple"]


def test_the_least_recently_used_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(executables, "MAX_FILES", 2)
    store = executables.Store(tmp_path, b"")
    for age, key in ((30, "a"), (20, "b")):
        store.put(key, key)
        os.utime(tmp_path / key, (1e9 - age, 1e9 - age))
    assert store.get("a") == "a"
    store.put("c", "c")
    assert [store.get(key) for key in "abc"] == ["a", None, "c"]
    monkeypatch.setattr(executables, "MAX_BYTES", 1)
    store.put("d", "d")
    assert not list(tmp_path.iterdir())
