"""A setting for the time of a call holds for what JAX traces after it: derivatives, parts, vmap."""

import concurrent.futures
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from sharded_calls import KINDS, LAYOUTS, drawn, floats, mesh_of, on

from ikbo_jax.ops import sharded


def high(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op as a layer with precision="highest" calls it."""

    def called(*arrays: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return op(*arrays)

    return called


def divided(kind: str | None, name: str) -> tuple[Callable[..., Any], list[Any]]:
    """An op in `high`, and its arrays, on a mesh of two devices if `kind` is not None."""
    op, arrays = drawn(name)
    specs = LAYOUTS[name] if kind else [None] * len(arrays)
    return high(op), on(mesh_of("2", kind) if kind else None, arrays, specs)


def check(fn: Callable[..., Any], arrays: list[Any], kind: str | None) -> None:
    """All products of a program have the highest precision.

    On Auto axes, XLA asks for the op's part while it compiles.
    """
    lowered = jax.jit(fn).lower(*arrays)
    if kind == "auto":
        check_compiled(lowered.compile().as_text())
    else:
        products = [x for x in lowered.as_text().splitlines() if "dot_general" in x]
        assert products
        assert not [x for x in products if "precision = [HIGHEST, HIGHEST]" not in x]


def check_compiled(text: str) -> None:
    products = [x for x in text.splitlines() if re.search(r" dot\(", x)]
    assert products
    assert not [x for x in products if "operand_precision={highest,highest}" not in x]


def slopes(op: Callable[..., Any], arrays: list[Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), floats(arrays))


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_have_the_precision_of_the_call(name: str, kind: str | None) -> None:
    """The result, and gradients of the call and of the jitted call."""
    op, arrays = divided(kind, name)
    check(op, arrays, kind)
    check(slopes(op, arrays), arrays, kind)
    check(slopes(jax.jit(op), arrays), arrays, kind)


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_have_the_default_precision(name: str) -> None:
    op, arrays = drawn(name)
    text = jax.jit(op).lower(*arrays).as_text()
    precisions = re.findall(r"dot_general .*precision = \[(\w+, \w+)\]", text)
    assert set(precisions) == {"DEFAULT, DEFAULT"}


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", ["linear", "jagged"])
def test_products_of_second_derivatives(name: str, kind: str | None) -> None:
    op, arrays = divided(kind, name)

    def bent(*arrays: Any) -> Any:
        return sum(jnp.sum(jnp.cos(x)) for x in slopes(op, list(arrays))(*arrays))

    check(jax.grad(bent, floats(arrays)), arrays, kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_products_of_vmap_after_the_call_was_traced(kind: str | None) -> None:
    op, arrays = divided(kind, "grouped_heads")
    arrays[1] = jnp.stack([arrays[1]] * 2)
    check(jax.vmap(jax.jit(op), (None, 0, None, None)), arrays, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_another_thread(kind: str) -> None:
    op, arrays = divided(kind, "linear")
    lowered = jax.jit(op).lower(*arrays)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        check_compiled(threads.submit(lowered.compile).result().as_text())


def test_reports_collected_side_by_side() -> None:
    """As two threads do that explain two functions: empty reports are equal, but not the same."""
    first, second = sharded.reports(), sharded.reports()
    of_first, of_second = first.__enter__(), second.__enter__()
    second.__exit__(None, None, None)
    sharded.report("call", "plan")
    assert (of_first, of_second) == ({"call": "plan"}, {})
    first.__exit__(None, None, None)
