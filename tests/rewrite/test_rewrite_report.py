"""The meaning of lookups, and what the report says of them."""

import copy
import dataclasses
import inspect
import pathlib
import pickle
import re
import sys
import types

import jax
import jax.numpy as jnp
import layout_models
import layout_sequences
import numpy as np
import pytest
from layout_table import LAYOUTS
from rewrite_basics import (
    ARGS,
    A,
    B,
    C,
    D,
    H,
    U,
    both,
    close,
    embed,
    embeddings,
    every_equation,
    model,
    report_of,
)

import ikbo_jax as ikbo
from ikbo_jax.rewrite import RewriteReport
from ikbo_jax.rewrite.report import cost, report
from ikbo_jax.rewrite.report.report import BothCosts

# Meaning of the lookup.

OUTSIDE = jnp.asarray([0, 3, 9, -1, -9, 2] * 4, jnp.int32)


def drops_nan(user, index):
    users = jnp.take(user, index, axis=0)
    return jnp.where(users > 0, users, 0.0) @ A.w_user


def test_what_drops_nan_runs_on_a_row_of_nan() -> None:
    close(*both(drops_nan, A.user, OUTSIDE))
    report = report_of(drops_nan, A.user, OUTSIDE)
    assert [place.line for place in report.materialised] == ["the function's result"]


@pytest.mark.parametrize(
    "in_bounds",
    [
        lambda index: jnp.clip(index, 0, U - 1),
        lambda index: jnp.minimum(jnp.maximum(index, 0), U - 1),
        lambda index: jnp.arange(B, dtype=jnp.int32) % U,
        lambda index: jnp.arange(B, dtype=jnp.int32) // 6,
        lambda index: np.arange(B, dtype=np.int32) % U,
        lambda index: jnp.repeat(
            jnp.arange(U, dtype=jnp.int32), jnp.bincount(index, length=U), total_repeat_length=B
        ),
    ],
)
def test_indices_known_to_be_in_bounds_have_no_rows_to_fill(in_bounds) -> None:
    def fn(user, index):
        return drops_nan(user, in_bounds(index))

    report = report_of(fn, A.user, A.index)
    assert report.changed
    assert [place.reason for place in report.materialised] == ["returned by the function"]
    close(*both(fn, A.user, A.index))


def test_counts_that_do_not_add_up() -> None:
    def fn(user, counts):
        users = jnp.repeat(user, counts, axis=0, total_repeat_length=B)
        return jnp.where(users > 0, users, 1.0) @ A.w_user

    for count in (0, 3, 30):
        close(*both(fn, A.user, jnp.asarray([5, count, 0, 2], jnp.int32)))


def test_integers_filled_with_a_number() -> None:
    def fn(ids, index):
        return jnp.take(ids, index, axis=0) * 2

    ids = jnp.arange(U * 3, dtype=jnp.int32).reshape(U, 3)
    np.testing.assert_array_equal(ikbo.rewrite(fn)(ids, OUTSIDE), fn(ids, OUTSIDE))


# The report.


def scored(user, cand, index):
    users = user[index]
    gate = jax.nn.sigmoid(users @ A.w_user)
    return jnp.sort(gate, axis=0), gate * (cand @ A.w_cand)


def test_report_tells_lines_what_it_became_and_what_was_saved() -> None:
    report = report_of(scored, A.user, A.cand, A.index)
    first = scored.__code__.co_firstlineno
    (found,) = report.broadcasts
    assert found.line == f"test_rewrite_report.py:{first + 1} (scored)"
    assert found.what == f"float32[{U},{D}] looked up by {B} indices -> float32[{B},{D}]"
    assert found.became == (
        f"product at the smaller batch, test_rewrite_report.py:{first + 2} (scored)",
        "work at the smaller batch",
        f"materialised, test_rewrite_report.py:{first + 3} (scored)",
    )
    assert report.flops_saved >= (B - U) * 2 * D * H
    (place,) = report.materialised
    assert place.line == f"test_rewrite_report.py:{first + 3} (scored)"
    assert (place.what, place.nbytes) == (f"float32[{B},{H}]", 4 * B * H)
    assert place.reason == "sort along the looked-up axis"
    headline = f"rewrite: 1 broadcast found; {report.costs}"
    first_lines = [headline, f"  {found.line}: {found.what}"]
    copied = f"    copied by {place}"
    assert str(report).splitlines() == [*first_lines, copied]
    became = [f"    -> {text}" for text in found.became]
    assert report.details.splitlines() == [*first_lines, *became, copied]


def test_entries_that_are_the_same_are_printed_once() -> None:
    report = report_of(model, *ARGS)
    (found,) = report.broadcasts
    text = dataclasses.replace(report, broadcasts=(found,) * 3).details
    assert text.startswith("rewrite: 3 broadcasts found; saves ")
    assert f"\n  3 times, each: {found.line}: {found.what}\n" in text
    assert text.count(found.what) == 1


def test_the_report_outlives_jit_and_stands_beside_the_ops() -> None:
    compiled = jax.jit(ikbo.rewrite(embed))
    compiled(*embeddings())
    explanation = ikbo.explain(compiled, *embeddings())
    assert [plan.op for plan in explanation.plans] == ["linear_compression"]
    (report,) = explanation.notes
    assert report.changed
    lines = str(explanation).splitlines()
    assert lines[0].startswith("rewrite: 1 broadcast found; saves ")
    assert [line for line in lines if line.startswith("1. linear_compression: ")]
    assert explanation.details.startswith(report.details + "\n1. ")


def test_the_documents_report_is_what_is_printed(tmp_path) -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "rewrite.md").read_text("utf-8")
    (source,) = re.findall(r"`model.py`,\n\n```python\n(.*?)```", text, re.DOTALL)
    short, details = re.findall(r"```\n(rewrite: .*?)\n```", text, re.DOTALL)
    path = tmp_path / "model.py"
    path.write_text(source, "utf-8")
    namespace: dict = {}
    exec(compile(source, str(path), "exec"), namespace)
    shapes = [(15, 64), (1024, 32), (64, 128), (160, 256)]
    user, cand, w_user, w_first = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    index = jax.ShapeDtypeStruct((1024,), jnp.int32)
    report = report_of(namespace["score"], user, cand, index, w_user, w_first)
    # Versions of XLA count other bytes.
    number = re.compile(r"[.\d]+(?= [kM]?(?:FLOP|B))")
    for found, told in ((str(report), short), (report.details, details)):
        assert number.sub("", found) == number.sub("", told)
        amounts = (list(map(float, number.findall(x))) for x in (found, told))
        np.testing.assert_allclose(*amounts, rtol=0.1)


def untouched(w, cand):
    return jax.nn.gelu(cand @ w)


def test_nothing_found_runs_the_original() -> None:
    report = report_of(untouched, A.w_cand, A.cand)
    assert report == RewriteReport(False)
    assert str(report) == "rewrite: no broadcast found; the original function runs"
    ours = jax.jit(ikbo.rewrite(untouched)).lower(A.w_cand, A.cand).as_text()
    theirs = jax.jit(untouched).lower(A.w_cand, A.cand).as_text()
    assert ours == theirs


def test_nothing_gained_runs_the_original() -> None:
    def fn(user, cand, index):
        return user[index][:, :C] + cand

    report = report_of(fn, A.user, A.cand, A.index)
    assert not report.changed
    assert "nothing gained; the original function runs" in str(report)
    assert (report.flops_saved, report.bytes_saved) == (0, 0)
    assert "saves" not in report.details
    np.testing.assert_array_equal(
        ikbo.rewrite(fn)(A.user, A.cand, A.index), fn(A.user, A.cand, A.index)
    )


def test_explanation_can_be_pickled_and_copied() -> None:
    found = ikbo.explain(ikbo.rewrite(model), *ARGS)
    for same in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert same == found
        assert same.details == found.details


# What the report says of costs, against counts taken from the two programs, for every layout.

FILES = tuple(f"{x.__name__}.py:" for x in (layout_models, layout_sequences))


@pytest.mark.parametrize("name", LAYOUTS)
def test_costs_are_xlas(name: str) -> None:
    layout = LAYOUTS[name]
    args, programs = layout.args(), (layout.fn, ikbo.rewrite(layout.fn))
    report = report_of(layout.fn, *args)
    assert report.changed
    for fn, told in zip(programs, (report.costs.original, report.costs.rewritten), strict=True):
        counts = jax.jit(fn).lower(*args).compile().cost_analysis()
        found = counts["flops"], counts["bytes accessed"]
        # Of a loop, XLA counts one step.
        if any(x.primitive.name == "scan" for x in every_equation(jax.make_jaxpr(fn)(*args))):
            assert told[:2] >= found
        else:
            np.testing.assert_allclose(told[:2], found, rtol=1e-3)
    check_text_is_plain_and_names_lines_of_the_model(report)


def check_text_is_plain_and_names_lines_of_the_model(report: RewriteReport) -> None:
    for text in (str(report), report.details):
        assert text.isascii()
        assert all(line.isprintable() and line == line.rstrip() for line in text.split("\n"))
    assert len(str(report)) < len(report.details)
    for line in re.findall(r"\S+:\d+ \(\w+\)", report.details):
        assert line.startswith(FILES), line
    assert "unknown line" not in report.details
    assert all(x.outcome == "removed" or x.reason for x in report.lookups)


def line_of(fn, text: str) -> str:
    """The line of a function that contains `text`, as the report names it."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = (n for n, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(fn).rpartition('/')[2]}:{first + offset} ({fn.__name__})"


@pytest.mark.parametrize(
    ("name", "lookup", "keepers"),
    [
        ("din", "history[index]", []),
        ("ids_flattened", "user_ids[index]", []),
        ("dlrm", "user_fields[index]", ['einsum("bfd,bgd->bfg"']),
        ("additive_attention", "history[index]", ['einsum("bs,bsd->bd"']),
        ("attention_with_a_bias_of_the_user", "history[index]", []),
    ],
)
def test_lines_of_a_lookup_and_of_what_keeps_the_rest(name, lookup, keepers) -> None:
    layout = LAYOUTS[name]
    found = report_of(layout.fn, *layout.args()).broadcasts[0]
    assert found.line == line_of(layout.fn, lookup)
    lines = [text.partition(": ")[0] for text in found.kept]
    assert lines == [line_of(layout.fn, text) for text in keepers]


def test_functions_of_jax_have_the_lines_of_their_callers() -> None:
    """JAX traces `jnp.take` once, for the first of these lines."""

    def fn(user, other, index):
        first = jnp.take(user, index, axis=0, mode="clip")
        second = jnp.take(other, index, axis=0, mode="clip")
        weights = jax.nn.softmax(first)
        others = jax.nn.softmax(second)
        return weights, jnp.sort(others, axis=0)

    user, index = jnp.ones((4, 8)), jnp.zeros(96, jnp.int32)
    report = report_of(fn, user, 2 * user, index)
    assert [x.line for x in report.broadcasts] == [
        line_of(fn, "jnp.take(user"),
        line_of(fn, "jnp.take(other"),
    ]
    (kept,) = report.broadcasts[1].kept
    assert kept.startswith(line_of(fn, "jnp.sort"))


def test_files_of_libraries_of_layers_are_not_the_models(monkeypatch) -> None:
    keras = types.SimpleNamespace(__file__="/libraries/keras/__init__.py")
    monkeypatch.setitem(sys.modules, "keras", keras)
    assert not report._is_model("/libraries/keras/src/dense.py")
    assert report._is_model("/libraries/model.py")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((2_000_000, 1500), (500_000, 0), "saves 1.5 MFLOP of 2 MFLOP, all 1.5 kB"),
        (
            (500_000, 0),
            (2_000_000, 1500),
            "computes 2 MFLOP instead of 500 kFLOP and moves 1.5 kB instead of 0 B",
        ),
        (
            (1000, 1000),
            (950, 951),
            "saves 50 FLOP of 1 kFLOP, but moves about as many bytes (1 kB)",
        ),
        (
            (1000, 1000),
            (1049, 1050),
            "computes about as many FLOPs (1 kFLOP) and moves 1.05 kB instead of 1 kB",
        ),
        ((0, 1000), (0, 900), "saves 100 B of 1 kB"),
        ((0, 0), (0, 0), ""),
    ],
)
def test_costs_in_words(before, after, words) -> None:
    """A difference that is smaller than the estimate's error has no sign."""
    assert str(BothCosts(cost.Cost(*before), cost.Cost(*after))) == words


def test_explain_compiles_both_programs_and_shows_what_xla_counts() -> None:
    def fn(user, index):
        return jnp.tanh(user[index] @ jnp.ones((64, 64)))

    args = jnp.ones((4, 64)), jnp.zeros(512, jnp.int32)
    found = ikbo.explain(jax.jit(ikbo.rewrite(fn)), *args, compile=True)
    ours, original = (float(x.split("counts ")[-1].split()[0].strip()) for x in _of_xla(found))
    # XLA's figures have the sign of the estimate's.
    assert ours < original / 10
    assert found.notes[0].flops_saved > 0
    assert "XLA counts" not in str(ikbo.explain(ikbo.rewrite(fn), *args))
    gradient = jax.grad(ikbo.rewrite(lambda *args: fn(*args).sum()))
    assert "original" not in str(ikbo.explain(gradient, *args, compile=True))


def _of_xla(found) -> list[str]:
    (line,) = [x for x in str(found).split("\n") if "XLA counts" in x]
    return line.replace("of the original ", "").split("; ")
