"""The autotuner: times every candidate configuration on this device and remembers the best.

Each candidate runs in a process of its own, because a CUDA error poisons the process it happens in
and a kernel that hangs can only be killed with its process. A worker checks its candidates against
the oracle, times them by the sustained protocol (launches back to back for a window, several
windows, the median), and times the 8192^3 bf16 matmul beside them: candidates of different
processes are compared by their fraction of it. The best ones and the XLA path then alternate in one
last process, which decides.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax import _timing
from ikbo_jax.tuning import rules, table, trials, trials_gdpa
from ikbo_jax.tuning.configs import AttentionProblem, LinearCompressionProblem
from ikbo_jax.tuning.gdpa_configs import GdpaConfig, GdpaProblem
from ikbo_jax.tuning.rules import Config, Problem

#: Called after every candidate with (done, total, what came out).
Progress = Callable[[int, int, str], None]
#: A configuration of the kernel, or None for the XLA path.
Candidate = Config | None

#: XLA must be this much faster for a row to prefer it.
XLA_MARGIN = 0.02
#: Seconds after which a worker counts as hung; compiling and timing take about ten.
WORKER_TIMEOUT_S = 240.0
#: Kernel candidates that meet again in the deciding process.
FINALISTS = 2
_RESULT_MARK = "ikbo-autotune-result "


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker is asked: candidates to check and to time by turns.

    Attributes:
      problem: sizes of the inputs.
      candidates: what to run.
      window_s: seconds of one timing window.
      windows: windows of each candidate.
      matmul_size: n of the n^3 bf16 matmul that normalises.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    window_s: float = 0.2
    windows: int = 3
    matmul_size: int = 8192

    def to_json(self) -> str:
        fields = {"op": rules.of(self.problem).op, **dataclasses.asdict(self)}
        fields["candidates"] = [
            {"implementation": "xla"} if config is None else dataclasses.asdict(config)
            for config in self.candidates
        ]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields = json.loads(text)
        return cls(
            table.problem_from_json(fields["problem"], fields["op"]),
            tuple(table.config_from_json(entry, fields["op"]) for entry in fields["candidates"]),
            fields["window_s"],
            fields["windows"],
            fields["matmul_size"],
        )


@dataclasses.dataclass(frozen=True)
class Trials:
    """What the tuner asks about an op.

    Attributes:
      operands: random arguments on the device, of a problem.
      runner: the kernel with a configuration, or for None the XLA path, as a function of them.
      check: of a problem, a result and the operands: its largest error, and the largest admitted.
      flops: useful FLOPs of the operands of a problem.
    """

    operands: Callable[[Any], Any]
    runner: Callable[[Any, Any], Callable[..., jax.Array]]
    check: Callable[[Any, jax.Array, Any], tuple[float, float]]
    flops: Callable[[Any], int]


TRIALS = {
    "linear_compression": Trials(
        trials.linear_compression_operands,
        trials.linear_compression_runner,
        lambda problem, actual, operands: trials.check_linear_compression(actual, operands),
        lambda problem: problem.useful_flops,
    ),
    "attention": Trials(
        trials.attention_operands,
        trials.attention_runner,
        lambda problem, actual, operands: trials.check_attention(actual, operands),
        lambda problem: problem.useful_flops,
    ),
    "gdpa": Trials(
        trials_gdpa.gdpa_operands,
        trials_gdpa.gdpa_runner,
        trials_gdpa.check_gdpa,
        trials_gdpa.gdpa_flops,
    ),
}


def _trials(problem: Problem) -> Trials:
    return TRIALS[rules.of(problem).op]


def measure(task: Task) -> dict[str, Any]:
    """Checks and times a task's candidates in this process.

    Returns:
      device, compute_capability and jax; matmul_ms, samples; results, one for every candidate: ms,
      samples, or failure, a text, for one that was wrong.
    """
    device = jax.devices()[0]
    problem, op = task.problem, _trials(task.problem)
    operands = op.operands(problem)
    size = task.matmul_size
    square = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul)
    runners: dict[int, Callable[..., jax.Array]] = {}
    results: list[dict[str, Any]] = []
    for position, candidate in enumerate(task.candidates):
        runner = op.runner(problem, candidate)
        error, bound = op.check(problem, runner(*operands), operands)
        if error <= bound:
            runners[position] = runner
            results.append({"ms": [], "error": error, "bound": bound})
        else:
            results.append({"failure": f"wrong result: error {error:.3g}, bound {bound:.3g}"})
    once = functools.partial(_timing.sustained_ms, window_s=task.window_s, windows=1)
    matmul_ms: list[float] = []
    for _ in range(task.windows):
        matmul_ms += once(matmul, square, square)
        for position, runner in runners.items():
            results[position]["ms"] += once(runner, *operands)
    return {
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "jax": jax.__version__,
        "matmul_ms": matmul_ms,
        "results": results,
    }


def worker(text: str, measure: Callable[[Task], dict[str, Any]] = measure) -> int:
    """Runs the task in `text` (JSON) and prints what came out as one marked line."""
    try:
        answer = measure(Task.from_json(text))
    except Exception as error:
        # Whatever it is, the tuner reports it beside the candidate and goes on to the next.
        first_line = (str(error).strip() or "no message").splitlines()[0]
        answer = {"failure": f"{type(error).__name__}: {first_line[:300]}"}
    print(_RESULT_MARK + json.dumps(answer), flush=True)
    return 0


def run_in_subprocess(
    task: Task, *, cache_dir: str | None = None, timeout_s: float = WORKER_TIMEOUT_S
) -> dict[str, Any]:
    """Measures a task in a process of its own; one that dies or hangs gives {"failure": why}.

    Workers with one `cache_dir` share what they all compile: the oracle, the matmul, the XLA path.
    """
    command = [sys.executable, "-m", "ikbo_jax.tuning.autotune", "--worker", task.to_json()]
    # The parent may hold device memory of its own, so a worker takes only what it needs.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if cache_dir is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = cache_dir
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer after {timeout_s:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_RESULT_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_RESULT_MARK))
            return answer
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"failure": f"worker ended with status {done.returncode}: {last[:300]}"}


def tune_linear_compression(
    problem: LinearCompressionProblem,
    *,
    progress: Progress | None = None,
    limit: int | None = None,
    run: Callable[[Task], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Finds the fastest choice for a problem on this device and writes it to the user's cache.

    Args:
      problem: sizes and dtype.
      progress: called after every candidate with (done, total, text).
      limit: times at most this many configurations, the likeliest first.
      run: measures a task; the default starts a process for it.

    Returns:
      The row, as it stands in the cache; its config is {"implementation": "xla"} where XLA was more
      than 2 % faster than the best configuration, or none worked.

    Raises:
      OSError: the user's cache cannot be written; nothing was timed.
      RuntimeError: the device is not a Hopper GPU, or even the XLA path fails on it.
    """
    return _tune(problem, progress, limit, run)


def tune_attention(
    problem: AttentionProblem,
    *,
    progress: Progress | None = None,
    limit: int | None = None,
    run: Callable[[Task], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """`tune_linear_compression` for attention, every user with all of its S keys."""
    return _tune(problem, progress, limit, run)


def tune_gdpa(
    problem: GdpaProblem,
    *,
    progress: Progress | None = None,
    limit: int | None = None,
    run: Callable[[Task], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """`tune_linear_compression` for the forward pass of generalised dot-product attention.

    All rows belong to sequences, whose lengths lie evenly about their mean up to `max_seqlen_q` and
    `max_seqlen_kv`. Other than there, a problem that no kernel takes is refused.

    Raises:
      ValueError: a mean length is above its bound; there are no sequences; no configuration of the
        kernel is legal.
    """
    for name, rows, sequences, longest in (
        ("queries", problem.q_rows, problem.batch, problem.max_seqlen_q),
        ("keys", problem.kv_rows, problem.batch_kv, problem.max_seqlen_kv),
    ):
        if not 0 < sequences <= rows:
            raise ValueError(f"{rows} rows of {name} do not fill {sequences} sequences")
        if longest is not None and rows > sequences * longest:
            raise ValueError(
                f"{rows} rows of {name} do not fit {sequences} sequences of at most {longest}"
            )
    if table.default_config(problem) is None:
        raise ValueError(rules.of(problem).illegal_reason(problem, GdpaConfig()))
    return _tune(problem, progress, limit, run)


def _tune(
    problem: Problem,
    progress: Progress | None,
    limit: int | None,
    run: Callable[[Task], dict[str, Any]] | None,
) -> dict[str, Any]:
    table.check_user_cache_writable()
    with contextlib.ExitStack() as stack:
        if run is None:
            cache_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="ikbo-jax-tune-"))
            run = functools.partial(run_in_subprocess, cache_dir=cache_dir)
        row = _sweep(problem, progress or (lambda done, total, text: None), limit, run)
    path = table.write_user_row(row)
    if progress is not None:
        winner = "XLA" if row.config is None else _brief(row.config)
        progress(1, 1, f"best: {winner}, {row.ms:.4g} ms; written to {path}")
    return row.to_json()


def _sweep(
    problem: Problem,
    report: Progress,
    limit: int | None,
    run: Callable[[Task], dict[str, Any]],
) -> table.Row:
    candidates = list(rules.of(problem).candidate_configs(problem))[:limit]
    total = len(candidates) + 2
    xla = _measured(run(Task(problem, (None,))), problem)[0]
    if isinstance(xla, str):
        raise RuntimeError(f"the XLA path cannot be timed here: {xla}")
    if not xla.is_hopper:
        raise RuntimeError(
            f"tuning needs a Hopper GPU (compute capability 9.0); this is {xla.device}"
        )
    report(1, total, f"XLA: {xla.text}")
    timed: list[tuple[Config, _Measured]] = []
    for done, config in enumerate(candidates, start=2):
        outcome = _measured(run(Task(problem, (config,))), problem)[0]
        if not isinstance(outcome, str):
            timed.append((config, outcome))
        text = outcome if isinstance(outcome, str) else outcome.text
        report(done, total, f"{_brief(config)}: {text}")
    timed.sort(key=lambda entry: -entry[1].fraction)
    best = timed[:FINALISTS]
    if best:
        final = _measured(run(Task(problem, (None, *(config for config, _ in best)))), problem)
        if len(final) == len(best) + 1 and not isinstance(final[0], str):
            xla = final[0]
            best = [
                (config, outcome)
                for (config, _), outcome in zip(best, final[1:], strict=True)
                if not isinstance(outcome, str)
            ]
        # Otherwise the deciding process died, and the fractions of the single ones decide.
    report(total, total, f"XLA again: {xla.text}")
    return _decide(problem, xla, best)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """One candidate's time, and the fraction of the matmul beside it."""

    ms: float
    fraction: float
    device: str
    is_hopper: bool
    jax: str

    @property
    def text(self) -> str:
        return f"{self.ms:.4g} ms, {self.fraction:.3f} of the matmul"


def _measured(
    answer: dict[str, Any], problem: Problem, matmul_size: int = 8192
) -> list[_Measured | str]:
    """What became of every candidate of a worker's answer: times, or the text of its failure."""
    if "failure" in answer:
        return [answer["failure"]]
    matmul_rate = 2 * matmul_size**3 / statistics.median(answer["matmul_ms"])
    flops = _trials(problem).flops(problem)
    outcomes: list[_Measured | str] = []
    for result in answer["results"]:
        if "failure" in result:
            outcomes.append(result["failure"])
            continue
        ms = statistics.median(result["ms"])
        fraction = flops / ms / matmul_rate
        is_hopper = answer["compute_capability"] == "9.0"
        outcomes.append(_Measured(ms, fraction, answer["device"], is_hopper, answer["jax"]))
    return outcomes


def _decide(
    problem: Problem,
    xla: _Measured,
    kernels: Sequence[tuple[Config, _Measured]],
) -> table.Row:
    """The row of the fastest kernel, or of XLA where that is faster by more than the margin."""
    winner: tuple[Candidate, _Measured] = (None, xla)
    if kernels:
        config, outcome = max(kernels, key=lambda entry: entry[1].fraction)
        if outcome.fraction * (1 + XLA_MARGIN) >= xla.fraction:
            winner = (config, outcome)
    config_or_xla, measured = winner
    return table.Row(
        problem,
        config_or_xla,
        measured.device,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        measured.jax,
        round(measured.ms, 5),
        round(measured.fraction, 4),
        round(xla.ms, 5),
    )


def _brief(config: Config) -> str:
    names = {"block_m": "block_m", "num_stages": "stages", "epilogue_rows": "epilogue"}
    fields = dataclasses.asdict(config)
    return " ".join(f"{names.get(name, name)} {value}" for name, value in fields.items())


@contextlib.contextmanager
def console_progress(title: str = "tuning") -> Iterator[Progress]:
    """A progress bar on a terminal, one plain line for every candidate when piped."""
    if not sys.stdout.isatty():

        def plain(done: int, total: int, text: str) -> None:
            print(f"{title} {done}/{total} {text}", flush=True)

        yield plain
        return
    import rich.progress  # Here, since only a terminal needs it.

    with rich.progress.Progress() as bar:
        task = bar.add_task(title, total=None)

        def fancy(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total)
            bar.console.print(text, markup=False, highlight=False)

        yield fancy


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of a worker process."""
    parser = argparse.ArgumentParser(description="Worker of the autotuner; started by it.")
    parser.add_argument("--worker", required=True, metavar="JSON", help="the task")
    return worker(parser.parse_args(argv).worker)


if __name__ == "__main__":
    sys.exit(main())
