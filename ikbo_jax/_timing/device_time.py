"""Times of calls on the device, by JAX's profiler, without gaps in which it waits for the host."""

import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

#: Calls that are timed.
CALLS = 20
#: Python launches no faster: shorter functions are timed on the device.
SHORT_MS = 0.3
#: Longer calls are not profiled: they cannot be short on the device, and XLA may take seconds.
MOST_CALL_MS = 10.0


class Event(NamedTuple):
    """A kernel, a "Memset" or a "Memcpy" with its kind, with its times by the device's clock."""

    begin_ns: float
    end_ns: float
    name: str

    @property
    def is_kernel(self) -> bool:
        return not self.name.startswith("Mem")


class DeviceTime(NamedTuple):
    """Milliseconds of each call on the device: of all its events, and of its kernels alone."""

    busy_ms: list[float]
    kernel_ms: list[float]

    @property
    def ms(self) -> float:
        """Median of `busy_ms`."""
        return statistics.median(self.busy_ms)


def record(call: Callable[[], Any], calls: int) -> list[Event]:
    """Records the first GPU's events during calls after a warm-up; none without an NVIDIA GPU."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=_options()):
            out = None
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return events_of(jax.profiler.ProfileData.from_file(str(path)))


def _options() -> jax.profiler.ProfileOptions:
    """Leaves calls on the host and loaded programs out: 12 instead of 51 ms on an H100."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    options.enable_hlo_proto = False
    return options


def events_of(profile: Any) -> list[Event]:
    """Returns the first GPU's events of a `jax.profiler.ProfileData`, in the order of time."""
    return sorted(
        Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def busy_ns(events: Sequence[Event]) -> float:
    """Sums the nanoseconds in which at least one event runs; events are in the order of time."""
    busy, reached = 0.0, 0.0
    for event in events:
        busy += max(0.0, event.end_ns - max(event.begin_ns, reached))
        reached = max(reached, event.end_ns)
    return busy


def measure(compiled: Any, *args: Any, calls: int = CALLS) -> DeviceTime | None:
    """Times calls on the device; None without an NVIDIA GPU, or if nothing was recorded."""
    if jax.default_backend() != "gpu":
        return None
    return times_of(record(lambda: compiled(*args), calls), calls)


def measure_all(programs: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, DeviceTime]:
    """Times compiled functions on their arguments, by name; empty if not all can be timed."""
    found = {}
    for name, (compiled, args) in programs.items():
        times = None if compiled is None else measure(compiled, *args)
        if times is None:
            return {}
        found[name] = times
    return found


def times_of(events: Sequence[Event], calls: int) -> DeviceTime | None:
    """Times the calls that launched these events: one call, their mean, if their numbers differ."""
    if not events:
        return None
    size, rest = divmod(len(events), calls)
    scale = 1e-6
    if rest:
        size, scale = len(events), 1e-6 / calls
    found = DeviceTime([], [])
    for at in range(0, len(events), size):
        of_call = events[at : at + size]
        found.busy_ms.append(scale * busy_ns(of_call))
        found.kernel_ms.append(scale * busy_ns([e for e in of_call if e.is_kernel]))
    return found
