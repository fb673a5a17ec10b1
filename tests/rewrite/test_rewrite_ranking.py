"""The models of the examples: values, gradients, and the work that their rewrite saves."""

import jax
import numpy as np
import pytest
from rewrite_basics import assert_same_up_to_rounding, computed, loss, report_of, share_saved

import ikbo_jax as ikbo
from examples import ranking_models as examples

pytestmark = pytest.mark.usefixtures("models_may_promote")

#: Shares of the FLOPs that the small models of the examples save at least; others save none.
SAVED = {
    "autoint": 0.19,
    "dlrm": 0.67,
    "dcn": 0.38,
    "dcn_low_rank": 0.3,
    "xdeepfm": 0.17,
    "masknet": 0.43,
    "fibinet": 0.42,
    "mmoe": 0.86,
    "ple": 0.72,
    "two_tower": 0.77,
    "listwise": 0.55,
    "din": 0.44,
    "dien": 0.2,
    "bst": 0.18,
    "twin": 0.73,
    "sasrec": 0.93,
    "transformer": 0.93,
    "hstu": 0.93,
    "phoenix": 0.77,
}


@pytest.mark.parametrize("name", examples.MODELS)
def test_models_of_the_examples(name, monkeypatch):
    """Asserts as well that forms by hand, which these are timed beside, compute the same."""
    monkeypatch.setattr(examples, "LAYERS", 2)
    program = examples.Program(name, examples.SMALL, "float32")
    args = program.arguments()

    fns = [ikbo.rewrite(program.scores)] + [program.by_hand] * program.has_form_by_hand
    for of in (lambda fn: fn, lambda fn: jax.grad(loss(fn), (0, 1))):
        original = computed(of(program.scores), *args)
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(original))
        for fn in fns:
            assert_same_up_to_rounding(computed(of(fn), *args), original, 5e-5)
    report = report_of(program.scores, *args)
    assert share_saved(program.scores, *args) >= SAVED.get(name, 0), report
    assert report.changed, report


def test_the_example_prints_its_reports(capsys):
    assert examples.main(["two_tower"]) == 0
    assert "two_tower\nrewrite: 1 broadcast" in capsys.readouterr().out
