"""Benchmark of `ikbo.rewrite` on ranking models of real size: original, rewritten, by hand.

    python -m benchmarks.rewrite_models --out benchmarks/results/rewrite-models-h200.json

The models are written here from the published descriptions: DLRM-DCNv2 (26 fields, low-rank cross
network), DIN (a history of 512), and a causal transformer over [history, candidate] (8 layers,
width 1280, history of 1022). The original looks the user up for every candidate; the form by hand
computes the same scores without the copy, in plain JAX. If the original does not fit into memory,
it scores a part of the candidates, and its time is multiplied.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness
from benchmarks.harness import Point
from benchmarks.records import Record, describe_all
from ikbo_jax.rewrite import rewrite
from ikbo_jax.rewrite.report import cost

#: Bars: time of rewritten over by hand at most, speed-up over the original at least.
BY_HAND_BAR, ORIGINAL_BAR = 1.1, 1.0
#: Largest difference of scores relative to the largest score: some roundings of bfloat16.
TOLERANCE = 2.0**-4
DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of one size: functions of parameters and a request, whose last array is the index.

    The original divides the request into `parts` calls of whole users; `part` is one call's.
    """

    original: Callable[..., jax.Array]
    hand: Callable[..., jax.Array]
    params: Any
    request: tuple[Any, ...]
    parts: int = 1
    part: tuple[Any, ...] | None = None


class _Random:
    """Random arrays on the device."""

    def __init__(self) -> None:
        self._key = jax.random.key(0)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(DTYPE)

    def weight(self, *shape: int) -> jax.Array:
        return self.normal(*shape, scale=shape[0] ** -0.5)

    def ids(self, rows: int, *shape: int) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return jax.random.randint(key, shape, 0, rows, jnp.int32)


def _index(users: int, candidates: int) -> jax.Array:
    return jnp.asarray(np.repeat(np.arange(users), candidates // users), jnp.int32)


def _mlp(layers: Any, x: jax.Array) -> jax.Array:
    for n, (w, b) in enumerate(layers):
        x = x @ w + b
        x = jax.nn.relu(x) if n < len(layers) - 1 else x
    return x


def _layers(random: _Random, *widths: int) -> list[tuple[jax.Array, jax.Array]]:
    pairs = zip(widths[:-1], widths[1:], strict=True)
    return [(random.weight(m, n), random.normal(1, n)) for m, n in pairs]


# DLRM-DCNv2.


def dlrm(params: Any, request: Any) -> jax.Array:
    """Scores by 26 embedded fields, dense features, three low-rank cross layers, a top network."""
    dense, user_ids, cand_ids, index = request
    ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
    # One table holds the rows of all fields.
    fields = params["table"].at[ids].get(mode="clip")
    bottom = _mlp(params["bottom"], dense[index])
    x = jnp.concatenate([bottom[:, None], fields], axis=1).reshape(len(index), -1)
    return _mlp(params["top"], _cross(params["cross"], x, x @ params["cross"][0][0]))


def _cross(layers: Any, x0: jax.Array, projected: jax.Array) -> jax.Array:
    x = x0
    for n, (down, up, bias) in enumerate(layers):
        projected = projected if n == 0 else x @ down
        x = x0 * (projected @ up + bias) + x
    return x


def dlrm_by_hand(params: Any, request: Any) -> jax.Array:
    """Computes embeddings, bottom network and share of the first projection once per user."""
    dense, user_ids, cand_ids, index = request
    users = params["table"].at[user_ids].get(mode="clip")
    bottom = _mlp(params["bottom"], dense)
    users = jnp.concatenate([bottom[:, None], users], axis=1).reshape(len(dense), -1)
    cands = params["table"].at[cand_ids].get(mode="clip").reshape(len(index), -1)
    down = params["cross"][0][0]
    split = users.shape[1]
    part = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    projected = (part(users, down[:split])[index] + part(cands, down[split:])).astype(DTYPE)
    x0 = jnp.concatenate([users[index], cands], axis=1)
    return _mlp(params["top"], _cross(params["cross"], x0, projected))


def dlrm_case(small: bool) -> Case:
    """Draws 17 fields of the user and 9 of the candidate, 64 candidates per user."""
    users, batch, width, rows, rank = (4, 64, 8, 100, 16) if small else (128, 8192, 128, 65536, 512)
    of_user, fields, random = 17, 26, _Random()
    size = (fields + 1) * width
    params = {
        "table": random.normal(rows, width, scale=0.1),
        "bottom": _layers(random, 13, *((16, width) if small else (512, 256, width))),
        "cross": [
            (random.weight(size, rank), random.weight(rank, size), random.normal(1, size))
            for _ in range(3)
        ],
        "top": _layers(random, size, *((16, 1) if small else (1024, 1024, 512, 256, 1))),
    }
    dense = random.normal(users, 13)
    ids = random.ids(rows, users, of_user), random.ids(rows, batch, fields - of_user)
    return Case(dlrm, dlrm_by_hand, params, (dense, *ids, _index(users, batch)))


# DIN.


def din(params: Any, request: Any) -> jax.Array:
    """Weights the history by the unit `[q, h, q - h, q * h]`; then applies a network."""
    history, cand, index = request
    h = history[index]
    q = jnp.broadcast_to(cand[:, None], h.shape)
    x = jnp.concatenate([q, h, q - h, q * h], axis=-1)
    return _din_score(params, x @ params["unit"], h, cand)


def _din_score(params: Any, unit: jax.Array, h: jax.Array, cand: jax.Array) -> jax.Array:
    weights = jax.nn.sigmoid(unit + params["bias"])
    weights = jax.nn.sigmoid(weights @ params["second"]) @ params["out"]
    interest = jnp.einsum("bsn,bsd->bd", weights, h)
    return _mlp(params["top"], jnp.concatenate([interest, cand], axis=-1))


def din_by_hand(params: Any, request: Any) -> jax.Array:
    """Multiplies h once per user and q once per candidate."""
    history, cand, index = request
    width = cand.shape[1]
    wq, wh, wd, wp = (params["unit"][n * width : (n + 1) * width] for n in range(4))
    part = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    users = part(history, wh) - part(history, wd)
    cands = part(cand, wq) + part(cand, wd)
    h = history[index]
    x = users[index] + cands[:, None] + part(cand[:, None] * h, wp)
    return _din_score(params, x.astype(DTYPE), h, cand)


def din_case(small: bool) -> Case:
    """Draws a history of 512 items."""
    users, batch, length, width = (4, 16, 8, 8) if small else (32, 2048, 512, 128)
    random = _Random()
    params = {
        "unit": random.weight(4 * width, 80),
        "bias": random.normal(1, 1, 80),
        "second": random.weight(80, 40),
        "out": random.weight(40, 1),
        "top": _layers(random, 2 * width, 200, 80, 1),
    }
    request = random.normal(users, length, width), random.normal(batch, width)
    return Case(din, din_by_hand, params, (*request, _index(users, batch)))


# A causal transformer over [history, candidate].


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def _block(layer: Any, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
    q, k, v = jnp.split(_norm(x, layer["first"]) @ layer["qkv"], 3, axis=-1)
    heads = (*x.shape[:-1], -1, layer["head"].shape[0])
    y = attend(q.reshape(heads), k.reshape(heads), v.reshape(heads))
    x = x + y.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(_norm(x, layer["second"]) @ layer["up"]) @ layer["down"]


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(mask, logits * q.shape[-1] ** -0.5, -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def transformer(params: Any, request: Any) -> jax.Array:
    """Appends the candidate as the last token, which attends to the history and to itself."""
    history, token, index = request
    x = jnp.concatenate([history[index], token[:, None]], axis=1)
    positions = jnp.arange(x.shape[1])
    mask = (positions[:, None] >= positions[None, :])[None, None]
    for layer in params["layers"]:
        x = _block(layer, x, functools.partial(_attention, mask=mask))
    return x[:, -1] @ params["score"]


def transformer_by_hand(params: Any, request: Any) -> jax.Array:
    """Computes the history once per user; candidates, in groups of equal size, attend to it."""
    history, token, index = request
    users, length, width = history.shape
    x, cands = history, token.reshape(users, -1, width)
    count = len(index) // users
    causal = np.tril(np.ones((length, length), bool))[None, None]
    # Every candidate attends to the history and to itself.
    own = np.concatenate([np.ones((count, length), bool), np.eye(count, dtype=bool)], 1)[None, None]
    for layer in params["layers"]:
        kept: list[jax.Array] = []

        def of_users(q: Any, k: Any, v: Any, kept: Any = kept) -> jax.Array:
            kept += [k, v]
            return _attention(q, k, v, causal)

        def of_candidates(q: Any, k: Any, v: Any, kept: Any = kept) -> jax.Array:
            keys, values = (
                jnp.concatenate(pair, axis=1) for pair in zip(kept, (k, v), strict=True)
            )
            return _attention(q, keys, values, own)

        x = _block(layer, x, of_users)
        cands = _block(layer, cands, of_candidates)
    return cands.reshape(len(index), width) @ params["score"]


def transformer_case(small: bool) -> Case:
    """Draws 8 layers of width 1280, a history of 1022, 64 candidates for each of 32 users."""
    sizes = (4, 16, 6, 16, 8, 2) if small else (32, 2048, 1022, 1280, 128, 8)
    users, batch, length, width, head, depth = sizes
    random = _Random()
    layers = [
        {
            "first": jnp.ones((1, 1, width), DTYPE),
            "second": jnp.ones((1, 1, width), DTYPE),
            "head": jnp.zeros(head, DTYPE),
            "qkv": random.weight(width, 3 * width),
            "out": random.weight(width, width),
            "up": random.weight(width, 4 * width),
            "down": random.weight(4 * width, width),
        }
        for _ in range(depth)
    ]
    params = {"layers": layers, "score": random.weight(width, 1)}
    history, token = random.normal(users, length, width), random.normal(batch, width)
    request = (history, token, _index(users, batch))
    # The original holds logits of [candidates, heads, 1023, 1023] in float32.
    parts = 2 if small else 16
    part = (history[: users // parts], token[: batch // parts], request[2][: batch // parts])
    return Case(transformer, transformer_by_hand, params, request, parts, part)


CASES = {"dlrm_dcnv2": dlrm_case, "din": din_case, "transformer": transformer_case}


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Times the three versions of a model and the reference matmul; compares the scores."""
    case = CASES[point.label](jax.default_backend() != "gpu")
    part = case.part or case.request
    versions = {
        "original": (case.original, part, case.parts),
        "rewritten": (rewrite(case.original), case.request, 1),
        "by-hand": (case.hand, case.request, 1),
    }
    lowered = [jax.jit(fn).lower(case.params, request) for fn, request, _ in versions.values()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda x: x.compile(), lowered))
    print(f"{point.label}: compiled", flush=True)
    contenders, expected = [], None
    for (name, (fn, request, parts)), program in zip(versions.items(), compiled, strict=True):
        scores = np.asarray(program(case.params, request).astype(jnp.float32))
        expected = scores if expected is None else expected
        error, largest = np.abs(scores[: len(expected)] - expected).max(), np.abs(expected).max()
        flops = cost.program_cost(jax.make_jaxpr(fn)(case.params, request)).flops
        record = {"name": name, "parts": parts, "flops": parts * flops, "error": float(error)}
        # Written so that NaN is wrong, too.
        record |= {"bound": float(TOLERANCE * largest), "ok": bool(error <= TOLERANCE * largest)}
        thunk = functools.partial(program, case.params, request)
        contenders.append(harness.Contender(record, thunk))
    measured = harness.measure(contenders, run.protocol)
    for record in measured["providers"]:
        record["median_ms"] *= record["parts"]
    return measured


def ratios(point: Record) -> tuple[float, float]:
    """Computes the rewritten model's time over by hand, and its speed-up over the original."""
    ms = {record["name"]: record["median_ms"] for record in point["providers"]}
    return ms["rewritten"] / ms["by-hand"], ms["original"] / ms["rewritten"]


def bars(point: Record) -> str:
    """Formats the ratios of a model, each with its bar."""
    over_by_hand, speed_up = ratios(point)
    return (
        f"{over_by_hand:.3f} of by hand, bar {BY_HAND_BAR}; {speed_up:.2f} x the original, "
        f"bar {ORIGINAL_BAR}"
    )


def _describe(point: Record) -> str:
    wrong = [record["name"] for record in point["providers"] if not record["ok"]]
    of_wrong = f"WRONG RESULT of {', '.join(wrong)}; " if wrong else ""
    return f"{describe_all(point)}; {of_wrong}{bars(point)}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", choices=[*CASES, []], help="models; default: all")


BENCHMARK = harness.Benchmark(
    "rewrite_models",
    (),
    lambda options: [Point("models", model, None) for model in options.models or CASES],
    lambda point: point,
    measure_point,
    lambda point, all_points, name: bars(point),
    describe=_describe,
    add_options=_add_options,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a model failed, was wrong or was left out."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    results = BENCHMARK.run(BENCHMARK.parse(argv))
    lines = (f"{point['label']}: {_describe(point)}" for point in results["points"])
    status = harness.print_results(results, "\n".join(lines))
    return 1 if results["left_out"] else status


if __name__ == "__main__":
    sys.exit(main())
