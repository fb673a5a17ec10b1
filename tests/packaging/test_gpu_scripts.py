"""The scripts that compute-sanitizer runs on a GPU find what they import, on any machine."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import on_gpu
import pytest

SUITES = sorted(pathlib.Path(__file__).parents[1].glob("gpu/test_gpu_*.py"))


def imports_of(suite: pathlib.Path) -> str | None:
    """The imports of a suite's script; None if it has no script."""
    for statement in ast.parse(suite.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SANITIZED":
            script = ast.parse(ast.literal_eval(statement.value))
            found = [x for x in script.body if isinstance(x, ast.Import | ast.ImportFrom)]
            return "\n".join(map(ast.unparse, found))
    return None


def test_scripts_find_what_they_import() -> None:
    scripts = [script for suite in SUITES if (script := imports_of(suite)) is not None]
    assert len(scripts) > 4
    subprocess.run(
        [sys.executable, "-c", "\n".join(scripts)],
        env={**on_gpu.environment_of_scripts(), "JAX_PLATFORMS": "cpu"},
        check=True,
        cwd="/",
    )


@pytest.mark.parametrize("missing", ["tests/support", "tests/gpu"])
def test_a_script_without_its_folders_fails(missing: str) -> None:
    environment = on_gpu.environment_of_scripts()
    folders = environment["PYTHONPATH"].split(":")
    environment["PYTHONPATH"] = ":".join(x for x in folders if not x.endswith(missing))
    module = {"tests/support": "problems", "tests/gpu": "test_gpu_attention_backward"}[missing]
    command = [sys.executable, "-c", f"import importlib.util as u; u.find_spec('{module}').name"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, check=False)
    assert done.returncode == 1
