"""Every model of `rewrite_models`: results, gradients, report, and no copy of a user's tensor."""

from __future__ import annotations

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


def assert_close(actual, expected, factor: float = 1.0) -> None:
    """Equal but for the order of f32 sums, or that of bf16 where a model computes in it."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        scale = np.max(np.abs(np.asarray(y, np.float64)), initial=1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * factor * scale)


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


@ALL
def test_gradients_agree(model: Model) -> None:
    args = model.args()
    floats = [n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        pytest.skip("no argument is differentiable")

    def loss(fn):
        def of(*args):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))

        return jax.jit(jax.grad(of, argnums=floats))

    factor = 2000 if "half" in model.name else 5
    assert_close(loss(ikbo.rewrite(model.fn))(*args), loss(model.fn)(*args), factor)


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
