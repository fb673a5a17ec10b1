"""A small model, and what tests of the rewrite ask of a rewritten function."""

import dataclasses
import math
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
from float64_oracle import ROUNDED, UnknownPrimitive, evaluate
from jax.extend import core

import ikbo_jax as ikbo
from ikbo_jax.rewrite import Lazy, NotCovered, RewriteReport, register_rule
from ikbo_jax.rewrite.report.cost import program_cost
from ikbo_jax.rewrite.report.report import BothCosts
from ikbo_jax.rewrite.values import jaxprs, registry

B, U, D, C, H = 24, 4, 6, 5, 8


def arrays(seed: int = 0) -> types.SimpleNamespace:
    rng = np.random.default_rng(seed)
    shapes = {"user": (U, D), "cand": (B, C), "w": (D + C, H), "w_user": (D, H), "w_cand": (C, H)}
    made = {name: problems.random_array(rng, shape, "float32") for name, shape in shapes.items()}
    index = jnp.asarray(problems.ragged_index(rng, U, B, "unsorted"))
    return types.SimpleNamespace(**made, index=index)


A = arrays()
ARGS = (A.w, A.user, A.cand, A.index)


def model(w, user, cand, index):
    x = jnp.concatenate([user[index], cand], axis=1)
    return jax.nn.relu(x @ w)


def close(x, y) -> None:
    chex.assert_trees_all_close(x, y, atol=1e-5, rtol=1e-5)


def computed(fn, *args):
    """What a function returns: its traced program, evaluated with NumPy.

    To compile a program takes a second, to evaluate it some milliseconds. A program is compiled if
    NumPy does not know an equation, or if a result is NaN: XLA makes a select of a product with a
    mask, which hides NaN.
    """
    program, like = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    try:
        found = [x for x, _ in evaluate(program, leaves, ROUNDED)]
        is_compiled = any(np.isnan(x).any() for x in found)
    except UnknownPrimitive:
        is_compiled = True
    if is_compiled:
        found = jax.jit(core.jaxpr_as_fun(program))(*leaves)
    arrays = (np.asarray(x, aval.dtype) for x, aval in zip(found, program.out_avals, strict=True))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def both(fn, *args):
    """What the rewritten function and the function itself return."""
    return computed(ikbo.rewrite(fn), *args), computed(fn, *args)


def assert_same_up_to_rounding(rewritten, original, bound: float = 1e-5) -> None:
    """Compares arrays, of which the largest element says how large a rounding is."""
    for x, y in zip(jax.tree.leaves(rewritten), jax.tree.leaves(original), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        largest = np.nanmax(np.abs(y), initial=1e-6)
        np.testing.assert_allclose(x / largest, y / largest, rtol=bound, atol=bound)


def check(of, fn, *args, bound: float = 1e-5) -> None:
    """Compares what `of` makes of the rewritten function and of the function itself."""
    found, wanted = (computed(of(f), *args) for f in (ikbo.rewrite(fn), fn))
    assert_same_up_to_rounding(found, wanted, bound)


def loss(fn):
    """A sum of sines, whose gradients differ between elements."""
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))


def gradients_by_all(args):
    """Makes a function's gradients by every floating-point argument."""

    def is_floating(x) -> bool:
        return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x))

    floats = tuple(n for n, x in enumerate(args) if is_floating(x))
    return lambda fn: jax.grad(loss(fn), argnums=floats)


def check_values_and_gradients(fn, *args, bound: float = 1e-5) -> None:
    """The rewritten function's are the function's, and are NaN at the same places."""
    check(lambda fn: fn, fn, *args, bound=bound)
    check(gradients_by_all(args), fn, *args, bound=bound)


def every_equation(program, inside_ops: bool = True):
    """Yields the equations of a program and of the programs in it; an op is one without these."""
    for eqn in program.eqns:
        yield eqn
        if inside_ops or eqn.params.get("name") not in (*jaxprs.OPS, "rows_without_kept_keys"):
            for inner in jaxprs.inner_programs(eqn):
                yield from every_equation(inner, inside_ops)


def shapes(program, inside_ops: bool = True) -> set[tuple[int, ...]]:
    """The shapes of all that a program computes."""
    results = (v for eqn in every_equation(program, inside_ops) for v in eqn.outvars)
    return {tuple(v.aval.shape) for v in results if hasattr(v.aval, "shape")}


def largest_outside_ops(fn, *args) -> int:
    """The elements of the largest array that a rewritten program computes, ops aside."""
    found = shapes(jax.make_jaxpr(ikbo.rewrite(fn))(*args), inside_ops=False)
    return max(map(math.prod, found))


def useful_flops(fn, *args) -> list[int]:
    """The useful FLOPs of a function and of its rewrite, which on a CPU may compute more."""
    return [program_cost(jax.make_jaxpr(f)(*args)).flops for f in (fn, ikbo.rewrite(fn))]


def share_saved(fn, *args) -> float:
    """The share of a function's useful FLOPs that its rewrite saves."""
    original, ours = useful_flops(fn, *args)
    return 1 - ours / original


def report_of(fn, *args, **kwargs) -> RewriteReport:
    (report,) = ikbo.explain(ikbo.rewrite(fn), *args, **kwargs).notes
    str(report)
    return report


def same(fn, *args, rtol=1e-5) -> RewriteReport:
    """Asserts that a function and its rewrite agree, with and without jit; returns the report."""
    expected = fn(*args)
    for ours in (ikbo.rewrite(fn)(*args), jax.jit(ikbo.rewrite(fn))(*args)):
        chex.assert_trees_all_equal_structs(ours, expected)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            assert jax.typeof(x) == jax.typeof(y)
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            x, y = (np.asarray(z.astype("float32") if z.dtype.itemsize < 2 else z) for z in (x, y))
            np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)
    return report_of(fn, *args)


def without_costs(report: RewriteReport) -> RewriteReport:
    """The costs differ: a value that a call returns is written."""
    return dataclasses.replace(report, costs=BothCosts())


def equations(fn, *args):
    """Those of the rewritten program, also if its derivative is another program's."""
    eqns = jax.make_jaxpr(ikbo.rewrite(fn))(*args).eqns
    calls = [e.params["program"] for e in eqns if e.primitive.name == "ikbo_rewritten"]
    eqns = calls[0].eqns if calls else eqns
    return eqns[0].params["jaxpr"].eqns if eqns[0].params.get("name") == "rewritten" else eqns


def became(fn, *args) -> str:
    return "\n".join("\n".join(b.became) for b in report_of(fn, *args).broadcasts)


def embed(w, e_user, e_cand, index):
    return jnp.einsum("mk,bkn->bmn", w, jnp.concatenate([e_user[index], e_cand], axis=1))


def embeddings(rng_seed: int = 0) -> tuple[jax.Array, ...]:
    shape = problems.LinearCompressionShape(U, B, 7, 3, 2, 8, "unsorted")
    w_cand, w_user, e_cand, e_user, index = problems.make_inputs(shape, "float32", rng_seed)
    return jnp.concatenate([w_user, w_cand], axis=1), e_user, e_cand, index


def add_rule_whose_fast_form_has_another_derivative(monkeypatch) -> list[bool]:
    """Adds a rule of `atan` of looked-up values, whose fast form has the derivative 0.

    Returns:
      For each call of the rule, whether it was asked for a form to differentiate.
    """
    monkeypatch.setitem(registry._RULES, "lazy", dict(registry._RULES["lazy"]))
    calls: list[bool] = []

    @register_rule("atan")
    def rule(ctx, eqn, x):
        calls.append(ctx.differentiated)
        if not isinstance(x, Lazy):
            raise NotCovered("atan of a concatenation")
        base = ctx.bind(eqn, x.base)
        if not ctx.differentiated:
            ctx.gradient_differs()
            base = jax.lax.stop_gradient(base)
        return Lazy(base, x.shape, x.lineage, x.axis, x.origins)

    return calls
