"""`custom_jvp` functions that are elementwise, with their derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite_basics import A, D, check, check_values_and_gradients, loss, report_of, share_saved

import ikbo_jax as ikbo
from ikbo_jax.rewrite.report import cost


def custom(function: Callable[[Any], Any], rule: Callable[[Any, Any, Any], Any]) -> Any:
    """A function with a JVP rule, which is also given the function."""
    wrapped = jax.custom_jvp(function)

    @wrapped.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return rule(wrapped, primals[0], tangents[0])

    return wrapped


FUNCTIONS: dict[str, Any] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "straight through": custom(jnp.rint, lambda f, x, t: (f(x), t)),
    "no slope": custom(jnp.tanh, lambda f, x, t: (jnp.tanh(x), jnp.zeros_like(t))),
    "a constant": custom(jnp.ones_like, lambda f, x, t: (f(x), 2 * t)),
    "another function": custom(jnp.sin, lambda f, x, t: (f(x), jax.nn.relu(jnp.cos(x)) * t)),
    "itself in the slope": custom(jnp.sin, lambda f, x, t: (f(x), f(f(x) + 1) * t)),
    "where": custom(lambda x: jnp.where(x > 0, x, x**2), lambda f, x, t: (f(x), (x + 1) * t)),
}


def of_a_lookup(f: Any, w: Any, user: Any, cand: Any, index: Any) -> Any:
    return f(user[index] @ w[:D]) * f(cand @ w[D:])


def of_a_concatenation(f: Any, w: Any, user: Any, cand: Any, index: Any) -> Any:
    return f(jnp.concatenate([user[index], cand], axis=1)) @ w


def of_merged_rows(f: Any, w: Any, user: Any, cand: Any, index: Any) -> Any:
    x = jnp.stack([user[index] @ w[:D], cand @ w[D:]], axis=1)
    return f(x.reshape(-1, x.shape[-1]))


def sums_of_squares(fn: Any) -> list[Any]:
    """Makes sums of a function, and of its first and second derivative by the users."""

    def of_slope(f: Any) -> Any:
        return lambda *args: jnp.sum(jax.grad(f, 1)(*args) ** 2)

    def total(*args: Any) -> Any:
        return jnp.mean(fn(*args) ** 2)

    slope = of_slope(total)
    return [total, slope, of_slope(slope)]


@pytest.mark.parametrize("model", [of_a_lookup, of_a_concatenation, of_merged_rows])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_derivatives(name: str, model: Any) -> None:
    f = FUNCTIONS[name]

    def original(w: Any, user: Any, cand: Any) -> Any:
        return model(f, w, user, cand, A.index)

    def all_of(fn: Any) -> Any:
        of_each = [fn, *(jax.grad(g, (0, 1, 2)) for g in sums_of_squares(fn))]
        return lambda *args: [f(*args) for f in of_each]

    check(all_of, original, A.w, A.user, A.cand)
    report = report_of(original, A.w, A.user, A.cand)
    assert report.changed or name == "a constant" or model is of_merged_rows


def test_the_slope_of_a_function_of_two_operands_takes_a_concatenation_by_parts() -> None:
    def flops(f: Any) -> int:
        fn = ikbo.rewrite(lambda user: of_a_concatenation(f, A.w, user, A.cand, A.index))
        return cost.program_cost(jax.make_jaxpr(jax.grad(loss(fn)))(A.user)).flops

    assert flops(lambda x: jnp.logaddexp(x, 0.0)) == flops(jnp.tanh)


def mixes_rows(f: Any, x: Any, t: Any) -> Any:
    return f(x), t * jnp.sum(x, axis=0, keepdims=True)


MIXED = custom(jnp.cos, mixes_rows)


@pytest.mark.parametrize(
    "f",
    [custom(jnp.sin, mixes_rows), custom(jnp.sin, lambda f, x, t: (f(x), MIXED(x) * t))],
    ids=["first", "second"],
)
def test_a_derivative_that_mixes_rows_is_the_original_one(f: Any) -> None:
    """The first derivative of a function, or the derivative of its derivative."""

    def slopes(fn: Any) -> Any:
        of_each = [jax.value_and_grad(g, (0, 1, 2)) for g in sums_of_squares(fn)[:2]]
        return lambda *args: [f(*args) for f in of_each]

    check(slopes, lambda w, user, cand: of_a_lookup(f, w, user, cand, A.index), A.w, A.user, A.cand)


def neighbours(x: Any, table: Any, w: Any) -> Any:
    return jax.nn.relu((x[:, 1:] - x[:, :-1]) @ w)


FIRST, SECOND = np.triu_indices(9, 1)
#: Pairs of fields, and the shares that are saved: DLRM's in six spellings, AFM, a layer, and FmFM.
PAIRS: dict[Any, float] = {
    lambda x, table, w: (x[:, :, None] * x[:, None]).sum(-1)[:, FIRST, SECOND] @ w[:36]: 0.39,
    lambda x, table, w: jnp.einsum("bid,bjd->ijb", x, x)[SECOND, FIRST].T @ w[:36]: 0.56,
    lambda x, table, w: jnp.take_along_axis(
        (x @ x.mT).reshape(-1, 81), jnp.tile(FIRST * 9 + SECOND, (96, 1)), axis=1
    ): 0.4,
    lambda x, table, w: (
        (lambda z: jnp.concatenate([z[:, n, :n] for n in range(1, 9)], 1))((x @ x.mT) / 3) @ w[:36]
    ): 0.56,
    lambda x, table, w: jnp.triu(x @ x.mT, 1).sum(axis=(1, 2)): 0.7,
    lambda x, table, w: (x[:, :, None] * x[:, None]).sum(-1).reshape(-1, 81) @ w: 0.42,
    lambda x, table, w: jnp.einsum(
        "bp,bpd->bd", jax.nn.softmax(((y := x[:, FIRST] * x[:, SECOND]) @ w[:8]).sum(-1), 1), y
    ): 0.35,
    lambda x, table, w: jnp.tanh(jnp.concatenate([x[:, FIRST], x[:, SECOND]], -1) @ w[:16]): 0.6,
    lambda x, table, w: (
        jnp.einsum("bpd,pde->bpe", x[:, FIRST], jnp.stack([w[:36]] * 8, 1)) * x[:, SECOND]
    ).sum(axis=(1, 2)): 0.87,
}


def embedded_times(x: Any, table: Any, w: Any) -> Any:
    times = jnp.rint(x[..., 0] * 4).astype(jnp.int32)
    since = jnp.concatenate([jnp.zeros_like(times[:, :1]), times[:, 1:] - times[:, :-1]], axis=1)
    return jax.nn.relu((x + table[jnp.clip(since + 4, 0, 8)]) @ w)


@pytest.mark.parametrize("model", [neighbours, embedded_times, *PAIRS])
def test_parts_that_end_at_other_places(model: Any) -> None:
    """Differences of neighbouring tokens, and pairs of fields: those of the user are the user's."""
    rng = np.random.default_rng(0)
    fields, w = (6, (81, 8)) if model in PAIRS else (18, (8, 64))
    shapes = (4, fields, 8), (96, 3, 8), (9, 8), w
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    index = jnp.asarray(rng.integers(0, 4, 96), jnp.int32)

    def fn(users: Any, cands: Any, table: Any, w: Any) -> Any:
        return model(jnp.concatenate([users[index], cands], axis=1), table, w)

    check_values_and_gradients(fn, *arrays)
    assert share_saved(fn, *arrays) >= PAIRS.get(model, 0.8)
    assert report_of(fn, *arrays).bytes_saved > 0 or model in PAIRS
