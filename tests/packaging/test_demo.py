"""The demo: its programs, its requests, what they hold and move."""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offline import modules_in
from processes import heeding_interrupts
from test_cli import TINY, TINY_SIZES

import ikbo_jax as ikbo
from ikbo_jax import cli, demo, demo_attention, demo_ranking
from ikbo_jax._timing import programs
from ikbo_jax._timing.programs import Programs
from ikbo_jax.models import ranking


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)


def part(name: str, said: list[str], log: list[str]) -> programs.Part[str]:
    """A part of a demo: two programs, which run and are noted in `log`."""
    mine = Programs(lambda text: said.append(f"{name} {text}"))
    for number in range(2):
        log.append(f"{name} lowers {number}")
        mine.add(f"p{number}", lambda x: x * 2 + 1, jax.ShapeDtypeStruct((3,), jnp.float32))
    compiled = yield mine
    log.append(f"{name} runs")
    np.testing.assert_array_equal(compiled["p1"](jnp.ones(3)), [3, 3, 3])
    log.append(f"{name} has run")
    return name


def test_parts_lower_in_order_and_none_runs_before_all_have_compiled():
    said: list[str] = []
    log: list[str] = []
    names = ["a", "b", "c"]
    found = programs.run_parts([part(n, said, log) for n in names])
    assert found == names
    assert log == [
        *(f"{name} lowers {number}" for name in names for number in range(2)),
        *(f"{name} {does}" for name in names for does in ("runs", "has run")),
    ]
    assert "b compiling p1" in said


def test_programs_compile_side_by_side(monkeypatch):
    """Two compilations that wait for each other both end."""
    meet = threading.Barrier(2, timeout=60)
    real = jax.stages.Lowered.compile

    def compile_together(self, *args, **kwargs):
        meet.wait()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_together)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert programs.run_parts([part("alone", [], [])]) == ["alone"]


def test_a_part_that_fails_stops_the_others():
    log: list[str] = []

    def fails():
        yield Programs(lambda text: None)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        programs.run_parts([fails(), part("b", [], log)])
    assert log == ["b lowers 0", "b lowers 1"]


def test_only_programs_that_are_not_timed_compile_without_autotuning(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    real = jax.stages.Lowered.compile

    def compile_here(self, compiler_options):
        asked.append(compiler_options)
        return real(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_here)
    mine = Programs(lambda text: None, programs.NETWORK_ON_GPU)
    mine.add("timed", jnp.sin, jnp.ones(2))
    mine.compiled()
    other = Programs(lambda text: None)
    other.add("oracle", jnp.sin, jnp.ones(2), timed=False)
    other.compiled()
    assert asked == [programs.NETWORK_ON_GPU, programs.UNTIMED_ON_GPU]
    assert "xla_gpu_autotune_level" not in programs.NETWORK_ON_GPU


def test_programs_of_kernels_call_the_same_modules():
    """XLA finds a compiled kernel by the bytes of its module."""
    shape = jax.ShapeDtypeStruct
    user, index = shape((2, 64, 2, 64), jnp.bfloat16), shape((3,), jnp.int32)
    call = jax.jit(lambda user, index: ikbo.attention(user[:, :4][index], user, user, index))
    lowered = call.trace(user, index).lower(lowering_platforms=("cuda",))
    whole = set(modules_in(lowered.compiler_ir("stablehlo")))
    kernels = [x.lower().compiler_ir("stablehlo") for x in programs.kernels_of(lowered)]
    assert sorted(module for x in kernels for module in modules_in(x)) == sorted(whole)
    assert whole
    assert programs.kernels_of(jax.jit(jnp.sin).lower(1.0)) == []


# The cache of compiled programs.


def test_a_cache_that_the_user_chose_is_the_only_one(tmp_path):
    chosen, folder = str(tmp_path / "chosen"), tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", chosen)
    try:
        with programs.use_store(folder, []) as reason:
            assert reason is None
            assert programs.current_store() is None
            assert jax.config.jax_compilation_cache_dir == chosen
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert not folder.exists()
    with programs.use_store(folder, []) as reason:
        assert reason is None
        assert programs.current_store() is not None


def test_a_folder_that_cannot_be_made_is_said_and_not_fatal(tmp_path):
    (tmp_path / "file").touch()
    with programs.use_store(tmp_path / "file" / "programs", []) as reason:
        assert "not kept for the next time" in reason
        assert str(tmp_path / "file") in reason
        assert programs.current_store() is None
    assert run_once(tmp_path / "file" / "programs") == ["compiling triple"]


@pytest.mark.slow
def test_programs_load_again_after_a_change_that_leaves_them_alike(tmp_path, monkeypatch):
    """A program from JAX's own cache, stored and loaded, lacked its functions on a CPU."""

    def first_words() -> set[str]:
        """Runs the demo; says whether its programs were compiled or loaded."""
        said: list[str] = []
        jax.clear_caches()  # what was compiled before is in memory
        part = demo.run(TINY_SIZES, 0, on_progress=said.append)
        (report,) = demo.run_parts([part], said.append)
        assert report.agree
        assert len(report.measured) == 3
        words = {word for text in said for word in ("compiling", "loading") if word in text}
        assert words, said
        return words

    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "WINDOW_S", 1e-3)
    assert first_words() == {"compiling"}
    real = programs.environment_digest
    monkeypatch.setattr(programs, "environment_digest", lambda tables: b"new" + real(tables))
    assert first_words() == {"compiling"}
    assert first_words() == {"loading"}


# Executables that a second demo finds without lowering their programs.


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


def run_once(folder, *, identity="part", size=4, table=None) -> list[str]:
    """Runs a part with one program; returns what it said."""
    said: list[str] = []
    with programs.use_store(folder, [] if table is None else [table]):
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
        ending = "rewrite/calls/sharing.py" if what == "source" else "driver/nvidia/version"
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


def unloadable(path: pathlib.Path) -> None:
    """An entry that reads well and whose program no loader takes."""
    store = programs.Store(path.parent, b"")
    shapes, (_, *trees) = store.get(path.name)
    store.put(path.name, (shapes, (b"no program", *trees)))


SPOILED = {
    "break_content": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "unloadable": unloadable,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_broken_file_is_compiled_again_and_mended(spoil, tmp_path, lowered):
    assert run_once(tmp_path) == ["compiling triple"]
    assert lowered == ["triple"]
    (kept,) = tmp_path.iterdir()
    spoil(kept)
    run_once(tmp_path)
    assert len(lowered) == 2
    assert run_once(tmp_path) == ["loading triple"]
    assert len(lowered) == 2


def test_the_least_recently_used_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MAX_FILES", 2)
    store = programs.Store(tmp_path, b"")
    for age, key in ((30, "a"), (20, "b")):
        store.put(key, key)
        os.utime(tmp_path / key, (1e9 - age, 1e9 - age))
    assert store.get("a") == "a"
    store.put("c", "c")
    assert [store.get(key) for key in "abc"] == ["a", None, "c"]
    monkeypatch.setattr(programs, "MAX_BYTES", 1)
    store.put("d", "d")
    assert not list(tmp_path.iterdir())


# Inputs that are made by one program.


def test_one_program_makes_the_inputs_that_the_functions_make():
    sizes, number = TINY_SIZES, demo.seed_bits(3)
    drawn = jax.jit(functools.partial(ranking.draw_request, sizes))(number)
    request = ranking.make_request(sizes, 3)
    for made, expected in zip(drawn, request[:4], strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-6)
    np.testing.assert_array_equal(ranking.user_index(sizes, 3), request.cand_to_user)


# Interruption.


@pytest.mark.parametrize("module", [demo_ranking, demo_attention])
def test_an_interrupted_demo_says_so(module, monkeypatch, capsys):
    for part_of_it in (demo_ranking, demo, demo_attention):
        monkeypatch.setattr(part_of_it, "run", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "run", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(TINY) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err.startswith("ikbo-jax demo: interrupted")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX'")
def test_ctrl_c_ends_with_a_sentence():
    command = [sys.executable, "-m", "ikbo_jax", *TINY]
    with subprocess.Popen(
        heeding_interrupts(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert "compiling" in first
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted before the end" in err.splitlines()[-1]
    assert out == ""


def test_requests_are_seeded_and_ragged():
    counts = ranking.candidate_counts(ranking.Sizes())
    assert counts.sum() == ranking.Sizes().candidates
    assert len(set(counts.tolist())) > 1
    np.testing.assert_array_equal(counts, ranking.candidate_counts(ranking.Sizes()))
    assert (counts != ranking.candidate_counts(ranking.Sizes(), 1)).any()


def test_inputs_have_the_sizes_of_the_request():
    sizes = dataclasses.replace(ranking.SMALL, dtype="float16")
    inputs = jax.eval_shape(lambda: demo.make_inputs(sizes, 0)).arguments
    w_cand, w_user, e_cand, e_user, cand_to_user = inputs
    assert w_cand.shape == (sizes.compressed, sizes.cand_tokens)
    assert w_user.shape == (sizes.compressed, sizes.user_rows)
    assert e_cand.shape == (sizes.candidates, sizes.cand_tokens, sizes.width)
    assert e_user.shape == (sizes.users, sizes.user_rows, sizes.width)
    assert cand_to_user.shape == (sizes.candidates,)
    assert cand_to_user.dtype == jnp.int32
    assert {x.dtype for x in inputs[:4]} == {jnp.dtype(jnp.float16)}


#: Every size is 1; a user has one row.
ONES = ranking.Sizes(
    **{
        field.name: 0 if field.name in ("dense_tokens", "user_tokens") else 1
        for field in dataclasses.fields(ranking.Sizes)
        if field.name != "dtype"
    }
)


def test_bytes_moved_are_counted_by_hand():
    # One candidate of one user, every size 1, bfloat16: two weights, two embeddings, one output,
    # the index; the user's float32 partial result goes out and comes back.
    moved = {stage.name.split(maxsplit=1)[1]: stage.bytes_moved for stage in demo.stages(ONES)}
    inputs_and_output = 2 * 5 + 4
    assert moved == {
        "materialised": inputs_and_output + 2 * 2 * 2,
        "aligned K": inputs_and_output + 2 * 2 * 8,
        "decomposed": inputs_and_output + 2 * 4 + 2 * 4,
        "fused": inputs_and_output + 2 * 4,
        "single launch": inputs_and_output + 2 * 4,
    }
    # Each stage of the full request moves less.
    moved = [stage.bytes_moved for stage in demo.stages(ranking.Sizes())]
    assert moved[1] > moved[0] > moved[2] > moved[3] == moved[4]


def test_what_attention_moves_is_counted_by_hand():
    # Every size 1, bfloat16: query, key, value, result and the index; a copied key and value goes
    # out and comes back.
    found = demo_attention.stages(ONES)
    moved = {stage.name.split(maxsplit=1)[1]: stage.bytes_moved for stage in found}
    assert moved["materialised"] == 4 * 2 + 4 + 4 * 2
    assert moved["decomposed"] == moved["fused"] == 4 * 2 + 4
