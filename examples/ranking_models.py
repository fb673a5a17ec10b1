"""Ranking models as teams write them, in a few lines each, and what `ikbo.rewrite` makes of them.

python examples/ranking_models.py din          the report on a small DIN
python examples/ranking_models.py              on all models

A model takes weights, features of users and candidates, and the index of each candidate's user:
`u` [users, fields, width], `c` [candidates, fields, width], or a history `h` [users, length, width]
beside a candidate's token `c` [candidates, width]. It looks the user up, and returns scores. Its
name is its description. A form by hand computes the same scores without the copy, in plain JAX.
"""
# ruff: noqa: D103

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import nn

import ikbo_jax as ikbo

Array = jax.Array


class Weights:
    """Hands out a model's weights, in the order in which the model asks for them.

    Attributes:
      leaves: the weights; None to collect their shapes.
      shapes: shapes asked for, whose last dimension is the output's.
    """

    def __init__(self, dtype: Any, leaves: Sequence[Array] | None = None) -> None:
        self.dtype, self.leaves, self.shapes = dtype, leaves, list[tuple[int, ...]]()

    def __call__(self, *shape: int) -> Array:
        self.shapes.append(shape)
        known = self.leaves
        return jnp.zeros(shape, self.dtype) if known is None else known[len(self.shapes) - 1]

    def dense(self, x: Array, width: int, act: Callable[[Array], Array] = lambda x: x) -> Array:
        return act(x @ self(x.shape[-1], width) + self(*[1] * (x.ndim - 1), width))

    def mlp(self, x: Array, *widths: int) -> Array:
        for width in widths:
            x = self.dense(x, width, nn.relu)
        return x

    def score(self, x: Array, *widths: int) -> Array:
        return self.dense(self.mlp(x, *widths), 1)[:, 0]


P = Weights


def joined(u: Array, c: Array, i: Array) -> Array:
    return jnp.concatenate([u[i], c], axis=1)


def flat(x: Array) -> Array:
    return x.reshape(len(x), -1)


def norm(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def heads(x: Array, n: int) -> Array:
    return x.reshape(*x.shape[:-1], n, -1)


def product(x: Array, w: Array) -> Array:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def attend(q: Array, k: Array, v: Array, mask: Any = True, cap: float = 0.0) -> Array:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    logits = logits if mask is True else jnp.where(mask, logits, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", nn.softmax(logits), v)


def autoint(p: P, u: Array, c: Array, i: Array) -> Array:
    x = joined(u, c, i)
    for _ in range(2):
        q, k, v, rest = jnp.split(x @ p(x.shape[-1], 4 * x.shape[-1]), 4, -1)
        y = attend(heads(q, 2), heads(k, 2), heads(v, 2))
        x = nn.relu(y.reshape(x.shape) + rest)
    return p.score(flat(x))


def dlrm(p: P, u: Array, c: Array, i: Array) -> Array:
    x = joined(u, c, i)
    pairs = jnp.einsum("bfd,bgd->bfg", x, x)[:, *np.tril_indices(x.shape[1], -1)]
    bottom = p.mlp(u[i][:, 0], 256, x.shape[-1])
    return p.score(jnp.concatenate([bottom, pairs], 1), 512, 256)


def dcn(p: P, u: Array, c: Array, i: Array, rank: int = 0) -> Array:
    x = x0 = flat(joined(u, c, i))
    for _ in range(3):
        x = x0 * p.dense(x @ p(x.shape[1], rank) if rank else x, x.shape[1]) + x
    return p.score(jnp.concatenate([x, p.mlp(x0, 512, 256)], 1))


def dcn_low_rank(p: P, u: Array, c: Array, i: Array) -> Array:
    return dcn(p, u, c, i, rank=256)


def cross(p: P, x0: Array, projected: Array) -> Array:
    """Applies three low-rank cross layers, the first one of a product that is known."""
    x = x0
    for n in range(3):
        projected = x @ p(x.shape[1], CROSS_RANK) if n else projected
        x = x0 * p.dense(projected, x.shape[1]) + x
    return p.score(x, 1024, 1024, 512, 256)


def dlrm_dcnv2(p: P, u: Array, c: Array, i: Array) -> Array:
    bottom = p.mlp(u[i][:, 0], 512, 256, u.shape[-1])
    x = jnp.concatenate([bottom, flat(joined(u, c, i))], 1)
    return cross(p, x, x @ p(x.shape[1], CROSS_RANK))


def dlrm_dcnv2_by_hand(p: P, u: Array, c: Array, i: Array) -> Array:
    """Computes bottom network and share of the first projection once per user."""
    users = jnp.concatenate([p.mlp(u[:, 0], 512, 256, u.shape[-1]), flat(u)], 1)
    width, cands = users.shape[1], flat(c)
    down = p(width + cands.shape[1], CROSS_RANK)
    projected = product(users, down[:width])[i] + product(cands, down[width:])
    return cross(p, jnp.concatenate([users[i], cands], 1), projected.astype(c.dtype))


def xdeepfm(p: P, u: Array, c: Array, i: Array) -> Array:
    x = x0 = joined(u, c, i)
    pooled = [p.mlp(flat(x), 256, 128)]
    for _ in range(2):
        pairs = jnp.einsum("bhd,bmd->bdhm", x, x0)
        x = jnp.einsum("bdhm,hmn->bnd", pairs, p(x.shape[1], x0.shape[1], 16))
        pooled.append(x.sum(-1))
    return p.score(jnp.concatenate(pooled, 1))


def masknet(p: P, u: Array, c: Array, i: Array) -> Array:
    x = joined(u, c, i)
    v, x = flat(x), flat(norm(x))
    for _ in range(2):
        mask = p.dense(p.mlp(v, 512), x.shape[1])
        x = nn.relu(norm((x * mask) @ p(x.shape[1], 256)))
    return p.score(x)


def fibinet(p: P, u: Array, c: Array, i: Array) -> Array:
    x = joined(u, c, i)
    gates = p.mlp(x.mean(-1), 8, x.shape[1])
    pairs = np.triu_indices(x.shape[1], 1)
    bilinear = [
        (y @ p(y.shape[-1], y.shape[-1]))[:, pairs[0]] * y[:, pairs[1]]
        for y in (x, x * gates[..., None])
    ]
    return p.score(flat(jnp.concatenate(bilinear, 1).sum(-1)), 256)


def wukong(p: P, u: Array, c: Array, i: Array) -> Array:
    x = joined(u, c, i)
    for _ in range(2):
        f, d = x.shape[1:]
        pairs = jnp.einsum("bfd,bgd,gk->bfk", x, x, p(f, 8))
        fm = p.mlp(norm(flat(pairs)), 256, f // 2 * d).reshape(-1, f // 2, d)
        x = norm(jnp.concatenate([fm, jnp.einsum("bfd,fk->bkd", x, p(f, f - f // 2))], 1) + x)
    return p.score(flat(x), 128)


def mmoe(p: P, u: Array, c: Array, i: Array, shared: int = 6) -> Array:
    x = flat(joined(u, c, i))
    experts = nn.relu(jnp.einsum("bi,eio->beo", x, p(shared, x.shape[1], 256)))
    gates = [nn.softmax(p.dense(x, shared)) for _ in range(2)]
    first, second = (p.score(jnp.einsum("be,beo->bo", g, experts), 64) for g in gates)
    return first + second


def ple(p: P, u: Array, c: Array, i: Array) -> Array:
    inputs = [flat(joined(u, c, i))] * 3
    for _ in range(2):
        banks = [jnp.stack([p.mlp(x, 128) for _ in range(2)], 1) for x in inputs]
        seen = [jnp.concatenate([bank, banks[2]], 1) for bank in banks[:2]] + [
            jnp.concatenate(banks, 1)
        ]
        gates = [nn.softmax(p.dense(x, y.shape[1])) for x, y in zip(inputs, seen, strict=True)]
        inputs = [jnp.einsum("be,beo->bo", g, y) for g, y in zip(gates, seen, strict=True)]
    return p.score(inputs[0], 64) + p.score(inputs[1], 64)


def two_tower(p: P, u: Array, c: Array, i: Array) -> Array:
    return (p.mlp(flat(u[i]), 512, 128) * p.mlp(flat(c), 512, 128)).sum(-1)


def listwise(p: P, u: Array, c: Array, i: Array) -> Array:
    x = p.mlp(flat(joined(u, c, i)), 256, 128).reshape(-1, 32, 128)
    q, k, v = jnp.split(x @ p(128, 384), 3, -1)
    x = norm(x + attend(heads(q, 4), heads(k, 4), heads(v, 4)).reshape(x.shape))
    return p.score(x.reshape(-1, 128), 128)


def din(p: P, h: Array, c: Array, i: Array) -> Array:
    h = h[i]
    q = jnp.broadcast_to(c[:, None], h.shape)
    x = jnp.concatenate([q, h, q - h, q * h], -1)
    return interest(p, x @ p(x.shape[-1], 64), h, c)


def interest(p: P, unit: Array, h: Array, c: Array) -> Array:
    unit = nn.sigmoid(unit + p(1, 1, unit.shape[-1]))
    found = jnp.einsum("bso,bsd->bd", p.dense(nn.sigmoid(p.dense(unit, 32)), 1), h)
    return p.score(jnp.concatenate([found, c], 1), 128, 64)


def din_by_hand(p: P, h: Array, c: Array, i: Array) -> Array:
    """Multiplies the history once per user, and the candidate once."""
    width, w = c.shape[1], p(4 * c.shape[1], 64)
    wq, wh, wd, wp = (w[n * width : (n + 1) * width] for n in range(4))
    users, cands = product(h, wh) - product(h, wd), product(c, wq) + product(c, wd)
    h = h[i]
    unit = users[i] + cands[:, None] + product(c[:, None] * h, wp)
    return interest(p, unit.astype(c.dtype), h, c)


def gru(p: P, x: Array, factors: Array) -> Array:
    """Runs a GRU over [rows, length, width]; factors [rows, length] scale its update gate."""
    width = x.shape[-1]
    w, r = p(width, 3 * width), p(width, 3 * width)

    def step(s: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        (a, b, y), (d, e, z) = jnp.split(xs[0] @ w, 3, -1), jnp.split(s @ r, 3, -1)
        gate = nn.sigmoid(a + d) * xs[1][:, None]
        s = (1 - gate) * s + gate * jnp.tanh(y + nn.sigmoid(b + e) * z)
        return s, s

    xs = jnp.swapaxes(x, 0, 1), factors.T
    return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), xs)[1], 0, 1)


def dien(p: P, h: Array, c: Array, i: Array) -> Array:
    h = h[i][:, -32:]
    h = gru(p, h, jnp.ones_like(h[..., 0]))
    weights = nn.softmax(jnp.einsum("bsd,bd->bs", h @ p(h.shape[-1], c.shape[-1]), c))
    return p.score(jnp.concatenate([gru(p, h, weights)[:, -1], c], 1), 128)


def layer(p: P, x: Array, attend: Callable[..., Array] = attend, **options: Any) -> Array:
    q, k, v = jnp.split(norm(x) @ p(x.shape[-1], 3 * x.shape[-1]), 3, -1)
    n = max(2, x.shape[-1] // 128)
    y = attend(heads(q, n), heads(k, n), heads(v, n), **options).reshape(x.shape)
    x = x + y @ p(x.shape[-1], x.shape[-1])
    return x + p.dense(p.dense(norm(x), 2 * x.shape[-1], nn.gelu), x.shape[-1])


def bst(p: P, h: Array, c: Array, i: Array) -> Array:
    x = joined(h, c[:, None], i)
    x = layer(p, x + p(1, *x.shape[1:]))
    return p.score(x.mean(1), 256, 64)


def sim(p: P, h: Array, c: Array, i: Array) -> Array:
    h = h[i]
    _, best = jax.lax.top_k(jnp.einsum("bsd,bd->bs", h, c), 16)
    h = jnp.take_along_axis(h, best[..., None], 1)
    k, v = (heads(h @ p(h.shape[-1], h.shape[-1]), 2) for _ in range(2))
    y = attend(heads(c[:, None] @ p(c.shape[1], c.shape[1]), 2), k, v)
    return p.score(jnp.concatenate([flat(y), c], 1), 128)


def twin(p: P, h: Array, c: Array, i: Array) -> Array:
    bias = (h[..., :8] @ p(8, 2))[i]
    h = h[i]
    k, v = (heads(h @ p(h.shape[-1], h.shape[-1]), 2) for _ in range(2))
    q = heads(c @ p(c.shape[1], c.shape[1]), 2)
    logits = jnp.einsum("bnh,bsnh->bsn", q, k) * q.shape[-1] ** -0.5 + bias
    y = jnp.einsum("bsn,bsnh->bnh", nn.softmax(logits, axis=1), v)
    return p.score(jnp.concatenate([flat(y), c], 1), 128)


def causal(n: int) -> Array:
    return jnp.tril(jnp.ones((1, 1, n, n), bool))


def sasrec(p: P, h: Array, c: Array, i: Array) -> Array:
    x = h[i]
    x = x + p(1, *x.shape[1:])
    for _ in range(2):
        x = layer(p, x, mask=causal(x.shape[1]))
    return (norm(x)[:, -1] * c).sum(-1)


def transformer(p: P, h: Array, c: Array, i: Array) -> Array:
    x = joined(h, c[:, None], i)
    for _ in range(LAYERS):
        x = layer(p, x, mask=causal(x.shape[1]))
    return p.score(x[:, -1])


def transformer_by_hand(p: P, h: Array, c: Array, i: Array) -> Array:
    """Computes the history once per user; candidates, in groups of equal size, attend to it."""
    (users, length, width), count = h.shape, len(i) // len(h)
    x, cands = h, c.reshape(users, count, width)
    # Every candidate attends to the history and to itself.
    own = jnp.concatenate([jnp.ones((count, length), bool), jnp.eye(count, dtype=bool)], 1)
    for _ in range(LAYERS):
        kept: list[Array] = []

        def of_users(q: Array, k: Array, v: Array, kept: Any = kept) -> Array:
            kept += [k, v]
            return attend(q, k, v, causal(length))

        def of_candidates(q: Array, *arrays: Array, kept: Any = kept) -> Array:
            k, v = (jnp.concatenate(pair, 1) for pair in zip(kept, arrays, strict=True))
            return attend(q, k, v, own)

        weights = Weights(p.dtype, p.leaves and p.leaves[len(p.shapes) :])
        x, cands = layer(p, x, of_users), layer(weights, cands, of_candidates)
    return p.score(cands.reshape(len(i), width))


def hstu(p: P, h: Array, c: Array, i: Array) -> Array:
    x = joined(h, c[:, None], i)
    n, width = x.shape[1:]
    for _ in range(2):
        q, k, v, u = jnp.split(nn.silu(norm(x) @ p(width, 4 * width)), 4, -1)
        logits = jnp.einsum("btnh,bsnh->bnts", heads(q, 2), heads(k, 2))
        weights = jnp.where(causal(n), nn.silu(logits) / n, 0)
        y = jnp.einsum("bnts,bsnh->btnh", weights, heads(v, 2)).reshape(x.shape)
        x = x + (norm(y) * u) @ p(width, width)
    return p.score(x[:, -1])


def phoenix(p: P, h: Array, c: Array, i: Array) -> Array:
    x = joined(h, c.reshape(-1, 4, c.shape[1]), i[::4])
    n = x.shape[1]
    mask = causal(n).at[:, :, -4:, -4:].set(jnp.eye(4, dtype=bool))
    for _ in range(2):
        x = layer(p, x, mask=mask, cap=30.0)
    return p.score(x[:, -4:].reshape(c.shape))


FIELDS = (autoint, dlrm, dcn, dcn_low_rank, dlrm_dcnv2, xdeepfm, masknet, fibinet, wukong, mmoe,
          ple, two_tower, listwise)  # fmt: skip
HISTORIES = (din, dien, bst, sim, twin, sasrec, transformer, hstu, phoenix)
MODELS: dict[str, Callable[..., Array]] = {fn.__name__: fn for fn in (*FIELDS, *HISTORIES)}
#: Forms by hand, by model; these models have a further size, the last one, which is a real one.
BY_HAND: dict[str, Callable[..., Array]] = {
    "dlrm_dcnv2": dlrm_dcnv2_by_hand,
    "din": din_by_hand,
    "transformer": transformer_by_hand,
}
#: The number of sizes, and sizes: users, candidates, fields of users and of candidates, and their
#: width; or users, candidates, length of histories, a token, and the width.
SIZES = 3
OF_FIELDS = ((15, 1024, 24, 8, 32), (32, 4096, 24, 8, 64), (32, 2048, 48, 16, 32))
OF_HISTORIES = ((15, 1024, 64, 1, 64), (32, 4096, 128, 1, 64), (16, 1024, 256, 1, 128))
REAL = {
    "dlrm_dcnv2": (128, 8192, 17, 9, 128),
    "din": (32, 2048, 512, 1, 128),
    "transformer": (32, 2048, 1022, 1, 1280),
}
#: The number of a program of small sizes, for a CPU, and these sizes.
SMALL, OF_SMALL = -1, (4, 64, 40, 2, 16)
CROSS_RANK, LAYERS = 512, 8


@dataclasses.dataclass(frozen=True)
class Program:
    """A model of one size and dtype."""

    model: str
    size: int
    dtype: str

    def scores(self, leaves: Sequence[Array], request: Sequence[Array], i: Array) -> Array:
        return MODELS[self.model](Weights(leaves[0].dtype, leaves), *request, i)

    def by_hand(self, leaves: Sequence[Array], request: Sequence[Array], i: Array) -> Array:
        return BY_HAND[self.model](Weights(leaves[0].dtype, leaves), *request, i)

    @property
    def has_form_by_hand(self) -> bool:
        return self.model in BY_HAND and self.size in (SIZES, SMALL)

    @property
    def parts(self) -> int:
        """Calls, of whole users, in which the original scores the candidates, for its memory."""
        # In one call, it would hold logits of [2048, 10, 1023, 1023] in float32.
        return {SIZES: 16, SMALL: 2}.get(self.size, 1) if self.model == "transformer" else 1

    @functools.cached_property
    def shapes(self) -> tuple[list[Any], list[Any], Any]:
        """Shapes of weights, features and index."""
        of_fields = MODELS[self.model] in FIELDS
        sizes = (
            *(OF_FIELDS if of_fields else OF_HISTORIES),
            REAL.get(self.model, OF_SMALL),
            OF_SMALL,
        )
        users, batch, length, count, width = sizes[self.size]
        of_cand = (batch, count, width) if of_fields else (batch, width)
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=self.dtype)
        features = [shape((users, length, width)), shape(of_cand)]
        index, asked = jax.ShapeDtypeStruct((batch,), jnp.int32), Weights(self.dtype)
        jax.eval_shape(lambda *x: MODELS[self.model](asked, *x), *features, index)
        return [shape(x) for x in asked.shapes], features, index

    def arguments(self, seed: int = 0) -> tuple[list[Array], list[Array], Array]:
        """Draws weights and features; candidates of a user stand together."""
        leaves, features, index = self.shapes
        rng = np.random.default_rng(seed)

        def draw(x: Any, fan_in: int = 1) -> Array:
            return jnp.asarray(rng.standard_normal(x.shape, np.float32) * fan_in**-0.5, x.dtype)

        users, batch = features[0].shape[0], index.shape[0]
        rows = jnp.asarray(np.arange(batch) * users // batch, jnp.int32)
        return [draw(x, math.prod(x.shape[:-1])) for x in leaves], [*map(draw, features)], rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the reports on the models named, or on all."""
    for name in (sys.argv[1:] if arguments is None else arguments) or MODELS:
        program = Program(name, SMALL, "float32")
        print(f"{name}\n{ikbo.explain(ikbo.rewrite(program.scores), *program.shapes)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
