"""The part of the demo on attention: the request's candidates attend to their users' histories.

`run` compiles the stages, checks each against an oracle in float32 and times them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax import demo
from ikbo_jax._timing.programs import Log, Programs
from ikbo_jax.demo import Measured, Stage
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.dispatch import hopper_unavailable_reason
from ikbo_jax.reference.attention import materialised

#: Number of candidates whose results are compared with the oracle.
NUM_CHECKED = 32


@dataclasses.dataclass(frozen=True)
class Request:
    """Sizes of the attention.

    Attributes:
      ranking: the demo's request, which holds candidates, users, dtype and seed.
      q_len: T, queries of a candidate.
      kv_len: S, keys of a user.
      heads: N = K, number of query heads and of key heads.
      head_dim: H, head width.
    """

    ranking: demo.Request
    q_len: int
    kv_len: int
    heads: int
    head_dim: int


class Inputs(NamedTuple):
    """The arguments of `attention`, in its order; the index is sorted."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `run`. `measured[0]` copies keys and values, the baseline of speed-ups."""

    request: Request
    measured: tuple[Measured, ...]
    not_run: tuple[Stage, ...]
    tolerance: float

    @property
    def agree(self) -> bool:
        """Whether every stage that ran agrees with the oracle."""
        return all(m.agrees for m in self.measured)


def default_request(ranking: demo.Request) -> Request:
    """Histories of 1,024 keys of width 128 on an accelerator, of 64 keys of width 16 on a CPU."""
    if jax.default_backend() == "cpu":
        return Request(ranking, q_len=4, kv_len=64, heads=2, head_dim=16)
    return Request(ranking, q_len=64, kv_len=1024, heads=2, head_dim=128)


def _draw(request: Request, seed: jax.Array) -> tuple[jax.Array, ...]:
    ranking = request.ranking
    dtype = jnp.dtype(ranking.dtype)
    keys = jax.random.split(jax.random.key(seed), 3)
    width = (request.heads, request.head_dim)
    kv_shape = (ranking.users, request.kv_len, *width)
    shapes = ((ranking.candidates, request.q_len, *width), kv_shape, kv_shape)
    return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


def _materialised(
    query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array
) -> jax.Array:
    """Attention of a model without this library: copies keys and values for every candidate."""
    keys, values = key[index], value[index]
    scores = jnp.einsum("btnh,bsnh->bnts", query, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(query.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights, values, preferred_element_type=jnp.float32)
    return out.astype(query.dtype)


def _materialised_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array
) -> jax.Array:
    out: jax.Array = jax.nn.dot_product_attention(
        query, key[index], value[index], implementation="cudnn"
    )
    return out


def _ours(*inputs: jax.Array, implementation: str) -> jax.Array:
    query, key, value, index = inputs
    out = attention(
        query, key, value, index, indices_are_sorted=True, implementation=implementation
    )
    assert isinstance(out, jax.Array)
    return out


def stages(request: Request) -> list[Stage]:
    """Every stage, the materialised one first."""
    ranking = request.ranking
    size = jnp.dtype(ranking.dtype).itemsize * request.heads * request.head_dim
    moved = size * 2 * (ranking.candidates * request.q_len + ranking.users * request.kv_len)
    moved += 4 * ranking.candidates
    moved_with_copies = moved + size * 2 * 2 * ranking.candidates * request.kv_len
    found = [
        Stage("1  materialised", _materialised, moved_with_copies, "xla"),
        Stage("2  decomposed", functools.partial(_ours, implementation="xla"), moved, "xla"),
    ]
    if (reason := hopper_unavailable_reason()) is not None:
        return [*found, Stage("3  fused", None, moved, reason)]
    cudnn = Stage("1b materialised, cuDNN", _materialised_cudnn, moved_with_copies, "cudnn")
    found.insert(1, cudnn)
    kernel = functools.partial(_ours, implementation="mosaic_gpu")
    return [*found, Stage("3  fused", kernel, moved, "mosaic_gpu")]


def _oracle(rows: np.ndarray, inputs: Inputs) -> jax.Array:
    query, key, value = (x.astype(jnp.float32) for x in (inputs.query[rows], *inputs[1:3]))
    scale = query.shape[-1] ** -0.5
    return materialised(query, key, value, inputs.cand_to_user[rows], scale=scale)[0]


def _compare(
    rows: np.ndarray, actual: jax.Array, expected: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return demo.compare(actual[rows], expected)


def _tolerance(request: Request, baseline_error: float, largest: float) -> float:
    """The allowed error: twice the materialised version's error in this dtype, plus one rounding.

    As in `demo.tolerance`, √S f32 roundings allow other orders of summation.
    """
    rounding = float(jnp.finfo(request.ranking.dtype).eps) / 2
    summation = math.sqrt(request.kv_len) * float(jnp.finfo(jnp.float32).eps)
    return 2 * baseline_error + (rounding + summation) * largest


def run(request: Request, *, on_progress: Log = lambda _: None) -> Report:
    """Checks the result of every stage and times the stages interleaved.

    Args:
      request: sizes and seed.
      on_progress: called with a description of each step.

    Returns:
      The report; stages that cannot run on this device are in `not_run`, with the reason as `path`.
    """
    log = demo.prefixed_log("attention", on_progress)
    unseeded = dataclasses.replace(request, ranking=dataclasses.replace(request.ranking, seed=0))
    programs = Programs(log, identity=f"attention {unseeded}")
    batch = request.ranking.candidates
    rows = np.linspace(0, batch - 1, min(NUM_CHECKED, batch)).astype(np.int32)
    seed = np.uint32(request.ranking.seed % 2**32)
    index = demo.user_index(request.ranking)
    drawn = programs.add("inputs", functools.partial(_draw, unseeded), seed, timed=False)
    shapes = Inputs._make([*drawn, jax.ShapeDtypeStruct(index.shape, index.dtype)])
    exact = programs.add("oracle in float32", functools.partial(_oracle, rows), shapes, timed=False)
    runnable, not_run = demo.add_stages(programs, stages(request), shapes)
    out = jax.ShapeDtypeStruct(shapes.query.shape, shapes.query.dtype)
    programs.add("comparison", functools.partial(_compare, rows), out, exact, timed=False)
    compiled = programs.compiled()

    inputs = Inputs._make([*compiled["inputs"](seed), index])
    expected = compiled["oracle in float32"](inputs)
    measured, limit = demo.measure(
        compiled, runnable, inputs, expected, functools.partial(_tolerance, request), log
    )
    return Report(request, measured, tuple(not_run), limit)
