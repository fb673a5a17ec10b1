"""Settings of the emulated tests."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

import emulator
import offline
import pytest
from signs import selected_integers_keep_their_sign as selected_integers_keep_their_sign

# The cases of the interpreted tests are emulated, too.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "interpret"))


# The emulator reads a launch's arguments as one version of jax lays them out.
def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")
    item.add_marker(
        pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux")
    )


@pytest.fixture(autouse=True)
def _on_cpu(on_cpu: None) -> None:
    """Arrays of emulated kernels are on the CPU."""


@pytest.fixture(scope="session")
def sm90(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulator.Emulator]:
    """Runs kernels' PTX; one process loads the compiler for all tests."""
    try:
        compiler = emulator.make_compiler(tmp_path_factory.mktemp("emulated"))
    except offline.OfflineUnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    with contextlib.closing(compiler):
        yield emulator.Emulator(compiler)
