"""A grammar of programs that resemble what `ikbo.rewrite` knows, drawn by number."""

import itertools
import random
import re
from collections.abc import Iterable, Iterator

from lookalike_rows import drawn_lookup, drawn_mixed, drawn_rows
from lookalikes import attention
from rounding_rule import Case

CONSTANTS = (1e-3, 0.03, 0.3, 1.0, 2.0, 10.0, 30.0, 40.0, 100.0, 1e4)
#: What may happen to logits before, and to weights after; c and d are constants.
CHANGES = (
    "jnp.clip(x, -c, c)",
    "jnp.clip(x, -c, c)",
    "jnp.minimum(x, c)",
    "jnp.minimum(x, c)",
    "jnp.maximum(x, -c)",
    "x + c",
    "x - c",
    "x + 0.0",
    "x * 0.5",
    "x * -1",
    "-x",
    "x / 3",
    "x * 1e-3",
    "c * jnp.tanh(x / c)",
    "c * jnp.tanh(x / c)",
    "jnp.where(x > c, x, d)",
    "jnp.where(x < -c, -d, x)",
    "jnp.where(x > -c, x, 0)",
    "stop(x)",
    "stop(x)",
    "x + stop(x)",
    "straight_through(jnp.round)(x)",
    "straight_through(lambda y: jnp.clip(y, -c, c))(x)",
    "with_slope(lambda y: y, 0.5)(x)",
    "with_slope(lambda y: jnp.minimum(y, c), 1.0)(x)",
    "with_gradient(lambda y: y, 2.0)(x)",
    "with_gradient(lambda y: y, 1.0)(x)",
    "jnp.abs(x)",
    "x.astype(bf16).astype(x.dtype)",
    "lax.reduce_precision(x, 8, 7)",
    "jnp.round(x)",
    "x * q[0, 0].sum()",
    "jnp.nan_to_num(x)",
    "lax.stop_gradient(jnp.minimum(x, 0)) + jnp.maximum(x, 0)",
)
ACTIVATIONS = (
    "nn.relu(x)",
    "nn.gelu(x)",
    "nn.gelu(x, approximate=False)",
    "nn.silu(x)",
    "nn.hard_swish(x)",
    *("nn.leaky_relu(x)", "nn.relu(x) ** 2", "jnp.square(nn.relu(x))", "jnp.maximum(x, 0)"),
    *("nn.relu(x)", "nn.gelu(x)", "nn.silu(x)", "nn.leaky_relu(x)", "nn.relu(x) ** 2"),
    *("nn.leaky_relu(x, 0.03)", "nn.leaky_relu(x, 0.011)", "jnp.maximum(x, 0.1 * x)"),
    *("nn.mish(x)", "nn.elu(x)", "nn.celu(x, 0.3)", "nn.selu(x)", "nn.softplus(x)", "x"),
    *("jnp.tanh(x)", "nn.sigmoid(x)", "nn.relu6(x)", "nn.hard_tanh(x)", "nn.log_sigmoid(x)"),
    *("nn.squareplus(x)", "nn.soft_sign(x)", "x * nn.sigmoid(1.702 * x)", "x * (x > 0)"),
    *("jnp.where(x > 0, x, 0)", "jnp.where(x >= 0, x, 0.01 * x)", "jnp.where(x > 0, x, 0.01 * x)"),
    *("x * jnp.clip(x + 3, 0, 6) / 6", "x * jnp.clip(x + 3, 0, 6) * 0.1666", "nn.relu(x) * x"),
    *("0.5 * x * (1 + lax.erf(x / 2 ** 0.5))", "0.5 * x * (1 + jnp.tanh(0.8 * x))"),
    *("x / (1 + jnp.exp(-x))", "x * stop(nn.sigmoid(x))", "nn.relu(stop(x))", "jnp.abs(x)"),
    *("straight_through(nn.relu)(x)", "with_slope(nn.relu, 2.0)(x)", "with_slope(nn.gelu, 1.0)(x)"),
    *("with_gradient(nn.silu, 0.5)(x)", "with_gradient(nn.relu, 1.0)(x)", "jnp.square(x)"),
    *("nn.relu(x) + 0.2", "nn.relu(x - 0.3)", "jnp.where(x > -2, nn.silu(x), 0)"),
    "jnp.where(x < -40, -1, nn.relu(x))",
    "nn.relu(x) - nn.relu(-x) * 0.01",
    "nn.silu(2 * x) / 2",
    *("jnp.where(jnp.isnan(x), 0, nn.relu(x))", "nn.relu(x) / jnp.maximum(x, 30)", "x ** 3 / 9"),
)
SOFTMAXES = (
    *("softmax(x)",) * 6,
    *("by_hand(x)", "by_hand_stopped(x)", "by_log(x)", "nn.softmax(x.astype(f32), -1)") * 2,
)
#: For small logits: exp of others would overflow.
OF_EXPONENTIALS = (
    "without_max(x)",
    "(lambda e: e / (1 + e.sum(-1, keepdims=True)))(jnp.exp(x))",
    "(lambda e: e / (1e-6 + e.sum(-1, keepdims=True)))(jnp.exp(x))",
    "(lambda e: e / jnp.maximum(e.sum(-1, keepdims=True), 3))(jnp.exp(x))",
    "(lambda e: e / stop(e.sum(-1, keepdims=True)))(jnp.exp(x))",
    "(lambda e: stop(e) / e.sum(-1, keepdims=True))(jnp.exp(x))",
    "(lambda e: e / e.sum())(jnp.exp(x))",
    "(lambda e: e / e.sum(-2, keepdims=True))(jnp.exp(x))",
    "(lambda e: e / e.max(-1, keepdims=True))(jnp.exp(x))",
    "(lambda e: e / jnp.sqrt(jnp.sum(e ** 2, -1, keepdims=True)))(jnp.exp(x))",
    "(lambda e: e / jnp.exp(x / 2).sum(-1, keepdims=True))(jnp.exp(x))",
    "(lambda e: e / e.sum(-1, keepdims=True))(jnp.exp2(x))",
)
RELATIVES = (
    "softmax(x) ** 2",
    "softmax(x * x)",
    "nn.softmax(x, axis=-2)",
    "nn.softmax(x, axis=0)",
    "nn.softmax(x, axis=(-2, -1))",
    "softmax(x / (1 + n[1]))",
    "softmax(x * q[:1, :1].sum())",
    "softmax(x * jnp.abs(q[:, :1]).sum())",
    "softmax(x * (1.0 + m[0].astype(x.dtype)))",
    "softmax(x / jnp.linspace(1, 2, S).astype(x.dtype))",
    "softmax(softmax(x))",
    "nn.log_softmax(x, axis=-1)",
    "1 - softmax(x)",
    "softmax(x) - 1 / S",
    "softmax(nn.relu(x))",
    "softmax(jnp.tanh(x))",
    "softmax(jnp.where(x >= lax.top_k(x, 2)[0][..., -1:], x, -1e9))",
    "softmax(jnp.where(x >= lax.top_k(x, 2)[0][..., -1:], x, -jnp.inf))",
    "softmax(x - x.mean(-1, keepdims=True))",
    "jnp.exp(x - x.max(-1, keepdims=True))",
    "jnp.exp(x - nn.logsumexp(x, axis=-1, keepdims=True))",
    "with_slope(softmax, 2.0)(x)",
    "with_gradient(softmax, 2.0)(x)",
    "softmax(x) * M",
    "jnp.where(M, softmax(x), 0)",
    "nn.softmax(x, axis=-1, where=M)",
    "straight_through(softmax)(x)",
    "nn.standardize(x)",
)
MASKS = (
    *("M",) * 6,
    *("~M", "C", "M & C", "at < N", "at <= N", "at > N", "at >= N", "at != N", "N > at", "N <= at"),
    *("at < 3", "at < n[1] - 3", "at[::-1] < N", "M | (at < 1)", "M & (at < N)", "at < N + 1"),
)
FILLS = (
    *("-inf", "-1e30", "jnp.finfo(x.dtype).min", "-1e9", "-1e5", "-1e4"),
    *("-inf", "-1e9", "-100.0", "-1.0", "0.0", "1e4", "-2e4"),
)
PUT_IN = (
    *("jnp.where(MASK, x, FILL)",) * 4,
    "jnp.where(~(MASK), FILL, x)",
    "x + jnp.where(MASK, 0, FILL).astype(x.dtype)",
    "x + (1 - (MASK).astype(x.dtype)) * FILL",
    "lax.select(jnp.broadcast_to(MASK, x.shape), x, jnp.full_like(x, FILL))",
    "jnp.minimum(x, jnp.where(MASK, 3e4, FILL).astype(x.dtype))",
)
SCALES = ("x * 1e-6", "x * 0.5", "x * -1", "x * 30", "x / 2", "x * 1e-4", "0.1 * x", "x / -4")


def weights(*changes: str, scale: float = 1) -> str:
    """The program of attention whose logits, scaled, become weights by these changes in turn."""
    lines = [f"x = L({scale} * q)", *(f"x = {change}" for change in changes), "out = mix(x)"]
    return "\n".join(lines)


def once(texts: Iterable[str]) -> list[str]:
    """The texts of a table, which may list one several times so that more draws have it."""
    return list(dict.fromkeys(texts))


def changed(functions: Iterable[str]) -> Iterator[str]:
    """Programs of every change before and after a function of the logits; these take turns."""
    turns = itertools.cycle(functions)
    for n, change in enumerate(once(CHANGES)):
        c, d = (repr(CONSTANTS[(n + k) % 5 + 2]) for k in (0, 2))
        change = re.sub(r"\bd\b", d, re.sub(r"\bc\b", c, change))
        yield weights(change, next(turns), scale=8)
        yield weights(next(turns), change, scale=8)


def masked() -> Iterator[tuple[str, ...]]:
    """Some triples of a fill, a spelling of the mask and a scale; every pair of two is in some."""
    triples = itertools.product(
        enumerate(once(FILLS)), enumerate(once(PUT_IN)), enumerate(["x", *SCALES])
    )
    for (n, fill), (m, put_in), (k, scale) in triples:
        # 0 * inf: all of it is NaN.
        if (n + m + k) % 3 == 0 and (fill != "-inf" or "(1 -" not in put_in):
            yield put_in.replace("MASK", "M").replace("FILL", fill), scale


def draw(number: int) -> Case:
    """The program of a number, the same one each time."""
    rng = random.Random(number)
    if number % 4 == 3:
        return drawn_mixed(rng, number)
    kind = rng.random()
    if kind < 0.40:
        return _attention(rng, number, _activation)
    if kind < 0.78:
        return _attention(rng, number, _softmax)
    return drawn_lookup(rng, number)


def _attention(rng: random.Random, number: int, middle) -> Case:
    dtype = rng.choices(("float32", "bfloat16", "float16"), (45, 35, 20))[0]
    largest = 8 if dtype == "float16" else 30
    scale = rng.choices((0.1, 1, 8, largest), (1, 6, 3, 2))[0]
    query = "q" if scale == 1 else f"{scale} * q"
    extra = ""
    if dtype != "float32" and rng.random() < 0.2:
        extra = ", preferred_element_type=f32"
    elif rng.random() < 0.05:
        extra = ", precision='highest'"
    lines = [f"x = L({query}{extra})"]
    if rng.random() < 0.3:
        lines.append("x = x * 0.5" if rng.random() < 0.5 else "x = x / H ** 0.5")
    lines += middle(rng, dtype, scale)
    if rng.random() < (0.8 if extra else 0.1):
        lines.append("x = x.astype(v.dtype)")
    lines.append(f"out = mix(x{extra if rng.random() < 0.3 else ''})")
    rows = "X[i]"
    if rng.random() < 0.2:
        rows = drawn_rows(rng)
    return attention("\n".join(lines), dtype, rng.random() < 0.6, rows, f"{number}: ")


def _constant(rng: random.Random, dtype: str) -> str:
    # float16 ends at 65504, and logits beyond it would be infinite in one program only.
    return repr(rng.choice(CONSTANTS[: -1 if dtype == "float16" else None]))


def _changed(rng: random.Random, dtype: str, chance: float) -> list[str]:
    lines = []
    while rng.random() < chance:
        change = rng.choice(CHANGES)
        c, d = _constant(rng, dtype), _constant(rng, dtype)
        change = re.sub(r"\bd\b", d, re.sub(r"\bc\b", c, change))
        lines.append(f"x = {change}")
        chance /= 2
    return lines


def _activation(rng: random.Random, dtype: str, scale: float) -> list[str]:
    lines = _changed(rng, dtype, 0.45)
    if rng.random() < 0.1:
        fill = rng.choice(("-1e4", "0.0", "-1.0"))
        lines.append("x = " + rng.choice(PUT_IN[:5]).replace("MASK", "M").replace("FILL", fill))
    choices = [a for a in ACTIVATIONS if dtype != "float16" or "3 /" not in a]
    lines.append(f"x = {rng.choice(choices)}")
    if rng.random() < 0.4:
        lines.append(rng.choice(("x = x / S", "x = x * 0.125", "x = x * -2", "x = x * M")))
    return lines + _changed(rng, dtype, 0.3)


def _softmax(rng: random.Random, dtype: str, scale: float) -> list[str]:
    lines = _changed(rng, dtype, 0.3)
    small = scale <= 1 and not lines
    count = rng.choices((0, 1, 2), (3, 5, 2))[0]
    for _ in range(count):
        fill = rng.choice(FILLS)
        small = small and fill != "1e4"
        put_in = rng.choice([p for p in PUT_IN if fill != "-inf" or "(1 -" not in p])
        lines.append("x = " + put_in.replace("MASK", rng.choice(MASKS)).replace("FILL", fill))
        if rng.random() < 0.35:
            lines.append(f"x = {rng.choice(SCALES)}")
            small = small and lines[-1] in ("x = x * 0.5", "x = x / 2", "x = 0.1 * x")
    kind = rng.random()
    choices: tuple[str, ...] = SOFTMAXES if kind < 0.6 else RELATIVES
    if small and kind > 0.8:
        choices = OF_EXPONENTIALS
    lines.append(f"x = {rng.choice(choices)}")
    if "f32" in lines[-1]:
        lines.append("x = x.astype(v.dtype)")
    if rng.random() < 0.1:
        lines.append("x = x * M")
    return lines + _changed(rng, dtype, 0.25)
