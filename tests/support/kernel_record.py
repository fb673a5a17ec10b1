"""Keeps what ptxas says of the kernels of the offline tests, so that only changed ones compile.

`tests/offline/digests.json` has the report of ptxas on each kernel, by the digest of the kernel's
module (`offline.module_digest`: without its places in the source). The module, the version of jax,
whose plugin has the LLVM that compiles it, and the version of ptxas determine the report. So a test
asserts on the recorded report as it does on a fresh one. A kernel that is not in the file is
compiled, and the summary of the tests names it. Every kernel is compiled

- with another version of jax or of ptxas than the file's, since registers and spills may differ;
- with `IKBO_PTXAS`: who names a ptxas asks what this program makes of the kernels;
- with `--compile-kernels`.

`--record-kernels` adds to the file what the chosen tests use. If all cases of all offline tests ran
(`make record-kernels`), it also removes what no test uses.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import subprocess
from typing import TYPE_CHECKING, Any

import jax
import pytest

if TYPE_CHECKING:
    import offline

PATH = pathlib.Path(__file__).parents[1] / "offline" / "digests.json"
#: Name of the property of a test's report that has the kernels that the test uses.
PROPERTY = "kernels"
#: By a module's digest, the kernel's name and fields of its report.
Kernels = dict[str, tuple[str, dict[str, Any]]]


def installed() -> dict[str, str]:
    """Versions of the programs that compile kernels."""
    import offline  # not in every process of the tests

    text = subprocess.check_output([offline.find_ptxas(), "--version"], text=True)
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if found is None:
        raise ValueError(f"ptxas does not tell its version:\n{text}")
    return {"jax": jax.__version__, "ptxas": found[1]}


def read() -> tuple[dict[str, str], Kernels]:
    """Returns the versions that made the file, and its kernels; nothing where there is no file."""
    content = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
    return content.get("toolchain", {}), content.get("kernels", {})


def write(toolchain: dict[str, str], kernels: Kernels) -> None:
    """Writes one line for each kernel, sorted by name."""
    order = sorted(kernels, key=lambda digest: (kernels[digest][0], digest))
    lines = ",\n".join(f"  {json.dumps(x)}: {json.dumps(kernels[x])}" for x in order)
    PATH.write_text(
        f'{{\n "toolchain": {json.dumps(toolchain)},\n "kernels": {{\n{lines}\n }}\n}}\n'
    )


def known_reports(config: pytest.Config) -> dict[str, offline.PtxasReport]:
    """Reports by digest that this run takes from the file."""
    import offline

    toolchain, kernels = read()
    compiles_all = config.getoption("compile_kernels") or os.environ.get("IKBO_PTXAS")
    if compiles_all or not toolchain or toolchain != installed():
        return {}
    found = {}
    for digest, (_, fields) in kernels.items():
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        found[digest] = offline.PtxasReport(**values)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels of the offline tests")
    group.addoption(
        "--record-kernels", action="store_true", help=f"write what ptxas says of them to {PATH}"
    )
    group.addoption(
        "--compile-kernels", action="store_true", help="compile those that the file has, too"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Uses())


class Uses:
    """Collects the kernels that the tests use, from all processes."""

    def __init__(self) -> None:
        self.used: Kernels = {}
        self.compiled: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = report.user_properties
        for name, uses in properties:
            if name == PROPERTY:
                for use in uses:
                    self.add(use)

    def add(self, use: dict[str, Any]) -> None:
        """Takes a `Use` as a dictionary."""
        self.used[use["digest"]] = use["name"], {k: v for k, v in use["report"].items() if v}
        if use["is_new"]:
            self.compiled[use["digest"]] = use["name"]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        if not self.used:
            return
        (toolchain, recorded), now = read(), installed()
        if self.compiled:
            terminalreporter.write_line(described(self.compiled, toolchain, recorded))
        if config.getoption("record_kernels"):
            is_replaced = exitstatus == 0 and is_whole(config)
            is_kept = toolchain == now and not is_replaced
            kernels = recorded | self.used if is_kept else self.used
            write(now, kernels)
            terminalreporter.write_line(f"{PATH}: {len(kernels)} kernels of {named(now)}")


def is_whole(config: pytest.Config) -> bool:
    """Whether all cases of all offline tests run."""
    chosen = config.getoption("keyword") or config.getoption("one_in") > 1
    folders = [config.rootpath / x for x in config.args]
    return config.getoption("all_cases") and not chosen and PATH.parent in folders


def named(toolchain: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in toolchain.items())


def described(compiled: dict[str, str], toolchain: dict[str, str], recorded: Kernels) -> str:
    """Returns a line about kernels that were compiled; `compiled` has names by digest."""
    counts = collections.Counter(compiled.values())
    names = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
    place = PATH.relative_to(PATH.parents[2])
    if toolchain and toolchain != installed():
        return (
            f"{len(compiled)} kernels were compiled by {named(installed())}, since {place} has "
            f"reports of {named(toolchain)}: {names}"
        )
    if recorded.keys() >= compiled.keys():
        return f"{len(compiled)} kernels of {place} were compiled again: {names}"
    return f"{len(compiled)} kernels differ from {place} and were compiled: {names}"
