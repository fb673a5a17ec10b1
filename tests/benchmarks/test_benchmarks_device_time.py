"""Times on the device, and the benchmarks' points that are timed there."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import harness
from ikbo_jax._timing import device_time


def _event(name: str, begin: float, end: float) -> device_time.Event:
    return device_time.Event(begin, end, name)


CALL = (_event("Memset 3", 0, 1e6), _event("kernel", 1.5e6, 3e6), _event("other", 2e6, 4e6))


def _calls(number: int) -> list[device_time.Event]:
    return [
        event._replace(begin_ns=event.begin_ns + 1e8 * n, end_ns=event.end_ns + 1e8 * n)
        for n in range(number)
        for event in CALL
    ]


def test_time_on_the_device_needs_a_gpu():
    assert device_time.measure(jax.jit(jnp.sin), jnp.zeros(())) is None
    assert device_time.times_of([], 3) is None


def test_times_of_calls_count_memsets_and_overlap_once():
    found = device_time.times_of(_calls(3), 3)
    assert (found.busy_ms, found.kernel_ms, found.ms) == ([3.5] * 3, [2.5] * 3, 3.5)
    # Calls that launched different events have their mean.
    found = device_time.times_of(_calls(3)[:-1], 3)
    assert found.busy_ms == pytest.approx([(3.5 + 3.5 + 2.5) / 3])


PROFILE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #13(Compute)"
    timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 5000 duration_ps: 2000 }
    events { metadata_id: 2 offset_ps: 1000 duration_ps: 3000 }
  }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  event_metadata { key: 2 value { id: 2 name: "Memset 3" } }
}
"""


def test_a_profile_is_read():
    profile = jax.profiler.ProfileData.from_text_proto(PROFILE)
    memset = device_time.Event(1001.0, 1004.0, "Memset 3")
    kernel = device_time.Event(1005.0, 1007.0, "kernel")
    assert device_time.events_of(profile) == [memset, kernel]


@pytest.mark.parametrize(("short_ms", "is_short"), [(3.6, True), (3.4, False)])
def test_short_points_are_timed_on_the_device(monkeypatch, short_ms, is_short):
    times = device_time.times_of(_calls(3), 3)
    monkeypatch.setattr(device_time, "measure", lambda compiled, *args: times)
    run = jax.jit(jnp.sin).lower(jnp.zeros(())).compile()
    contender = harness.Contender(
        {"name": "ikbo", "error": 0.0}, lambda: run(jnp.zeros(())), run, (jnp.zeros(()),)
    )
    windows = []

    def interleaved_ms(thunks, *, window_s, rounds):
        windows.append(window_s)
        return {name: [2.0] * rounds for name in thunks}

    monkeypatch.setattr(harness, "interleaved_ms", interleaved_ms)
    protocol = harness.Protocol(rounds=1, matmul_size=16, short_ms=short_ms)
    (record,) = harness.measure([contender], protocol, 3.5e9)["providers"]
    assert windows == [harness.SHORT_WINDOW_S if is_short else protocol.window_s]
    assert (record["device_ms"], record["kernel_ms"]) == (3.5, 2.5)
    assert (record["median_ms"] == 3.5) == is_short
    assert ("call_ms" in record) == is_short
    assert record["tflops"] == pytest.approx(3.5 / record["median_ms"])


def test_all_are_timed_on_the_device_or_none(monkeypatch):
    times = device_time.times_of(_calls(3), 3)
    monkeypatch.setattr(device_time, "measure", lambda compiled, *args: times if args else None)
    assert device_time.measure_all({"a": (abs, (1,)), "b": (abs, (2,))}) == {"a": times, "b": times}
    for other in ((abs, ()), (None, (1,))):
        assert device_time.measure_all({"a": (abs, (1,)), "b": other}) == {}
