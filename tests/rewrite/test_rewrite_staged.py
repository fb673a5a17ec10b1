"""Equations that are added to a trace at once are those of `jax.lax`."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_rewrite_tracing import calls

from ikbo_jax.rewrite.calls import loops
from ikbo_jax.rewrite.values import hoisting, staged

X = jnp.arange(24.0).reshape(2, 1, 12)
INDEX = jnp.array([1, 0, 1], jnp.int32)
PROMISED = lax.GatherScatterMode.PROMISE_IN_BOUNDS
ROWS = lax.GatherDimensionNumbers((1, 2), (0,), (0,))

#: Functions that `staged` and `lax` have by one name, with the same arguments.
ALIKE: dict[str, Callable[..., Any]] = {
    "reshape": lambda of, x, _: of.reshape(x, (2, 12)),
    "squeeze": lambda of, x, _: of.squeeze(x, (1,)),
    "broadcast_in_dim": lambda of, x, _: of.broadcast_in_dim(x, (2, 5, 12), (0, 1, 2)),
    "expand_dims": lambda of, x, _: of.expand_dims(x, (0, 3)),
    "concatenate": lambda of, x, _: of.concatenate([x, x], 1),
}
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (partial(fn, staged), partial(fn, lax)) for name, fn in ALIKE.items()},
    "transpose": (lambda x, _: staged.transpose(x, [2, 0, 1]), lambda x, _: x.transpose(2, 0, 1)),
    "no transpose": (lambda x, _: staged.transpose(x, [0, 1, 2]), lambda x, _: x),
    "no reshape": (lambda x, _: staged.reshape(x, [2, 1, 12]), lambda x, _: x),
    "no squeeze": (lambda x, _: staged.squeeze(x, []), lambda x, _: x),
    "slice": (
        lambda x, _: staged.slice_of(x, (0, 0, 1), (2, 1, 9), (1, 1, 2)),
        lambda x, _: lax.slice(x, (0, 0, 1), (2, 1, 9), (1, 1, 2)),
    ),
    "slice_in_dim": (
        lambda x, _: staged.slice_in_dim(x, 2, 5, 2),
        lambda x, _: lax.slice(x, (0, 0, 2), (2, 1, 5)),
    ),
    "one part": (lambda x, _: staged.concatenate([x], 1), lambda x, _: x),
    "cast": (lambda x, _: staged.cast(x, jnp.dtype("bfloat16")), lambda x, _: x.astype("bfloat16")),
    "no cast": (lambda x, _: staged.cast(x, x.dtype), lambda x, _: x),
    "gather_rows": (
        lambda x, index: staged.gather_rows(x, index, 0),
        lambda x, index: lax.gather(
            x, lax.expand_dims(index, (1,)), ROWS, (1, 1, 12), mode=PROMISED
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_equations_are_those_of_lax_in_fewer_calls(name: str) -> None:
    direct, usual = (jax.make_jaxpr(fn)(X, INDEX) for fn in PAIRS[name])
    assert str(direct) == str(usual)
    for a, b in zip(direct.eqns, usual.eqns, strict=True):
        assert a.params == b.params
    # Outside of a trace, and for a value of a trace that encloses the current one.
    expected = PAIRS[name][1](X, INDEX)
    np.testing.assert_array_equal(PAIRS[name][0](X, INDEX), expected)
    inside = jax.jit(lambda x, i: jax.jit(lambda: PAIRS[name][0](x, i))())(X, INDEX)
    np.testing.assert_array_equal(inside, expected)
    if not name.startswith(("no ", "one ")):
        assert calls(PAIRS[name][0], (X, INDEX)) < calls(PAIRS[name][1], (X, INDEX))


def run_again(program: Any, *args: Any) -> list[Any]:
    """The results of a program of one equation after another, by `staged.bind`."""
    env = dict(zip(program.invars, args, strict=True))
    literal = jax.extend.core.Literal
    for eqn in program.eqns:
        operands = [v.val if isinstance(v, literal) else env[v] for v in eqn.invars]
        results = staged.bind(eqn.primitive, operands, eqn.params, eqn.invars)
        env.update(
            zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True)
        )
    return [env[v] for v in program.outvars]


def test_literals_and_calls_are_bound_as_they_are() -> None:
    def fn(x: Any, y: Any) -> Any:
        x = jax.nn.relu(2 * x) + jnp.float32(1)
        x = jnp.where(x > 3, x, y.astype(jnp.float32)) @ jnp.ones((12, 2))
        return lax.scan(lambda c, _: (c * 0.5, None), x, None, length=2)[0]

    program = jax.make_jaxpr(fn)(X, X.astype(jnp.int32))
    assert not program.consts
    again = jax.make_jaxpr(lambda *args: run_again(program, *args))(X, X.astype(jnp.int32))
    assert str(again) == str(program)


def test_a_closed_over_value_becomes_a_constant_of_the_inner_trace() -> None:
    def fn(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return carry + staged.bind(lax.exp_p, [x], {"accuracy": None}), None

        return lax.scan(body, jnp.zeros_like(x), None, length=3)[0]

    (scan,) = [e for e in jax.make_jaxpr(fn)(X).eqns if e.primitive.name == "scan"]
    assert [e.primitive.name for e in scan.params["jaxpr"].eqns] == ["exp", "add"]


def test_a_value_on_a_mesh_takes_the_usual_way() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P()))
        for direct, usual in PAIRS.values():
            first, second = (jax.make_jaxpr(fn)(x, INDEX) for fn in (direct, usual))
            assert str(first) == str(second)


# Loops whose equation is made at once are those that `lax.scan` and `lax.while_loop` make.

LOOPED = jnp.arange(6.0).reshape(2, 3)
N, ONES = jnp.arange(3, dtype=jnp.int32), np.ones((2, 3), np.float32)


def closed_over(x: Any) -> Any:
    y = jnp.sin(x)
    body = lambda c, xs: ([c[0] * y + ONES, c[1] + xs[0]], [c[0] * 2, xs[0] + 1])  # noqa: E731
    return body, [x, N[0]], [N]


def with_an_effect(carry: Any, _: Any) -> Any:
    jax.debug.callback(lambda _: None, carry[0])
    return [jnp.sin(carry[0])], []


#: Of x: the body of a scan, its carries and its slices.
SCANS: dict[str, Callable[[Any], tuple[Any, list[Any], list[Any]]]] = {
    "closed over": closed_over,
    "without slices": lambda x: (lambda c, _: ([jnp.cos(c[0])], []), [x], []),
    "without carry": lambda x: (lambda _, xs: ([], [xs[0] * x[0]]), [], [jnp.ones((3, 3))]),
    "a weak type": lambda x: (lambda c, _: ([c[0] + x[0, 0]], []), [1.0], []),
    "an unchanged carry": lambda x: (
        lambda c, xs: ([c[0], c[1] * c[0]], [xs[0]]),
        *([x, x + 1], [N]),
    ),
    "a constant result": lambda x: (lambda c, _: ([c[0] + x], [2.0]), [x], []),
    "an effect": lambda x: (with_an_effect, [x], []),
}
AT_ONCE = ("closed over", "without slices", "without carry")


def text(program: Any) -> str:
    """A program without the numbers of its functions, and without names of trees."""
    return re.sub(r"\bft_(in|out)=.*|0x[0-9a-f]+|name=\w+", "", str(program))


def of_lax(fn: Any) -> Any:
    def run(x: Any) -> Any:
        body, init, xs = fn(x)
        return lax.scan(body, init, xs, length=3, reverse=True, unroll=2)

    return run


def at_once(fn: Any) -> Any:
    program = jax.make_jaxpr(of_lax(fn))(LOOPED)
    (eqn,) = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
    return lambda x: loops.scan(eqn, *fn(x))


@pytest.mark.parametrize("name", SCANS)
def test_the_equation_is_that_of_lax(name: str) -> None:
    fn = SCANS[name]
    direct, usual = (jax.make_jaxpr(f)(LOOPED) for f in (at_once(fn), of_lax(fn)))
    assert text(direct) == text(usual)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(at_once(fn))(LOOPED), jax.jit(of_lax(fn))(LOOPED)
    )
    assert name not in AT_ONCE or calls(at_once(fn), (LOOPED,)) < calls(of_lax(fn), (LOOPED,)) - 900


def test_with_64_bit_types() -> None:
    with jax.enable_x64(True):
        hoisting.scan_params.cache_clear()
        fn = SCANS["closed over"]
        direct, usual = (jax.make_jaxpr(f)(LOOPED) for f in (at_once(fn), of_lax(fn)))
        assert text(direct) == text(usual)


def test_without_jit_it_runs_step_by_step() -> None:
    def fn(x: Any) -> tuple[Any, list[Any], list[Any]]:
        return lambda carry, xs: ([carry[0] * xs[0]], [carry[0] + 1]), [x], [jnp.arange(3.0)]

    run = at_once(fn)
    with jax.disable_jit():
        carry, ys = run(LOOPED)
    jax.tree.map(np.testing.assert_allclose, (carry, ys), run(LOOPED))
