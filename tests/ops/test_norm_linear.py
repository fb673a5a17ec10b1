"""`norm_linear` and `gated_linear` in XLA: values and gradients of NumPy in f64, and the rest."""

import functools
from typing import Any

import complex_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import PartitionSpec as P
from sharded_calls import CASES, close, draw, mesh_of, on, on_mesh

import ikbo_jax as ikbo
from ikbo_jax.problems.norm_linear import GatedLinearConfig, NormLinearConfig, NormLinearProblem
from ikbo_jax.reference import norm_linear as reference

pytestmark = pytest.mark.usefixtures("on_cpu")

ROWS, F, N, H = 5, 6, 2, 3
ACTIVATIONS = ("silu", "identity", "gelu")
EPS = 1e-3
#: Largest errors in roundings; gradients are relative to the largest one.
UNITS = {"float32": 16.0, "bfloat16": 3.0, "float16": 3.0}
ACTS = {
    "identity": lambda z: z,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z / 2 * (1 + scipy.special.erf(z / np.sqrt(2))),
}


def drawn(shapes: dict[str, tuple[int, ...] | None], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: None if s is None else rng.normal(size=s) for name, s in shapes.items()}


def normed(kind: str, x: np.ndarray, eps: float = EPS) -> np.ndarray:
    if kind is None:
        return x
    if kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def or_(x: np.ndarray | None, default: float) -> Any:
    return default if x is None else x


# --- norm_linear ----------------------------------------------------------------------------------

LINEAR = {
    "x": (ROWS, F), "scale": (F,), "bias": (F,),
    "w0": (F, N, H), "w1": (F, N, 4), "w2": (F, N), "b0": (N, H), "b1": None, "b2": (N,),
}  # fmt: skip
PLAIN = LINEAR | {"scale": None, "bias": None}


def numpy_norm_linear(kind: str, **a: Any) -> list[np.ndarray]:
    rows = normed(kind, a["x"]) * or_(a["scale"], 1) + or_(a["bias"], 0)
    return [
        ACTS[name](np.tensordot(rows, a[f"w{g}"], 1) + or_(a[f"b{g}"], 0))
        for g, name in enumerate(ACTIVATIONS)
    ]


def norm_linear(kind: str, a: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
    weights, biases = ([a[f"{c}{g}"] for g in range(3)] for c in "wb")
    scales = {"norm": kind, "norm_scale": a["scale"], "norm_bias": a["bias"], "eps": EPS}
    activations = {"activations": ACTIVATIONS} | scales | options
    return ikbo.norm_linear(a["x"], weights, biases, **activations)


# --- gated_linear ---------------------------------------------------------------------------------

GATED = {
    "u": (ROWS, N, H), "a": (ROWS, N, H), "scale": (N * H,), "bias": (N * H,),
    "weight": (3 * N * H, F), "residual": (ROWS, F), "shared": None,
}  # fmt: skip
BY_HEAD = GATED | {"scale": (N,), "bias": (N,)}
PRODUCT = GATED | {"weight": (N * H, F), "residual": None, "scale": None, "bias": None}
ADDED = PRODUCT | {"u": None, "residual": (ROWS, F), "shared": (1, F)}
EACH_SHARES = GATED | {"shared": (ROWS, F)}


def numpy_gated_linear(kind: str, by_head: bool, kept: Any = (1, 1, 1), **a: Any) -> np.ndarray:
    u, x = a["u"], a["a"]
    shape = (N, H) if by_head else (1, N * H)
    rows = normed(kind, x.reshape(ROWS, *shape))
    scale, bias = (np.reshape(or_(a[c], d), (-1, 1)) for c, d in (("scale", 1.0), ("bias", 0.0)))
    if not by_head:
        scale, bias = scale.T, bias.T
    gated = or_(u, 1) * (rows * scale + bias).reshape(x.shape)
    parts = [u, x, gated] if len(a["weight"]) > N * H else [gated]
    parts = [x.reshape(ROWS, -1) * k for x, k in zip(parts, kept[-len(parts) :], strict=True)]
    added = or_(a["residual"], 0) + np.repeat(or_(a["shared"], np.zeros((1, F))), ROWS, axis=0)
    return np.concatenate(parts, axis=1) @ a["weight"] + added


def gated_linear(kind: str, by_head: bool, a: dict[str, Any], **options: Any) -> jax.Array:
    return ikbo.gated_linear(
        *(a["u"], a["a"], a["weight"], a["residual"], a["shared"]),
        norm=kind, by_head=by_head, eps=EPS,
        norm_scale=a["scale"], norm_bias=a["bias"], concat=len(a["weight"]) > N * H, **options,
    )  # fmt: skip


# --- both -----------------------------------------------------------------------------------------


def in_dtype(arrays: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {name: None if x is None else jnp.asarray(x, dtype) for name, x in arrays.items()}


def value_and_gradients(fn: Any, arrays: dict[str, Any], cotangents: Any) -> Any:
    out, pull_back = jax.vjp(fn, arrays)
    return out, pull_back(jax.tree.map(lambda c, x: jnp.asarray(c, x.dtype), cotangents, out))[0]


def agree(numpy_fn: Any, jax_fn: Any, arrays: dict[str, Any], dtype: str, units: float) -> None:
    """Asserts that values and all gradients of two functions of named arrays agree."""
    held = in_dtype(arrays, dtype)
    exact = {k: None if x is None else np.asarray(x, np.float64) for k, x in held.items()}
    outs = numpy_fn(**exact)
    rng = np.random.default_rng(9)
    cotangents = jax.tree.map(lambda out: rng.choice([-1.0, 0.5, 2.0], out.shape), outs)

    def loss(**a: Any) -> Any:
        found = numpy_fn(**a)
        return sum(np.sum(x * c) for x, c in zip(
            jax.tree.leaves(found), jax.tree.leaves(cotangents), strict=True
        ))  # fmt: skip

    found, gradients = jax.jit(functools.partial(value_and_gradients, jax_fn))(
        held, jax.tree.unflatten(jax.tree.structure(jax_fn(held)), jax.tree.leaves(cotangents))
    )
    unit = units * float(jnp.finfo(dtype).eps)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(outs), strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=unit, atol=unit)
    for name, y in complex_step.gradients(loss, exact).items():
        if y is not None:
            x = np.asarray(gradients[name], np.float64)
            largest = np.abs(y).max()
            np.testing.assert_allclose(x / largest, y / largest, atol=unit, err_msg=name)


LINEAR_CASES = [
    (LINEAR, "layer", (), "float32"),
    (LINEAR, "rms", ("norm",), "bfloat16"),
    (PLAIN, "rms", ("norm", "projection"), "float32"),
    (PLAIN, "layer", ("projection",), "float16"),
]


@pytest.mark.parametrize(("shapes", "kind", "recompute", "dtype"), LINEAR_CASES)
def test_norm_linear_is_numpys(shapes: Any, kind: str, recompute: Any, dtype: str) -> None:
    agree(
        functools.partial(numpy_norm_linear, kind),
        lambda a: list(norm_linear(kind, a, recompute=recompute)),
        *(drawn(shapes), dtype, UNITS[dtype]),
    )


@pytest.mark.parametrize(
    ("shapes", "kind", "by_head", "dtype"),
    [
        (GATED, "layer", False, "float32"),
        (BY_HEAD, "layer", True, "bfloat16"),
        (PRODUCT, "rms", True, "float32"),
        (PRODUCT, "layer", False, "float16"),
        (ADDED, None, False, "bfloat16"),
        (ADDED, "rms", True, "float32"),
        (PRODUCT | {"scale": (N * H,), "bias": (N * H,)}, "rms", False, "bfloat16"),
        (ADDED | {"scale": (N,), "bias": (N,)}, "layer", True, "float32"),
    ],
)
def test_gated_linear_is_numpys(shapes: Any, kind: str, by_head: bool, dtype: str) -> None:
    agree(
        functools.partial(numpy_gated_linear, kind, by_head),
        functools.partial(gated_linear, kind, by_head),
        *(drawn(shapes), dtype, UNITS[dtype]),
    )


KEY = jax.random.key(3)


def kept_numbers(rate: float) -> list[np.ndarray]:
    """The factors of u, a and u · norm(a) that the key gives."""
    seed = jnp.pad(jax.random.bits(KEY, (2,), jnp.uint32), (0, 1))
    gate = reference.Gate(reference.Norm(), dropout_rate=rate)
    kept = reference._kept_numbers(gate, seed, (ROWS, N * H))
    return [np.asarray(k) / (1 - rate) for k in kept]


def test_dropout_is_a_mask_of_all_rows() -> None:
    kept = kept_numbers(0.4)
    for shapes, by_head in (
        (GATED, False),
        (BY_HEAD, True),
        (BY_HEAD | {"weight": (N * H, F)}, True),
    ):
        agree(
            functools.partial(numpy_gated_linear, "layer", by_head, kept),
            functools.partial(gated_linear, "layer", by_head, dropout_rate=0.4, dropout_key=KEY),
            *(drawn(shapes), "float32", UNITS["float32"]),
        )
    gate = reference.Gate(reference.Norm(), dropout_rate=0.25)
    many = reference._kept_numbers(gate, jnp.array([7, 8, 0], jnp.uint32), (300, 64))
    for one in many:
        np.testing.assert_allclose(np.mean(one), 0.75, atol=0.01)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        np.testing.assert_allclose(np.mean(many[one] & many[other]), 0.75**2, atol=0.015)
    # Another first row gives the rows from there on.
    later = reference._kept_numbers(gate, jnp.array([7, 8, 100], jnp.uint32), (200, 64))
    np.testing.assert_array_equal(later, [one[100:] for one in many])


@pytest.mark.parametrize("batched", ["rows", "all"])
def test_vmap_of_results_and_gradients(batched: str) -> None:
    """Problems with the same weights are folded into one."""
    for shapes, fn, rows in (
        (LINEAR, lambda a: norm_linear("layer", a), ("x",)),
        (GATED, lambda a: gated_linear("layer", False, a), ("u", "a", "residual")),
    ):
        problems = [in_dtype(drawn(shapes, seed), "float32") for seed in (1, 2)]
        problems[1] = {k: x if batched == "all" or k in rows else problems[0][k]
                       for k, x in problems[1].items()}  # fmt: skip
        axes = {k: 0 if batched == "all" or k in rows else None for k in shapes}
        stacked = {
            k: x if axes[k] is None or x is None else jnp.stack([x, problems[1][k]])
            for k, x in problems[0].items()
        }

        def with_gradients(a: Any, fn: Any = fn) -> Any:
            out, pull_back = jax.vjp(fn, a)
            return out, pull_back(jax.tree.map(jnp.ones_like, out))[0]

        found = jax.jit(jax.vmap(with_gradients, ({k: axes[k] for k in stacked},)))(stacked)
        expected = [with_gradients(a) for a in problems]
        close(found, jax.tree.map(lambda *x: jnp.stack(x), *expected), 1e-5)
        if batched == "rows":
            (plan,) = ikbo.explain(jax.vmap(fn, ({k: axes[k] for k in stacked},)), stacked).plans
            assert plan.problem.rows == 2 * ROWS


def test_export_with_symbolic_rows() -> None:
    (rows,) = jax.export.symbolic_shape("r")
    for shapes, fn, names in (
        (LINEAR, lambda a: norm_linear("layer", a), ("x",)),
        (EACH_SHARES, lambda a: gated_linear("layer", False, a), ("u", "a", "residual", "shared")),
    ):
        arrays = in_dtype(drawn(shapes), "bfloat16")
        symbolic = {
            k: x if x is None else jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
            if k in names else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for k, x in arrays.items()
        }  # fmt: skip
        exported = jax.export.export(jax.jit(fn), platforms=["cpu", "cuda"])(symbolic)
        close(exported.call(arrays), jax.jit(fn)(arrays), 0)


def test_explain_says_that_xla_computes_and_why() -> None:
    arrays = in_dtype(drawn(LINEAR), "bfloat16")
    (plan,) = ikbo.explain(lambda a: norm_linear("layer", a), arrays).plans
    assert plan.problem == NormLinearProblem(
        ROWS, F, (N * H, N * 4, N), "layer", "bfloat16", "silu+identity+gelu"
    )
    assert (plan.implementation, plan.backward) == ("xla", "XLA")
    assert "multiples of 8 (16 bytes, for TMA), but F=6" in plan.cuda.reason
    arrays = in_dtype(drawn(BY_HEAD), "bfloat16")
    (plan,) = ikbo.explain(lambda a: gated_linear("layer", True, a), arrays).plans
    wanted = "rows=5 F=6 columns=6 bfloat16 layer norm, [u, a, u · norm(a)], 2 groups"
    assert plan.problem.describe() == wanted


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (f"{op}_{words}", words)
        for op in ("norm_linear", "gated_linear")
        for words in ("rows", "columns")
    ],
)
def test_explain_says_what_is_divided(name: str, word: str) -> None:
    case, mesh = CASES[name], mesh_of("8", "auto")
    (plan,) = ikbo.explain(case.op, *on_mesh(mesh, case, draw(case)).values()).plans
    assert f"{word} over 'x'" in plan.division


def test_no_rows() -> None:
    linear = in_dtype(drawn(LINEAR), "float32")
    out = norm_linear("layer", linear | {"x": linear["x"][:0]})
    assert [x.shape for x in out] == [(0, N, H), (0, N, 4), (0, N)]
    gated = in_dtype(drawn(EACH_SHARES), "float32")
    none = {k: gated[k][:0] for k in ("u", "a", "residual", "shared")}
    assert gated_linear("layer", False, gated | none).shape == (0, F)


def test_wrong_arguments_are_named_with_both_values() -> None:
    a, g = in_dtype(drawn(LINEAR), "float32"), in_dtype(drawn(GATED), "float32")

    def linear(**changes: Any) -> Any:
        options = {k: changes.pop(k) for k in list(changes) if k not in a}
        return lambda: norm_linear("layer", a | changes, **options)

    def gated(**changes: Any) -> Any:
        options = {k: changes.pop(k) for k in list(changes) if k not in g}
        return lambda: gated_linear("layer", False, g | changes, **options)

    for call, message in (
        (linear(w1=a["w1"][:5]), r"x has F=6 but weights\[1\] has F=5"),
        (linear(w1=a["w1"].astype(jnp.bfloat16)), r"x is float32 but weights\[1\] is bfloat16"),
        (linear(w0=a["w0"][None]), r"weights\[0\] must have shape \[F, N, H\]"),
        (linear(b0=a["b0"][:1]), r"biases\[0\] has shape \(1, 3\) but weights\[0\] has shape"),
        (linear(scale=a["scale"][:2]), r"norm_scale has shape \(2,\) but x has F=6"),
        (linear(x=a["x"][0]), r"x must have shape \[rows, F\]"),
        (linear(activations=("silu",)), "3 weights, 3 biases and 1 activations"),
        (linear(activations=("silu", "softmax", "gelu")), "unknown activation 'softmax' of group"),
        (linear(norm="batch"), "unknown norm 'batch'; known: 'layer', 'rms'"),
        (linear(eps=1e-40), "eps must be above 0 in float32, but is 1e-40"),
        (linear(recompute=("gate",)), "unknown name 'gate'; known: 'norm', 'projection'"),
        (linear(recompute=None), "recompute must hold names, but is None"),
        (linear(implementation="cuda"), "unknown implementation 'cuda'"),
        (gated(u=g["u"][:, :1]), r"u has shape \(5, 1, 3\) but a has shape \(5, 2, 3\)"),
        (gated(weight=g["weight"][:-1]), r"weight has shape \(17, 6\) but a has C=6, which needs"),
        (gated(residual=g["residual"][:1]), r"residual has shape \(1, 6\) but the result has"),
        (gated(residual=g["residual"].astype(jnp.float16)), "a is float32 but residual is float16"),
        (gated(shared=g["residual"][:2]), r"shared_residual has shape \(2, 6\) but the result has"),
        (gated(shared=g["residual"][:0]), r"shared_residual has shape \(0, 6\) but the result has"),
        (gated(u=None), "concat needs u, but u is None"),
        (gated(scale=g["scale"][:N]), r"norm_scale has shape \(2,\) but a has C=6"),
        (gated(dropout_rate=1.0), r"dropout_rate must be in \[0, 1\), but is 1.0"),
        (gated(dropout_rate=0.5, dropout_key=3), "dropout_key must be one key of jax.random, but"),
        (
            gated(dropout_rate=0.5, dropout_key=jax.random.split(KEY)),
            r"dropout_key must be one key of jax.random, but is key<fry>\[2\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    flat = {k: g[k].reshape(ROWS, -1) for k in ("u", "a")}
    with pytest.raises(ValueError, match=r"by_head needs a of shape \[rows, N, H\], but a has"):
        gated_linear("layer", True, g | flat)
    for call in (linear, gated):
        with pytest.raises(NotImplementedError, match="need a Hopper GPU"):
            call(implementation="mosaic_gpu")()
    with pytest.raises(NotImplementedError, match="norm_linear has no forward-mode"):
        jax.jvp(lambda x: norm_linear("rms", a | {"x": x}), (a["x"],), (a["x"],))


# --- which calls take the kernels, for which a fake stands ----------------------------------------


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        ("bfloat16", {}, ""),
        ("float32", {}, "float32"),
        ("bfloat16", {"features": 648}, "at most F=640 in shared memory, but F=648"),
        ("bfloat16", {"rows": 1}, "at least 2 rows, for TMA, but there is 1"),
        ("bfloat16", {"rows": 128}, "XLA is faster for at most 128 rows"),
    ],
)
def test_programs_for_hopper_have_the_kernel_where_it_takes_the_call(dtype, changes, reason):
    sizes = {"rows": 300, "features": 64} | changes
    x = jax.ShapeDtypeStruct((sizes["rows"], sizes["features"]), dtype)
    w = jax.ShapeDtypeStruct((sizes["features"], 2, 64), dtype)
    (plan,) = ikbo.explain(lambda x, w: ikbo.norm_linear(x, [w, w]), x, w).plans
    assert (plan.cuda.implementation, plan.cuda.backward[:3]) == (
        "xla" if reason else "mosaic_gpu",
        "XLA",
    )
    assert isinstance(plan.cuda.config, type(None) if reason else NormLinearConfig)
    assert reason in plan.cuda.reason


@pytest.mark.parametrize("recompute", [(), ("norm", "projection")])
def test_the_kernel_runs_below_a_gradient(recompute: tuple[str, ...]) -> None:
    x = jnp.ones((512, 8), jnp.bfloat16)
    w = jnp.ones((8, 16), jnp.bfloat16)

    def loss(x: Any, w: Any) -> jax.Array:
        options = {"activations": ["silu"], "recompute": recompute}
        return ikbo.norm_linear(x, [w], **options)[0].astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(loss))
    assert "mosaic_gpu" in jax.export.export(step, platforms=["cuda"])(x, w).mlir_module()
    mesh = mesh_of("2", "auto")
    for args in ((x, w), on(mesh, [x, w], [P("x"), P()])):
        (plan,) = ikbo.explain(step, *args).plans
        assert plan.cuda.implementation == "mosaic_gpu"
    assert plan.division.startswith("rows over")


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"by_head": True}, ""),
        ({"rows": 512}, {}, "XLA is faster for at most 512 rows"),
        ({"width": 72}, {"by_head": True}, "heads of a multiple of 64 columns, but there are 2 of"),
        ({"width": 66}, {}, "multiples of 8 (16 bytes, for TMA), but columns=132"),
        ({}, {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "the kernel drops nothing"),
    ],
)
def test_gated_linear_takes_the_kernel_with_and_without_a_gradient(changes, options, reason):
    rows, width = (changes.get(name, size) for name, size in (("rows", 600), ("width", 64)))
    u, w, x = (
        jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 2, width), (6 * width, 16), (rows, 16))
    )

    def loss(u: Any, w: Any, x: Any) -> jax.Array:
        found = ikbo.gated_linear(u, u, w, x, concat=True, **options)
        return found.astype(jnp.float32).sum()

    for fn in (jax.jit(loss), jax.jit(jax.value_and_grad(loss))):
        exported = jax.export.export(fn, platforms=["cuda"])(u, w, x)
        assert ("mosaic_gpu" in exported.mlir_module()) == (not reason)
        (plan,) = ikbo.explain(fn, u, w, x).plans
        assert (plan.cuda.implementation == "xla", plan.cuda.backward[:3]) == (bool(reason), "XLA")
        assert isinstance(plan.cuda.config, type(None) if reason else GatedLinearConfig)
        assert reason in plan.cuda.reason


@pytest.mark.parametrize("rows", [8192, 8200, 8209])
def test_sums_of_many_rows_have_equal_parts(rows: int) -> None:
    """8,209 rows have no parts."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (rows, columns)).astype(np.float32) for columns in (3, 130))
    program = jax.jit(reference._sum_of_rows).trace(a, b)
    parts = {8192: 256, 8200: 164, 8209: 1}[rows]
    assert f"f32[{parts},{rows // parts},3]" in str(program.jaxpr)
    np.testing.assert_array_equal(program.lower().compile()(a, b), a.T @ b)
