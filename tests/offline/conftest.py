"""Fixtures of tests that lower or compile kernels for CUDA."""

import collections
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator

import jax
import kernel_record
import offline
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from signs import selected_integers_keep_their_sign as selected_integers_keep_their_sign

from ikbo_jax.ops import dispatch

# Operands of interpreted tests are compiled, too.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "interpret"))


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(
        pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux")
    )


@pytest.fixture(scope="session")
def session_compiler(tmp_path_factory, pytestconfig) -> Iterator[offline.Compiler]:
    """Compiles kernels for sm_90a; one process loads the plugin for all tests."""
    try:
        known = kernel_record.known_reports(pytestconfig)
        found = offline.Compiler(tmp_path_factory.mktemp("offline"), known=known)
    except offline.OfflineUnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    with contextlib.closing(found):
        yield found


@pytest.fixture
def compiler(session_compiler, record_property) -> Iterator[offline.Compiler]:
    """Compiles kernels that `kernel_record` does not know; the test's report has those it used."""
    session_compiler.uses.clear()
    yield session_compiler
    uses = [dataclasses.asdict(use) for use in session_compiler.uses]
    record_property(kernel_record.PROPERTY, uses)


@pytest.fixture
def empty_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are lowered without their bodies, for tests of the programs around them.

    Bodies take two thirds of the time that lowering takes, and nearly all of XLA's compilation.
    """
    monkeypatch.setattr(lowering, "lower_jaxpr_to_mosaic_gpu", lambda *_: [])


@pytest.fixture
def lowered_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter]:
    """Counts, by kernel, how often Mosaic GPU makes a module; the device seems to be a Hopper."""
    counts: collections.Counter = collections.Counter()
    real = lowering.lower_jaxpr_to_module

    def counted(*args, **kwargs):
        result = real(*args, **kwargs)
        counts[str(result.module.operation.attributes["sym_name"])] += 1
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_module", counted)
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 132)
    jax.clear_caches()
    yield counts
    jax.clear_caches()
