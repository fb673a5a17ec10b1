"""Small programs as text: attention-like ones, and lookups with indices out of bounds.

A program is an expression, or several lines that define `out`; a failing test prints it. The names
that it may use stand in `ATTENTION` and in `LOOKUPS`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rounding_rule import Case, assert_same

DTYPES = ("float32", "bfloat16", "float16")
F32, BF16, F16 = ("float32",), ("bfloat16",), ("float16",)
B, U, T, S, N, H, D = 6, 3, 2, 5, 2, 4, 4
RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


QUERY, KEY, VALUE = _normal(B, T, N, H), _normal(U, S, N, H), _normal(U, S, N, H)
INDEX = np.array([1, 0, 2, 2, 0, 2], np.int32)
#: Out of bounds at both ends, where negative ones count from the end, and beyond that.
OUTSIDE = np.array([0, -1, U + 1, -U - 2, 2, U], np.int32)
#: No key of the first user, each of the second one's, some of the third one's.
KEPT = np.array([[0] * S, [1] * S, [0, 1, 1, 0, 1]], bool)
LENGTHS = np.array([0, S, 2], np.int32)


def straight_through(f: Any) -> Any:
    """f forward, the identity backward."""
    return lambda x: x + lax.stop_gradient(f(x) - x)


def with_slope(f: Any, factor: float) -> Any:
    """f, with a slope of its own: `factor` times f's."""
    g = jax.custom_jvp(lambda x: f(x))  # Of one argument, whatever defaults f has.
    g.defjvp(lambda x, t: (f(x[0]), jax.jvp(f, x, t)[1] * factor))
    return g


def with_gradient(f: Any, factor: float) -> Any:
    """f, with a custom_vjp: `factor` times f's gradient."""
    g = jax.custom_vjp(lambda x: f(x))
    g.defvjp(lambda x: (f(x), x), lambda x, t: (jax.vjp(f, x)[1](t)[0] * factor,))
    return g


def by_hand(x: Any) -> Any:
    """Softmax as people write it."""
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand_stopped(x: Any) -> Any:
    e = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def without_max(x: Any) -> Any:
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def by_log(x: Any) -> Any:
    return jnp.exp(jax.nn.log_softmax(x, axis=-1))


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


SOFTMAXES = (softmax, by_hand, by_hand_stopped, without_max, by_log)
COMMON = {
    **{f.__name__: f for f in (*SOFTMAXES, straight_through, with_slope, with_gradient)},
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "nn": jax.nn,
    "stop": lax.stop_gradient,
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "inf": jnp.inf,
    "B": B,
    "S": S,
    "H": H,
    "U": U,
    "J": OUTSIDE,
}
ATTENTION = """
q [B,T,N,H]; k, v [U,S,N,H]; i [B], j [B] (out of bounds); m [U,S] bool; n [U] lengths
L(q) = einsum("btnh,bsnh->bnts", q, k[i]); mix(p) = einsum("bnts,bsnh->btnh", p, v[i])
M = m[i], N = n[i] and C (a mask by candidate), as the logits' shape needs them; at = arange(S)
"""


def _result(code: Any, names: dict[str, Any]) -> Any:
    names = {**COMMON, **names}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(code, names)
    return names["out"]


@functools.cache
def _compiled(text: str) -> Any:
    return compile(text if "out =" in text else f"out = {text}", "<program>", "exec")


#: Products with keys and with values, and dimensions of the logits that a mask by key lacks.
_FORMS: dict[bool | None, tuple[str, str, tuple[None, ...]]] = {
    True: ("btnh,bsnh->bnts", "bnts,bsnh->btnh", (None, None)),
    False: ("btd,bsd->bts", "bts,bsd->btd", (None,)),
    None: ("bd,bsd->bs", "bs,bsd->bd", ()),
}


def attention(
    text: str,
    dtype: Any = jnp.float32,
    heads: bool | None = True,
    rows: str = "X[i]",
    number: Any = "",
) -> Case:
    """A program of `ATTENTION`'s names.

    Args:
      text: the program.
      dtype: of query, key and value.
      heads: whether there are heads; without, query, key and value are matrices of one head. None:
        a candidate has one query, which is a vector.
      rows: how keys and values, `X`, are looked up.
      number: tells apart programs that are the same.
    """
    code, of_rows = _compiled(text), _compiled(rows)

    def fn(q, k, v, i, j, m, n):
        def look_up(x):
            return _result(of_rows, {"X": x, "i": i, "j": j})

        of_keys, of_values, between = _FORMS[heads]
        if not heads:
            q, k, v = q[:, 0 if heads is None else slice(None), 0], k[:, :, 0], v[:, :, 0]
        own: dict[str, Any] = {
            "L": lambda q, **kw: jnp.einsum(of_keys, q, look_up(k), **kw),
            "mix": lambda p, **kw: jnp.einsum(of_values, p, look_up(v), **kw),
            "M": m[i][:, *between],
            "N": n[i][:, *between, None],
            "C": (jnp.arange(B * S).reshape(B, S) % 7 > 1)[:, *between],
        }
        own |= {"q": q, "k": k, "v": v, "i": i, "j": j, "m": m, "n": n, "at": jnp.arange(S)}
        return _result(code, own)

    args = (*(x.astype(dtype) for x in (QUERY, KEY, VALUE)), INDEX, OUTSIDE, KEPT, LENGTHS)
    form = {True: "", False: ", no heads", None: ", one query"}[heads]
    name = f"{text}  # {number}{np.dtype(dtype).name}{form}"
    name += "" if rows == "X[i]" else f", looked up by {rows}"
    return Case(name, fn, tuple(map(jnp.asarray, args)), "one_hot" in name)


LOOKUPS = """
u [U,D]; c [B,D]; w [D,D]; w2 [2D,D]; j [B] (out of bounds), i [B]
e [U,3,D] and f [B,2,D] embeddings, r [4,5] their compression; q [B,D]; t [U,S,D]
"""
LOOKUP_ARGS = {
    "u": _normal(U, D),
    "c": _normal(B, D),
    "w": _normal(D, D),
    "w2": _normal(2 * D, D),
    "e": _normal(U, 3, D),
    "f": _normal(B, 2, D),
    "r": _normal(4, 5),
    "q": _normal(B, D),
    "t": _normal(U, S, D),
}


def lookup(text: str, dtype: Any = jnp.float32, number: Any = "") -> Case:
    """A program of `LOOKUPS`' names."""
    code = _compiled(text)

    def fn(*args):
        return _result(code, dict(zip([*LOOKUP_ARGS, "i", "j"], args, strict=True)))

    args = (*(x.astype(dtype) for x in LOOKUP_ARGS.values()), INDEX, OUTSIDE)
    name = f"{text}  # {number}{np.dtype(dtype).name}"
    return Case(name, fn, tuple(map(jnp.asarray, args)), "one_hot" in name)


MIXED = """
u [U,D], c [B,D], w [D,D], w2 [2D,D] in float32; i [B], candidates for a user as named
F(x) = x.astype(the dtype of the computation); k and s, a size and a loss scale of NumPy
placed(x), under a sharding constraint
"""


def mixed(
    text: str, dtype: str, candidates: int, scale: float, derivative: str, number: Any = ""
) -> Case:
    """A program of `MIXED`'s names: float32 parameters, and another dtype to compute in.

    Args:
      text: the program.
      dtype: what `F` casts to.
      candidates: of a user.
      scale: of the loss, `s`.
      derivative: "reverse" or "forward".
      number: tells apart programs that are the same.
    """
    code, rng = _compiled(text), np.random.default_rng(len(text))
    index = rng.permutation(np.repeat(np.arange(U, dtype=np.int32), candidates))
    arrays = [rng.standard_normal(n, np.float32) for n in ((U, D), (len(index), D), (D, D))]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def fn(u, c, w, w2, i, k, s):
        if not isinstance(k, np.integer):
            raise TypeError("a size is traced")
        own = {"u": u, "c": c, "w": w, "w2": w2, "i": i, "k": k, "s": s}
        own["F"] = lambda x: x.astype(dtype)
        own["placed"] = lambda x: lax.with_sharding_constraint(x, place)
        return _result(code, own)

    numbers = (*arrays, rng.standard_normal((2 * D, D), np.float32), index)
    name = f"{text}  # {number}{dtype}, {candidates} candidates, scale {scale}, {derivative}"
    statics = np.int64(2), np.float32(scale)
    args, forward = tuple(jnp.asarray(x) for x in numbers), derivative == "forward"
    return Case(name, fn, args, statics=statics, forward=forward, is_mixed=True)


#: How rows of X are looked up by j.
MODES = {
    "index": "X[j]",
    "take": "jnp.take(X, j, axis=0)",
    "take_clip": "jnp.take(X, j, axis=0, mode='clip')",
    "take_wrap": "jnp.take(X, j, axis=0, mode='wrap')",
    "take_fill": "jnp.take(X, j, axis=0, mode='fill')",
    "take_fill_0": "jnp.take(X, j, axis=0, mode='fill', fill_value=0)",
    "get": "X.at[j].get()",
    "get_clip": "X.at[j].get(mode='clip')",
    "get_fill": "X.at[j].get(mode='fill')",
    "get_fill_7": "X.at[j].get(mode='fill', fill_value=7.0)",
    "get_drop": "X.at[j].get(mode='drop')",
    "one_hot": "jnp.einsum('bu,u...->b...', nn.one_hot(j, U, dtype=X.dtype), X)",
}
#: What becomes of rows: X stands for the lookup.
CONSUMERS = {
    "sum": "X(u).sum(-1)",
    "sum_of_all": "X(u).sum()",
    "power": "X(u) ** 0",
    "times": "X(u) * c",
    "tower": "jnp.tanh(X(nn.relu(u @ w)) @ w)",
    "tower_after": "jnp.tanh(nn.relu(X(u) @ w) @ w)",
    "concat": "jnp.concatenate([X(u), c], 1) @ w2",
    "compression": "jnp.einsum('mk,bkn->bmn', r, jnp.concatenate([X(e), f], 1))",
    "attention": "jnp.einsum('bs,bsd->bd', softmax(jnp.einsum('bd,bsd->bs', q, X(t))), X(t))",
    "gelu": "jnp.einsum('bs,bsd->bd', nn.gelu(jnp.einsum('bd,bsd->bs', q, X(t))), X(t))",
    "masked": "jnp.where(X(u) > 0, X(u), 2.0)",
}


def looked_up(mode: str, consumer: str, dtype: Any = jnp.float32) -> Case:
    text = CONSUMERS[consumer]
    for name in ("u", "e", "t", "nn.relu(u @ w)"):
        operand = name if name.isidentifier() else f"({name})"
        text = text.replace(f"X({name})", MODES[mode].replace("X", operand))
    return lookup(text, dtype)


def every(
    texts: Iterable[str],
    dtypes: Iterable[str] = DTYPES,
    make: Callable[[str, Any], Case] = attention,
) -> list[Case]:
    """Each program in each dtype."""
    return [make(text, dtype) for text in texts for dtype in dtypes]


def are_same(cases: Iterable[Case], count: int) -> Callable[..., None]:
    """A test that programs and their rewrites agree, named by the beginning of the first of them.

    At most `count` cases share a compilation, which is what takes the time. All but the first so
    many are slow tests.
    """
    params = [
        pytest.param(
            batch, id=batch[0].name.replace("/", "|")[:60], marks=[pytest.mark.slow] if n else []
        )
        for n, batch in enumerate(itertools.batched(cases, count))
    ]

    @pytest.mark.parametrize("cases", params)
    def test(cases: tuple[Case, ...]) -> None:
        assert_same(cases)

    return test
