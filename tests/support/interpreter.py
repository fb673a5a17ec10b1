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


#: Of two ranges of a buffer; the ranges of a kernel's loops come again and again.
_overlap = functools.lru_cache(maxsize=1 << 16)(race_detection_state._ranges_overlap)


class _Accesses(list[Any]):
    """Accesses of a buffer, as the detector keeps them, and the maximum of their clocks."""

    latest: Any = 0

    def append(self, access: Any) -> None:
        self.latest = np.maximum(self.latest, access[1].clock)
        super().append(access)

    def may_race_with(self, clock: Any, where: Any) -> bool:
        """Whether one that is neither before `clock` nor after it overlaps `where`."""
        # All of them are before `clock`; a clock that equals it is not.
        if (self.latest <= clock.clock).all() and (self.latest != clock.clock).any():
            return False
        return any(_overlap(where, at) and not one.ordered(clock) for _, one, at, _ in self)


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
            if not any(getattr(self, name)[key].may_race_with(clock, where) for name in conflicts):
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
