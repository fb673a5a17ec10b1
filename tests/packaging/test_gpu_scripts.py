"""The scripts that compute-sanitizer runs on a GPU find what they import, on any machine."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import on_gpu
import pytest

SUITES = sorted(pathlib.Path(__file__).parents[1].glob("gpu/test_gpu_*.py"))


#: Before a script: the ops check configurations as on a GPU, and run in XLA.
ON_CPU = """
import dataclasses
from ikbo_jax.ops import dispatch
choose = dispatch.choose
def checked(request, problem):
    if request.implementation == "mosaic_gpu":
        config = request.config or problem.default_config()
        assert (reason := config.illegal_reason(problem)) is None, reason
    return choose(dataclasses.replace(request, implementation="xla", config=None), problem)
dispatch.choose = checked
"""


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


# Other scripts have templates, or call a kernel without an op.
@pytest.mark.parametrize("suite", ["attention", "few_queries", "linear_compression"])
def test_configurations_of_scripts_are_legal(suite: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_CPU + SCRIPTS[f"test_gpu_{suite}"]],
        env={**on_gpu.environment_of_scripts(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert "FINISHED" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("missing", ["tests/support", "tests/gpu"])
def test_a_script_without_its_folders_fails(missing: str) -> None:
    environment = on_gpu.environment_of_scripts()
    folders = environment["PYTHONPATH"].split(":")
    environment["PYTHONPATH"] = ":".join(x for x in folders if not x.endswith(missing))
    module = {"tests/support": "problems", "tests/gpu": "test_gpu_attention_backward"}[missing]
    command = [sys.executable, "-c", f"import importlib.util as u; u.find_spec('{module}').name"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, check=False)
    assert done.returncode == 1
