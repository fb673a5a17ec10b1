"""Every model of `rewrite_models`: results, gradients, report, and no copy of a user's tensor."""

import re
from collections.abc import Iterable, Iterator

import jax
import pytest
from batches import some_at_once
from rewrite_basics import check, gradients_by_all
from rewrite_models import MODELS, B, Model

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

ALL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
SEVERAL = some_at_once("models", MODELS.values(), 8, lambda model: model.name)


@pytest.fixture(autouse=True)
def models_may_add_a_bias_as_people_do() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def shapes_in(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays in StableHLO and HLO text."""
    stable = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    compiled = re.findall(r"[a-z]\d+\[([\d,]+)\]", text)
    found = {tuple(map(int, s.rstrip("x").split("x"))) for s in stable}
    return found | {tuple(map(int, s.split(","))) for s in compiled}


def in_any_order(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes as they are however an array is transposed."""
    return [tuple(sorted(shape)) for shape in shapes]


@ALL
def test_results_and_gradients_agree(model: Model) -> None:
    args = model.args()
    check(lambda fn: fn, model.fn, *args)
    # Gradients of a model in bfloat16 are sums in another order.
    bound = 2e-2 if "half" in model.name else 5e-5
    check(gradients_by_all(args), model.fn, *args, bound=bound)


@SEVERAL
def test_there_is_no_copy_of_a_users_tensor(models: tuple[Model, ...]) -> None:
    """Neither in a model's own program nor, once compiled, in one of several models."""
    args = [model.args() for model in models]
    for model, x in zip(models, args, strict=True):
        before, after = (
            shapes_in(jax.jit(fn).lower(*x).as_text()) for fn in (model.fn, ikbo.rewrite(model.fn))
        )
        never = in_any_order(model.never)
        # The first is a copy that the original makes; without it the test says nothing.
        assert not never or never[0] in in_any_order(before), model.name
        assert not set(never) & set(in_any_order(after)), model.name
    together = [ikbo.rewrite(model.fn) for model in models if model.never]
    operands = [x for model, x in zip(models, args, strict=True) if model.never]
    run = jax.jit(lambda args: [fn(*x) for fn, x in zip(together, args, strict=True)])
    compiled = in_any_order(shapes_in(run.lower(operands).compile().as_text()))
    assert not set(compiled) & {x for model in models for x in in_any_order(model.never)}


@ALL
def test_report(model: Model) -> None:
    (report,) = ikbo.explain(ikbo.rewrite(model.fn), *model.args()).notes
    text = report.details
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
