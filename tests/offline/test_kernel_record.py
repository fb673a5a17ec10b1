"""Kernels with a recorded report are not compiled; others are, and the summary names them."""

import dataclasses
import pathlib
import types
from typing import Any

import jax
import kernel_record
import offline
import pytest
import test_offline_compile as linear_compression

INSTALLED = {"jax": "0.11.2", "ptxas": "13.5.37"}
GOOD, BAD = offline.PtxasReport(168), offline.PtxasReport(168, 8, serialized=("(C7510)",))
NAME = "narrowest_block_m1"


class CountingCompiler(offline.Compiler):
    """Counts what a compiler would compile."""

    count = 0

    def assemble(self, module: bytes) -> offline.PtxasReport:
        self.count += 1
        return GOOD


def modules(**changes: Any) -> list[bytes]:
    problem, settings = linear_compression.CASES[NAME]
    case = problem, dataclasses.replace(settings, **changes)
    return offline.mosaic_modules(*linear_compression.launch(*case))


@pytest.fixture
def record(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of three kernels, made by what is installed."""
    path = tmp_path / "tests" / "offline" / "digests.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(kernel_record, "PATH", path)
    monkeypatch.setattr(kernel_record, "installed", lambda: INSTALLED)
    monkeypatch.delenv("IKBO_PTXAS", raising=False)
    uses = kernel_record.Uses()
    for digest, name, report in ("d1", "b", BAD), ("d2", "a", GOOD), ("d3", "a", GOOD):
        uses.add(dataclasses.asdict(offline.Use(digest, name, report, is_new=False)))
    kernel_record.write(INSTALLED, uses.used)


def config(**options: Any) -> Any:
    """What `kernel_record` reads of pytest's configuration."""
    getoption = ({"one_in": 1} | options).get
    root = kernel_record.PATH.parents[2]
    return types.SimpleNamespace(getoption=getoption, rootpath=root, args=["tests/offline"])


def summary(uses: list[offline.Use], exitstatus: int = 0, **options: Any) -> list[str]:
    """Lines at the end of a session whose tests have these uses."""
    lines: list[str] = []
    properties = [(kernel_record.PROPERTY, [dataclasses.asdict(use) for use in uses])]
    session = kernel_record.Uses()
    session.pytest_runtest_logreport(types.SimpleNamespace(user_properties=properties))
    reporter = types.SimpleNamespace(write_line=lines.append)
    session.pytest_terminal_summary(reporter, exitstatus, config(**options))
    return lines


NEW, OLD = offline.Use("d4", "c", GOOD, is_new=True), offline.Use("d1", "b", BAD, is_new=False)


def test_only_kernels_without_a_report_are_compiled(tmp_path: pathlib.Path) -> None:
    """A recorded spill fails a test as a fresh one does."""
    (module,) = modules()
    for known, report in ({}, GOOD), ({offline.module_digest(module): BAD}, BAD):
        compiler = CountingCompiler(tmp_path, known=known)
        kernels = [compiler.compile_module(module) for _ in range(2)]
        assert compiler.count == (not known)
        assert [use.is_new for use in compiler.uses] == [not known, False]
        assert [kernel.ptxas for kernel in kernels] == [report] * 2
        assert kernels[0].smem_bytes > 0
    with pytest.raises(AssertionError, match="C7510.*8 bytes spilled"):
        linear_compression.test_offline_kernel_is_fit(NAME, compiler)


def test_a_digest_is_of_the_code_alone() -> None:
    """Neither of its places in the source, nor of how many kernels were lowered before."""
    found = modules()
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    try:
        found += [*modules(), *modules(num_stages=linear_compression.CASES[NAME][1].num_stages + 1)]
    finally:
        jax.config.update("jax_include_full_tracebacks_in_locations", False)
    assert len(set(found)) == 3
    plain, other_places, other_code = map(offline.module_digest, found)
    assert plain == other_places != other_code


@pytest.mark.usefixtures("record")
def test_reports_are_those_of_the_file_unless_all_kernels_are_compiled(monkeypatch) -> None:
    lines = kernel_record.PATH.read_text().splitlines()
    assert [line.split('"')[1] for line in lines[3:6]] == ["d2", "d3", "d1"]
    assert kernel_record.known_reports(config()) == {"d1": BAD, "d2": GOOD, "d3": GOOD}
    assert kernel_record.known_reports(config(compile_kernels=True)) == {}
    monkeypatch.setenv("IKBO_PTXAS", "/opt/ptxas")
    assert kernel_record.known_reports(config()) == {}
    monkeypatch.delenv("IKBO_PTXAS")
    kernel_record.PATH.unlink()
    assert kernel_record.known_reports(config()) == {}


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("changes", [{"jax": "0.12.0"}, {"ptxas": "13.0.88"}])
def test_another_toolchain_compiles_all_kernels(changes, monkeypatch) -> None:
    other = INSTALLED | changes
    monkeypatch.setattr(kernel_record, "installed", lambda: other)
    assert kernel_record.known_reports(config()) == {}
    (line,) = summary([NEW])
    by = f"jax {other['jax']} and ptxas {other['ptxas']}"
    assert line.startswith(f"1 kernels were compiled by {by}, since")
    summary([NEW], record_kernels=True)
    assert kernel_record.read() == (other, {"d4": ["c", {"registers": 168}]})


@pytest.mark.usefixtures("record")
def test_the_summary_names_compiled_kernels() -> None:
    assert summary([OLD]) == []
    place = "tests/offline/digests.json"
    assert summary([NEW, OLD]) == [f"1 kernels differ from {place} and were compiled: c (1)"]
    again = dataclasses.replace(OLD, is_new=True)
    assert summary([again]) == [f"1 kernels of {place} were compiled again: b (1)"]


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    "changes", [{}, {"exitstatus": 1}, {"all_cases": False}, {"keyword": "h64"}, {"one_in": 8}]
)
def test_entries_go_only_if_all_tests_ran(changes: dict[str, Any]) -> None:
    summary([NEW, OLD], **{"record_kernels": True, "all_cases": True, **changes})
    _, kernels = kernel_record.read()
    assert sorted(kernels) == (["d1", "d2", "d3", "d4"] if changes else ["d1", "d4"])


def test_versions_are_of_what_is_installed() -> None:
    found = kernel_record.installed()
    assert found["jax"] == jax.__version__
    assert found["ptxas"].count(".") == 2
