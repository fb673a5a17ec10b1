"""The demo's parts, and its part on linear compression.

A part builds a seeded request whose users have different numbers of candidates, compiles stages,
checks each against an oracle in float32 and times them. `ikbo-jax demo` prints the report.
"""

import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax._timing import interleaved_ms, programs
from ikbo_jax._timing.programs import Log, Part, Programs
from ikbo_jax.cases import error_rule
from ikbo_jax.cases.linear_compression import ALIGNED_K, Case, Inputs, oracle
from ikbo_jax.models import ranking
from ikbo_jax.models.ranking import Sizes
from ikbo_jax.ops.dispatch import hopper_unavailable_reason
from ikbo_jax.ops.explain import explain
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.tuning.user_cache import user_cache_path

#: Number of rounds. A round times all stages interleaved: half a window of warm-up and one window
#: of launches back to back for each. The other stages keep the device busy between windows.
ROUNDS = 3
#: Seconds of a window; twelve stages take 3 s in all.
WINDOW_S = 0.05


@dataclasses.dataclass(frozen=True)
class Stage:
    """Describes one implementation of an op, or one version of the network.

    Attributes:
      name: name in the printed table.
      fn: takes the fields of the inputs, returns the result; None if it cannot run here.
      bytes_moved: least number of bytes that the stage reads and writes; 0 for the network.
      path: the implementation and its configuration, or why it cannot run; "" for the network.
    """

    name: str
    fn: Callable[..., jax.Array] | None
    bytes_moved: int = 0
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds the measurements of a stage that ran.

    Attributes:
      time_ms: median over the rounds.
      memory_bytes: output and temporary buffers, as the compiler laid them out.
      error: largest absolute difference to the float32 oracle.
      agrees: whether `error` is within `Report.tolerance`.
    """

    stage: Stage
    time_ms: float
    memory_bytes: int
    error: float
    agrees: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """Holds a part's result. `measured[0]` copies users and is the baseline of speed-ups."""

    sizes: Sizes
    measured: tuple[Measured, ...]
    not_run: tuple[Stage, ...]
    tolerance: float

    @property
    def agree(self) -> bool:
        """Whether every stage that ran agrees with the oracle."""
        return all(m.agrees for m in self.measured)


def run_parts(parts: Sequence[Part[Any]], log: Log) -> list[Any]:
    """Runs parts (see `_timing.programs`); stores programs beside the tuning cache."""
    table = user_cache_path()
    # Lowering takes an eighth less time without Python's garbage collector, and 27 MB more.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with programs.use_store(table.parent / "programs", [table]) as reason:
            if reason is not None:
                log(reason)
            return programs.run_parts(parts)
    finally:
        if is_collecting:
            gc.enable()


def case_of(sizes: Sizes) -> Case:
    """Makes the case; only its drawn arrays are used, since the index is `ranking.user_index`."""
    batches, ks = (sizes.users, sizes.candidates), (sizes.user_rows, sizes.cand_tokens)
    return Case(LinearCompressionProblem(batches, ks, sizes.compressed, sizes.width, sizes.dtype))


def make_inputs(sizes: Sizes, seed: int) -> Inputs:
    """Draws inputs whose results are near one."""
    return Inputs(*case_of(sizes).draw(seed), (None, ranking.user_index(sizes, seed)))


def _bytes_moved(sizes: Sizes, *, copied_k: int = 0, separate_add: bool = False) -> int:
    """Counts the bytes that a stage must at least read and write.

    Args:
      copied_k: rows of the concatenated embedding that the stage writes and reads back, 0 if none.
      separate_add: whether the stage writes the candidates' product and reads it for the addition.
    """
    size = jnp.dtype(sizes.dtype).itemsize
    partial = 4  # partial results are float32
    rows = sizes.compressed * sizes.width
    moved = size * sizes.compressed * (sizes.cand_tokens + sizes.user_rows)
    moved += size * sizes.width * sizes.candidates * sizes.cand_tokens
    moved += size * sizes.width * sizes.users * sizes.user_rows
    moved += size * sizes.candidates * rows
    moved += 4 * sizes.candidates
    if copied_k:
        return moved + 2 * size * sizes.candidates * copied_k * sizes.width
    moved += 2 * partial * sizes.users * rows
    if separate_add:
        moved += 2 * partial * sizes.candidates * rows
    return moved


def _kernel_stage(sizes: Sizes, name: str, *, single_launch: bool) -> Stage:
    """Makes a stage of the kernel; its `path` is the reason if the kernel cannot run here."""
    moved = _bytes_moved(sizes)
    if (reason := hopper_unavailable_reason()) is not None:
        return Stage(name, None, moved, reason)
    case = case_of(sizes)
    config = case.config(single_launch=single_launch) or LinearCompressionConfig(
        single_launch=single_launch
    )
    if (reason := config.illegal_reason(case.problem)) is not None:
        return Stage(name, None, moved, reason)
    path = f"mosaic_gpu, block_m {config.block_m}, {config.num_stages} stages"
    return Stage(name, case.contender("fused", config), moved, path)


def stages(sizes: Sizes) -> list[Stage]:
    """Makes every stage, the materialised model first."""
    k = sizes.cand_tokens + sizes.user_rows
    aligned = -(-k // ALIGNED_K) * ALIGNED_K
    contender = case_of(sizes).contender
    return [
        Stage(
            "1  materialised",
            contender("materialised"),
            _bytes_moved(sizes, copied_k=k),
            f"xla, K={k}",
        ),
        Stage(
            "1b aligned K",
            contender("materialised-aligned"),
            _bytes_moved(sizes, copied_k=aligned),
            f"xla, K={aligned}",
        ),
        Stage(
            "2  decomposed",
            contender("decomposed"),
            _bytes_moved(sizes, separate_add=True),
            "xla",
        ),
        _kernel_stage(sizes, "3  fused", single_launch=False),
        _kernel_stage(sizes, "4  single launch", single_launch=True),
    ]


def automatic_path(sizes: Sizes) -> str:
    """Names the implementation that `linear_compression` chooses here, and the reason."""
    shapes = jax.eval_shape(lambda: make_inputs(sizes, 0))
    plan = explain(case_of(sizes).contender("automatic"), *shapes).plans[0]
    return f"{plan.implementation} ({plan.reason})"


def device_memory(executable: jax.stages.Compiled) -> int:
    """Counts bytes of output and temporary buffers; 0 if the compiler does not report them."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.output_size_in_bytes + analysis.temp_size_in_bytes)


def add_stages(
    programs: Programs, stages: Sequence[Stage], inputs: Sequence[Any]
) -> tuple[list[Stage], list[Stage]]:
    """Adds stages to the programs; returns the added stages, and the stages that cannot run."""
    runnable, not_run = [], []
    for stage in stages:
        if stage.fn is None:
            not_run.append(stage)
            continue
        try:
            programs.add(stage.name, stage.fn, *inputs)
        except NotImplementedError as error:  # The kernel cannot run; the message says why.
            not_run.append(dataclasses.replace(stage, fn=None, path=str(error)))
            continue
        runnable.append(stage)
    return runnable, not_run


def time_interleaved(
    compiled: Mapping[str, Callable[..., Any]], inputs: Sequence[Any], log: Log
) -> dict[str, list[float]]:
    """Times functions interleaved; returns milliseconds per call in every round, by name."""

    def on_turn(name: str, turn: int) -> None:
        if turn == 0:
            log(f"timing {' '.join(name.split())}, round 1 of {ROUNDS}")

    thunks = {name: functools.partial(fn, *inputs) for name, fn in compiled.items()}
    return interleaved_ms(thunks, window_s=WINDOW_S, rounds=ROUNDS, on_turn=on_turn)


def prefixed_log(part: str, on_progress: Log) -> Log:
    """Puts the name of a part before every text of `on_progress`."""
    return lambda text: on_progress(f"{part}: {text}")


def timed(
    compiled: Mapping[str, jax.stages.Compiled],
    stages: Sequence[Stage],
    inputs: Sequence[Any],
    errors: Mapping[str, float],
    limit: float,
    largest: float,
    log: Log,
) -> tuple[Measured, ...]:
    """Times stages with known largest errors; `largest` is the oracle's largest absolute value."""
    programs = {stage.name: compiled[stage.name] for stage in stages}
    samples = time_interleaved(programs, inputs, log)
    return tuple(
        Measured(
            stage,
            time_ms=statistics.median(samples[stage.name]),
            memory_bytes=device_memory(compiled[stage.name]),
            error=errors[stage.name],
            # False for NaN, and if the baseline's error is so large that any result would pass.
            agrees=errors[stage.name] <= limit < largest,
        )
        for stage in stages
    )


def seed_bits(seed: int) -> np.ndarray:
    """Makes a program's argument of a seed: its low 32 bits, which JAX uses.

    The seed is an argument of the program "inputs", so that one program serves all seeds.
    """
    return np.asarray(seed % 2**32, np.uint32)


def run_stages(
    part: str,
    sizes: Sizes,
    case: Any,
    seed: int,
    make: Callable[[Any, Any], Any],
    oracle: Callable[[Any], jax.Array],
    stages: Sequence[Stage],
    on_progress: Log,
    rows: np.ndarray | slice = slice(None),
) -> Part[Report]:
    """Checks the result of every stage and times the stages interleaved.

    Args:
      part: name of the part of the demo.
      sizes: the report's sizes.
      case: draws the arrays and names the rounding.
      make: makes the arguments of a stage from the drawn arrays and the index.
      oracle: computes the exact results of the candidates `rows`.
      stages: the stages, the baseline first.

    Returns:
      The report; stages that cannot run on this device are in `not_run`, with the reason as `path`.
    """
    log, index = prefixed_log(part, on_progress), ranking.user_index(sizes, seed)
    programs = Programs(log, identity=f"{part} {case}")
    drawn = programs.add("inputs", case.draw, seed_bits(seed), timed=False)
    shapes = make(drawn, jax.ShapeDtypeStruct(index.shape, index.dtype))
    exact = programs.add("oracle in float32", oracle, shapes, timed=False)
    runnable, not_run = add_stages(programs, stages, shapes)

    def compare(actual: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
        return error_rule.compare(actual[rows], expected)

    baseline = runnable[0]
    assert baseline.fn is not None
    out = jax.eval_shape(baseline.fn, *shapes)
    programs.add("comparison", compare, out, exact, timed=False)
    compiled = yield programs

    inputs = make(compiled["inputs"](seed_bits(seed)), index)
    expected = compiled["oracle in float32"](inputs)
    log("checking the results")
    errors, largest = {}, 0.0
    for stage in runnable:
        found = compiled["comparison"](compiled[stage.name](*inputs), expected)
        errors[stage.name], largest = (float(x) for x in found)
    limit = error_rule.bound(errors[baseline.name], largest, *case.rounding)
    measured = timed(compiled, runnable, inputs, errors, limit, largest, log)
    return Report(sizes, measured, tuple(not_run), limit)


def run(sizes: Sizes, seed: int, *, on_progress: Log = lambda _: None) -> Part[Report]:
    """Runs the part on linear compression; see `run_stages`."""
    return run_stages(
        *("linear compression", sizes, case_of(sizes), seed),
        make=lambda drawn, index: Inputs._make([*drawn, (None, index)]),
        oracle=oracle,
        stages=stages(sizes),
        on_progress=on_progress,
    )
