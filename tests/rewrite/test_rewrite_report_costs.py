"""What the report says of costs, against counts taken from the two programs, for every layout."""

import inspect
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import layout_models  # These fill the table.
import layout_positions
import layout_sequences
import pytest
from layout_table import LAYOUTS
from rewrite_basics import report_of

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch, explain
from ikbo_jax.rewrite import RewriteReport
from ikbo_jax.rewrite.report import cost, report
from ikbo_jax.rewrite.report.report import BothCosts
from ikbo_jax.rewrite.values import jaxprs

FILES = tuple(f"{x.__name__}.py:" for x in (layout_models, layout_positions, layout_sequences))


def products(program) -> int:
    """The FLOPs of a program's products, counted without the pass's own model of costs."""
    count = 0
    for eqn in program.eqns:
        out = eqn.outvars[0].aval
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            count += 2 * out.size * summed
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            count += 2 * out.size * kernel.size // kernel.shape[features]
        elif eqn.params.get("name") in ("_attention", "_gdpa", "_linear_compression"):
            (problem,) = {
                x.problem
                for x in explain.marks(eqn.params["jaxpr"])
                if isinstance(x, dispatch.Plan)
            }
            useful = problem.useful_flops
            if callable(useful):
                useful = useful(problem.q_rows * problem.max_seqlen_kv)
            count += useful
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            count += times * sum(map(products, jaxprs.inner_programs(eqn)))
    return count


@pytest.mark.parametrize("name", LAYOUTS)
def test_costs_are_those_of_the_two_programs(name: str) -> None:
    layout = LAYOUTS[name]
    args = layout.args()
    before, after = (jax.make_jaxpr(fn)(*args) for fn in (layout.fn, ikbo.rewrite(layout.fn)))
    report = report_of(layout.fn, *args)
    assert report.changed
    assert report.flops_saved == products(before) - products(after)
    moved = [cost.program_cost(x).nbytes for x in (before, after)]
    assert report.bytes_saved == moved[0] - moved[1]
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


def test_costs_in_words() -> None:
    before, after = cost.Cost(2_000_000, 1500), cost.Cost(500_000, 0)
    assert str(BothCosts(before, after)) == "1.5 MFLOP of 2 MFLOP, all 1.5 kB"
    assert str(BothCosts(after, before)) == (
        "-1.5 MFLOP of 500 kFLOP, but moves 1.5 kB instead of 0 B"
    )
    assert str(BothCosts()) == "0 FLOP, 0 B"


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


def _of_xla(found) -> list[str]:
    (line,) = [x for x in str(found).split("\n") if "XLA counts" in x]
    return line.replace("of the original ", "").split("; ")
