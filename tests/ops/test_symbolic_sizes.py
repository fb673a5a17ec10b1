"""The ops under symbolic dimensions of `jax.export`, which the XLA path takes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_export
from jax import export

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch

pytestmark = pytest.mark.usefixtures("on_cpu")

SIZES = {"b": 7, "u": 3, "s": 5, "t": 2}
B, U, S, T = export.symbolic_shape(", ".join(SIZES))


def of(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def attention(b: Any, u: Any, t: Any = 2, s: Any = 5) -> tuple[Any, ...]:
    return of(b, t, 4, 8), of(u, s, 2, 8), of(u, s, 2, 8), integers(b)


def jagged(batch: Any, rows: Any, keys: Any) -> tuple[Any, ...]:
    offsets = integers(batch + 1)
    return of(rows, 4, 8), of(keys, 2, 8), of(keys, 2, 8), offsets, offsets


def shared_queries(query, key, value, offsets, **options):
    return ikbo.gdpa(query, key, value, None, offsets, broadcast_q=True, **options)


def masked(query, key, value, offsets, targets, **options):
    mask = ikbo.masks.hstu(targets, contextual=2, window=9)
    return ikbo.gdpa(query, key, value, offsets, offsets, mask=mask, **options)


def with_own_tokens(query, key, value, index, own, **options):
    return ikbo.attention(query, key, value, index, self_key=own, self_value=own, **options)


def with_ranges(query, key, value, index, ranges, **options):
    return ikbo.attention(query, key, value, index, key_value_ranges=ranges, **options)


gradient = functools.partial(test_export.gradient, count=3)
softmax = functools.partial(ikbo.gdpa, activation="softmax")
compression = (of(32, 40), of(32, 24), of(B, 40, 16), of(U, 24, 16), integers(B))
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention_b": (ikbo.attention, attention(B, 3)),
    "attention_b_u": (ikbo.attention, attention(B, U)),
    "attention_t": (ikbo.attention, attention(7, 3, t=T)),
    "attention_gradient": (gradient(ikbo.attention), attention(B, 3)),
    "attention_own": (with_own_tokens, (*attention(B, 3), of(B, 2, 2, 8))),
    "attention_ranges": (gradient(with_ranges), (*attention(B, 3, t=T), integers(B, 2))),
    "gdpa_b": (ikbo.gdpa, jagged(B, 50, 60)),
    "gdpa_rows": (ikbo.gdpa, jagged(7, 25 * T, 12 * S)),
    "gdpa_gradient": (gradient(softmax), jagged(B, 16 * B, 8 * B)),
    "gdpa_masked": (gradient(masked), (*jagged(B, 16 * B, 8 * B)[:4], integers(B))),
    "gdpa_broadcast": (shared_queries, (of(5, 4, 8), of(60, 2, 8), of(60, 2, 8), integers(B + 1))),
    "linear_compression": (ikbo.linear_compression, compression),
}


def example(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    rng = np.random.default_rng(0)
    sizes = [d if isinstance(d, int) else eval(str(d), {}, SIZES) for d in shape.shape]
    if shape.dtype == jnp.float32:
        return rng.standard_normal(sizes, dtype=np.float32)
    most = 3 if sizes == [7] else 50  # users, or rows
    return np.sort(rng.integers(0, most, sizes)).astype(np.int32)


@pytest.mark.parametrize("name", CASES)
def test_xla_path_exports_and_gives_what_known_sizes_give(name: str) -> None:
    op, shapes = CASES[name]
    exported = export.export(jax.jit(op))(*shapes)
    arrays = [example(shape) for shape in shapes]
    actual, expected = exported.call(*arrays), jax.jit(op)(*arrays)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), actual, expected
    )


@pytest.mark.parametrize("implementation", [None, "xla", "mosaic_gpu"])
def test_size_that_nothing_takes_is_named(implementation: str | None) -> None:
    run = functools.partial(ikbo.attention, implementation=implementation)
    words = r"attention: S is symbolic \('s'\).* export with a concrete S"
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(run, *attention(7, 3, s=S))
    run = functools.partial(ikbo.gdpa, implementation=implementation)
    query, keys, offsets = of(10, 4, 8), of(10, S, 8), integers(3)
    with pytest.raises(NotImplementedError, match="gdpa: K is symbolic .*concrete K"):
        jax.eval_shape(run, query, keys, keys, offsets, offsets)


@pytest.mark.parametrize(
    ("name", "axis", "size"),
    [("attention_b", "B", "b"), ("gdpa_rows", "total_q", "25*t"), ("linear_compression", "U", "u")],
)
def test_kernels_leave_symbolic_sizes_to_xla(name, axis, size, monkeypatch) -> None:
    """On a machine with the card, and in a program that is lowered for it elsewhere."""
    op, shapes = CASES[name]
    words = f"{axis} is symbolic ('{size}'), "
    insist = functools.partial(op, implementation="mosaic_gpu")
    for is_hopper in (False, True):
        if is_hopper:
            monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
        (plan,) = ikbo.explain(op, *shapes).plans
        plan = plan if is_hopper else plan.cuda
        assert (plan.implementation, plan.reason[: len(words)]) == ("xla", words)
        with pytest.raises(NotImplementedError, match=f"{axis} is symbolic .* concrete {axis}"):
            jax.eval_shape(insist, *shapes)
