"""The autotuner: finds the fastest configuration on this device and writes it to the user's cache.

A worker process compiles all contenders in parallel, checks each against the oracle and times them
(`session`, `worker`, `bench`), so that a CUDA error or a kernel that hangs ends the worker and not
the caller. `Contest` finds the winner. A heat is one round of successive halving: it times the
contenders interleaved, in the first heat for windows of 5 ms, and the faster half enters the next
heat, with windows twice as long. The final times the last few contenders and XLA in sustained
windows. The choice of the dispatch table (the incumbent) takes part in every round, however slow,
so that every round can compare with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ikbo_jax.autotuner.bench import Contender, Task, brief, case_of
from ikbo_jax.autotuner.session import Interrupted, Progress, Session
from ikbo_jax.problems import Config, GdpaBackwardProblem, GdpaProblem, Problem
from ikbo_jax.tuning import table, table_rows, user_cache

#: A row prefers XLA only if XLA is faster than the best kernel by more than this fraction.
XLA_MARGIN = 0.02
#: Number of configurations that the heats leave for the final.
FINALISTS = 4
#: Seconds of a window in the first heat; the windows of each later heat are twice as long.
FIRST_WINDOW_S = 0.005
#: Windows of a heat; an estimate of the noise needs at least two.
HEAT_WINDOWS = 2
#: Lower bound of a heat's noise: the fastest of a hundred contenders in two short windows is partly
#: the luckiest.
HEAT_NOISE = 0.02
#: Seconds of a window of the final, and number of windows.
FINAL_WINDOW_S, FINAL_WINDOWS = 0.2, 3


def tune(
    problem: Problem,
    *,
    progress: Progress | None = None,
    limit: int | None = None,
    run: Callable[[Task], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Finds the fastest configuration, or XLA, for a problem on this device.

    Writes a row to the user's cache if the winner is faster than the choice of the dispatch table
    by more than the noise. Users of attention have all S keys. Lengths of gdpa's sequences are
    spread evenly around their mean, up to `max_seqlen_q` and `max_seqlen_kv`.

    Args:
      problem: sizes and dtype.
      progress: called with (done, total, text) after every compilation, check and round; the last
        text names the winner, its lead, and the file that was written.
      limit: time at most this many configurations besides XLA and the dispatch table's choice.
      run: measures a task; by default a worker process measures all tasks.

    Returns:
      The row of the winner, if it was written to the cache. Otherwise a row of the choice of the
      dispatch table with the time measured now. Its config is {"implementation": "xla"} if XLA was
      more than 2 % faster than the best configuration, or no configuration worked.

    Raises:
      ValueError: a mean length of gdpa's sequences is above its bound, there are no sequences, or
        no configuration of gdpa's kernel is legal.
      OSError: the user's cache cannot be written.
      RuntimeError: the device is not a Hopper GPU, the XLA path fails on it, or no round could be
        measured.
      KeyboardInterrupt: Ctrl-C; the text says what was measured and whether it was written.
    """
    if isinstance(problem, GdpaProblem | GdpaBackwardProblem):
        _check_gdpa(problem)
    user_cache.check_user_cache_writable()
    report = progress or (lambda done, total, text: None)
    contest = Contest(problem, limit, report)
    with contextlib.ExitStack() as stack:
        if run is None:
            run = stack.enter_context(Session(problem, contest.contenders, report))
        try:
            contest.play(run)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Interrupted):
                contest.keep(stop.task, stop.answer)
            raise KeyboardInterrupt(_after_interruption(contest.verdict())) from None
    verdict = contest.verdict()
    if verdict is None:
        raise RuntimeError("no round could be measured")
    try:
        report(1, 1, f"{verdict.text}; {_written(verdict)}")
    except OSError as error:
        raise OSError(f"{verdict.text}; {error}") from error
    return verdict.row.to_json()


def _check_gdpa(problem: GdpaProblem | GdpaBackwardProblem) -> None:
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
    if problem.default_config() is None:
        raise ValueError(problem.config_type().illegal_reason(problem))


def _written(verdict: Verdict) -> str:
    if not verdict.is_better:
        return "nothing written, the table's choice stays"
    return f"written to {user_cache.write_user_row(verdict.row)}"


def _after_interruption(verdict: Verdict | None) -> str:
    if verdict is None:
        return "interrupted before the table's choice was timed; nothing written"
    try:
        return f"interrupted; so far {verdict.text}; {_written(verdict)}"
    except OSError as error:
        return f"interrupted; {error}"


@contextlib.contextmanager
def console_progress(title: str = "tuning") -> Iterator[Progress]:
    """Yields a progress function, which draws a bar on a terminal and prints lines elsewhere."""
    start = time.perf_counter()

    def elapsed() -> str:
        return f"[{time.perf_counter() - start:5.1f} s]"

    if not sys.stdout.isatty():

        def plain(done: int, total: int, text: str) -> None:
            print(f"{elapsed()} {title} {done}/{total} {text}", flush=True)

        yield plain
        return
    import rich.progress  # Imported here because only a terminal needs it.

    with rich.progress.Progress() as bar:
        task = bar.add_task(title, total=None)

        def fancy(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total)
            bar.console.print(f"{elapsed()} {text}", markup=False, highlight=False)

        yield fancy


@dataclasses.dataclass(frozen=True)
class Times:
    """Samples of one contender in one round, one per window, in milliseconds per call."""

    samples: tuple[float, ...]

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)

    @property
    def noise(self) -> float:
        """Median absolute deviation of the samples, as a fraction of their median."""
        return statistics.median(abs(x - self.ms) for x in self.samples) / self.ms


@dataclasses.dataclass(frozen=True)
class Round:
    """Holds times of every contender of a task that worked, and of the reference matmul.

    `least_noise` is a lower bound of the noise of a comparison, as a fraction.
    """

    times: dict[Contender, Times]
    matmul_ms: float
    least_noise: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Holds the result of a contest.

    The row is the winner's if it is better than the table's choice by more than their noise, else
    the choice's; the text names the winner and its lead.
    """

    row: table_rows.Row
    is_better: bool
    text: str


def choices_of_table(problem: Problem, device: str = "") -> tuple[Contender, Contender]:
    """Looks up the choices with and without the user's cache, on a card; None is XLA."""
    with_rows, without = (
        table.lookup(problem, device=device, with_user_rows=x).config for x in (True, False)
    )
    return with_rows, without


class Contest:
    """Finds the fastest configuration among `contenders`: call `play`, then `verdict`."""

    def __init__(self, problem: Problem, limit: int | None, report: Progress) -> None:
        """Collects the contenders: at most `limit` configurations, the table's choices and XLA."""
        self._problem, self._report = problem, report
        self._take_choices("")
        # This process sees no device: the answer to the first task names the card.
        choices = [self._fixed, *(choices_of_table(problem, x) for x in table.devices())]
        configs = problem.configs()[:limit]
        self.contenders: tuple[Contender, ...] = tuple(
            dict.fromkeys((None, *itertools.chain(*choices), *configs))
        )
        self._rounds: list[Round] = []
        self._failures: dict[Contender, str] = {}
        self._device, self._jax, self._xla_ms = "", "", math.nan

    def _take_choices(self, device: str) -> None:
        """Sets the choices that take part in every round; the first one is to be beaten."""
        self._incumbent, shipped = choices_of_table(self._problem, device)
        self._fixed = tuple(dict.fromkeys((self._incumbent, shipped)))

    def play(self, run: Callable[[Task], dict[str, Any]]) -> None:
        """Runs all rounds; `run` measures a task as `Bench.measure`, or returns {"failure": text}.

        Raises:
          RuntimeError: the device is not a Hopper GPU, or the XLA path fails on it.
        """
        self._begin(run(Task(self._problem, (None,), FINAL_WINDOW_S, HEAT_WINDOWS)))
        remaining: list[Config] = [c for c in self.contenders if c is not None]
        heats = 0
        while (1 << heats) * FINALISTS < len(remaining):
            heats += 1
        for heat in range(heats):
            if len(remaining) <= FINALISTS:
                break
            window_s = FIRST_WINDOW_S * 2**heat
            entrants = tuple(dict.fromkeys((*self._fixed, *remaining)))
            task = Task(self._problem, entrants, window_s, HEAT_WINDOWS)
            times = self._played(task, run(task))
            remaining = sorted((c for c in remaining if c in times), key=lambda c: times[c].ms)
            working = len(remaining)
            remaining = remaining[: max(FINALISTS, -(-len(remaining) // 2))]
            text = f"{working} timed for {window_s * 1e3:.0f} ms each, {len(remaining)} go on"
            if remaining:
                text += f"; fastest {times[remaining[0]].ms:.4g} ms: {brief(remaining[0])}"
            self._report(heat + 1, heats + 1, text)
        entrants = tuple(
            c for c in dict.fromkeys((None, *self._fixed, *remaining)) if c not in self._failures
        )
        task = Task(self._problem, entrants, FINAL_WINDOW_S, FINAL_WINDOWS)
        times = self._played(task, run(task))
        for contender, found in times.items():
            text = f"final: {brief(contender)}: {found.ms:.4g} ms ± {found.noise:.1%}"
            self._report(heats + 1, heats + 1, text)

    def _begin(self, answer: dict[str, Any]) -> None:
        """Reads the device and the time of the XLA path from the answer to the first task."""
        failure = answer.get("failure") or answer["results"][0].get("failure")
        if failure is not None:
            raise RuntimeError(f"the XLA path cannot be timed here: {failure}")
        if answer["compute_capability"] != "9.0":
            raise RuntimeError(
                f"tuning needs a Hopper GPU (compute capability 9.0); this is {answer['device']}"
            )
        self._device, self._jax = answer["device"], answer["jax"]
        self._take_choices(self._device)
        self._xla_ms = statistics.median(answer["results"][0]["ms"])
        self._report(1, 1, f"XLA: {self._xla_ms:.4g} ms")

    def _played(self, task: Task, answer: dict[str, Any]) -> dict[Contender, Times]:
        """Stores a round; returns the times of the contenders that worked."""
        if "failure" in answer:
            # The whole task failed: the verdict uses earlier rounds.
            self._report(1, 1, f"a round failed: {answer['failure']}")
            return {}
        times, failures = {}, {}
        for contender, result in zip(task.contenders, answer["results"], strict=True):
            if "failure" in result:
                failures[contender] = result["failure"]
            elif result["ms"]:
                times[contender] = Times(tuple(result["ms"]))
        for contender, text in failures.items():
            if contender not in self._failures:
                self._report(1, 1, f"out: {brief(contender)}: {text}")
        self._failures |= failures
        if answer["matmul_ms"]:
            matmul_ms = statistics.median(answer["matmul_ms"])
            least_noise = HEAT_NOISE if task.windows < FINAL_WINDOWS else 0.0
            self._rounds.append(Round(times, matmul_ms, least_noise))
        return times

    def keep(self, task: Task, answer: dict[str, Any]) -> None:
        """Stores an interrupted round, without contenders that have too few samples for a noise."""
        results = [
            result if len(result.get("ms", ())) >= HEAT_WINDOWS else {"ms": []}
            for result in answer["results"]
        ]
        self._played(task, answer | {"results": results})

    def verdict(self) -> Verdict | None:
        """Compares the fastest contender with the table's choice in the last round with both.

        Returns None if no round had both. A contender that failed in any round cannot win.
        """
        has_failed = self._incumbent in self._failures
        for played in reversed(self._rounds):
            times = {c: t for c, t in played.times.items() if c not in self._failures}
            if times and (self._incumbent in times or has_failed):
                return self._judge(dataclasses.replace(played, times=times))
        return None

    def _judge(self, played: Round) -> Verdict:
        times = played.times
        winner = self._winner(times)
        best, incumbent = times[winner], times.get(self._incumbent)
        table_name = f"the table's choice ({brief(self._incumbent)})"
        if winner == self._incumbent:
            is_better, text = False, f"best: {table_name}, {best.ms:.4g} ms"
        elif incumbent is None:
            is_better = True
            text = f"best: {brief(winner)}, {best.ms:.4g} ms; {table_name} failed"
        else:
            gain, noise = incumbent.ms / best.ms - 1, incumbent.noise + best.noise
            noise = max(noise, played.least_noise)
            is_better = gain > noise
            text = (
                f"best: {brief(winner)}, {best.ms:.4g} ms, {gain:.1%} faster than {table_name}, "
                f"{incumbent.ms:.4g} ms, with a noise of {noise:.1%}"
            )
        xla_ms = times[None].ms if None in times else self._xla_ms
        if winner is not None:
            text += f"; XLA takes {xla_ms:.4g} ms, {xla_ms / best.ms:.2f} times as long"
        chosen = winner if is_better else self._incumbent
        return Verdict(
            self._row(chosen, times[chosen].ms, played.matmul_ms, xla_ms), is_better, text
        )

    def _winner(self, times: dict[Contender, Times]) -> Contender:
        kernels = [c for c in times if c is not None]
        best = min(kernels, key=lambda c: times[c].ms, default=None)
        xla = times.get(None)
        is_kernel = best is not None and (
            xla is None or times[best].ms <= xla.ms * (1 + XLA_MARGIN)
        )
        return best if is_kernel else None

    def _row(self, config: Contender, ms: float, matmul_ms: float, xla_ms: float) -> table_rows.Row:
        size = Task(self._problem, ()).matmul_size
        rate = 2 * size**3 / matmul_ms
        fraction = case_of(self._problem).useful_flops / ms / rate
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        # Fixed decimals would round small fractions to 0.
        numbers = (float(f"{x:.5g}") for x in (ms, fraction, xla_ms))
        return table_rows.Row(self._problem, config, self._device, today, self._jax, *numbers)
