"""`tune` of a function, `tuned` files and `benchmark`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_tuning import HERE, row

import ikbo_jax as ikbo
from ikbo_jax.autotuner import autotune
from ikbo_jax.tuning import user_cache

INDEX = jnp.array([0, 0, 1], jnp.int32)
USER = jnp.ones((2, 16, 2, 64), jnp.bfloat16)

CAND = jnp.ones((3, 4, 2, 64), jnp.bfloat16)


@pytest.fixture
def tuner(seems_hopper: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine whose tuner writes the default configuration; returns the tuned problems."""
    tuned: list[Any] = []

    def tune(problem: Any, *, progress: Any) -> dict[str, Any]:
        tuned.append(problem)
        progress(1, 1, "best: the first")
        if problem.op == "attention_backward":
            raise RuntimeError("no round could be measured")
        found = row(problem, device=HERE)
        user_cache.write_user_row(found)
        return found.to_json()

    monkeypatch.setattr(autotune, "tune", tune)
    return tuned


def model(cand: jax.Array, user: jax.Array, index: jax.Array) -> jax.Array:
    history = user[index]
    scores = jnp.einsum("btnh,bsnh->bnts", cand, history)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(user.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, history)


def loss(*arrays: jax.Array) -> jax.Array:
    return jnp.sum(ikbo.rewrite(model)(*arrays).astype(jnp.float32))


def test_problems_of_rewrite_and_grad_are_tuned_once(tuner: list[Any], capsys: Any) -> None:
    report = ikbo.tune(ikbo.rewrite(model), CAND, USER, INDEX)
    assert [problem.op for problem in tuner] == ["attention"]
    assert tuner[0].is_sorted
    assert [r["op"] for r in report.rows] == ["attention"]
    assert "attention: " in str(report)
    assert "best: the first" in str(report)
    assert "1 of 1, attention" in capsys.readouterr().out

    again = ikbo.tune(ikbo.rewrite(model), CAND, USER, INDEX)
    assert "measured already: user cache" in str(again)
    assert len(tuner) == 1
    report = ikbo.tune(jax.grad(loss), CAND, USER, INDEX)
    assert tuner[-1].op == "attention_backward"
    assert "not tuned: no round could be measured" in str(report)


def test_a_gradient_is_tuned_in_both_directions_of_every_op(tuner: list[Any]) -> None:
    def loss(cand: jax.Array, user: jax.Array, index: jax.Array) -> jax.Array:
        attended = ikbo.attention(cand, user, user, index).reshape(12, 2, 64)
        rows, keys = user.reshape(2, 16, 128), user.reshape(32, 2, 64)
        offsets = jnp.arange(4, dtype=jnp.int32) * 4, jnp.arange(3, dtype=jnp.int32) * 16
        fed = ikbo.gdpa(attended, keys, keys, *offsets, q_to_kv=index)
        weights = cand[0, 0, :, :4], cand[0, 0, :, :16]
        out = ikbo.linear_compression(*weights, fed.reshape(3, 4, 128), rows, index)
        return jnp.sum(out.astype(jnp.float32))

    report = ikbo.tune(jax.grad(loss), CAND, USER, INDEX)
    ops = ("attention", "gdpa", "linear_compression")
    both = sorted(f"{op}{direction}" for op in ops for direction in ("", "_backward"))
    assert sorted(problem.op for problem in tuner) == both
    assert sorted(line.split(":")[0] for line in str(report).splitlines()) == both


def test_on_a_cpu_there_is_nothing_to_tune(on_cpu: None) -> None:
    report = ikbo.tune(model, CAND, USER, INDEX)
    assert re.match(r"nothing to tune: .* need a Hopper GPU, but .* is a cpu$", str(report))


def test_what_has_no_tuner_is_named(tuner: list[Any]) -> None:
    assert str(ikbo.tune(jnp.sin, 1.0)) == "nothing to tune: no op of this library is called"
    report = ikbo.tune(ikbo.attention, *(USER[:, :4][INDEX], USER, USER), INDEX, logit_cap=3.0)
    looked_up = ikbo.tune(ikbo.look_up, USER, INDEX)
    assert "look_up: " in str(looked_up)
    assert "this op has no tuner\nnothing to tune: every op" in str(looked_up)
    assert len(report.outcomes) == 1
    tuner.clear()
    f32 = USER.astype(jnp.float32)
    assert "no legal configuration" in str(ikbo.tune(ikbo.attention, f32[INDEX], f32, f32, INDEX))
    assert tuner == []


def test_a_file_stands_in_for_the_user_s_cache(tuner, tmp_path, cache_file) -> None:
    path = tmp_path / "model.json"
    call = jax.jit(lambda *x: ikbo.attention(x[0][:, :4][x[1]], x[0], x[0], x[1]))

    def reason() -> str:
        (plan,) = ikbo.explain(call, USER, INDEX).plans
        return (plan if plan.cuda is None else plan.cuda).reason

    outside = reason()
    with ikbo.tuned(path):
        ikbo.tune(call, USER, INDEX)
    assert path.exists()
    assert not cache_file.exists()
    with ikbo.tuned(str(path)):
        assert reason().startswith("model.json, ")
    assert reason() == outside


@pytest.mark.parametrize("path", [None, "", 3])
def test_tuned_takes_a_path(path: Any) -> None:
    with pytest.raises(ValueError, match="tuned takes the name of a file"), ikbo.tuned(path):
        pass


def test_tuned_needs_a_folder(tmp_path: Any) -> None:
    missing = pytest.raises(FileNotFoundError, match="there is no folder .*nowhere")
    with missing, ikbo.tuned(tmp_path / "nowhere" / "model.json"):
        pass


def test_benchmark_times_by_turns() -> None:
    x = np.ones((8, 8), np.float32)
    one = ikbo.benchmark(jnp.matmul, x, x, window_s=0.002)
    assert one.ms > 0
    assert len(one.samples_ms) == 3
    assert not one.on_device
    assert re.fullmatch(r"\S+ ms \(\S+ to \S+\)", str(one))
    both = ikbo.benchmark({"a": jnp.matmul, "b": jnp.add}, x, x, window_s=0.002, rounds=1)
    assert [len(both[name].samples_ms) for name in ("a", "b")] == [1, 1]


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (None, {}, "benchmark(f, x), but fn is None"),
        (jnp.ones(3), {}, "but fn is float32[3]"),
        ({"a": 3}, {}, "but fn is an int"),
        ({}, {}, "but fn is a dict"),
        (jnp.sin, {"window_s": 0}, "window_s must be above 0, but is 0"),
        (jnp.sin, {"rounds": 0}, "rounds must be an integer of at least 1, but is 0"),
        (jnp.sin, {"rounds": "3"}, "known while tracing, but is '3'"),
    ],
)
def test_benchmark_refuses(fn: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ikbo.benchmark(fn, 1.0, **options)
