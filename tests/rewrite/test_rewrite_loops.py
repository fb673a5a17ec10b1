"""Loops whose equation is made at once are those that `lax.scan` and `lax.while_loop` make."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_rewrite_tracing import calls

from ikbo_jax.rewrite.calls import loops
from ikbo_jax.rewrite.values import hoisting

X = jnp.arange(6.0).reshape(2, 3)
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
    program = jax.make_jaxpr(of_lax(fn))(X)
    (eqn,) = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
    return lambda x: loops.scan(eqn, *fn(x))


@pytest.mark.parametrize("name", SCANS)
def test_the_equation_is_that_of_lax(name: str) -> None:
    fn = SCANS[name]
    direct, usual = (jax.make_jaxpr(f)(X) for f in (at_once(fn), of_lax(fn)))
    assert text(direct) == text(usual)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(at_once(fn))(X), jax.jit(of_lax(fn))(X))
    assert name not in AT_ONCE or calls(at_once(fn), (X,)) < calls(of_lax(fn), (X,)) - 900


def test_with_64_bit_types() -> None:
    with jax.enable_x64(True):
        hoisting.scan_params.cache_clear()
        fn = SCANS["closed over"]
        direct, usual = (jax.make_jaxpr(f)(X) for f in (at_once(fn), of_lax(fn)))
        assert text(direct) == text(usual)


def test_without_jit_it_runs_step_by_step() -> None:
    def fn(x: Any) -> tuple[Any, list[Any], list[Any]]:
        return lambda carry, xs: ([carry[0] * xs[0]], [carry[0] + 1]), [x], [jnp.arange(3.0)]

    run = at_once(fn)
    with jax.disable_jit():
        carry, ys = run(X)
    jax.tree.map(np.testing.assert_allclose, (carry, ys), run(X))
