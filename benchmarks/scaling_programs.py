"""Programs of the benchmark of several devices, laid out on a mesh; see `scaling`.

A request is (candidates, users). Every process may lay out the arrays of all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ikbo_jax import place_users
from ikbo_jax.models import ranking
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.linear_compression import linear_compression

LEARNING_RATE = 1e-4


class Program(NamedTuple):
    """A function and its arguments, laid out on a mesh.

    Attributes:
      fn: the function.
      args: its arguments.
      compare: makes what is compared with other programs' results.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    compare: Callable[[Any], np.ndarray]


def mesh_of(devices: int, kind: AxisType) -> Mesh:
    """A mesh with one axis "x" of the first devices; one device is this process' own."""
    found = jax.local_devices() if devices == 1 else jax.devices()
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=found[:devices])


def _put(mesh: Mesh, x: Any, spec: P) -> jax.Array:
    """An array that every process has whole, laid out on the devices of all."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), host.__getitem__)


def _as_float(x: jax.Array) -> np.ndarray:
    is_here = x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(
        x if is_here else multihost_utils.process_allgather(x, tiled=True), np.float32
    )


def _draw(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: np.asarray(jax.random.normal(key, shape, jnp.bfloat16))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _index(candidates: int, users: int) -> np.ndarray:
    counts = ranking.random_counts(users, candidates, 0)
    return np.repeat(np.arange(users, dtype=np.int32), counts)


def linear_compression_program(mesh: Mesh, request: tuple[int, int], *, small: bool) -> Program:
    """Linear compression at the default sizes; candidates divided, users replicated."""
    candidates, users = request
    index = _index(candidates, users)
    m, k_cand, k_user, n = (16, 16, 24, 16) if small else (433, 866, 1178, 256)
    x = _draw(
        {
            "w_cand": (m, k_cand), "w_user": (m, k_user),
            "e_cand": (candidates, k_cand, n), "e_user": (users, k_user, n),
        }
    )  # fmt: skip
    args = (
        _put(mesh, x["w_cand"], P()),
        _put(mesh, x["w_user"], P()),
        _put(mesh, x["e_cand"], P("x")),
        _put(mesh, x["e_user"], P()),
        _put(mesh, index, P("x")),
    )
    return Program(linear_compression, args, _as_float)


def attention_program(mesh: Mesh, request: tuple[int, int], *, small: bool) -> Program:
    """Target attention; candidates divided, users replicated."""
    candidates, users = request
    index = _index(candidates, users)
    t, s, heads, width = (4, 32, 2, 16) if small else (64, 2048, 2, 128)
    x = _draw(
        {
            "query": (candidates, t, heads, width),
            "key": (users, s, heads, width),
            "value": (users, s, heads, width),
        }
    )
    args = (
        _put(mesh, x["query"], P("x")),
        _put(mesh, x["key"], P()),
        _put(mesh, x["value"], P()),
        _put(mesh, index, P("x")),
    )

    def attend(*arrays: jax.Array) -> Any:
        return attention(*arrays, indices_are_sorted=True)

    return Program(attend, args, _as_float)


def network_program(
    mesh: Mesh, request: tuple[int, int], *, small: bool, training: bool = False
) -> Program:
    """The ranking network or a step of its training, users beside their candidates."""
    candidates, users = request
    index = _index(candidates, users)
    base = ranking.SMALL if small else ranking.Sizes()
    sizes = dataclasses.replace(base, candidates=candidates, users=users)
    drawn = ranking.Request._make((*map(np.asarray, ranking.draw_request(sizes, 0)), index))
    placement = place_users(index, users, mesh.size)
    of_users = map(placement.lay_out_users, drawn[:3])
    laid_out = (*of_users, placement.lay_out_candidates(drawn.cand_tokens), placement.index)
    parts = ranking.Request._make(_put(mesh, x, P("x")) for x in laid_out)
    params = jax.tree.map(lambda x: _put(mesh, x, P()), ranking.init(sizes))
    real = _put(mesh, placement.lay_out_candidates(np.ones(candidates, np.float32)), P("x"))
    forward = jax.shard_map(
        ranking.co_designed, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")
    )
    if not training:
        return Program(forward, (params, parts), lambda x: placement.restore(_as_float(x)))

    def loss(params: Any, parts: Any, real: jax.Array) -> jax.Array:
        # Labels: the first task is always met, the second never.
        logits = forward(params, parts) * jnp.asarray([-1.0, 1.0])[None]
        return jnp.sum(jax.nn.softplus(logits) * real[:, None]) / candidates

    def step(params: Any, parts: Any, real: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, parts, real)
        norms = [jnp.linalg.norm(g.astype(jnp.float32).ravel()) for g in jax.tree.leaves(gradients)]
        rate = LEARNING_RATE
        new = jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, gradients)
        return value, norms, new

    def compare(result: Any) -> np.ndarray:
        value, norms, _ = result
        return np.stack([*map(_as_float, (value, *norms))])

    return Program(step, (params, parts, real), compare)


def training_program(mesh: Mesh, request: tuple[int, int], *, small: bool) -> Program:
    """A step of the network's training: loss, gradients of all parameters, plain descent."""
    return network_program(mesh, request, small=small, training=True)


PROGRAMS: dict[str, Callable[..., Program]] = {
    "linear_compression": linear_compression_program,
    "attention": attention_program,
    "network": network_program,
    "training": training_program,
}
