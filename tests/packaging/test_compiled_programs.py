"""The suite drops compiled programs before their mappings run out and their memory grows large."""

import functools
import mmap
import pathlib
from collections.abc import Iterator

import compiled_programs
import jax
import jax.numpy as jnp
import pytest
from compiled_programs import CompiledPrograms, mappings, resident_bytes

pytestmark = pytest.mark.skipif(mappings() == 0, reason="this system does not list mappings")
#: No process has so many mappings, or bytes.
MANY = 1 << 50


@pytest.fixture
def many_programs() -> Iterator[int]:
    """20 compiled programs, of a function that lives on; how many mappings there were before."""

    @functools.partial(jax.jit, static_argnums=1)
    def compute(x: jax.Array, i: int) -> jax.Array:
        return jnp.sin(x) * i

    compute(jnp.float32(1), -1)
    jax.clear_caches()
    before = mappings()
    for i in range(20):
        compute(jnp.float32(1), i).block_until_ready()
    assert mappings() >= before + 20
    yield before
    compute.clear_cache()


def test_programs_are_dropped_above_the_limit(many_programs: int) -> None:
    hook = CompiledPrograms(limit=many_programs, most_bytes=MANY, tests_between=2)
    hook.pytest_runtest_teardown()
    assert mappings() >= many_programs + 20
    hook.pytest_runtest_teardown()
    assert mappings() < many_programs + 20


def test_programs_are_kept_until_much_memory_is_resident(many_programs: int) -> None:
    hook = CompiledPrograms(limit=MANY, most_bytes=MANY, tests_between=1)
    hook.pytest_runtest_teardown()
    assert mappings() >= many_programs + 20
    hook.most_bytes = resident_bytes() - 1
    hook.pytest_runtest_teardown()
    assert mappings() < many_programs + 20
    # The next drop comes when memory has grown, not after the next test.
    assert hook.most_bytes > resident_bytes() + compiled_programs.LEAST_GROWTH // 2


def test_resident_memory_is_that_of_now() -> None:
    """It falls when memory is given back, which `free` need not do; unlike the peak."""
    before = resident_bytes()
    with mmap.mmap(-1, 1 << 27) as pages:
        pages.write(bytes(1 << 27))
        grown = resident_bytes()
    assert grown > before + (1 << 26)
    assert resident_bytes() < grown - (1 << 26)


def test_the_suite_has_the_hook(pytestconfig: pytest.Config) -> None:
    plugins = pytestconfig.pluginmanager.get_plugins()
    (hook,) = (x for x in plugins if isinstance(x, CompiledPrograms))
    allowed = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < hook.limit <= allowed // 2
    assert hook.most_bytes >= compiled_programs.MOST_BYTES
