"""The soak: its programs, how launches are counted, what it finds, a run in small."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import soak
from ikbo_jax.problems import AttentionProblem, FewQueriesConfig

SMALL = (
    ("attention", "both", (7, 5, 3, 9, 2, 1, 8), soak.RAGGED),
    ("linear compression", "forward", ((3, 7), (4, 5), 6, 8), soak.UNSORTED),
    ("gdpa", "both", ((3, 0, 2), (4, 0, 1), 2, 1, 8), {"activation": "softmax"}),
    ("own tokens", "both", (7, 5, 3, 9, 2, 1, 8), soak.RAGGED),
    ("sums", "both", (9, 4, 6), {"order": "hot", "dtype": "float32"}),
    ("hstu layer", "both", ((3, 0, 5), 8, 2, 8), {}),
)


def test_programs_have_every_op_and_direction_and_no_name_twice():
    kinds = {(op, direction) for op, direction, *_ in soak.PROGRAMS}
    assert kinds == {(op, direction) for op in soak.MAKERS for direction in ("forward", "both")}
    names = [soak.name_of(*program) for program in soak.PROGRAMS]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.parametrize(("op", "is_for_few"), [("attention", False), ("few queries", True)])
def test_the_kernel_for_few_queries_runs_where_it_should(op, is_for_few):
    for name, _, sizes, options in soak.PROGRAMS:
        if name == op:
            problem = AttentionProblem(*sizes, options.get("dtype", "bfloat16"))
            assert isinstance(problem.default_config(), FewQueriesConfig) == is_for_few


def test_ragged_programs_have_lengths_of_0_and_users_without_candidates():
    shape = soak.attention_shape(50, 9, 1, 7, 1, 1, 8, **soak.RAGGED)
    index = shape.cand_to_user
    assert (np.diff(index) < 0).any()
    assert len(set(index.tolist())) < 9
    assert (shape.lengths == 0).any()
    even = soak.attention_shape(50, 9, 1, 7, 1, 1, 8)
    assert set(even.cand_to_user.tolist()) == set(range(9))


PROGRAM = """HloModule jit_run, is_scheduled=true, entry_computation_layout={()->s32[]}

%body.1 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %k.1 = f32[4]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", backend_config={}
  %k.2 = f32[4]{0} custom-call(%k.1), custom_call_target="mosaic_gpu_v2"
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %k.2)
}

%captured.2 (p: f32[4]) -> f32[4] {
  ROOT %k.3 = f32[4]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main.9 (Arg_0.1: f32[4]) -> s32[] {
  %c = f32[4]{0} call(%Arg_0.1), to_apply=%captured.2
  %w = (s32[], f32[4]) while(%c), condition=%c.1, body=%body.1, backend_config={TRIPS}
  ROOT %r = s32[] get-tuple-element(%w), index=0
}
""".replace("TRIPS", '"known_trip_count":{"n":"4"}')


def test_launches_are_counted_in_captured_calls():
    assert soak.count_launches(PROGRAM) == 1 + 4 * 2


def test_every_step_is_compared_and_NaN_is_equal_to_itself():
    def fn(x):
        return x, jnp.full(3, jnp.nan)

    run = jax.jit(soak.repeated(fn))
    x = jnp.asarray([1.0, -0.0])
    zero = jnp.int32(0)
    _, expected = run(zero, fn(x), x)
    assert int(run(zero, expected, x)[0]) == 0
    assert int(run(zero, expected, jnp.asarray([1.0, 0.0]))[0]) == soak.REPEATS  # another bit
    assert int(run(jnp.int32(5), expected, jnp.asarray([jnp.nan, 0.0]))[0]) == 5 + soak.REPEATS


def test_steps_depend_on_each_other():
    """No step may leave the loop: an op without effects whose arrays stay the same could.

    LAPACK's calls stand for kernels, which need a GPU.
    """
    x = jnp.eye(4)
    run = jax.jit(soak.repeated(jnp.linalg.cholesky))
    text = run.lower(jnp.int32(0), x, x).compile().as_text()
    assert soak.count_launches(text, "lapack_") == soak.REPEATS
    assert soak.count_launches(text) == 0


def test_a_program_that_does_not_end_is_named():
    found, ended = [], threading.Event()

    class Call:
        def __init__(self, is_ready):
            self._is_ready = is_ready

        def is_ready(self):
            return self._is_ready

        def block_until_ready(self):
            ended.wait(20)

    def on_hang(name):
        found.append(name)
        ended.set()

    calls = {"ends": Call(is_ready=True), "hangs": Call(is_ready=False), "waits": Call(False)}
    soak.wait(calls, 0.2, on_hang)
    assert found == ["hangs"]
    soak.wait({"quick": jnp.int32(0) + 1}, 20.0, pytest.fail)


@pytest.fixture(scope="module")
def compiled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "PROGRAMS", SMALL)
        return soak.compile_all(print, pytest.fail)


def test_a_run_in_small(tmp_path, capsys, compiled, monkeypatch):
    monkeypatch.setattr(soak, "compile_all", lambda *_: compiled)
    out = tmp_path / "soak.json"
    assert soak.main(["--launches", "100", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["launches"] == sum(p["launches"] for p in results["programs"]) >= 100
    assert [p["wrong_steps"] for p in results["programs"]] == [0] * len(SMALL)
    assert all(p["calls"] >= 4 for p in results["programs"])
    assert "0 steps with another result than the first" in capsys.readouterr().out


def test_what_differs_or_is_missing_is_a_failure(tmp_path, capsys, compiled, monkeypatch):
    first, *rest = compiled
    spoiled = first._replace(call=lambda differences: first.call(differences) + 1)
    out = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "compile_all", lambda *_: [spoiled, *rest])
    assert soak.main(["--launches", "20", "--out", str(out)]) == 1
    assert "DIFFERS in 1 steps: attention both 7 5 3 9" in capsys.readouterr().out
    monkeypatch.setattr(soak, "compile_all", lambda *_: [first, *rest])
    assert soak.main(["--launches", "20", "--budget-s", "0", "--out", str(out)]) == 1
    assert "20 launches were not reached in time" in capsys.readouterr().err
