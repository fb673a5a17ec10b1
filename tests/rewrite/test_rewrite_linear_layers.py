"""Norms with products as people write them become `norm_linear` on a GPU, and nothing else does."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export, lax, nn
from rounding_rule import Case, assert_same

import ikbo_jax as ikbo
from ikbo_jax.rewrite.attention import linear_layers

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, F, N, H = 6, 16, 2, 8
NAMES = "x s b w v c t z g"


def arguments(dtype: Any) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int, at: float = 0.0, like: Any = F32) -> jax.Array:
        return jnp.asarray(rng.normal(at, 0.5, shape), like)

    vectors = normal(F, at=1.0), normal(F)
    weights = normal(F, N * H, like=dtype), normal(F, N, H, like=dtype)
    more = normal(N * H, like=dtype), normal(2, 3, F, at=0.3, like=dtype)
    matrices = normal(ROWS, F, like=dtype), normal(F, F, like=dtype)
    return (normal(ROWS, F, at=0.3, like=dtype), *vectors, *weights, *more, *matrices)


def up(x: jax.Array) -> jax.Array:
    return x.astype(F32)


def mean(x: jax.Array) -> jax.Array:
    return x.mean(-1, keepdims=True)


def variance(x: jax.Array, ddof: int = 0) -> jax.Array:
    return jnp.var(x, -1, keepdims=True, ddof=ddof)


def layer(x, s=None, b=None, eps=1e-5, fast=False):
    """As Keras writes it: the factors first, and the mean with its sign changed."""
    f = up(x)
    m = mean(f)
    squares = mean(f * f) - m * m if fast else mean(jnp.square(f - m))
    factor = lax.rsqrt(squares + eps) * (1 if s is None else s)
    return (f * factor + (-m * factor + (0 if b is None else b))).astype(x.dtype)


def rms(x, s=None, eps=1e-6):
    f = up(x)
    y = f / jnp.sqrt(mean(f**2) + eps)
    return (y if s is None else y * s).astype(x.dtype)


def by_flax(module: Any, dense: Any, act: Any):
    """A norm and a dense layer of Flax Linen, whose parameters are `s`, `b`, `w` and `c`."""

    def fn(x, s, b, w, c):
        norm = {"scale": s, "bias": b} if module is linen.LayerNorm else {"scale": s}
        y = module(dtype=x.dtype).apply({"params": norm}, x)
        return act(dense(w.shape[-1]).apply({"params": {"kernel": up(w), "bias": up(c)}}, y))

    return fn


def by_nnx(x, s, b, v, c, **options):
    norm = nnx.LayerNorm(F, dtype=x.dtype, rngs=nnx.Rngs(0), **options)
    dense = nnx.LinearGeneral(F, (N, H), dtype=x.dtype, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = s, b
    dense.kernel[...], dense.bias[...] = up(v), up(c).reshape(N, H)
    return dense(norm(x))


ONE = jax.sharding.NamedSharding(jax.make_mesh((1,), ("i",)), jax.sharding.PartitionSpec())
SCOPE = {name: value for name, value in globals().items() if not name.startswith("_")}
SCOPE |= {"Dense": lambda n: linen.Dense(n, dtype=BF16)}

#: Programs, and the norm and the groups that are found in them.
FOUND = {
    "by_flax(linen.LayerNorm, Dense, nn.gelu)(x, s, b, w, c)": "layer norm, gelu_tanh",
    "by_flax(linen.LayerNorm, Dense, lambda y: nn.gelu(y, approximate=False))(x, s, b, w, c)": (
        "layer norm, gelu"
    ),
    "by_flax(linen.RMSNorm, Dense, nn.silu)(x, s, b, w, c)": "rms norm, silu",
    "nnx.silu(by_nnx(x, s, b, v, c))": "layer norm, silu",
    "nnx.relu(by_nnx(x, s, b, v, c, use_fast_variance=False))": "layer norm, relu",
    "nn.gelu(layer(x, s, b) @ w + c)": "layer norm, gelu_tanh",
    "layer(x, fast=True) @ w": "layer norm, identity",
    "(lambda y: y * nn.sigmoid(y))(layer(x, s) @ w)": "layer norm, silu",
    "nn.silu(jnp.einsum('bf,fnh->bnh', layer(x, None, b), v))": "layer norm, silu",
    "nn.silu(up(rms(x, s) @ w) + up(c)).astype(x.dtype)": "rms norm, identity",
    "nn.silu(jnp.dot(rms(x, s), w, preferred_element_type=F32)).astype(x.dtype)": (
        "rms norm, silu"
    ),
    # Llama, Gemma and T5.
    "s.astype(BF16) * rms(x) @ w": "rms norm, identity",
    "rms(x, 1 + s) @ w": "rms norm, identity",
    "(x * lax.rsqrt(mean(up(x) ** 2) + 1e-6)).astype(BF16) @ w": "rms norm, identity",
    "nn.standardize(up(x), epsilon=1e-5).astype(BF16) @ w": "layer norm, identity",
    "((up(x) - mean(up(x))) / jnp.sqrt(variance(up(x)) + 1e-5))"
    ".astype(BF16) @ w": "layer norm, identity",
    "layer(x) @ w + z": "layer norm, identity",
    "layer(g, s, b) @ w": "bfloat16[16,16], layer norm, identity",
    "(up(x) * (mean(up(x) ** 2) + 1e-6) ** -0.5).astype(BF16) @ w": "rms norm, identity",
    "(up(x) / (mean(up(x) ** 2) + 1e-6) ** 0.5).astype(BF16) @ w": "rms norm, identity",
    # Biases and scales that are none of the op's.
    "layer(g) @ w + c[:, None]": "layer norm, identity",
    "layer(x) @ w + c + 2 * c": "layer norm, identity",
    "nn.silu(2 * (layer(x) @ w))": "layer norm, identity",
    "2 * nn.silu(layer(x) @ w)": "layer norm, silu",
    "up(nn.silu(layer(x) @ w)) ** 2": "layer norm, silu",
    # Numbers that are not real, and programs deeper than the stack.
    "jnp.where(up(layer(x) @ w) * 1j == 0, 0.0, 1.0)": "layer norm, identity",
    "([y := up(z)], [y := y + 1 for _ in range(999)], layer(x) @ w, y.astype(BF16) @ w)[2:]": (
        "layer norm, identity"
    ),
    # Sequences, and a residual around the layer.
    "t + nn.silu(layer(t, s, b) @ w) @ w": "bfloat16[2,3,16], layer norm, silu",
    "layer(t, s, b).reshape(6, F) @ w": "layer norm, identity",
    "(lambda f: f + up(((f - mean(f)) / jnp.sqrt(mean(f * f) - mean(f) ** 2 + 1e-5) * s)"
    ".astype(BF16) @ w))(up(x))": "layer norm, identity",
    # Groups, and what follows them.
    "(lambda y: nn.silu(y @ w) * (y @ g))(rms(x, s))": ("rms norm, silu+identity"),
    "(lambda y: [y @ w, jnp.einsum('bf,fnh->bnh', y, v)])(layer(x, s, b))": (
        "layer norm, identity+identity"
    ),
    "jnp.maximum(layer(x) @ w, 0)": "layer norm, relu",
    "(lambda y: (y, nn.silu(y)))(layer(x) @ w)": "layer norm, identity",
    "(lambda y: (nn.silu(y), nn.relu(y)))(layer(x) @ w)": "layer norm, identity",
    "jnp.tanh(layer(x) @ w)": "layer norm, identity",
    "(lambda y: (y @ (2 * up(w)).astype(BF16), y @ (1 + up(g)).astype(BF16)))(rms(x, s))": (
        "rms norm, identity+identity"
    ),
    "(lambda y: (y @ w[:, :N], y @ w[:, N:]))(rms(x, s))": "rms norm, identity+identity",
    "(lambda y: [y @ v[:, 0], y @ v[:, 1]])(layer(x, s, b))": "layer norm, identity+identity",
    # Programs within programs.
    "jax.jit(lambda x: nn.silu(jax.jit(layer)(x) @ w + c))(x)": "layer norm, silu",
    "jax.checkpoint(lambda x: nn.silu(layer(x) @ w))(x)": "layer norm, silu",
    "lax.scan(lambda x, _: (x + nn.silu(layer(x) @ w), None), x, length=3)[0]": (
        "layer norm, silu"
    ),
    "jax.vmap(lambda x: layer(x, s, b) @ w)(x)": "layer norm, identity",
}

#: Norms that are none of the op's, of rows `f` in float32.
OTHER_NORMS = {
    "(f - mean(f)) / (jnp.std(f, -1, keepdims=True) + 1e-5)": (
        "the number is added to the deviation"
    ),
    "(f - mean(f)) / jnp.sqrt(jnp.maximum(variance(f), 1e-5))": "the number is a bound",
    "(f - mean(f)) * lax.rsqrt(variance(f, ddof=1) + 1e-5)": "the variance is divided by F - 1",
    "(f - f.mean(0)) * lax.rsqrt(jnp.var(f, 0) + 1e-5)": "statistics of columns",
    "f * lax.rsqrt(variance(f) + 1e-5)": "the mean is not subtracted",
    "(f - mean(f)) * lax.rsqrt(mean(f**2) + 1e-5)": "the mean is in one place only",
    "(f - 2 * mean(f)) * lax.rsqrt(variance(f) + 1e-5)": "twice the mean",
    "f / jnp.sqrt(jnp.sum(f**2, -1, keepdims=True) + 1e-5)": "a sum in place of a mean",
    "f * lax.rsqrt(mean(f**4) + 1e-5)": "another power",
    "(f - mean(f)) * lax.rsqrt(mean(up(z) ** 2) + 1e-5)": "statistics of other rows",
    "(f - mean(f)) * lax.rsqrt(mean((f * s - mean(f * s)) ** 2) + 1e-5)": (
        "statistics of scaled rows"
    ),
    "(f * s - mean(f * s)) * lax.rsqrt(mean((f - mean(f)) ** 2) + 1e-5)": "the mean of scaled rows",
    "(lambda m: (f - m) * lax.rsqrt(mean(f * f) - m * m + 1e-5))(mean(f).sum(-1, keepdims=True) "
    "/ F)": "a mean that is divided twice",
    "(lambda v: f * lax.rsqrt(v + 1e-5) - mean(f) * lax.rsqrt(v + 1e-3))(variance(f))": (
        "two numbers"
    ),
    "f * lax.rsqrt(jnp.maximum(1e-3, mean(f**2)) + 1e-5)": "a bound and a number",
    "(lambda f: f * lax.rsqrt(mean(f * f) + 1e-6))(jnp.maximum(0, f))": "a relu before it",
    "f * lax.rsqrt(mean(f * f * f) + 1e-5)": "a cube",
    "f * f * lax.rsqrt(mean(f * f) + 1e-6) / f": "0 / 0",
    "up(rms(x)) * lax.rsqrt(mean(f**2) + 1e-6) * f": "a square of it",
    "(f - mean(f)) * mean(f) * lax.rsqrt(mean((f - mean(f)) ** 2) + 1e-5)": "times the mean",
    "f * lax.rsqrt(mean(f**2) + 1e-6) ** 2": "divided twice",
}
#: Programs that stay as they are.
LEFT = {
    f"(lambda f: {norm})(up(x)).astype(BF16) @ w": reason for norm, reason in OTHER_NORMS.items()
} | {
    # Other norms.
    "layer(x, eps=0.0) @ w": "no number is added",
    "nn.standardize(up(t), axis=(1, 2), epsilon=1e-5).astype(BF16) @ w": "statistics of two axes",
    "(up(g) * lax.rsqrt(jnp.mean(up(g) ** 2, -1) + 1e-5)).astype(BF16) @ w": "a row of statistics",
    "(up(g) * lax.rsqrt(jnp.broadcast_to(jnp.mean(up(g) ** 2, -1), g.shape) + 1e-5))"
    ".astype(BF16) @ w": "the same",
    "(lambda f: (f - f.mean(0)[:, None]) * lax.rsqrt(((f - f.mean(0)[:, None]) ** 2)"
    ".mean(0)[:, None] + 1e-5))(up(g)).astype(BF16) @ w": "statistics of columns of a square",
    "([y := up(x)], [y := y * y + y for _ in range(12)], y.astype(BF16) @ w)[2]": "4,096 terms",
    "(2 * layer(x)) @ w": "twice the norm",
    "(layer(x) + 1) @ w": "a number is added",
    "layer(x).astype(jnp.int32).astype(BF16) @ w": "a cast to integers",
    "(layer(x) * z) @ w": "a scale of every row",
    "layer(x).astype(jnp.float16) @ w.astype(jnp.float16)": "a product in another dtype",
    "(up(g) * lax.rsqrt(mean(up(g) ** 2)[:, 0] + 1e-5)).astype(BF16) @ w": (
        "statistics along the wrong axis of a square"
    ),
    "nn.standardize(up(x)[:, :8], epsilon=1e-5).astype(BF16) @ w[:8]": "rows cast before a slice",
    "jnp.where(x > 0, layer(x), 0) @ w": "a select after it",
    # Coarser statistics.
    "((x - mean(x)) * lax.rsqrt(jnp.mean((x - mean(x)) ** 2, -1, keepdims=True) + 1e-5)) @ w": (
        "statistics of 16 bits"
    ),
    "((up(x) - mean(up(x)).astype(BF16)) * lax.rsqrt(variance(up(x)) + 1e-5))"
    ".astype(BF16) @ w": "a rounded mean",
    # Other readers of the normalised rows.
    "(lambda y: (y, y @ w))(layer(x, s, b))": "the function returns them",
    "(lambda y: y @ w + y)(layer(x, s, b))": "a sum reads them",
    "(lambda y: y @ w + y @ y.T @ y)(layer(x, s, b))": "a product that is none of weights",
    "(lambda y: (lambda q: (q, y @ (q.T @ q)))(y @ w))(layer(x))": "a weight that a group computes",
    "(jax.debug.print('{}', w[0, 0]), layer(x) @ w)[1]": "a program with effects",
    "jax.jit(layer, out_shardings=ONE)(x) @ w": "rows that are placed on devices",
    # Other products.
    "jnp.dot(layer(x), w, preferred_element_type=F32)": "a result in float32",
    "jnp.dot(layer(x), w, precision='highest')": "a precision of its own",
    "layer(x) @ w.T": "a transposed weight is copied",
    "up(layer(x)) @ up(w)": "a product in float32",
    "jnp.einsum('btf,bfc->btc', layer(t), jnp.stack([w, w]))": "a weight for every request",
}


def program(text: str, dtype: Any = BF16) -> Case:
    """The program of an expression of some of `NAMES`, as a case."""
    names = [x for x in NAMES.split() if x in text]
    given = dict(zip(NAMES.split(), arguments(dtype), strict=True))
    fn = eval(f"lambda {', '.join(names)}: {text}", dict(SCOPE))
    return Case(text, fn, tuple(given[x] for x in names))


def layers(case: Case) -> tuple[str, ...]:
    (report,) = ikbo.explain(ikbo.rewrite(case.fn), *case.args).notes
    return report.layers


@pytest.fixture(autouse=True)
def _as_users_do() -> Iterator[None]:
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision("default"),
    ):
        yield


@pytest.fixture
def gpu(monkeypatch) -> None:
    """A GPU on which the kernels pay for the small layers of these programs."""
    monkeypatch.setattr(linear_layers, "has_kernels", lambda: True)
    monkeypatch.setattr(linear_layers, "_pays", lambda *_: True)


@pytest.mark.parametrize("text", FOUND)
@pytest.mark.usefixtures("gpu")
def test_found(text: str) -> None:
    (found,) = layers(program(text))
    assert found.endswith(FOUND[text]), found
    assert_same([program(text)])


@pytest.mark.parametrize("text", LEFT)
@pytest.mark.usefixtures("gpu")
def test_left(text: str) -> None:
    assert not layers(program(text)), LEFT[text]


@pytest.mark.parametrize("text", [x for x in FOUND if "BF16" not in x and "Dense" not in x])
@pytest.mark.usefixtures("gpu")
def test_left_in_float32(text: str) -> None:
    assert not layers(program(text, F32))


def test_left_on_a_cpu() -> None:
    assert not linear_layers.has_kernels()
    assert not layers(program(next(iter(FOUND))))


@pytest.mark.parametrize(
    ("rows", "features", "columns", "is_found"),
    [
        (4096, 512, 512, True),
        (65536, 128, 128, True),
        (4096, 512, 256, False),
        (4096, 64, 512, False),
        (2048, 512, 2048, False),
        (4096, 648, 2048, False),
        (4096, 508, 2048, False),
        (4096, 512, 2044, False),
    ],
)
def test_found_where_the_kernel_was_faster(monkeypatch, rows, features, columns, is_found) -> None:
    monkeypatch.setattr(linear_layers, "has_kernels", lambda: True)
    args = [jax.ShapeDtypeStruct(x, BF16) for x in ((rows, features), (features, columns))]
    fn = ikbo.rewrite(lambda x, w: nn.silu(rms(x) @ w))
    explained = ikbo.explain(fn, *args)
    assert bool(explained.notes[0].layers) == is_found
    assert [plan.op for plan in explained.plans] == ["norm_linear"] * is_found
    # XLA's gradient of the program as written is faster, and has a forward mode.
    gradient = jax.make_jaxpr(jax.grad(lambda *args: fn(*args).astype(F32).sum()))(*args)
    assert "norm_linear" not in str(gradient)
    jax.eval_shape(lambda *args: jax.jvp(fn, args, args), *args)


@pytest.mark.usefixtures("gpu")
def test_found_at_both_batches() -> None:
    """The users' layer runs at user batch; a report lists both."""

    def fn(user, cand, index, w):
        tower = nn.silu(layer(user)[index] @ w)
        return tower * nn.silu(rms(cand) @ w)

    rng = np.random.default_rng(0)
    user, cand, w = (jnp.asarray(rng.normal(size=x), BF16) for x in ((4, F), (64, F), (F, 512)))
    args = user, cand, jnp.asarray(np.arange(64) // 16, jnp.int32), w
    explained = ikbo.explain(ikbo.rewrite(fn), *args)
    (report,) = explained.notes
    assert report.changed
    found = sorted(x.partition(": ")[2].partition(",")[0] for x in report.layers)
    assert found == ["norm_linear of bfloat16[4", "norm_linear of bfloat16[64"]
    assert all(x in str(report) for x in report.layers)
    assert {plan.op for plan in explained.plans} == {"norm_linear"}
    assert_same([Case("both", fn, args)])


@pytest.mark.parametrize(("features", "columns"), [(F, "n"), ("n", 16), (F, 0)])
@pytest.mark.usefixtures("gpu")
def test_found_beside_a_layer_that_no_kernel_takes(features, columns) -> None:
    shapes = (8, F), (F, 16), (8, features), (features, columns)
    (n,) = export.symbolic_shape("n")
    args = [jax.ShapeDtypeStruct([n if k == "n" else k for k in x], BF16) for x in shapes]
    fn = ikbo.rewrite(lambda x, w, y, v: (rms(x) @ w, layer(y) @ v))
    (report,) = ikbo.explain(fn, *args).notes
    (found,) = report.layers
    assert found.endswith("rms norm, identity")


@pytest.mark.usefixtures("gpu")
def test_a_called_program_is_the_same_in_every_trace() -> None:
    """JAX compiles it again otherwise, at every call of a function that is not under `jit`."""
    inner = jax.jit(lambda x, w: layer(x) @ w)
    fn = ikbo.rewrite(lambda x, w: [2 * inner(x, w), lax.map(lambda x: inner(x, w), x[None])])
    programs = []
    for _ in range(2):
        (eqn, *_) = jax.make_jaxpr(fn)(*program("x @ w").args).eqns
        programs.append(eqn.params["program"].eqns[0].params["jaxpr"])
        assert len(ikbo.explain(fn, *program("x @ w").args).notes[0].layers) == 1
    assert programs[0] is programs[1]
    assert "norm_linear" in str(programs[0])


@pytest.mark.parametrize("where", ["graph_of", "without_dead_code"])
@pytest.mark.usefixtures("gpu")
def test_an_exception_leaves_the_program(monkeypatch, where) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(linear_layers, where, fail)
    case = program("layer(x) @ w")
    (text,) = layers(case)
    assert "linear layers stay as they are: RuntimeError: broken" in text
    assert "except" not in str(ikbo.explain(ikbo.rewrite(case.fn), *case.args))
    np.testing.assert_array_equal(ikbo.rewrite(case.fn)(*case.args), case.fn(*case.args))
