"""Every model of `rewrite_models`: results, gradients, report, and no copy of a user's tensor."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite_models import MODELS, B, Model

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

ALL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def models_may_add_a_bias_as_people_do() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def assert_close(actual, expected, factor: float = 1.0, name: str = "") -> None:
    """Equal but for the order of f32 sums, or that of bf16 where a model computes in it."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        scale = np.max(np.abs(np.asarray(y, np.float64)), initial=1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * factor * scale, err_msg=name)


def shapes_in(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays in StableHLO and HLO text."""
    stable = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    compiled = re.findall(r"[a-z]\d+\[([\d,]+)\]", text)
    found = {tuple(map(int, s.rstrip("x").split("x"))) for s in stable}
    return found | {tuple(map(int, s.split(","))) for s in compiled}


def test_there_are_enough() -> None:
    assert len(MODELS) >= 25
    assert sum(bool(model.never) for model in MODELS.values()) >= 25


@ALL
def test_results_agree_without_a_copy_of_a_users_tensor(model: Model) -> None:
    args = model.args()
    lowered = [jax.jit(fn).lower(*args) for fn in (model.fn, ikbo.rewrite(model.fn))]
    compiled = [program.compile() for program in lowered]
    expected, actual = (run(*args) for run in compiled)
    assert_close(actual, expected)
    before, after = (
        shapes_in(x.as_text() + y.as_text()) for x, y in zip(lowered, compiled, strict=True)
    )
    # The first of the shapes is a copy that the original makes; without it the test says nothing.
    assert not model.never or model.never[0] in before
    assert [shape for shape in model.never if shape in after] == []


#: Spellings of attention, whose gradients are compared in test_rewrite_attention.py.
SPELLINGS = (
    "attention_by_jax_nn",
    "attention_with_lengths",
    "attention_by_linen",
    "attention_by_nnx",
    "attention_by_einsum_btnh",
)
DIFFERENTIABLE = [model for name, model in MODELS.items() if name not in SPELLINGS]


@pytest.mark.parametrize(
    "models", list(itertools.batched(DIFFERENTIABLE, 6)), ids=lambda x: x[0].name
)
def test_gradients_agree(models: tuple[Model, ...]) -> None:
    """Of several models in one program: compiling each is what would take the time."""

    def gradients(fn, args):
        floats = [n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

        def loss(*args):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))

        return jax.grad(loss, argnums=floats)(*args)

    @jax.jit
    def run(args):
        pairs = zip(models, args, strict=True)
        return [[gradients(f, x) for f in (ikbo.rewrite(m.fn), m.fn)] for m, x in pairs]

    found = run([model.args() for model in models])
    for model, (actual, expected) in zip(models, found, strict=True):
        factor = 2000 if "half" in model.name else 5
        assert_close(actual, expected, factor, model.name)


@ALL
def test_report(model: Model) -> None:
    (report,) = ikbo.explain(ikbo.rewrite(model.fn), *model.args()).notes
    text = str(report)
    position = 0
    for phrase in model.became:
        position = text.find(phrase, position)
        assert position >= 0, f"{phrase!r} not in, or not in this order:\n{text}"
    assert len(report.materialised) == model.materialised, text
    if model.became:
        assert report.changed
        lines = [found.line for found in report.broadcasts] + re.findall(r", (\S+:\d+)", text)
        assert lines
        assert all(line.startswith("rewrite_models.py:") for line in lines), text
        assert report.flops_saved > 0 or report.bytes_saved > 0
    else:
        assert not report.changed
        assert "the original function runs" in text


def test_shapes_in_reads_both_texts() -> None:
    assert shapes_in("f32[48,9,8]{2,1,0} tensor<6x9xf32> s32[48]") == {(48, 9, 8), (6, 9), (B,)}
