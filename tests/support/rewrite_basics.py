"""A small model, and what tests of the rewrite ask of a rewritten function."""

from __future__ import annotations

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems

import ikbo_jax as ikbo
from ikbo_jax.rewrite import RewriteReport
from ikbo_jax.rewrite.work import BothCosts

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


def both(fn, *args):
    """What the rewritten function and the function itself return, of one program."""
    return jax.jit(lambda *args: (ikbo.rewrite(fn)(*args), fn(*args)))(*args)


def check_values_and_gradients(fn, *args) -> None:
    """The rewritten function's are the function's, and are NaN at the same places."""
    floats = tuple(n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact))

    def gradients(fn, *args):
        return jax.grad(lambda *args: jnp.sin(fn(*args)).sum(), argnums=floats)(*args)

    @jax.jit
    def of_both(*args):
        return [gradients(f, *args) for f in (ikbo.rewrite(fn), fn)]

    for rewritten, original in (both(fn, *args), of_both(*args)):
        for x, y in zip(jax.tree.leaves(rewritten), jax.tree.leaves(original), strict=True):
            largest = np.nanmax(np.abs(y), initial=1e-6)
            np.testing.assert_allclose(x / largest, y / largest, rtol=1e-5, atol=1e-5)


def report_of(fn, *args, **kwargs) -> RewriteReport:
    (report,) = ikbo.explain(ikbo.rewrite(fn), *args, **kwargs).notes
    return report


def without_costs(report: RewriteReport) -> RewriteReport:
    """The costs differ: a value that a call returns is written."""
    broadcasts = tuple(dataclasses.replace(x, costs=None) for x in report.broadcasts)
    return dataclasses.replace(report, broadcasts=broadcasts, costs=BothCosts())


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
