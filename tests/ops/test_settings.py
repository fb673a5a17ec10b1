"""A setting for the time of a call holds for what JAX traces after it: derivatives, parts, vmap."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding_layouts import KINDS, drawn

from ikbo_jax.ops import sharded

#: How arrays are divided over the two devices of a mesh.
LAYOUTS = {
    "linear": [P(), P(), P("x"), P(), P("x")],
    "grouped_heads": [P("x"), P(), P(), P("x")],
    "own_tokens": [P("x"), P(), P(), P("x"), P("x"), P("x"), P()],
    "jagged": [P("x"), P(), P(), P()],
}


def high(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op as a layer with precision="highest" calls it."""

    def called(*arrays: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return op(*arrays)

    return called


def on(kind: str | None, arrays: list[Any], specs: list[P]) -> list[Any]:
    if kind is None:
        return arrays
    mesh = jax.make_mesh((2,), ("x",), axis_types=(KINDS[kind],))
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def check(program: Any) -> None:
    """All products of a compiled program have the highest precision."""
    products = [x for x in program.as_text().splitlines() if re.search(r" dot\(", x)]
    assert products
    assert not [x for x in products if "operand_precision={highest,highest}" not in x]


def slopes(op: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), tuple(range(count)))


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_have_the_precision_of_the_call(name: str, kind: str | None) -> None:
    op, arrays = drawn(name, 0)
    divided = on(kind, arrays, LAYOUTS[name])
    count = sum(x.dtype == "float32" for x in arrays)
    check(jax.jit(high(op)).lower(*divided).compile())
    check(jax.jit(slopes(high(op), count)).lower(*divided).compile())
    check(jax.jit(slopes(jax.jit(high(op)), count)).lower(*divided).compile())


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", ["linear", "jagged"])
def test_products_of_second_derivatives(name: str, kind: str | None) -> None:
    op, arrays = drawn(name, 0)
    divided = on(kind, arrays, LAYOUTS[name])
    count = sum(x.dtype == "float32" for x in arrays)

    def bent(*arrays: Any) -> Any:
        return sum(jnp.sum(jnp.cos(x)) for x in slopes(high(op), count)(*arrays))

    check(jax.jit(jax.grad(bent, tuple(range(count)))).lower(*divided).compile())


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_products_of_vmap_after_the_call_was_traced(kind: str | None) -> None:
    op, arrays = drawn("grouped_heads", 0)
    divided = on(kind, arrays, LAYOUTS["grouped_heads"])
    divided[1] = jnp.stack([divided[1]] * 2)
    batched = jax.vmap(jax.jit(high(op)), (None, 0, None, None))
    check(jax.jit(batched).lower(*divided).compile())


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_another_thread(kind: str) -> None:
    op, arrays = drawn("linear", 0)
    lowered = jax.jit(high(op)).lower(*on(kind, arrays, LAYOUTS["linear"]))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        check(threads.submit(lowered.compile).result())


def test_reports_collected_side_by_side() -> None:
    """As two threads do that explain two functions: empty reports are equal, but not the same."""
    first, second = sharded.reports(), sharded.reports()
    of_first, of_second = first.__enter__(), second.__enter__()
    second.__exit__(None, None, None)
    sharded.report("call", "plan")
    assert (of_first, of_second) == ({"call": "plan"}, {})
    first.__exit__(None, None, None)
