"""A ranking request, run through every stage from the materialised model to the single launch.

`run` builds a seeded request with a ragged number of candidates per user, compiles the stages,
checks each against an oracle in float32 and times them. `ikbo-jax demo` prints what it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax._timing import by_turns
from ikbo_jax._timing.programs import Programs, Say, kept_compilations, side_by_side
from ikbo_jax.ops.dispatch import hopper_unavailable_reason
from ikbo_jax.ops.explain import explain
from ikbo_jax.ops.linear_compression import linear_compression
from ikbo_jax.reference.linear_compression import materialised
from ikbo_jax.tuning.configs import (
    LinearCompressionConfig,
    LinearCompressionProblem,
    illegal_reason,
)
from ikbo_jax.tuning.table import default_config, lookup, user_cache_path

#: Rounds over all stages; in each, every stage has one window of launches back to back, and half a
#: window before it. The stages' turns keep the card busy between a stage's windows.
ROUNDS = 3
#: Seconds of a window: twelve stages take 3 s in all.
WINDOW_S = 0.05
#: Embedding rows are padded to a multiple of this in the aligned baseline: 16 bytes of bfloat16.
ALIGNED_K = 8


@dataclasses.dataclass(frozen=True)
class Request:
    """Sizes of a ranking request.

    Attributes:
      candidates: B, rows to score.
      users: U, rows they share.
      m: compressed rows.
      n: embedding width.
      k_cand: embedding rows of a candidate.
      k_user: embedding rows of a user.
      dtype: name of the dtype of every array.
      seed: of the inputs and of the number of candidates per user.
    """

    candidates: int
    users: int
    m: int
    n: int
    k_cand: int
    k_user: int
    dtype: str
    seed: int = 0

    @property
    def problem(self) -> LinearCompressionProblem:
        """The request as the dispatch table knows it."""
        return LinearCompressionProblem(
            batches=(self.users, self.candidates),
            ks=(self.k_user, self.k_cand),
            m=self.m,
            n=self.n,
            dtype=self.dtype,
        )


#: What an accelerator is given: about 70 candidates for each of 15 users.
FULL = Request(candidates=1024, users=15, m=433, n=256, k_cand=866, k_user=1178, dtype="bfloat16")
#: What a CPU is given: a quarter of every size. CPUs multiply bfloat16 slowly, hence float32.
SMALL = Request(candidates=256, users=4, m=109, n=64, k_cand=217, k_user=295, dtype="float32")


class Inputs(NamedTuple):
    """The arguments of `linear_compression`, in its order."""

    w_cand: jax.Array
    w_user: jax.Array
    e_cand: jax.Array
    e_user: jax.Array
    cand_to_user: jax.Array


@dataclasses.dataclass(frozen=True)
class Stage:
    """One way to compute the request.

    Attributes:
      name: what the table calls it.
      fn: takes `Inputs`' fields, returns [B, M, N]; None if it cannot run here.
      bytes_moved: the least this stage has to read and write in device memory.
      path: what runs it, or why nothing does.
    """

    name: str
    fn: Callable[..., jax.Array] | None
    bytes_moved: int
    path: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """A stage that ran.

    Attributes:
      stage: the stage.
      time_ms: median over the rounds, milliseconds.
      memory_bytes: output and temporary buffers, as the compiler laid them out.
      error: largest absolute difference to the oracle in float32.
      agrees: whether that is within `Report.tolerance`.
    """

    stage: Stage
    time_ms: float
    memory_bytes: int
    error: float
    agrees: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """What `run` found. `measured[0]` is the materialised model, the baseline of the speed-ups."""

    request: Request
    counts: tuple[int, ...]
    measured: tuple[Measured, ...]
    not_run: tuple[Stage, ...]
    tolerance: float

    @property
    def agree(self) -> bool:
        """Whether every stage that ran agrees with the oracle."""
        return all(m.agrees for m in self.measured)


def run_parts(calls: Sequence[Callable[[], Any]], say: Say) -> list[Any]:
    """What the calls return: parts of the demo, run as `_timing.programs` says.

    Compiled programs are kept for the next time, beside the user's tuning cache.
    """
    table = user_cache_path()
    with kept_compilations(table.parent / "compilations", [table]) as reason:
        if reason is not None:
            say(reason)
        return side_by_side(calls)


def default_request() -> Request:
    """The full request on an accelerator, the small one on a CPU."""
    return SMALL if jax.default_backend() == "cpu" else FULL


def candidate_counts(request: Request) -> np.ndarray:
    """Candidates of every user, [U] int64: ragged around B / U, B in all, zero not excluded."""
    rng = np.random.default_rng(request.seed)
    popularity = rng.uniform(0.5, 1.5, request.users)
    return rng.multinomial(request.candidates, popularity / popularity.sum())


def _draw(request: Request, key: jax.Array) -> tuple[jax.Array, ...]:
    dtype = jnp.dtype(request.dtype)
    keys = jax.random.split(key, 4)
    scale = 1 / math.sqrt(request.k_cand + request.k_user)
    shapes = (
        (request.m, request.k_cand),
        (request.m, request.k_user),
        (request.candidates, request.k_cand, request.n),
        (request.users, request.k_user, request.n),
    )
    w_cand, w_user, e_cand, e_user = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    return (w_cand * scale).astype(dtype), (w_user * scale).astype(dtype), e_cand, e_user


def _draw_seeded(request: Request, seed: jax.Array) -> tuple[jax.Array, ...]:
    return _draw(request, jax.random.key(seed))


def user_index(request: Request) -> jax.Array:
    """The user of every candidate, [B] int32, sorted."""
    counts = candidate_counts(request)
    return jnp.asarray(np.repeat(np.arange(request.users, dtype=np.int32), counts))


def make_inputs(request: Request) -> Inputs:
    """Seeded random inputs; weights are scaled so that results are of order one."""
    return Inputs._make([*_draw(request, jax.random.key(request.seed)), user_index(request)])


def _levels(
    w_cand: jax.Array,
    w_user: jax.Array,
    e_cand: jax.Array,
    e_user: jax.Array,
    cand_to_user: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    """The two-level request as the reference functions take it: coarsest level first."""
    return (w_user, w_cand), (e_user, e_cand), (None, cand_to_user)


def _materialised(
    align_k: int = 1, precision: jax.lax.PrecisionLike = None
) -> Callable[..., jax.Array]:
    def fn(*inputs: jax.Array) -> jax.Array:
        return materialised(*_levels(*inputs), align_k=align_k, precision=precision)

    return fn


def oracle(inputs: Inputs) -> jax.Array:
    """The materialised model in float32, [B, M, N] float32."""
    wide = (x.astype(jnp.float32) for x in inputs[:4])
    exact = _materialised(precision=jax.lax.Precision.HIGHEST)
    return exact(*wide, inputs.cand_to_user)


def _bytes_moved(request: Request, *, copied_k: int = 0, separate_add: bool = False) -> int:
    """The least a stage has to read and write.

    Args:
      request: the sizes.
      copied_k: rows of the concatenated embedding that the stage writes and reads back, 0 if none.
      separate_add: whether the candidates' partial result makes a round trip before the addition.
    """
    size = jnp.dtype(request.dtype).itemsize
    partial = 4  # partial results are float32
    rows = request.m * request.n
    moved = size * request.m * (request.k_cand + request.k_user)
    moved += size * request.n * request.candidates * request.k_cand
    moved += size * request.n * request.users * request.k_user
    moved += size * request.candidates * rows
    moved += 4 * request.candidates
    if copied_k:
        return moved + 2 * size * request.candidates * copied_k * request.n
    moved += 2 * partial * request.users * rows
    if separate_add:
        moved += 2 * partial * request.candidates * rows
    return moved


def _kernel_stage(request: Request, name: str, *, single_launch: bool) -> Stage:
    """A stage that only the Mosaic GPU kernel can run, or the reason why it cannot run here."""
    moved = _bytes_moved(request)
    if (reason := hopper_unavailable_reason()) is not None:
        return Stage(name, None, moved, reason)
    tuned = lookup(request.problem).config or default_config(request.problem)
    config = dataclasses.replace(tuned or LinearCompressionConfig(), single_launch=single_launch)
    if (reason := illegal_reason(request.problem, config)) is not None:
        return Stage(name, None, moved, reason)

    def fn(*inputs: jax.Array) -> jax.Array:
        return linear_compression(*inputs, implementation="mosaic_gpu", config=config)

    path = f"mosaic_gpu, {config.block_m} rows, {config.num_stages} deep"
    return Stage(name, fn, moved, path)


def stages(request: Request) -> list[Stage]:
    """Every stage, the materialised model first."""
    k = request.k_cand + request.k_user
    aligned = -(-k // ALIGNED_K) * ALIGNED_K

    def decomposed(*inputs: jax.Array) -> jax.Array:
        return linear_compression(*inputs, implementation="xla")

    return [
        Stage(
            "1  materialised",
            _materialised(),
            _bytes_moved(request, copied_k=k),
            f"xla, K={k}",
        ),
        Stage(
            "1b aligned K",
            _materialised(align_k=ALIGNED_K),
            _bytes_moved(request, copied_k=aligned),
            f"xla, K={aligned}",
        ),
        Stage("2  decomposed", decomposed, _bytes_moved(request, separate_add=True), "xla"),
        _kernel_stage(request, "3  fused", single_launch=False),
        _kernel_stage(request, "4  single launch", single_launch=True),
    ]


def automatic_path(request: Request) -> str:
    """What `linear_compression` runs here when it is left to choose, and why."""
    plan = explain(linear_compression, *jax.eval_shape(lambda: make_inputs(request))).plans[0]
    return f"{plan.implementation} ({plan.reason})"


def tolerance(request: Request, baseline_error: float, largest: float) -> float:
    """Twice the materialised model's own error in this dtype, and one rounding.

    In float32 the materialised model *is* the oracle and its error zero, while another order of
    summation is as good: allow what K roundings add up to at random.
    """
    k = request.k_cand + request.k_user
    rounding = float(jnp.finfo(request.dtype).eps) / 2
    summation = math.sqrt(k) * float(jnp.finfo(jnp.float32).eps)
    return 2 * baseline_error + (rounding + summation) * largest


def compare(actual: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest absolute difference, and the largest absolute value expected; two scalars."""
    error = jnp.max(jnp.abs(actual.astype(jnp.float32) - expected), initial=0.0)
    return error, jnp.max(jnp.abs(expected), initial=0.0)


def device_memory(executable: jax.stages.Compiled) -> int:
    """Bytes of the output and of temporary buffers; 0 where the compiler does not say."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.output_size_in_bytes + analysis.temp_size_in_bytes)


def add_stages(
    programs: Programs, stages: Sequence[Stage], inputs: Sequence[Any]
) -> tuple[list[Stage], list[Stage]]:
    """Adds the stages to the programs; those added, and those that cannot run here, and why."""
    runnable, not_run = [], []
    for stage in stages:
        if stage.fn is None:
            not_run.append(stage)
            continue
        try:
            programs.add(stage.name, stage.fn, *inputs)
        except NotImplementedError as error:  # legal, but not for this kernel: its message says why
            not_run.append(dataclasses.replace(stage, fn=None, path=str(error)))
            continue
        runnable.append(stage)
    return runnable, not_run


def time_by_turns(
    compiled: Mapping[str, Callable[..., Any]], inputs: Sequence[Any], say: Say
) -> dict[str, list[float]]:
    """Milliseconds of every round, by name."""

    def on_turn(name: str, turn: int) -> None:
        if turn == 0:
            say(f"timing {' '.join(name.split())}, round 1 of {ROUNDS} by turns")

    thunks = {name: functools.partial(fn, *inputs) for name, fn in compiled.items()}
    return by_turns(thunks, window_s=WINDOW_S, rounds=ROUNDS, on_turn=on_turn)


def said_of(part: str, on_progress: Say) -> Say:
    """`on_progress` for one part of the demo, whose name it puts before every text."""
    return lambda text: on_progress(f"{part}: {text}")


def measure(
    compiled: Mapping[str, jax.stages.Compiled],
    runnable: Sequence[Stage],
    inputs: Sequence[jax.Array],
    expected: jax.Array,
    tolerance_of: Callable[[float, float], float],
    say: Say,
) -> tuple[tuple[Measured, ...], float]:
    """Checks and times stages.

    Args:
      compiled: programs by name: the stages', and "comparison", which is `compare` or like it.
      runnable: the stages, the baseline first.
      inputs: of every stage.
      expected: what "comparison" takes beside a stage's result.
      tolerance_of: from the baseline's error and the largest value expected, the largest error
        allowed.
      say: is told what is being done.

    Returns:
      What was measured, and the largest error allowed.
    """
    say("checking the results")
    errors, largest = {}, 0.0
    for stage in runnable:
        found = compiled["comparison"](compiled[stage.name](*inputs), expected)
        errors[stage.name], largest = (float(x) for x in found)
    limit = tolerance_of(errors[runnable[0].name], largest)
    samples = time_by_turns({stage.name: compiled[stage.name] for stage in runnable}, inputs, say)
    measured = tuple(
        Measured(
            stage,
            time_ms=statistics.median(samples[stage.name]),
            memory_bytes=device_memory(compiled[stage.name]),
            error=errors[stage.name],
            # A NaN disagrees; and a baseline whose error hides the result has no right to vouch.
            agrees=errors[stage.name] <= limit < largest,
        )
        for stage in runnable
    )
    return measured, limit


def run(request: Request, *, on_progress: Say = lambda _: None) -> Report:
    """Computes the request in every stage, checks the results, and times the stages in turn.

    Args:
      request: sizes and seed.
      on_progress: is told what is being done.

    Returns:
      The report; stages that cannot run on this device are in `not_run`, with the reason as path.
    """
    say = said_of("linear compression", on_progress)
    # The seed is an argument of what draws, so that one program serves all seeds.
    unseeded = dataclasses.replace(request, seed=0)
    programs = Programs(say, identity=f"linear compression {unseeded}")
    number, index = np.uint32(request.seed % 2**32), user_index(request)
    drawn = programs.add("inputs", functools.partial(_draw_seeded, unseeded), number, timed=False)
    shapes = Inputs._make([*drawn, jax.ShapeDtypeStruct(index.shape, index.dtype)])
    exact = programs.add("oracle in float32", oracle, shapes, timed=False)
    runnable, not_run = add_stages(programs, stages(request), shapes)
    out = jax.ShapeDtypeStruct(exact.shape, jnp.dtype(request.dtype))
    programs.add("comparison", compare, out, exact, timed=False)
    compiled = programs.compiled()

    inputs = Inputs._make([*compiled["inputs"](number), index])
    expected = compiled["oracle in float32"](inputs)
    measured, limit = measure(
        compiled, runnable, inputs, expected, functools.partial(tolerance, request), say
    )
    counts = tuple(int(c) for c in candidate_counts(request))
    return Report(request, counts, measured, tuple(not_run), limit)
