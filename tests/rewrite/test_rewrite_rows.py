"""Lookups that a rewritten program makes or keeps: their gradient is a segment sum in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ikbo_jax as ikbo
from ikbo_jax.rewrite.report.cost import program_cost

U, B, D, V = 3, 2000, 8, 2100
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(RNG.integers(0, U, B), jnp.int32)
#: Indices out of bounds on both sides, and one item that most candidates have.
IDS = jnp.asarray(np.where(RNG.random(B) < 0.6, 5, RNG.integers(-V - 9, V + 9, B)), jnp.int32)
#: How a model looks items up, in a table with more rows than there are candidates.
ITEMS: dict[str, Callable[..., Any]] = {
    "default": lambda table, ids: table[ids],
    "clip": lambda table, ids: table.at[ids].get(mode="clip", wrap_negative_indices=False),
    "fill": lambda table, ids: jnp.take(table, ids, axis=0, fill_value=2.0),
    "drop": lambda table, ids: table.at[ids].get(mode="drop", wrap_negative_indices=False),
    "of two axes": lambda table, ids: table[ids.reshape(-1, 2)].reshape(-1, D),
    "of columns": lambda table, ids: table.T[:, ids].T,
    "int16": lambda table, ids: jnp.take(table, ids.astype(jnp.int16), axis=0, mode="clip"),
}


def model(items: Any, table: Any, user: Any, index: Any, ids: Any) -> Any:
    return jnp.tanh(user[index] @ jnp.eye(D, dtype=user.dtype)) * items(table, ids)


def arguments(dtype: str) -> tuple[Any, Any]:
    return tuple(jnp.asarray(RNG.normal(size=(n, D)), dtype) for n in (V, U))


def slopes(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Gradients of a sum, by table and users; the casts leave values as they are."""

    def total(table: Any, user: Any, *indices: Any) -> Any:
        return jnp.sum(fn(table.astype(dtype), user.astype(dtype), *indices).astype(jnp.float32))

    return jax.grad(total, (0, 1))


@pytest.mark.parametrize(
    ("items", "dtype"), [*((name, "bfloat16") for name in ITEMS), ("default", "float16")]
)
def test_values_are_equal_and_gradients_rounded_once(items: str, dtype: str) -> None:
    fn = functools.partial(model, ITEMS[items])
    args = *arguments(dtype), INDEX, IDS
    text = str(jax.make_jaxpr(slopes(ikbo.rewrite(fn), dtype))(*args))
    assert text.count("ikbo_row_sums[") == 2
    values = (np.asarray(f(*args), np.float32) for f in (ikbo.rewrite(fn), fn))
    np.testing.assert_array_equal(*values)
    # With float32 arrays and operations in 16 bits, sums are float32.
    wide = [x.astype(jnp.float32) for x in args[:2]]
    exact = jax.jit(slopes(fn, "float32"))(*wide, *args[2:])
    ours = jax.jit(slopes(ikbo.rewrite(fn), dtype))(*args)
    for x, y in zip(ours, exact, strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=scale * jnp.finfo(dtype).eps)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("items", ["default", "clip", "fill", "of columns"])
def test_derivatives_under_vmap_are_jaxs(items: str, axes: tuple[Any, Any]) -> None:
    table, ids = arguments("float32")[0][:20], IDS[:12] % 27 - 3
    tables, many = jnp.stack([table, -table]), jnp.stack([ids, ids[::-1]])

    def derivatives(fn: Any) -> Any:
        def of(table: Any, ids: Any) -> Any:
            def one(table: Any) -> Any:
                return jnp.sin(fn(table, table[:3], jnp.arange(12) % 3, ids))

            def slope(table: Any) -> Any:
                return jax.grad(lambda table: jnp.sum(one(table)))(table)

            pushed = jax.jvp(one, (table,), (table * 2,))
            second = jax.jvp(slope, (table,), (table * 2,))
            third = jax.grad(lambda table: jnp.sum(jnp.sin(slope(table))))(table)
            return *pushed, *second, third

        args = table if axes[0] is None else tables, ids if axes[1] is None else many
        return jax.jit(jax.vmap(of, axes))(*args)

    fn = functools.partial(model, ITEMS[items])
    for x, y in zip(derivatives(ikbo.rewrite(fn)), derivatives(fn), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def scored(look_up: Callable[..., Any], user: Any, index: Any) -> Any:
    rows = look_up(user, index, indices_are_sorted=True)
    return jnp.tanh(rows @ jnp.eye(D, dtype=user.dtype)).sum(axis=1)


@pytest.mark.parametrize("users", [U, B])
def test_a_call_of_look_up_is_a_lookup(users: int) -> None:
    """It is removed, or stays as it is where there are as many users as candidates."""

    def gather(user: Any, index: Any, **_: Any) -> Any:
        return user.at[index].get(mode="clip", wrap_negative_indices=False)

    user = jnp.asarray(RNG.normal(size=(users, D)), jnp.float32)
    args = user, jnp.sort(IDS[:B] % users).at[-1].set(users + 3)
    fn, usual = (functools.partial(scored, f) for f in (ikbo.look_up, gather))
    ours, theirs = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: f(*x).sum()))(*args)
        for f in (ikbo.rewrite(fn), usual)
    )
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    report = ikbo.explain(ikbo.rewrite(fn), *args)
    (note,), plans = report.notes, report.plans
    assert [x.outcome for x in note.lookups] == ["removed" if users == U else "kept"]
    assert len(plans) == (0 if users == U else 1)
    assert note.changed == (users == U)
    assert "test_rewrite_rows.py" in str(note)


def test_a_lookup_of_a_rewritten_function_is_a_lookup_in_another() -> None:
    w, user = jnp.eye(D) / 2, arguments("float32")[1]

    def nested(change: Callable[..., Any]) -> Callable[..., Any]:
        inner = change(lambda user: (user, jnp.tanh(jnp.repeat(user, B, axis=0) @ w)))
        return change(lambda user: jnp.tanh(inner(user)[1] @ w).sum(axis=1))

    fn = nested(ikbo.rewrite)
    np.testing.assert_allclose(fn(user), nested(lambda f: f)(user), rtol=1e-5, atol=1e-6)
    ours, theirs = (program_cost(jax.make_jaxpr(f)(user)) for f in (fn, nested(lambda f: f)))
    assert ours.flops <= 2 / B * theirs.flops


def test_rows_of_a_small_table_are_a_table_of_users() -> None:
    """A history of few kinds is looked up by users' ids, and then for candidates."""
    rng = np.random.default_rng(1)
    kinds, table = jnp.asarray(rng.integers(0, 9, (U, 16)), jnp.int32), jnp.ones((9, D))

    def fn(table, kinds, index):
        return jnp.tanh(table[kinds][index] @ jnp.ones((D, D)))

    np.testing.assert_allclose(*(f(table, kinds, INDEX) for f in (fn, ikbo.rewrite(fn))))
    (report,) = ikbo.explain(ikbo.rewrite(fn), table, kinds, INDEX).notes
    assert report.flops_saved > 0.99 * report.costs.original.flops
    assert [x.outcome for x in report.lookups] == ["removed", "removed"]
