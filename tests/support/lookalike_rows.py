"""Programs of looked-up rows that resemble what `ikbo.rewrite` knows, drawn by number."""

import random
import re

from lookalikes import MODES, lookup, mixed
from rounding_rule import Case

#: What rows are looked up by.
INDICES = ("j", "j", "j", "i", "J", "i - U", "jnp.clip(j, 0, U - 1)", "j % U", "jnp.abs(j)", "-i")
#: Other ways to a row for each candidate: copies of users or of one user, rows of rows, a table.
SOURCES = {
    "repeat": "jnp.repeat(X, B // U, axis=0)",
    "tile": "jnp.tile(X, (B // U, *(1,) * (X.ndim - 1)))",
    "one": "jnp.broadcast_to(X[:1], (B, *X.shape[1:]))",
    "levels": "X[jnp.array([1, 0, 1])][i]",
    "both": "(X[jnp.array([1, 0, 1])] * X)[i]",
    "items": "jnp.concatenate([X, X[:2] * 2])[jnp.array([3, 0, 4, 4, 1, 3])]",
}
#: What may happen to a list of looked-up rows, x; most of it is work on users.
ROW_STEPS = (
    *("nn.relu(x @ w)", "jnp.tanh(x)", "x ** 0", "x * c", "c - x", "x * x", "x + c.sum()"),
    "jnp.where(x > 0, x, 2.0)",
    "jnp.where(x > 0, x, c)",
    "jnp.maximum(x, c)",
    "x @ w",
    "softmax(x)",
    "jnp.concatenate([x, c], 1) @ w2",
    "jnp.concatenate([c, x], 1) @ w2",
    "x * stop(x)",
    "stop(x)",
    "x - x.mean(-1, keepdims=True)",
    "x.sum(-1, keepdims=True) * c",
    "x.max(-1, keepdims=True) + x",
    "jnp.concatenate([x, x * 2], 1) @ w2",
    "jnp.isnan(x) * c + c",
    "jnp.nan_to_num(x)",
    "-x",
    "x[::-1]",
    *("x + ROWS(u)", "ROWS(u) * c + x", "jnp.concatenate([x, ROWS(u)], 1) @ w2", "x * 0"),
    "nn.relu(x) + (x < -1)",
    "jnp.cumsum(x, 1)",
    "x / (1 + x * x)",
    "x.astype(bf16).astype(x.dtype)",
    "jnp.stack([x, c], 1).reshape(-1, 2 * H) @ w2",
    "jnp.stack([c, x, x * c], 1).reshape(-1, H)[1::3]",
    "jnp.concatenate([x - c, x], 1) @ w2",
    "jnp.concatenate([c, c - 2 * x], 1) @ w2",
    "jnp.concatenate([x + stop(c), c + x], 1) @ w2",
    "(nn.relu(jnp.stack([c, x], 1).reshape(-1, H)) @ w).reshape(-1, 2 * H) @ w2",
    "jnp.tanh(x.reshape(-1, 2)).reshape(-1, H)",
    "lax.top_k(x, 3)[0] @ w[:3]",
    "x.at[:, 1].set(c[:, 0])",
    "x.at[:, 1].add(x[:, 0])",
    "x.at[:, :2].set(2.0)",
    "lax.dynamic_slice_in_dim(x, 1, 2, 1) @ w[:2]",
    "lax.dynamic_update_slice(x, -x[:, :2], (0, 2))",
    "(lambda f: jnp.einsum('bfd,bgd->bfg', f, f))(jnp.stack([x, c, x], 1))"
    "[:, jnp.array([1, 2, 2, 0]), jnp.array([0, 0, 1, 0])] @ w",
    "(lambda f: f @ f.transpose(0, 2, 1))(jnp.stack([c, x], 1)).reshape(-1, 4) @ w",
    "jnp.concatenate([x[:, :, None], c[:, :, None]], 2).reshape(-1, 2 * H) @ w2",
    # Positions in rows, of the same rows and of others.
    "jnp.take_along_axis(x, jnp.argsort(ROWS(u), 1), axis=1) @ w",
    "jnp.take_along_axis(x, jnp.argsort(c, 1)[:, :2], axis=1) @ w[:2]",
    "x[jnp.arange(B)[:, None], lax.top_k(ROWS(u), 2)[1]] @ w[:2]",
    "x[jnp.arange(B)[::-1], jnp.argmax(ROWS(u), 1)][:, None] * c",
    "ROWS(t)[jnp.arange(B), jnp.argmax(ROWS(u), 1)] + x",
    "jax.vmap(lambda y, n: y[n + 3])(ROWS(t), jnp.argmax(ROWS(u), 1)) * x",
    "t[i, jnp.argmax(u[i], 1)] + x",
    "t[j, jnp.argmax(u[j], 1)] + x",
    "t.at[j, jnp.argmax(u[j], 1)].get(mode='fill', fill_value=7.0) + x",
    "x.at[jnp.arange(B), jnp.argmax(ROWS(u), 1)].set(2.0) @ w",
    "x.at[jnp.arange(B)[::-1], jnp.argmax(ROWS(u), 1)].add(c[:, 0])",
    # Updates by candidates, and constant positions of concatenations.
    "x.at[:, 1:3].set(c[:, :2]) @ w",
    "x.at[:, jnp.array([2, 0])].set(c[:, :2]) @ w",
    "x.at[:, jnp.array([2, 5])].set(c[:, :2]) @ w",
    "lax.dynamic_update_slice(x, c[:, :2], (0, 3)) @ w",
    "lax.dynamic_update_slice(x, c[:2], (3, 0)) @ w",
    "jnp.concatenate([x, c], 1)[:, jnp.array([7, 0, 1, 5])] @ w",
    "jnp.concatenate([x, c], 1)[:, ::-1] @ w2",
    "jnp.pad(jnp.concatenate([c, x[:, :1]], 1), ((0, 0), (1, 2)), constant_values=2.0) @ w2",
    "jnp.pad(jnp.concatenate([c, x], 1), ((0, 1), (0, 0)))[1:] @ w2",
    # Loops and windows, along rows and across them.
    "lax.map(lambda a: jnp.tanh(u[a[0]] @ w) + a[1], (i, x))",
    "lax.map(lambda a: sum(jnp.tanh(jnp.take(u, a[0], axis=0) @ w) for _ in 'ab') + a[1], (j, x))",
    "lax.map(lambda a: jnp.tanh(a @ w) @ w, ROWS(u)) + x",
    "lax.scan(lambda h, n: (u[n], jnp.tanh((u[n] + h) @ w)), c[0], i)[1] + x",
    "lax.fori_loop(0, 2, lambda n, h: jnp.tanh(h @ w + x), jnp.zeros_like(x))",
    "lax.fori_loop(0, 2, lambda n, h: jnp.tanh(h[::-1] + x), jnp.zeros_like(x))",
    "lax.fori_loop(0, 2, lambda n, h: h + x * c, jnp.ones_like(x)) @ w",
    "lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), 'SAME') @ w",
    "lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), 'SAME') @ w",
    "lax.scan(lambda h, s: (jnp.tanh(h @ w) * s + x, h.sum(1)), x, w[0])[1].T @ w",
    "nn.gelu(x)",
    "jnp.sort(x, axis=1)",
    "x.reshape(B // 2, -1).reshape(B, -1)",
    "x[jnp.array([3, 0, 5, 2, 2, 1])]",
    "x - x.mean(0, keepdims=True)",
    "x[:, ::2] @ w[:2]",
    "nn.standardize(x, epsilon=1e-3)",
    "straight_through(jnp.round)(2 * x)",
    "with_gradient(lambda x: jnp.round(4 * x) / 4 + x, 0.5)(x)",
    "jnp.einsum('bd,bd->b', x, c)[:, None] * c",
    "jax.jit(lambda x: jnp.cos(x[:, :1]) * x)(x)",
    "jax.checkpoint(lambda x: jnp.sin(x) @ w)(x)",
    "lax.cond(w[0, 0] > 0, lambda x: x * 2, jnp.tanh, x)",
    "jnp.cumsum(x.reshape(B, 2, 2).transpose(0, 2, 1), axis=1).max(axis=2) @ w[:2]",
    "jnp.einsum('bs,bsd->bd', softmax(jnp.einsum('bd,bsd->bs', x, ROWS(t))), ROWS(t))",
    "jnp.take(w, jnp.clip(jnp.floor(2 * x), 0, 3).astype(int).reshape(-1), axis=0)"
    ".reshape(B, -1, H).sum(1)",
)


#: What may happen to rows of users, x; y is the candidates' rows in the same dtype.
MIXED_STEPS = (
    "x * y",
    "x + y",
    "nn.relu(x @ F(w))",
    "nn.sigmoid(x) * y",
    "jnp.tanh(x)",
    "x - y",
    "x * 0.5",
    "jnp.concatenate([x, y], 1) @ F(w2)",
    "nn.relu(jnp.concatenate([x, y], 1) @ F(w2))",
    "jax.checkpoint(lambda x: jnp.tanh(x @ F(w)))(x)",
    "x * F(lax.rsqrt(jnp.square(x.astype(f32)).mean(-1, keepdims=True) + 0.1))",
    "jnp.einsum('bd,bd->b', x, y)[:, None] * y",
    "jnp.square(jnp.concatenate([x, y], 1)) @ F(w2)",
    "nn.softmax(x, axis=-1) * y",
    "lax.fori_loop(0, int(k), lambda n, x: jnp.tanh(x @ F(w)), x)",
    "placed(x)",
    "x[:, :k].sum(-1, keepdims=True) + x",
)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CANDIDATES = (1, 2, 16, 64, 256, 1024, 4096)


def drawn_rows(rng: random.Random) -> str:
    """A lookup of rows by one of the ways that `lookalikes` and `INDICES` list."""
    return re.sub(r"\bj\b", rng.choice(INDICES), rng.choice(sorted(MODES.values())))


def drawn_mixed(rng: random.Random, number: int) -> Case:
    """A tower in another dtype than its parameters'."""
    dtype = rng.choices(("bfloat16", "float16", "float32", *FLOAT8), (60, 20, 8, 6, 6))[0]
    lines = ["y = F(c)"]
    if dtype in FLOAT8:
        # Products are in float32, of operands in float8.
        lines = [
            "narrow, F = F, lambda x: x.astype(f32)",
            "y = F(narrow(c))",
            "x = F(narrow(u[i]))",
        ]
    else:
        starts = ("F(u[i])", "F(u)[i]", "nn.relu(F(u) @ F(w))[i]", "nn.relu(F(u[i]) @ F(w))")
        lines.append(f"x = {rng.choice(starts)}")
    lines += [f"x = {rng.choice(MIXED_STEPS)}" for _ in range(rng.randint(1, 4))]
    lines.append("x = x.astype(f32)")
    loss = ("s * x", "s * x.sum(-1)", "s * x.mean()", "s * jnp.logaddexp(0, x.sum(-1)).mean()")
    lines.append(f"out = {rng.choice(loss)}")
    derivative = rng.choices(("reverse", "forward"), (85, 15))[0]
    scale = rng.choice((1.0, 1.0, 1024.0, 2.0**15)) if dtype != "bfloat16" else 1.0
    return mixed("\n".join(lines), dtype, rng.choice(CANDIDATES), scale, derivative, f"{number}: ")


def draw_lookup(number: int) -> Case:
    """A program of lookups, the same one each time."""
    return drawn_lookup(random.Random(number), number)


def step_of(source: str, step: str) -> Case:
    """One of `ROW_STEPS` on rows from one of `SOURCES`, beside the candidates' rows."""
    lines = [f"rows = lambda X: {SOURCES[source]}", "x = rows(u)"]
    lines += [f"x = {step.replace('ROWS', 'rows')}", "out = x @ w * c if x.shape == c.shape else x"]
    return lookup("\n".join(lines))


def drawn_lookup(rng: random.Random, number: int) -> Case:
    dtype = rng.choices(("float32", "bfloat16", "float16"), (70, 20, 10))[0]
    lines = []
    for name in ("rows", "others"):
        rows = rng.choice([*SOURCES.values()]) if rng.random() < 0.3 else drawn_rows(rng)
        lines.append(f"{name} = lambda X: {rows}")
    if rng.random() < 0.2:
        of_values = rng.choice(("rows", "rows", "others"))
        act = rng.choice(("softmax(x)", "nn.gelu(x)", "nn.silu(x)", "jnp.tanh(x)"))
        lines += ["x = jnp.einsum('bd,bsd->bs', q, rows(t))", f"x = {act}"]
        lines.append(f"out = jnp.einsum('bs,bsd->bd', x, {of_values}(t))")
    elif rng.random() < 0.2:
        parts = rng.choice(("[rows(e), f]", "[f, rows(e)]", "[rows(e), others(e)[:, :2]]"))
        lines.append(f"out = jnp.einsum('mk,bkn->bmn', r, jnp.concatenate({parts}, 1))")
    else:
        lines.append(f"x = rows({rng.choice(('u', 'u', 'nn.relu(u @ w)'))})")
        for _ in range(rng.randint(0, 3)):
            step = rng.choice(ROW_STEPS).replace("ROWS", rng.choice(("rows", "others")))
            lines.append(f"x = {step}")
        lines.append(rng.choice(("out = x", "out = x.sum(-1)", "out = x.sum(0)", "out = x @ w")))
    return lookup("\n".join(lines), dtype, f"{number}: ")
