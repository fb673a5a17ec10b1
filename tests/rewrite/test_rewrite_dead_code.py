"""Dead equations are removed as JAX removes them, also inside of scans and calls."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from ikbo_jax.rewrite.values.dead_code import without_dead_code

X = jnp.ones((3, 4))


def scanned(body: Any, init: Any, xs: Any = None, results: Any = lambda c, y: (c, y)) -> Any:
    return results(*lax.scan(body, init, xs, length=3))


def layer_with_dead_equations(x: Any) -> Any:
    jnp.sin(x) @ x.T
    return jnp.cos(x)


def nothing_dead(x: Any) -> Any:
    return scanned(lambda c, y: ((c[1], c[0] + y), c[1]), (x[0], x[1]), x, lambda c, y: (c[0], y))


def a_carry_that_the_next_iteration_reads(x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return (c[0] * c[1], layer_with_dead_equations(c[1])), None

    return scanned(body, (x, x), None, lambda c, _: c[0])


def a_carry_that_nothing_reads(x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return (jnp.sin(c[0]), c[0] * c[1]), None

    return scanned(body, (x, x + 1), None, lambda c, _: c[0])


def unused_slices(x: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        jnp.sin(y[0])
        return c + y[1], jnp.cos(c)

    return scanned(body, x[0], (x, 2 * x), lambda c, _: c)


def unused_constants(x: Any) -> Any:
    y = jnp.exp(x)

    def body(c: Any, _: Any) -> Any:
        jnp.sin(y)
        return layer_with_dead_equations(c), None

    return scanned(body, x, None, lambda c, _: c)


def inside_checkpoint_in_a_scan(x: Any) -> Any:
    layer = jax.checkpoint(layer_with_dead_equations)
    return scanned(lambda c, _: ((layer(c[0]), c[0] + c[1]), None), (x, x), None, lambda c, _: c[1])


def dead_operand_of_a_call(x: Any) -> Any:
    @jax.jit
    def call(x: Any, y: Any) -> Any:
        return jnp.sin(x), jnp.cos(y)

    return call(x, jnp.exp(x))[0] + call(x, x)[1]


def a_scan_in_a_scan(x: Any) -> Any:
    def inner(c: Any, _: Any) -> Any:
        return (layer_with_dead_equations(c[0]), c[1] * c[0]), None

    def outer(c: Any, _: Any) -> Any:
        c = lax.scan(inner, c, None, length=2)[0]
        return (c[0], c[0]), None

    return scanned(outer, (x, x), None, lambda c, _: c[1])


def with_an_effect(x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        jax.debug.callback(lambda _: None, c[1])
        return (jnp.sin(c[0]), c[1] + 1), None

    return scanned(body, (x, x), None, lambda c, _: c[0])


def unused_results_of_calls(x: Any) -> Any:
    def call(x: Any, y: Any, z: Any) -> Any:
        return jnp.sin(x), jnp.cos(y) @ x.T, jnp.exp(z)

    first = jax.jit(call)(x, x + 1, x + 2)[0]
    second = jax.checkpoint(call)(first, x + 3, x + 4)[1:]
    return jax.jit(lambda x: jax.jit(call)(x, x, x))(second[1])[2]


def unused_results_of_a_call_named_like_an_op(x: Any) -> Any:
    @jax.jit
    def _attention(x: Any, y: Any) -> Any:
        return layer_with_dead_equations(x), jnp.cos(y)

    return _attention(x, x + 1)[0]


def unused_results_of_a_call_with_an_effect(x: Any) -> Any:
    @jax.jit
    def call(x: Any, y: Any) -> Any:
        jax.debug.callback(lambda _: None, y)
        return jnp.sin(x), jnp.cos(y)

    return call(x, x + 1)[0]


def unused_results_of_a_sharded_call(x: Any) -> Any:
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
    call = jax.jit(
        lambda x, y: (jnp.sin(x), jnp.cos(y)),
        in_shardings=(sharding, None),
        out_shardings=(None, sharding),
        donate_argnums=1,
    )
    return call(x, x + 1)[0] + call(x + 2, x + 3)[1]


def dead_code_in_branches_and_loops(x: Any) -> Any:
    def step(x: Any) -> Any:
        jnp.exp(x)
        return layer_with_dead_equations(x)

    y = lax.cond(x[0, 0] > 0, step, jnp.sin, x)
    return lax.while_loop(lambda x: x[0, 0] < 0, step, y)


def text(program: core.Jaxpr) -> str:
    """The program in words, without what JAX notes about the trees of a scan's arguments."""
    return re.sub(r"\bft_(in|out)=.*", "", str(program))


PROGRAMS = [
    nothing_dead,
    a_carry_that_the_next_iteration_reads,
    a_carry_that_nothing_reads,
    unused_slices,
    unused_constants,
    inside_checkpoint_in_a_scan,
    dead_operand_of_a_call,
    a_scan_in_a_scan,
    with_an_effect,
    unused_results_of_calls,
    unused_results_of_a_call_named_like_an_op,
    unused_results_of_a_call_with_an_effect,
    unused_results_of_a_sharded_call,
    dead_code_in_branches_and_loops,
]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("jitted", [False, True])
def test_it_is_what_jax_removes(fn: Any, jitted: bool) -> None:
    program = jax.make_jaxpr(jax.jit(fn) if jitted else fn)(X)
    expected, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    cleared = without_dead_code(program)
    assert text(cleared) == text(expected)
    assert text(without_dead_code(cleared)) == text(cleared)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.core.eval_jaxpr(cleared, cleared.consts, X),
        jax.core.eval_jaxpr(program, program.consts, X),
    )


def test_a_program_without_dead_code_is_the_same_object() -> None:
    program = jax.make_jaxpr(nothing_dead)(X)
    assert without_dead_code(program) is program


def test_calls_with_the_same_unused_results_share_a_program() -> None:
    step = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))
    layer = jax.checkpoint(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    whole = jax.jit(layer_with_dead_equations)

    def fn(x: Any) -> Any:
        x = layer(layer(x, x)[0], x)[0]
        return whole(whole(step(step(step(x)[0])[0])[1]))

    eqns = without_dead_code(jax.make_jaxpr(fn)(X)).eqns
    first, second, third, fourth, fifth, sixth, seventh = (eqn.params["jaxpr"] for eqn in eqns)
    assert first is second
    assert third is fourth
    assert fifth is not fourth
    # All results are used, but not all equations.
    assert sixth is seventh
    assert [len(x.eqns) for x in (sixth, seventh)] == [1, 1]
    assert [len(eqn.invars) for eqn in eqns] == [1] * 7


def test_a_scan_of_layers_is_not_given_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("JAX processes every program that the equation calls")

    program = jax.make_jaxpr(inside_checkpoint_in_a_scan)(X)
    monkeypatch.setattr(partial_eval, "dce_jaxpr", refuse)
    (scan,) = [eqn for eqn in without_dead_code(program).eqns if eqn.primitive.name == "scan"]
    checkpoint = scan.params["jaxpr"].eqns[0]
    assert [eqn.primitive.name for eqn in checkpoint.params["jaxpr"].eqns] == ["cos"]
