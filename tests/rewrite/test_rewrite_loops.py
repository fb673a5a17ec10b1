"""Loops whose equation is made at once are those that `lax.scan` and `lax.while_loop` make."""

import re
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
N = jnp.arange(3, dtype=jnp.int32)


def closed_over(x: Any) -> tuple[Any, list[Any], list[Any]]:
    y, z = jnp.sin(x), np.ones((2, 3), np.float32)

    def body(carry: Any, xs: Any) -> Any:
        a, b = carry
        return [a * y + z, b + xs[0]], [a * 2, xs[0] + 1]

    return body, [x, N[0]], [N]


def without_slices(x: Any) -> tuple[Any, list[Any], list[Any]]:
    return lambda carry, _: ([jnp.cos(carry[0])], []), [x], []


def without_carry(x: Any) -> tuple[Any, list[Any], list[Any]]:
    return lambda _, xs: ([], [xs[0] * x[0]]), [], [jnp.ones((3, 3))]


def with_a_weak_type(x: Any) -> tuple[Any, list[Any], list[Any]]:
    return lambda carry, _: ([carry[0] + x[0, 0]], []), [1.0], []


def with_an_unchanged_carry(x: Any) -> tuple[Any, list[Any], list[Any]]:
    return lambda carry, xs: ([carry[0], carry[1] * carry[0]], [xs[0]]), [x, x + 1], [N]


def with_a_constant_result(x: Any) -> tuple[Any, list[Any], list[Any]]:
    return lambda carry, _: ([carry[0] + x], [2.0]), [x], []


def with_an_effect(x: Any) -> tuple[Any, list[Any], list[Any]]:
    def body(carry: Any, _: Any) -> Any:
        jax.debug.callback(lambda _: None, carry[0])
        return [jnp.sin(carry[0])], []

    return body, [x], []


SCANS = [
    closed_over,
    without_slices,
    without_carry,
    with_a_weak_type,
    with_an_unchanged_carry,
    with_a_constant_result,
    with_an_effect,
]
AT_ONCE = SCANS[:3]


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


@pytest.mark.parametrize("fn", SCANS, ids=lambda fn: fn.__name__)
def test_the_equation_is_that_of_lax(fn: Any) -> None:
    direct, usual = (jax.make_jaxpr(f)(X) for f in (at_once(fn), of_lax(fn)))
    assert text(direct) == text(usual)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(at_once(fn))(X), jax.jit(of_lax(fn))(X))
    assert fn not in AT_ONCE or calls(at_once(fn), (X,)) < calls(of_lax(fn), (X,)) - 900


def test_with_64_bit_types() -> None:
    with jax.enable_x64(True):
        hoisting.scan_params.cache_clear()
        direct, usual = (jax.make_jaxpr(f)(X) for f in (at_once(closed_over), of_lax(closed_over)))
        assert text(direct) == text(usual)


def test_without_jit_it_runs_step_by_step() -> None:
    def fn(x: Any) -> tuple[Any, list[Any], list[Any]]:
        return lambda carry, xs: ([carry[0] * xs[0]], [carry[0] + 1]), [x], [jnp.arange(3.0)]

    run = at_once(fn)
    with jax.disable_jit():
        carry, ys = run(X)
    jax.tree.map(np.testing.assert_allclose, (carry, ys), run(X))
