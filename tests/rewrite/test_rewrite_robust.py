"""No program that runs may fail once it is rewritten, and the report says what was left and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import lax
from jax.experimental import io_callback
from rewrite_basics import report_of, same

import ikbo_jax as ikbo
from ikbo_jax.rewrite import NotCovered, interpret, register_rule
from ikbo_jax.rewrite.rules import sources
from ikbo_jax.rewrite.values import registry

B, U, D = 12, 3, 4
_, USER, CAND, W, INDEX = problems.vectors(U, B, D)


# Shapes and types.


@pytest.mark.parametrize("shape", [(0, D), (U, 0), (1, 1)])
def test_empty_arrays_and_numbers(shape: tuple[int, int]) -> None:
    def fn(user, index):
        users = user[index]
        return users.sum(), jnp.sin(users), users.reshape(-1) * 2, jnp.float32(3) * users.mean()

    index = jnp.zeros(B if shape[0] else 0, jnp.int32)
    if all(shape):
        same(fn, jnp.ones(shape), index)
    same(lambda *args: fn(*args)[:3], jnp.ones(shape), index)
    same(lambda x, i: (x[i], jnp.tanh(x)[i] * 2.0), jnp.arange(3.0), jnp.int32(1))


def test_looked_up_columns_in_bfloat16() -> None:
    """The sum of the parts' products is rounded once, like the undivided product.

    XLA has no kernel on a CPU for a product in float32 of an operand that it transposes.
    """

    def fn(user, cand, index, w):
        return jnp.concatenate([user[index], cand[:, jnp.array([1, 0] * 32)]], axis=1) @ w

    rng = np.random.default_rng(0)
    args = [problems.random_array(rng, x, "bfloat16") for x in ((4, 512), (64, 64), (576, 64))]
    args.insert(2, jnp.arange(64) // 16)
    assert report_of(fn, *args).changed
    ours = np.asarray(jax.jit(ikbo.rewrite(fn))(*args), np.float64)
    user, cand, index, w = (np.asarray(x, np.float64) for x in args)
    exact = np.concatenate([user[index.astype(int)], cand[:, [1, 0] * 32]], axis=1) @ w
    # Half a unit in the last place, and roundings of the sum in float32.
    np.testing.assert_allclose(ours, exact, rtol=2**-8, atol=1e-4)


def test_weak_types_are_kept() -> None:
    def fn(user, index):
        return jnp.sin(user[index]), lax.stop_gradient(jnp.full((U,), 2.0))[index] * 1

    same(lambda x, i: (x * jnp.ones((U, D)))[i].sum() * 2, 2.0 * jnp.float32(1), INDEX)
    same(lambda x, i: jnp.broadcast_to(x, (U,))[i] * 2, jnp.asarray(2.0), INDEX)
    same(fn, USER, INDEX)


# Effects.


def test_ordered_callbacks_run_once_and_in_order() -> None:
    seen: list[str] = []

    def note(name, x):
        seen.append(f"{name} {float(np.sum(x)):.3f}")
        return np.float32(len(seen))

    def fn(user, cand, index):
        users = jnp.tanh(user[index] @ W)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        first = io_callback(functools.partial(note, "first"), scalar, users, ordered=True)
        jax.debug.callback(functools.partial(note, "second"), cand, ordered=True)

        @jax.jit
        def inner(x):
            io_callback(functools.partial(note, "third"), scalar, x, ordered=True)
            return jnp.sort(x, axis=0) * 2

        def body(carry, _):
            jax.debug.callback(functools.partial(note, "step"), carry, ordered=True)
            return carry * 0.5, None

        x, _ = lax.scan(body, inner(users), length=2)
        seen_by_numpy = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((B, D), jnp.float32), users)
        return jnp.concatenate([x, cand], axis=1) @ jnp.concatenate([W, W]) + first + seen_by_numpy

    def observed(f):
        seen.clear()
        out = jax.jit(f)(USER, CAND, INDEX)
        jax.effects_barrier()
        return np.asarray(out), list(seen)

    (ours, order), (theirs, expected) = observed(ikbo.rewrite(fn)), observed(fn)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert order == expected
    assert len(order) == 5
    assert report_of(fn, USER, CAND, INDEX).changed


# Rules that raise.


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setitem(registry._RULES, "lazy", dict(registry._RULES["lazy"]))
    return register_rule


def work(user, index):
    return jnp.sin(user[index] @ W).sum(axis=1)


def raising(error):
    def rule(ctx, eqn, x):
        raise error

    return rule


RAISED = "the rule of sin raised"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (raising(ZeroDivisionError("a message")), f"{RAISED} ZeroDivisionError: a message"),
        (raising(AssertionError()), f"{RAISED} AssertionError"),
        (raising(TypeError("")), f"{RAISED} TypeError"),
        (lambda ctx, eqn, x: x.base[:1], f"{RAISED} ValueError: it returned float32[1, 4]"),
        (raising(NotCovered("not today")), "not today"),
    ],
)
def test_a_rule_that_fails_leaves_the_equation(rules, rule, reason: str) -> None:
    rules("sin")(rule)
    report = same(work, USER, INDEX)
    assert report.changed
    (place,) = report.materialised
    assert place.reason.startswith(reason)


def test_a_rule_that_raises_inside_of_programs(rules) -> None:
    rules("sin")(raising(ZeroDivisionError))
    inner = jax.jit(lambda x: jnp.cos(jnp.sin(x * 2) + 1) @ W)
    bodies = {
        "jit": inner,
        "again": lambda x: inner(inner(inner(x))),
        "checkpoint": jax.checkpoint(inner),
        "scan": lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 2, None), x, length=2)[0],
        "cond": lambda x: lax.cond(W[0, 0] > 0, jnp.sin, jnp.cos, x),
    }
    for body in bodies.values():
        same(lambda user, index, body=body: body(jnp.tanh(user[index])), USER, INDEX)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModuleNotFoundError])
def test_an_interrupt_and_a_missing_module_come_through(rules, error: type) -> None:
    """A module that is not installed would otherwise make every rewrite silently slow."""
    rules("sin")(raising(error))
    with pytest.raises(error):
        ikbo.rewrite(work)(USER, INDEX)


def test_the_original_runs_if_the_rewritten_program_cannot_be_traced(monkeypatch) -> None:
    def fail(*args):
        raise RuntimeError("cannot build")

    monkeypatch.setattr(interpret.Context, "materialise", fail)
    report = same(work, USER, INDEX)
    assert not report.changed
    assert report.reason == "its rewriting raised RuntimeError: cannot build"
    assert "the original function runs: its rewriting raised RuntimeError" in str(report)
    (lookup,) = report.lookups
    assert (lookup.outcome, lookup.reason) == ("kept", report.reason)


# The report lists every lookup.


def test_every_lookup_is_listed() -> None:
    table = jnp.ones((50, D))

    @jax.jit
    def library(table, ids):
        return jnp.sin(table[ids])

    def fn(user, table, ids, index):
        users = jnp.tanh(user[index] @ W)
        rows = table[ids] + library(table, ids)
        loop = lax.while_loop(lambda x: x.sum() > 1e9, lambda x: x + user[index], rows)
        return users + rows + loop

    report = same(fn, USER, table, INDEX, INDEX)
    first = fn.__code__.co_firstlineno
    found = {x.line: (x.outcome, x.reason) for x in report.lookups}
    at = {n: f"test_rewrite_robust.py:{first + n} (fn)" for n in range(6)}
    assert found[at[1]] == ("removed", "")
    assert found[at[2]] == ("kept", "its result has no more rows than its operand")
    (loop,) = (x for x in report.lookups if "while" in x.reason)
    assert loop.outcome == "kept"
    in_library = library.__wrapped__.__code__.co_firstlineno + 2
    assert found[f"test_rewrite_robust.py:{in_library} (library)"][0] == "kept"
    assert len(report.lookups) == 4
    text = report.details
    assert "lookups left as they are:" in text
    assert text.count(": kept: ") == 3


def test_no_broadcast_is_said_only_without_lookups_and_repetitions(monkeypatch) -> None:
    table = jnp.ones((50, D))
    none = report_of(lambda x: jnp.sin(x) @ W, CAND)
    assert str(none) == "rewrite: no broadcast found; the original function runs"
    bias = report_of(lambda x: x + jnp.broadcast_to(W[0], x.shape), CAND)
    text = "rewrite: nothing gained from repeated dimensions; the original function runs"
    assert str(bias) == text
    kept = report_of(lambda t, i: t[i] @ W, table, INDEX)
    assert str(kept).startswith("rewrite: 1 lookup found, none removed; the original function runs")

    def cannot(*args):
        raise NotCovered("a reason of its own")

    monkeypatch.setattr(sources, "looked_up", cannot)
    refused = report_of(lambda u, i: jnp.sin(u[i]) @ W, USER, INDEX)
    assert [(x.outcome, x.reason) for x in refused.lookups] == [("refused", "a reason of its own")]


def test_returned_is_said_of_returned_values_alone() -> None:
    def fn(cand, keys, index):
        return jax.nn.sigmoid(jnp.einsum("btd,bsd->bts", cand, keys[index]))

    args = CAND[:, None], jnp.stack([USER, USER], axis=1), INDEX
    reasons = [place.reason for place in report_of(fn, *args).materialised]
    assert "returned by the function" not in reasons
    returned = report_of(lambda u, i: jnp.sin(u[i]), USER, INDEX)
    assert [place.reason for place in returned.materialised] == ["returned by the function"]


# Functions under jit.


@functools.partial(jax.jit, static_argnums=2, static_argnames=("mode",))
def jitted(user, index, times, mode="a"):
    return jnp.sin(user[index]) * times + (1 if mode == "a" else 2)


def test_a_function_under_jit_keeps_its_parameters_and_methods() -> None:
    rewritten = ikbo.rewrite(jitted)
    assert ikbo.rewrite(rewritten) is rewritten
    expected = jitted(USER, INDEX, 3, mode="b")
    np.testing.assert_allclose(rewritten(USER, INDEX, 3, mode="b"), expected, rtol=1e-6)
    compiled = rewritten.lower(USER, INDEX, 3, mode="b").compile()
    np.testing.assert_allclose(compiled(USER, INDEX), expected, rtol=1e-6)
    assert rewritten.eval_shape(USER, INDEX, 3).shape == (B, D)
    (note,) = ikbo.explain(rewritten, USER, INDEX, 3).notes
    assert note.changed
    traced, original = (f.trace(USER, INDEX, 3).jaxpr for f in (rewritten, jitted))
    assert "sin" in str(traced)
    assert traced.out_avals == original.out_avals
    donated = ikbo.rewrite(jax.jit(lambda x, i: x[i][:3] + x, donate_argnums=0))
    (args_info, _) = donated.lower(USER, INDEX).args_info
    assert [x.donated for x in args_info] == [True, False]


def test_a_method_under_jit_and_other_functions_with_such_methods_keep_them() -> None:
    class Scorer:
        @functools.partial(jax.jit, static_argnums=0)
        def score(self, user, index):
            return jnp.sin(user[index])

    class Wrapped:
        """As Flax's and Equinox's functions under jit are."""

        __name__ = "wrapped"

        def __call__(self, user, index):
            return jnp.sin(user[index])

        def lower(self, *args):
            raise NotImplementedError

    expected = jnp.sin(USER[INDEX])
    for rewritten in map(ikbo.rewrite, (Scorer().score, Wrapped())):
        compiled = (fn.lower(USER, INDEX).compile() for fn in (rewritten, jax.jit(rewritten)))
        for fn in (rewritten, jax.jit(rewritten), *compiled):
            np.testing.assert_allclose(fn(USER, INDEX), expected, rtol=1e-6)
        shape = rewritten.eval_shape(USER, INDEX)
        assert shape == rewritten.trace(USER, INDEX).out_info
        assert shape.shape == (B, D)
