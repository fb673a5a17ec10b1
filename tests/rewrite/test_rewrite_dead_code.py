"""Dead equations are removed as JAX removes them, also inside of scans and calls."""

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
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


def inside_checkpoint_in_a_scan(x: Any) -> Any:
    layer = jax.checkpoint(layer_with_dead_equations)
    return scanned(lambda c, _: ((layer(c[0]), c[0] + c[1]), None), (x, x), None, lambda c, _: c[1])


def text(program: core.Jaxpr) -> str:
    """The program in words, without what JAX notes about the trees of a scan's arguments."""
    return re.sub(r"\bft_(in|out)=.*", "", str(program))


def named_like_an_op(fn: Any) -> Any:
    fn.__name__ = "_attention"
    return jax.jit(fn)


def sharded(fn: Any) -> Any:
    """A call of three values, one of which is donated."""
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
    return jax.jit(fn, in_shardings=(sharding, None, sharding), donate_argnums=1)


WRAPPERS = (jax.jit, jax.checkpoint, named_like_an_op, sharded)


def extended(values: list[Any], rng: random.Random, depth: int) -> list[Any]:
    """Computes values [3, 4] of others, in calls, loops and branches; some of them are needed."""

    def some(number: int) -> list[Any]:
        return [rng.choice(values) for _ in range(number)]

    def inner(number: int, *more: Any) -> list[Any]:
        return rng.sample(extended([*more], rng, depth + 1), number)

    for _ in range(rng.randint(2, 4)):
        kinds = ("sin", "product", "call", "call", "scan", "cond", "while", "effect")
        match rng.choice(kinds[: 8 - depth]):
            case "sin":
                values = [*values, jnp.sin(*some(1))]
            case "product":
                values = [*values, jnp.multiply(*some(2))]
            case "call":
                wrapper, number = rng.choice(WRAPPERS), rng.randint(1, 3)
                values += wrapper(lambda *x, n=number: inner(n, *x))(*some(3))
            case "scan":
                init, xs, outer = some(2), jnp.stack(some(3)), some(1)

                def body(carry: Any, x: Any, outer: Any = outer) -> Any:
                    *carry, y, z = inner(4, *carry, x, *outer)
                    return carry, (y, z)

                carry, (y, _) = lax.scan(body, init, xs)
                values = [*values, *carry, y.sum(axis=0)]
            case "cond":
                branches = (lambda *x: inner(2, *x),) * 2
                values = [*values, *lax.cond(X[0, 0] > 0, *branches, *some(2))]
            case "while":

                def step(carry: Any) -> Any:
                    return inner(2, *carry)

                values += lax.while_loop(lambda c: c[0][0, 0] < 0, step, some(2))
            case "effect":
                jax.debug.callback(lambda _: None, *some(1))
    return values


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_drawn_programs_are_what_jax_makes_of_them(first: int) -> None:
    for seed in range(first, first + 10):

        def fn(x: Any, y: Any, seed: int = seed) -> Any:
            rng = random.Random(seed)
            return rng.sample(extended([x, y, x + y], rng, 0), 2)

        program = jax.make_jaxpr(fn)(X, 2 * X)
        expected, _ = partial_eval.dce_jaxpr(program, [True, True], instantiate=True)
        cleared = without_dead_code(program)
        assert text(cleared) == text(expected), program
        assert text(without_dead_code(cleared)) == text(cleared)


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
