"""Pallas' GPU interpreter for tests: races of every launch, and those of WGMMA operands.

Four things that jax leaves out are added from outside:

- The interpreter begins a new race detector at every launch; here all of them are kept.
- Its WGMMA reads its operands behind the detector's back, and at once.  Here the reads are
  reported, and again when the warpgroup's next WGMMA is issued, unless the accumulator was read
  between: no earlier can `wgmma_wait(1)` promise that they are over.  So a stage that is handed
  back one step too early is a race, as it is on the device.  WGMMAs with accumulators of their own
  stay in flight side by side, until `accumulator.wait`, which reads an accumulator that no WGMMA
  wrote: what it waits for is reported once more, and then over.
- A copy by TMA that is not aligned as Hopper demands fails (`alignment`).
- When a thread fails, the interpreter wakes the threads that wait at an allocated barrier, but not
  those that wait at a named barrier: the launch would never end.  Here both are woken and fail.

Three things are done in less time, which saves tests half of theirs: every thread of a launch
would trace and lower their common program for itself, every scalar that reaches a callback would
become an array on a device first, and an access is compared with every earlier one of its buffer,
clock by clock.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import alignment
import jax
import numpy as np
import numpy_launches
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

#: The value of `mosaic.interpreted`, also for kernels with named barriers.
PARAMS = plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="_hack_model_inline_mgpu_tokamax")

_wgmma = gpu_callbacks.wgmma
_wgmma_accumulator_deref = gpu_callbacks.wgmma_accumulator_deref
#: Operands of every warpgroup's newest WGMMA of each accumulator, oldest first.
_in_flight: dict[Any, dict[Any, list[tuple[Any, Any]]]] = {}


def _tick(memory: Any, thread: Any) -> Any:
    """The time of an asynchronous read of shared memory by a warpgroup's tensor core.

    Tensor cores have no place in the interpreter's clocks.  That of the warpgroup's first warp
    serves: a warpgroup that multiplies does not run warp by warp.
    """
    with memory.lock:
        clock = memory.clocks[thread]
        clock.inc(memory.all_concurrent_threads[thread] + 1)
        return clock.async_smem_clock.copy()


@gpu_callbacks.fail_on_exception
def _watched_wgmma(**kwargs: Any) -> Any:
    memory, thread = gpu_callbacks._get_shared_memory(), kwargs["thread"]
    operands = []
    for name in ("a", "b"):
        key = gpu_callbacks.HostAllocationKey.from_array(kwargs[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(kwargs[f"{name}_transforms"])
        operands.append((key, memory.access(key, jax.tree.map(int, transforms))))
    in_flight = _in_flight.setdefault(thread, {})
    reads = [*(read for reads in in_flight.values() for read in reads), *operands]
    _report(memory, thread, reads, kwargs.get("source_info"))
    accumulator = gpu_callbacks.HostAllocationKey.from_array(kwargs["acc_allocation_key_as_array"])
    in_flight.pop(accumulator, None)
    in_flight[accumulator] = operands
    return _wgmma(**kwargs)


def _report(memory: Any, thread: Any, reads: list[tuple[Any, Any]], source_info: Any) -> None:
    clock = _tick(memory, thread)
    for key, access in reads:
        gpu_callbacks.get_races().check_read(thread, clock, key, access, source_info=source_info)


@gpu_callbacks.fail_on_exception
def _watched_wgmma_accumulator_deref(**kwargs: Any) -> Any:
    thread, wait_n = kwargs["thread"], kwargs["wait_n"]
    in_flight = _in_flight.setdefault(thread, {})
    key = gpu_callbacks.HostAllocationKey.from_array(kwargs["acc_allocation_key_as_array"])
    if key not in in_flight:  # a wait
        over = list(in_flight)[: len(in_flight) - wait_n]
        reads = [read for accumulator in over for read in in_flight.pop(accumulator)]
        _report(gpu_callbacks._get_shared_memory(), thread, reads, kwargs.get("source_info"))
    elif not wait_n:
        in_flight.clear()
    return _wgmma_accumulator_deref(**kwargs)


def _aligned(copy: Callable[..., Any]) -> Callable[..., Any]:
    """A copy between device and shared memory, which fails where TMA cannot make it."""

    @gpu_callbacks.fail_on_exception
    @functools.wraps(copy)
    def checked(**kwargs: Any) -> Any:
        memory, found = gpu_callbacks._get_shared_memory(), {}
        for name in ("src", "dst"):
            key = gpu_callbacks.HostAllocationKey.from_array(
                kwargs[f"{name}_allocation_key_as_array"]
            )
            transforms = gpu_callbacks._remove_noop_transforms(kwargs[f"{name}_transforms"])
            access = memory.access(key, jax.tree.map(int, transforms))
            is_shared = key.memory_space_id == _SHARED
            found[is_shared] = memory.buffer_shape_and_dtype(key), access.range
        if len(found) == 2 and (reason := alignment.why_not(*found[False], *found[True])):
            raise ValueError(f"TMA cannot make this copy: {reason}")
        return copy(**kwargs)

    return checked


_SHARED = shared_memory.get_memory_space_idx(plgpu.SMEM)
_abort_waiters = shared_memory.GPUSharedMemory._abort_waiters


def _abort_all_waiters(self: Any) -> None:
    """Also wakes threads at named barriers, which the interpreter keeps apart from others."""
    _abort_waiters(self)
    for barrier in self.named_barriers.values():
        barrier.abort()


#: Most dimensions of a buffer.
_DIMS = 8


@functools.lru_cache(maxsize=1 << 14)
def _bounds(where: tuple[slice | int, ...]) -> tuple[tuple[int, int], ...]:
    """The first index in every dimension, and one past the last one.

    A dimension without bounds overlaps everything.
    """
    bounds = []
    for x in where:
        if not isinstance(x, slice):
            bounds.append((x, x + 1))
        elif x == slice(None):
            bounds.append((np.iinfo(np.int64).min, np.iinfo(np.int64).max))
        else:
            bounds.append((x.start, max(x.start + 1, x.stop)))
    return tuple(bounds)


class _Accesses(list[Any]):
    """Accesses of a buffer, in order, as the detector keeps them; also as arrays.

    Attributes:
      clocks: the vector clock of every access: [threads, accesses].
      bounds: `_bounds` of every access: [_DIMS, 2, accesses]. A missing dimension has none.
      latest: the elementwise maximum of the clocks: [threads].
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: np.ndarray = np.zeros((0, 0), np.int32)
        self.bounds: np.ndarray = np.zeros((_DIMS, 2, 0), np.int64)
        self.latest: np.ndarray = np.zeros(0, np.int32)

    def append(self, access: Any) -> None:
        _, clock, where, _ = access
        count = len(self)
        if count == self.clocks.shape[1]:
            most = max(16, 2 * count)
            clocks = np.zeros((len(clock.clock), most), clock.clock.dtype)
            bounds = np.empty((_DIMS, 2, most), np.int64)
            bounds[:, 0], bounds[:, 1] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
            if not self:
                self.latest = np.zeros_like(clock.clock)
            else:
                clocks[:, :count], bounds[..., :count] = self.clocks, self.bounds
            self.clocks, self.bounds = clocks, bounds
        self.clocks[:, count] = clock.clock
        np.maximum(self.latest, clock.clock, out=self.latest)
        for n, first_and_end in enumerate(_bounds(where)):
            self.bounds[n, :, count] = first_and_end
        super().append(access)

    def may_race_with(self, clock: np.ndarray, where: Any) -> bool:
        """Whether an access that is neither before `clock` nor after it may overlap `where`."""
        count = len(self)
        # All of them are before `clock`; a clock that equals it is not.
        if not count or ((self.latest <= clock).all() and (self.latest != clock).any()):
            return False
        # Dimension by dimension: NumPy is slow where it reduces short rows.
        overlap = np.ones(count, bool)
        for (first, end), (firsts, ends) in zip(_bounds(where), self.bounds, strict=False):
            overlap &= (firsts[:count] < end) & (ends[:count] > first)
        overlapping = np.flatnonzero(overlap)
        if not overlapping.size:
            return False
        difference = self.clocks[:, overlapping] - clock[:, None]
        return bool(((difference.min(axis=0) < 0) == (difference.max(axis=0) > 0)).any())


def _compared_at_once(check: Callable[..., None], conflicts: tuple[str, ...], kept_in: str) -> Any:
    """`check`, a method of the detector, which is left to decide where there may be a race.

    Args:
      check: compares an access with earlier ones, one by one, and appends it.
      conflicts: attributes that hold the accesses that it is compared with.
      kept_in: the attribute that holds accesses of its kind.
    """

    def checked(
        self: Any, thread: Any, clock: Any, key: Any, where: Any, source_info: Any = None
    ) -> None:
        with self.lock:
            if not any(
                getattr(self, name)[key].may_race_with(clock.clock, where) for name in conflicts
            ):
                frame = source_info_util.summarize(source_info) if source_info else "pallas_call"
                getattr(self, kept_in)[key].append((thread, clock, where, frame))
                return
        check(self, thread, clock, key, where, source_info)

    return checked


_Detector = race_detection_state.RaceDetectionState
_check_read = _compared_at_once(_Detector.check_read, ("writes",), "reads")
_check_write = _compared_at_once(_Detector.check_write, ("writes", "reads"), "writes")


class Launches:
    """What the race detector saw, in one entry a launch."""

    def __init__(self) -> None:
        self.detectors: list[gpu_callbacks.GPURaceDetectionState] = []

    def __len__(self) -> int:
        return len(self.detectors)

    @property
    def with_races(self) -> list[int]:
        return [i for i, detector in enumerate(self.detectors) if detector.races_found]

    def assert_no_races(self, launches: int) -> None:
        assert len(self) == launches, f"{len(self)} launches were interpreted, not {launches}"
        assert not self.with_races, f"races in launches {self.with_races}: see the captured output"


@contextlib.contextmanager
def watched() -> Iterator[Launches]:
    """Kernels that run within are watched as the module's docstring says."""
    launches = Launches()
    make_detector = gpu_callbacks.GPURaceDetectionState

    def make_and_keep(**sizes: Any) -> gpu_callbacks.GPURaceDetectionState:
        _in_flight.clear()
        detector = make_detector(**sizes)
        detector.reads = collections.defaultdict(_Accesses)
        detector.writes = collections.defaultdict(_Accesses)
        launches.detectors.append(detector)
        return detector

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with (
        mock.patch.multiple(
            gpu_callbacks,
            GPURaceDetectionState=make_and_keep,
            wgmma=_watched_wgmma,
            wgmma_accumulator_deref=_watched_wgmma_accumulator_deref,
            copy_gmem_to_smem=_aligned(gpu_callbacks.copy_gmem_to_smem),
            copy_smem_to_gmem=_aligned(gpu_callbacks.copy_smem_to_gmem),
        ),
        numpy_launches.in_numpy(),
        mock.patch.object(shared_memory.GPUSharedMemory, "_abort_waiters", _abort_all_waiters),
        mock.patch.object(_Detector, "check_read", _check_read),
        mock.patch.object(_Detector, "check_write", _check_write),
    ):
        try:
            yield launches
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
