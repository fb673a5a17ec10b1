"""What layers share while a program is rewritten is not shared by others that only look alike."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import layout_sequences
import numpy as np
import pytest
from layout_table import S, arrays
from lookalikes import with_slope
from rewrite_basics import ARGS, D, check, equations, gradients_by_all, report_of, without_costs

DOUBLE = functools.partial(with_slope, lambda x: x * 2)
#: This one is not elementwise.
CENTRED = functools.partial(with_slope, lambda x: x - jnp.mean(x, axis=-1, keepdims=True))


def with_argument() -> Any:
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def double(x: jax.Array, slope: float) -> jax.Array:
        del slope
        return x * 2

    @double.defjvp
    def derivative(slope: float, primals: Any, tangents: Any) -> Any:
        return double(*primals, slope), tangents[0] * slope

    return lambda slope: lambda x: double(x, slope)


@pytest.mark.parametrize(
    "make", [DOUBLE, CENTRED, with_argument()], ids=["elementwise", "rows", "argument"]
)
def test_functions_with_other_derivatives(make: Any) -> None:
    three, five = make(3.0), make(5.0)

    def fn(w, user, cand, index):
        users = five(three(three(user[index] @ w[:D])))
        return jnp.sum((users * five(cand @ w[D:])) ** 2)

    assert "work at the smaller batch" in str(report_of(fn, *ARGS).broadcasts[0].became)
    check(lambda f: jax.grad(f, (0, 1, 2)), fn, *ARGS, bound=5e-6)
    check(lambda f: jax.jacfwd(jax.grad(f, 1), 1), fn, *ARGS, bound=5e-6)


@pytest.mark.parametrize("activation", [jax.nn.relu, CENTRED(3.0)], ids=["relu", "rows"])
def test_one_function_on_two_lookups_and_other_shapes(activation: Any) -> None:
    def fn(w, user, cand, index):
        more = jnp.concatenate([user, 2 * user])
        users, others = activation(user[index] @ w[:D]), activation(more[index[::-1]] @ w[:D])
        wide = activation(user[index] @ jnp.concatenate([w[:D], w[:D] / 2], axis=1))
        return jnp.sum((users + others * 2) ** 2) + jnp.sum(wide**2)

    check(lambda f: jax.grad(f, (0, 1)), fn, *ARGS)


# Jitted functions whose operands or results are concatenations.


def is_layer(eqn: Any) -> bool:
    return eqn.params.get("name") == "layer" or eqn.primitive.name in ("checkpoint", "remat2")


def check_calls(make: Any, args: Any, programs: int, calls: int, wrapper: Any = jax.jit) -> None:
    """Checks a function of jitted layers: the report is that of the same layers in place.

    `make` takes the wrapper of a layer and returns the function. In the rewritten function, so many
    `calls` of `layer` share so many `programs`.
    """
    jitted, in_place = make(wrapper), make(lambda layer: layer)
    found = [e.params["jaxpr"] for e in equations(jitted, *args) if is_layer(e)]
    assert (len(set(map(id, found))), len(found)) == (programs, calls)
    reports = [without_costs(report_of(fn, *args)) for fn in (jitted, in_place)]
    assert reports[0] == reports[1]
    check(gradients_by_all(args), jitted, *args, bound=2e-5)


def first_and_last(x: Any) -> Any:
    return x[:, 0] + x[:, -1]


@pytest.mark.parametrize("wrapper", [jax.jit, jax.checkpoint])
def test_layers_over_a_concatenation_share_a_program(wrapper: Any) -> None:
    given = arrays()
    args = given["blocks8"][:5], given["long"], given["token"], given["index"]
    make = functools.partial(layout_sequences.transformer, result=first_and_last)
    check_calls(lambda wrapper: make(wrapper=wrapper), args, 1, 5, wrapper)


def test_layers_with_different_masks() -> None:
    causal = np.tril(np.ones((S + 1, S + 1), bool))
    window = causal & ~np.tril(np.ones((S + 1, S + 1), bool), -3)

    def masks(_: Any) -> Any:
        return [jnp.asarray(mask)[None, None] for mask in (causal, window, window, causal)]

    given = arrays()
    fn = layout_sequences.transformer(masks=masks, result=first_and_last)
    args = given["blocks2"] * 2, given["long"], given["token"], given["index"]
    assert "attention with own tokens" in str(report_of(fn, *args).broadcasts[0].became)
    check(lambda f: f, fn, *args)


def biased(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention that adds the mask to the logits."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) + mask
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), v)


@pytest.mark.parametrize(("masks", "programs", "calls"), [(1, 1, 4), (2, 2, 3)])
def test_layers_with_masks_of_numbers(masks: int, programs: int, calls: int) -> None:
    given = arrays()
    args = given["blocks8"][:5], given["long"], given["token"], given["index"]

    def make(wrapper: Any) -> Any:
        return layout_sequences.transformer(
            biased,
            wrapper,
            lambda mask: [jnp.where(mask, 0.0, -1e9 * (n + 1)) for n in range(masks)],
            first_and_last,
        )

    check_calls(make, args, programs, calls)


def pooled(jit: Any) -> Any:
    """Layers that take one concatenation, of which some need all or a part as an array."""

    @jit
    def layer(w: Any, both: Any, x: Any) -> Any:
        users, _ = both[:, :D], jnp.sort(both, axis=0)
        x = jnp.tanh(x @ w + jnp.sort(both, axis=0)[:, :D] + jnp.sort(users, axis=0))
        return jnp.concatenate([users, x], axis=1), both, x

    def fn(w: Any, user: Any, cand: Any, index: Any) -> Any:
        x = cand @ w[D:, :D]
        both = jnp.concatenate([user[index], jnp.sin(x)], axis=1)
        total = 0.0
        for n in range(5):
            met, both, x = layer(w[:D, :D] * (n + 1), both, x)
            total = total + jnp.tanh(met).sum(axis=1)
        return total + both.sum(axis=1)

    return fn


def test_calls_share_what_they_need_of_a_concatenation_as_an_array() -> None:
    # The last call, of which one result alone is needed, is a call of another program.
    check_calls(pooled, ARGS, 1, 4)
    wide = [e for e in equations(pooled(jax.jit), *ARGS) if e.primitive.name == "concatenate"]
    assert len(wide) == 1


def activation_units(jit: Any) -> Any:
    """DIN's unit, whose product sees that one of the parts is a difference."""

    @jit
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(jax.nn.sigmoid(x @ w) * 2 + 1) * 3

    def fn(w: Any, history: Any, cand: Any, index: Any) -> Any:
        h = history[index]
        q = jnp.broadcast_to(cand[:, None], h.shape)
        x = jnp.concatenate([q, h, q - h], axis=-1)
        return layer(w, x).sum(axis=(1, 2)) + layer(2 * w, x).sum(axis=(1, 2))

    return fn


def test_a_part_that_is_a_sum_is_multiplied_by_its_terms() -> None:
    given, width = arrays(), arrays()["cand"].shape[1]
    w = given["w_unit"][: 3 * width, :1]
    check_calls(activation_units, (w, given["history"], given["cand"], given["index"]), 0, 0)


def flattened(jit: Any) -> Any:
    """Layers on positions of all candidates, whose axis a reshape has merged."""

    @jit
    def layer(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w) * 2 + 1
        return x - y * jnp.exp(-(x * x)), y

    def fn(w: Any, history: Any, cand: Any, index: Any) -> Any:
        x, total = history[index].reshape(-1, history.shape[-1]), 0.0
        for n in range(3):
            x, y = layer(w * (n + 1), x)
            total = total + y.reshape(*index.shape, -1).sum(axis=1)
        return total[:, None] * cand + x.reshape(*index.shape, -1)[:, :8]

    return fn


def test_calls_share_a_program_of_merged_values() -> None:
    given, width = arrays(), arrays()["cand"].shape[1]
    w = given["w_unit"][:width, :width]
    check_calls(flattened, (w, given["history"], given["cand"], given["index"]), 1, 3)


def divided(jit: Any) -> Any:
    """Calls on concatenations of one shape, whose parts have different sizes."""

    @jit
    def layer(w: Any, both: Any) -> Any:
        y = jnp.tanh(jnp.sin(both) @ w) * 2 + 1
        return y * y.mean(axis=1, keepdims=True)

    def fn(w: Any, user: Any, cand: Any, index: Any) -> Any:
        total = 0.0
        for size in (2, 3):
            both = jnp.concatenate([user[index], cand[:, :size], cand[:, size:]], axis=1)
            total = total + layer(w, both) + layer(w * 2, both)
        return total

    return fn


def test_concatenations_of_other_parts_have_another_program() -> None:
    check_calls(divided, ARGS, 2, 4)
