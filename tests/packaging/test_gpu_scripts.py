"""The scripts that compute-sanitizer runs on a GPU find what they import, on any machine."""

import ast
import pathlib
import subprocess
import sys

import on_gpu
import pytest

import ikbo_jax
from ikbo_jax.ops import dispatch

SUITES = sorted(pathlib.Path(__file__).parents[1].glob("gpu/test_gpu_*.py"))


def script_of(suite: pathlib.Path) -> str | None:
    """A suite's script; None if it has none."""
    for statement in ast.parse(suite.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SANITIZED":
            return str(ast.literal_eval(statement.value))
    return None


def imports_of(script: str) -> str:
    """The imports of a script."""
    found = [x for x in ast.parse(script).body if isinstance(x, ast.Import | ast.ImportFrom)]
    return "\n".join(map(ast.unparse, found))


SCRIPTS = {suite.stem: script for suite in SUITES if (script := script_of(suite)) is not None}


def test_scripts_find_what_they_import() -> None:
    scripts = list(map(imports_of, SCRIPTS.values()))
    assert len(scripts) > 4
    subprocess.run(
        [sys.executable, "-c", "\n".join(scripts)],
        env={**on_gpu.environment_of_scripts(), "JAX_PLATFORMS": "cpu"},
        check=True,
        cwd="/",
    )


class Chosen(Exception):
    """A call has come to the choice of its kernel."""


# Other scripts have templates, or call a kernel without an op.
@pytest.mark.parametrize(
    ("suite", "calls"), [("attention", 4), ("few_queries", 12), ("linear_compression", 7)]
)
def test_configurations_of_scripts_are_legal(suite, calls, monkeypatch, capsys) -> None:
    """The ops check configurations as on a GPU, and run nothing."""
    checked = []

    def choose(request, problem):
        assert request.implementation == "mosaic_gpu"
        config = request.config or problem.default_config()
        assert (reason := config.illegal_reason(problem)) is None, reason
        checked.append(config)
        raise Chosen

    def stop_at_choice(op):
        def call(*args, **kwargs):
            with pytest.raises(Chosen):
                op(*args, **kwargs)

        return call

    monkeypatch.setattr(dispatch, "choose", choose)
    for op in (ikbo_jax.attention, ikbo_jax.linear_compression):
        monkeypatch.setattr(ikbo_jax, op.__name__, stop_at_choice(op))
    exec(SCRIPTS[f"test_gpu_{suite}"], {})
    assert capsys.readouterr().out == "FINISHED\n"
    assert len(checked) == calls
