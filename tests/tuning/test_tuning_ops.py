"""What holds for every op in the dispatch table and in the autotuner."""

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_tuning_attention as of_attention
import test_tuning_compressions as of_compressions
import test_tuning_gdpa as of_gdpa
import test_tuning_gradients as of_gradients
from fake_tuning import ATTENTION, GDPA, LINEAR, QUICK, Bench, other, row

from ikbo_jax import cases, problems
from ikbo_jax.autotuner import autotune, bench
from ikbo_jax.autotuner.bench import Task
from ikbo_jax.tuning import table, table_rows, user_cache

GRADIENTS = {
    LINEAR: problems.LinearCompressionBackwardProblem.of(LINEAR),
    ATTENTION: problems.AttentionBackwardProblem.of(ATTENTION),
    GDPA: problems.GdpaBackwardProblem.of(GDPA),
}
EVERY = [*GRADIENTS, *GRADIENTS.values()]
LINEAR_BACKWARD, ATTENTION_BACKWARD, GDPA_BACKWARD = GRADIENTS.values()

# For the machine of the tests.
TINY_GDPA = of_gdpa.TINY
TINY_ATTENTION = problems.AttentionProblem(40, 3, 2, 9, 4, 2, 16, "float32")
#: More candidates than are compared with the oracle.
TINY_LINEAR = problems.LinearCompressionProblem(
    (3, 2 * cases.case.SAMPLED), (7, 5), 9, 16, "float32"
)
TINY_LINEAR_BACKWARD = problems.LinearCompressionBackwardProblem((3, 20), (9, 7), 6, 8, "float32")
TINY_GDPA_BACKWARD = problems.GdpaBackwardProblem(
    *(4, 4, 20, 24, 2, 1, 8, "float32"), *(("silu",), None, False, 9, None)
)
TINY_ATTENTION_BACKWARD = problems.AttentionBackwardProblem.of(TINY_ATTENTION)


def op_of(problem: Any) -> str:
    return problem.op


# Rows.


ROWS = {
    **{f"{problem.op}, default": row(problem) for problem in EVERY},
    **{f"{problem.op}, another": row(problem, other(problem)) for problem in EVERY},
    **{f"{problem.op}, XLA": row(problem, None) for problem in EVERY},
    "activations of heads": row(dataclasses.replace(GDPA, activations=("relu", "gelu") * 2)),
    "packed tiles": row(of_compressions.PACKED),
    "resident weights": row(of_compressions.SMALL),
    "fraction of zero": dataclasses.replace(row(LINEAR), fraction=0.0),
    "no time of XLA": dataclasses.replace(row(LINEAR), xla_ms=None),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_survive_json(name):
    assert table_rows.Row.from_json(json.loads(json.dumps(ROWS[name].to_json()))) == ROWS[name]


def test_rows_of_all_ops_share_the_users_cache():
    for problem in EVERY:
        path = user_cache.write_user_row(row(problem, other(problem)))
    assert {r["op"] for r in json.loads(path.read_text())["rows"]} == set(problems.PROBLEMS)
    for problem in EVERY:
        choice = table.lookup(problem)
        assert (choice.config, choice.source, choice.exact) == (other(problem), "user cache", True)


@pytest.mark.parametrize(("result", "gradient"), GRADIENTS.items(), ids=map(op_of, GRADIENTS))
def test_rows_of_one_direction_say_nothing_about_the_other(result, gradient, builtin):
    assert result.distance(gradient) == gradient.distance(result) == float("inf")
    builtin(row(result), row(gradient, other(gradient)))
    assert table.lookup(gradient).config == other(gradient)
    assert table.lookup(result).config == result.default_config()
    builtin(row(result))
    choice = table.lookup(gradient)
    assert (choice.config, choice.source) == (gradient.default_config(), "default")
    builtin(row(gradient, None))
    assert (table.lookup(result).source, table.lookup(gradient).config) == ("default", None)


FEW = of_attention.FEW
LONG, SHORT, LONG_BACKWARD = of_gdpa.DEFAULT, of_gdpa.SHORT, of_gradients.GDPA
ROWS_OF_LONG = {"q_rows": LONG_BACKWARD.q_rows, "kv_rows": LONG_BACKWARD.kv_rows}


@pytest.mark.parametrize(
    ("measured", "config", "near", "far"),
    [
        (
            *(LINEAR, other(LINEAR), []),
            [{"batches": (30, 2048)}, {"dtype": "float16"}, {"n": 264}, {"m": 432}],
        ),
        # Tiles of 224 rows would pad 512 to 672.
        (LINEAR, LINEAR.default_config(), [], [{"m": 512}]),
        (
            LINEAR_BACKWARD,
            dataclasses.replace(LINEAR_BACKWARD.default_config(), stages=4),
            *([{"batches": (18, 900)}], [{"m": 40}, {"ks": (1178, 20)}]),
        ),
        (ATTENTION, other(ATTENTION), [], [{"head_dim": 192}]),
        (FEW, problems.FewQueriesConfig(splits=3), [], [{"kv_len": 4096}, {"q_len": 64}]),
        (LONG, other(LONG), [], [{"activations": ("relu",), "approx": None}, {"head_dim": 64}]),
        # Runs are for keys that stay, narrow blocks for short sequences.
        (
            *(SHORT, SHORT.default_config(), [{"batch": 1100}]),
            [{"kv_rows": LONG.kv_rows, "max_seqlen_kv": LONG.max_seqlen_kv}],
        ),
        (
            dataclasses.replace(LONG_BACKWARD, q_rows=1152 * 20, kv_rows=1152 * 20),
            problems.GdpaBackwardConfig(32, 3),
            [{"batch": 1100}],
            [ROWS_OF_LONG, ROWS_OF_LONG | {"activations": ("softmax",)}],
        ),
    ],
)
def test_rows_speak_for_near_problems_alone(measured, config, near, far, builtin):
    builtin(row(measured, config))
    for changes in near:
        choice = table.lookup(dataclasses.replace(measured, **changes))
        assert (choice.config, choice.exact) == (config, False)
        assert "sm90.json, nearest row" in choice.reason
    for changes in far:
        asked = dataclasses.replace(measured, **changes)
        choice = table.lookup(asked)
        assert (choice.config, choice.source) == (asked.default_config(), "default")
        assert not choice.exact


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        (LINEAR, {"dtype": "float32"}, "but the inputs are float32"),
        (ATTENTION, {"head_dim": 80}, "head widths 64, 96, 128, 192, 256, but H=80"),
        (ATTENTION, {"head_dim": 8, "q_len": 1}, "but H=8"),
        (ATTENTION, {"head_dim": 512, "q_len": 1}, "but H=512"),
        (LINEAR_BACKWARD, {"dtype": "float32"}, "but the inputs are float32"),
        (LINEAR_BACKWARD, {"n": 250}, "N to be a multiple of 8 (16 bytes, for TMA), but N=250"),
        (LINEAR_BACKWARD, {"ks": (0, 866)}, "K=(0, 866)"),
        (LINEAR_BACKWARD, {"batches": (15, 0)}, "sizes of at least 1, but B=(15, 0)"),
        (LINEAR_BACKWARD, {"m": 0}, "sizes of at least 1"),
        (GDPA_BACKWARD, {"dtype": "float32"}, "but the inputs are float32"),
        (GDPA_BACKWARD, {"head_dim": 256}, "H=256"),
        (
            GDPA_BACKWARD,
            {"activations": ("softmax", "gelu", "gelu", "gelu")},
            "softmax in all heads or in none",
        ),
        (GDPA_BACKWARD, {"kv_rows": 0}, "need a query, a key and a sequence"),
    ],
)
def test_without_a_legal_configuration_xla_runs(problem, changes, message):
    problem = dataclasses.replace(problem, **changes)
    assert list(problem.configs()) == []
    choice = table.lookup(problem)
    assert (choice.config, choice.source, choice.exact) == (None, "none", False)
    assert message in choice.reason


def test_useful_flops_of_gradients():
    """Four products for the two of a result's levels, five for attention's two."""
    assert LINEAR_BACKWARD.useful_flops == 2 * LINEAR.useful_flops
    assert ATTENTION_BACKWARD.useful_flops == 2.5 * ATTENTION.useful_flops
    assert GDPA_BACKWARD.useful_flops(10) == 2.5 * GDPA.useful_flops(10)


# The tuner.


@pytest.mark.parametrize("problem", EVERY, ids=op_of)
def test_tuning_writes_the_winner(problem, builtin):
    builtin()
    best, lines = other(problem), []
    found = autotune.tune(
        problem,
        run=Bench({None: 9.0, best: 1.0}, 1.5),
        limit=3,
        progress=lambda done, total, text: lines.append(text),
    )
    assert table_rows.config_from_json(found["config"], problem.op) == best
    assert (found["op"], found["ms"], found["xla_ms"]) == (problem.op, 1.0, 9.0)
    choice = table.lookup(problem)
    assert (choice.config, choice.source) == (best, "user cache")
    assert any(autotune.brief(best) in line for line in lines)


@pytest.mark.parametrize(
    "problem",
    [
        TINY_ATTENTION,
        TINY_ATTENTION_BACKWARD,
        TINY_GDPA,
        TINY_GDPA_BACKWARD,
        dataclasses.replace(TINY_GDPA_BACKWARD, activations=("softmax",)),
        TINY_LINEAR_BACKWARD,
    ],
    ids=lambda problem: f"{problem.op} {getattr(problem, 'activations', '')}",
)
def test_worker_measures_on_this_machine(problem):
    """In this process: test_tuning_session.py has the worker's own."""
    task = Task.from_json(Task(problem, (None,), **QUICK).to_json())
    (found,) = bench.Bench(task.problem, task.contenders).measure(task)["results"]
    assert "failure" not in found, found
    assert len(found["ms"]) == 2
    assert found["error"] <= found["bound"]


def unsorted(problem) -> cases.linear_compression_backward.Case:
    return cases.linear_compression_backward.Case(problem, "unsorted")


#: A case, its problem, the error bound's bound, an error that it finds, and where that is added.
CHECKED = {
    "linear_compression": (cases.linear_compression.Case, TINY_LINEAR, 0.2, 0.5, (-1, 3, 5)),
    "attention": (cases.attention.Case, TINY_ATTENTION, 0.1, 0.2, (-2, 1, 3, 5)),
    "gdpa": (cases.gdpa.Case, TINY_GDPA, 0.05, 0.1, (-2, 1, 3)),
    "gdpa, indexed": (
        *(cases.gdpa.Case, dataclasses.replace(TINY_GDPA, batch_kv=3, kv_rows=24)),
        *(0.05, 0.1, (-2, 1, 3)),
    ),
    "gdpa, seeds": (
        cases.gdpa.Case,
        dataclasses.replace(TINY_GDPA, broadcast_q=True, max_seqlen_q=None, activations=("relu",)),
        *(0.05, 0.1, (-2, 1, 3)),
    ),
    "attention_backward": (
        *(cases.attention_backward.Case, TINY_ATTENTION_BACKWARD),
        *(0.5, 0.5, (-1, 1, 1, 5)),
    ),
    "gdpa_backward": (cases.gdpa_backward.Case, TINY_GDPA_BACKWARD, 3.0, 3.0, (1, 0, 3)),
    "linear_compression_backward": (unsorted, TINY_LINEAR_BACKWARD, 3.0, 3.0, (-1, -1)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gdpa", "float32"),
        ("gdpa, indexed", "bfloat16"),
        ("gdpa, seeds", "float16"),
        *itertools.product(
            [name for name in CHECKED if CHECKED[name][0] is not cases.gdpa.Case],
            ["bfloat16", "float32"],
        ),
    ],
)
def test_check_admits_the_right_result_and_no_other(name, dtype):
    case_of, problem, most, bad, place = CHECKED[name]
    case = case_of(dataclasses.replace(problem, dtype=dtype))
    inputs = case.inputs()
    right = case.runner(None)(*inputs)
    error, bound = case.check(right, inputs)
    assert error <= bound < most
    leaves, structure = jax.tree.flatten(right)
    for number, leaf in enumerate(leaves):
        for added in (bad, np.nan, np.inf):
            wrong = np.array(leaf)
            wrong[place] += np.asarray(added, dtype)
            results = [*leaves[:number], jnp.asarray(wrong), *leaves[number + 1 :]]
            assert not case.check(jax.tree.unflatten(structure, results), inputs).ok


@pytest.mark.parametrize(
    ("case_of", "problem"),
    [
        (cases.gdpa_backward.Case, dataclasses.replace(TINY_GDPA_BACKWARD, head_dim=64)),
        (cases.attention_backward.Case, dataclasses.replace(TINY_ATTENTION_BACKWARD, head_dim=64)),
        (cases.linear_compression_backward.Case, TINY_LINEAR_BACKWARD),
    ],
    ids=["gdpa", "attention", "linear_compression"],
)
def test_the_kernels_gradients_have_the_shapes_of_xlas(case_of, problem):
    problem = dataclasses.replace(problem, dtype="bfloat16")
    case = case_of(problem)
    inputs = jax.eval_shape(case.inputs)
    config = problem.default_config()
    # With the device's number of SMs, and with another one.
    runners = (case.runner(None), case.runner(config), case.runner(config, num_sms=132))
    by_xla, *kernels = (
        jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(runner, *inputs))
        for runner in runners
    )
    assert kernels == [by_xla, by_xla]
