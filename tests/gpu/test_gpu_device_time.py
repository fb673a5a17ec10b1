"""Times on a Hopper GPU by JAX's profiler, and the tuner that relies on them."""

import jax
import jax.numpy as jnp
import on_gpu
import pytest

from ikbo_jax._timing import device_time
from ikbo_jax.autotuner import bench
from ikbo_jax.problems import LinearCompressionProblem

pytestmark = pytest.mark.gpu

SMALL = LinearCompressionProblem((3, 40), (70, 50), 33, 32, "bfloat16")


def test_every_call_is_recorded():
    x = jnp.ones((1024, 1024), jnp.float32)
    add = jax.jit(lambda x: x + 1).lower(x).compile()
    for _ in range(2):  # one profile after another
        found = device_time.measure(add, x, calls=7)
        assert found is not None
        assert len(found.busy_ms) == len(found.kernel_ms) == 7
        # Other processes may use the device, too.
        assert all(0 < kernel <= busy for busy, kernel in zip(*found, strict=True))


def test_memsets_count_beside_kernels():
    """cuDNN clears memory before its kernel."""
    array = jax.random.normal(jax.random.key(0), (2, 256, 2, 64), jnp.bfloat16)
    attend = jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"))
    events = device_time.record(lambda: attend(array), 3)
    is_kernel = [event.is_kernel for event in events]
    assert is_kernel.count(True) == 3
    assert is_kernel.count(False) > 0
    assert len(events) % 3 == 0


def test_the_tuner_times_short_kernels_on_the_device(monkeypatch):
    monkeypatch.setattr(device_time, "SHORT_MS", float("inf"))
    configs = tuple(SMALL.configs())[:2]
    stand = bench.Bench(SMALL, (None, *configs))
    stand.prepare()
    found = stand.measure(bench.Task(SMALL, (*configs, None), window_s=0.002, windows=2))
    assert stand._is_short
    assert [len(result["ms"]) for result in found["results"]] == [2, 2, 2]
    assert all(ms > 0 for result in found["results"] for ms in result["ms"])


def test_kernels_are_linked_where_nothing_is_traced():
    """Other processes lower the kernels, and XLA is not among the contenders."""
    script = f"""
from ikbo_jax.autotuner import bench
from ikbo_jax.problems import LinearCompressionProblem
if __name__ == "__main__":
    problem = {SMALL!r}
    stand = bench.Bench(problem, tuple(problem.configs())[:2])
    stand.prepare()
    assert not stand._failures, stand._failures
    print(len(stand._checked), "checked")
"""
    assert "2 checked" in on_gpu.run_python(script)
