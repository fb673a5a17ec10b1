"""Calls of ops on arrays that are divided over the devices of a mesh, and what programs move."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ikbo_jax as ikbo

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
B, U = 16, 3


class Case(NamedTuple):
    """A call with its layout.

    Attributes:
      op: takes the arrays in their order.
      arrays: name to shape; integer arrays are drawn below the last number, a bound.
      specs: how every array is sharded; absent: replicated.
      out: how the result is.
      sums: how many reductions the gradients of all floating-point arrays need.
      is_local: whether the result needs no collective.
    """

    op: Callable[..., Any]
    arrays: Mapping[str, tuple[int, ...]]
    specs: dict[str, P]
    out: P
    sums: int
    is_local: bool = True


def padded(w_cand: jax.Array, w_user: jax.Array, *rest: jax.Array) -> jax.Array:
    padded_cand, padded_user = map(ikbo.pad_weight, (w_cand, w_user))
    return ikbo.linear_compression(padded_cand, padded_user, *rest)


def three_levels(*arrays: jax.Array) -> jax.Array:
    w_cand, w_user, e_cand, e_user, index, w_all, e_all, user_index = arrays
    levels = (w_all, e_all), (w_user, e_user, user_index), (w_cand, e_cand, index)
    return ikbo.multilevel_linear_compression([ikbo.Term(*level) for level in levels])


def attend(query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array) -> Any:
    return ikbo.attention(query, key, value, index)


def with_own_tokens(
    query: Any, key: Any, value: Any, self_key: Any, self_value: Any, index: Any, lengths: Any
) -> jax.Array:
    own = {"self_key": self_key, "self_value": self_value, "key_value_seq_lengths": lengths}
    out, lse = ikbo.attention(query, key, value, index, **own, return_residuals=True)
    return out + lse[..., None]


def attend_twice(query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    parts: list[Any] = [
        ikbo.attention(query, k, v, index, return_residuals=True)
        for k, v in ((key, value), (value, key))
    ]
    return ikbo.merge_attention(*parts[0], *parts[1])[0]


#: Constants of the program. `gdpa` takes NumPy's arrays, too.
OFFSETS: Any = np.array([0, 3, 3, 9, 12], np.int32)
MORE_OFFSETS: Any = np.array([0, 3, 3, 9, 16], np.int32)
MASKED_OFFSETS: Any = np.array([0, 3, 3, 14, 20, 22, 22, 29, 30], np.int32)


def jagged(activation: str) -> Callable[..., jax.Array]:
    def op(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return ikbo.gdpa(query, key, value, OFFSETS, OFFSETS, activation=activation)

    return op


def indexed(query: Any, key: Any, value: Any, index: Any) -> jax.Array:
    return ikbo.gdpa(
        query, key, value, MORE_OFFSETS, MORE_OFFSETS, activation="softmax", q_to_kv=index
    )


def with_ranges(query: Any, key: Any, value: Any, index: Any, ranges: Any) -> jax.Array:
    return ikbo.attention(query, key, value, index, key_value_ranges=ranges)


def biased(query: Any, key: Any, value: Any, index: Any, bias: Any) -> jax.Array:
    return ikbo.attention(query, key, value, index, bias=bias)


def scaled(query: Any, key: Any, value: Any, scales: Any) -> jax.Array:
    names = ("silu", "softmax") * 4
    offsets = MORE_OFFSETS, MORE_OFFSETS
    return ikbo.gdpa(query, key, value, *offsets, activation=names, output_scale=scales)


def masked(query: Any, key: Any, value: Any, targets: Any) -> jax.Array:
    mask = ikbo.masks.hstu(targets, contextual=1, window=4)
    offsets = MASKED_OFFSETS, MASKED_OFFSETS
    return ikbo.gdpa(query, key, value, *offsets, activation="softmax", mask=mask)


def within_intervals(query: Any, key: Any, value: Any, begin: Any) -> jax.Array:
    mask = ikbo.masks.intervals(begin, begin + np.int32(2))
    offsets = MASKED_OFFSETS, MASKED_OFFSETS
    return ikbo.gdpa(query, key, value, *offsets, activation="silu", mask=mask)


def summed(values: jax.Array, index: jax.Array) -> jax.Array:
    return ikbo.segment_sum(values, index, 16)


def norm_linear(x: Any, w0: Any, w1: Any, b0: Any, scale: Any, bias: Any) -> jax.Array:
    options: Any = {"norm_scale": scale, "norm_bias": bias}
    options |= {"activations": ("silu", "identity")}
    return jnp.concatenate(ikbo.norm_linear(x, (w0, w1), (b0, None), **options), axis=2)


def gated_linear(u: Any, a: Any, weight: Any, residual: Any, scale: Any, bias: Any) -> jax.Array:
    options = {"norm_scale": scale, "norm_bias": bias, "concat": True, "by_head": True}
    dropout: Any = {"dropout_rate": 0.5, "dropout_key": jax.random.key(3)}
    return ikbo.gated_linear(u, a, weight, residual, **options, **dropout)


LINEAR = {
    "w_cand": (16, 5), "w_user": (16, 7), "e_cand": (B, 5, 8), "e_user": (U, 7, 8),
    "index": (B, -U),
}  # fmt: skip
THREE = LINEAR | {"w_all": (16, 3), "e_all": (2, 3, 8), "user_index": (U, -2)}
ATTENTION = {
    "query": (B, 3, 8, 8), "key": (U, 5, 8, 8), "value": (U, 5, 8, 8), "index": (B, -U),
}  # fmt: skip
ONE_KEY_HEAD = ATTENTION | {"key": (U, 5, 1, 8), "value": (U, 5, 1, 8)}
EVERYTHING = {
    "query": (B, 3, 8, 8), "key": (U, 5, 8, 8), "value": (U, 5, 8, 8),
    "self_key": (B, 2, 8, 8), "self_value": (B, 2, 8, 8), "index": (B, -U), "lengths": (U, -6),
}  # fmt: skip
JAGGED = {"query": (12, 8, 8), "key": (12, 8, 8), "value": (12, 8, 8)}
SCALED = {"query": (16, 8, 8), "key": (16, 8, 8), "value": (16, 8, 8), "scales": (4,)}
ROWS = {"query": (32, 8, 4), "key": (32, 8, 4), "value": (32, 8, 4)}
NORM_LINEAR = {
    "x": (16, 5), "w0": (5, 8, 3), "w1": (5, 8, 2), "b0": (8, 3), "scale": (5,), "bias": (5,),
}  # fmt: skip
GATED_LINEAR = {
    "u": (16, 2, 3), "a": (16, 2, 3), "weight": (18, 8), "residual": (16, 8),
    "scale": (2,), "bias": (2,),
}  # fmt: skip
BIAS, BIAS_OF_HEADS = (ATTENTION | {"bias": (U, *sizes, 5)} for sizes in ((1, 1), (8, 3)))
LOOK_UP = {"user": (16, 24), "index": (64, -16)}
SEGMENT_SUM = {"values": (64, 24), "index": (64, -16)}
#: Layouts over the larger axis, by what is divided.
CANDIDATES = {"query": P("x"), "index": P("x")}
HEADS = dict.fromkeys(("query", "key", "value"), P(None, None, "x"))
JAGGED_HEADS = dict.fromkeys(("query", "key", "value"), P(None, "x"))
EMBEDDINGS = {"e_cand": P("x"), "index": P("x")}
WEIGHTS = {"w_cand": P("x"), "w_user": P("x")}

#: "x" is the larger axis of a mesh, "y" the other one.
CASES = {
    "linear_candidates": Case(ikbo.linear_compression, LINEAR, EMBEDDINGS, P("x"), sums=3),
    "linear_m": Case(ikbo.linear_compression, LINEAR, WEIGHTS, P(None, "x"), sums=2),
    "linear_padded": Case(padded, LINEAR, EMBEDDINGS, P("x"), sums=3),
    "linear_padded_m": Case(padded, LINEAR, WEIGHTS, P(None, "x"), sums=2),
    "linear_index_replicated": Case(
        ikbo.linear_compression, LINEAR, {"e_cand": P("x")}, P("x"), sums=3
    ),
    "three_levels": Case(three_levels, THREE, EMBEDDINGS, P("x"), sums=5),
    "attention_candidates": Case(attend, ATTENTION, CANDIDATES, P("x"), sums=2),
    "attention_heads": Case(attend, ATTENTION, HEADS, P(None, None, "x"), sums=0),
    "attention_one_key_head": Case(
        attend, ONE_KEY_HEAD, {"query": P(None, None, "x")}, P(None, None, "x"), sums=2
    ),
    "attention_everything": Case(
        with_own_tokens, EVERYTHING, CANDIDATES | {"self_key": P("x"), "self_value": P("x")},
        P("x"), sums=2,
    ),
    "attention_merged": Case(attend_twice, ATTENTION, CANDIDATES, P("x"), sums=4),
    "gdpa_heads": Case(jagged("gelu"), JAGGED, JAGGED_HEADS, P(None, "x"), sums=0),
    "gdpa_softmax_heads": Case(jagged("softmax"), JAGGED, JAGGED_HEADS, P(None, "x"), sums=0),
    "attention_users": Case(
        attend, ATTENTION | {"key": (8, 5, 8, 8), "value": (8, 5, 8, 8)},
        CANDIDATES | {"key": P("x"), "value": P("x")}, P("x"), sums=2, is_local=False,
    ),
    "attention_keys_over_s": Case(
        attend, ATTENTION | {"key": (U, 8, 8, 8), "value": (U, 8, 8, 8)},
        CANDIDATES | {"key": P(None, "x"), "value": P(None, "x")}, P("x"), sums=2, is_local=False,
    ),
    "attention_ranges": Case(
        with_ranges, ATTENTION | {"ranges": (B, 2, -7)}, CANDIDATES | {"ranges": P("x")}, P("x"),
        sums=2,
    ),
    "attention_bias": Case(biased, BIAS, CANDIDATES, P("x"), sums=3),
    "attention_bias_of_heads": Case(biased, BIAS_OF_HEADS, CANDIDATES, P("x"), sums=3),
    "attention_heads_bias": Case(biased, BIAS, HEADS, P(None, None, "x"), sums=1),
    "attention_heads_bias_of_heads": Case(
        biased, BIAS_OF_HEADS, HEADS, P(None, None, "x"), sums=0, is_local=False
    ),
    "gdpa_rows_scaled": Case(scaled, SCALED, {"query": P("x")}, P("x"), sums=3, is_local=False),
    "gdpa_rows_masked": Case(
        masked, ROWS | {"targets": (8, -10)}, {"query": P("x"), "targets": P("x")}, P("x"),
        sums=2, is_local=False,
    ),
    "gdpa_heads_masked": Case(
        masked, ROWS | {"targets": (8, -10)}, JAGGED_HEADS, P(None, "x"), sums=0
    ),
    "gdpa_rows_within_intervals": Case(
        within_intervals, ROWS | {"begin": (32, 2, -9)}, {"query": P("x"), "begin": P("x")}, P("x"),
        sums=2, is_local=False,
    ),
    "look_up_candidates": Case(ikbo.look_up, LOOK_UP, {"index": P("x")}, P("x"), sums=1),
    "look_up_users": Case(ikbo.look_up, LOOK_UP, {"user": P("x")}, P(), sums=0, is_local=False),
    "look_up_columns": Case(ikbo.look_up, LOOK_UP, {"user": P(None, "x")}, P(None, "x"), sums=0),
    "segment_sum_candidates": Case(
        summed, SEGMENT_SUM, {"values": P("x"), "index": P("x")}, P(), sums=1, is_local=False
    ),
    "segment_sum_columns": Case(
        summed, SEGMENT_SUM, {"values": P(None, "x")}, P(None, "x"), sums=0
    ),
    "norm_linear_rows": Case(norm_linear, NORM_LINEAR, {"x": P("x")}, P("x"), sums=5),
    "norm_linear_columns": Case(
        norm_linear, NORM_LINEAR, {"w0": P(None, "x"), "w1": P(None, "x"), "b0": P("x")},
        P(None, "x"), sums=3,
    ),
    "gated_linear_rows": Case(
        gated_linear, GATED_LINEAR, dict.fromkeys(("u", "a", "residual"), P("x")), P("x"), sums=3
    ),
    "gated_linear_columns": Case(
        gated_linear, GATED_LINEAR, dict.fromkeys(("weight", "residual"), P(None, "x")),
        P(None, "x"), sums=4,
    ),
}  # fmt: skip
#: Both axes of a mesh at once.
CASES_OF_TWO_AXES = {
    "linear_candidates_and_m": Case(
        ikbo.linear_compression, LINEAR,
        {"e_cand": P("x"), "index": P("x"), "w_cand": P("y"), "w_user": P("y")},
        P("x", "y"), sums=4,
    ),
    "attention_candidates_and_heads": Case(
        attend, ATTENTION,
        {
            "query": P("x", None, "y"), "index": P("x"),
            "key": P(None, None, "y"), "value": P(None, None, "y"),
        },
        P("x", None, "y"), sums=2,
    ),
    "attention_candidates_over_both": Case(
        attend, ATTENTION, {"query": P(("x", "y")), "index": P(("x", "y"))}, P(("x", "y")), sums=2
    ),
}  # fmt: skip

#: Ops whose arrays every mesh of eight devices divides: shapes of the arrays, and lengths and
#: bounds of the index arrays behind them.
OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, int]]]] = {
    "linear": (ikbo.linear_compression, [(16, 8), (16, 8), (B, 8, 8), (8, 8, 8)], [(B, 8)]),
    "grouped_heads": (ikbo.attention, [(B, 2, 8, 8), (8, 8, 4, 8), (8, 8, 4, 8)], [(B, 8)]),
    "own_tokens": (
        with_own_tokens,
        [(B, 2, 8, 8), (8, 8, 4, 8), (8, 8, 4, 8), (B, 2, 4, 8), (B, 2, 4, 8)],
        [(B, 8), (8, 9)],
    ),
    "jagged": (indexed, [(16, 8, 8), (16, 4, 8), (16, 4, 8)], [(4, 4)]),
}
#: Layouts of `OPS` with candidates, or rows, over "x".
LAYOUTS: dict[str, list[P]] = {
    "linear": [P(), P(), P("x"), P(), P("x")],
    "grouped_heads": [P("x"), P(), P(), P("x")],
    "own_tokens": [P("x"), P(), P(), P("x"), P("x"), P("x"), P()],
    "jagged": [P("x"), P(), P(), P()],
}


def drawn(name: str, seed: int = 0) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """One of `OPS` and its arrays."""
    op, shapes, indices = OPS[name]
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return op, arrays + [rng.integers(0, bound, n).astype(np.int32) for n, bound in indices]


def floats(arrays: Sequence[Any]) -> tuple[int, ...]:
    """The positions of floating-point arrays."""
    return tuple(n for n, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))


@functools.cache
def step_of(op: Callable[..., Any]) -> Any:
    """A jitted function: the gradients of a sum by all floating-point arrays, and the op's result.

    One function for each op, so that all tests of an op share the program of one device.
    """

    def loss(*arrays: Any) -> Any:
        out = op(*arrays)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    return jax.jit(lambda *arrays: jax.grad(loss, floats(arrays), has_aux=True)(*arrays))


def on(mesh: Any, arrays: Sequence[Any], specs: Sequence[P | None]) -> list[Any]:
    """The arrays in these layouts; None leaves an array on no mesh."""
    return [
        x if spec is None else jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Asserts that all arrays of two trees are equal within a tolerance."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def draw(case: Case) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        if shape[-1] < 0:
            return rng.integers(0, -shape[-1], shape[:-1]).astype(np.int32)
        return rng.normal(size=shape).astype(np.float32)

    return {name: jax.device_put(values(shape)) for name, shape in case.arrays.items()}


def check_source_locations(compiled_text: str) -> None:
    """Every source location that an instruction names is one of the program's.

    One that XLA took over from another program can make its passes loop for ever.
    """
    known = re.findall(r"^(\d+) \{file_location_id", compiled_text, re.MULTILINE)
    named = re.findall(r"stack_frame_id=(\d+)", compiled_text)
    assert known
    assert max(map(int, named), default=0) <= len(known)


def collectives(program: str) -> set[str]:
    """The collectives in a compiled program's text."""
    return {name for name in COLLECTIVES if re.search(rf" {name}(?:-start)?\(", program)}


def reductions(program: str) -> int:
    """How many arrays, scalars apart, are reduced over devices; XLA may reduce several at once."""
    shapes = re.findall(r" = (\(.*?\)|\S+) (?:all-reduce|reduce-scatter)(?:-start)?\(", program)
    return sum(len(re.findall(r"f32\[\d", shape)) for shape in shapes)


def on_mesh(
    mesh: jax.sharding.Mesh, case: Case, arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    return {
        name: jax.device_put(x, NamedSharding(mesh, case.specs.get(name, P())))
        for name, x in arrays.items()
    }


def mesh_of(name: str, kind: str) -> jax.sharding.Mesh:
    """A mesh of CPUs, named by its sizes as in "4x2", with axes "x", "y" and "z"."""
    shape = tuple(map(int, name.split("x")))
    axes = tuple("xyz"[: len(shape)])
    devices = jax.devices("cpu")[: math.prod(shape)]
    return jax.make_mesh(shape, axes, axis_types=(KINDS[kind],) * len(shape), devices=devices)
