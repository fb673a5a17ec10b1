"""Who is fastest: successive halving, a deciding round by turns, and the rule of what is written.

Heats time all contenders by turns, first for 5 ms at a time; the faster half goes on to the next
heat, of windows twice as long. The last few and XLA meet in a final of sustained windows. The
table's own choice is a contender in every round, whatever its times, so that a result can be
compared with it.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from ikbo_jax.tuning import rules, table
from ikbo_jax.tuning.bench import Candidate, Task, trials_of
from ikbo_jax.tuning.gdpa_configs import GdpaProblem
from ikbo_jax.tuning.rules import Config, Problem
from ikbo_jax.tuning.session import Progress

#: XLA must be this much faster than the best kernel for a row to prefer it.
XLA_MARGIN = 0.02
#: Configurations that the heats leave for the final.
FINALISTS = 4
#: Seconds of a window of the first heat; every later heat has twice those of the one before.
FIRST_WINDOW_S = 0.005
#: Windows of a heat; two are the fewest that show a noise.
HEAT_WINDOWS = 2
#: Least noise of a heat: the fastest of a hundred in two short windows is so by luck as well.
HEAT_NOISE = 0.02
#: Seconds of a window of the final, and their number.
FINAL_WINDOW_S, FINAL_WINDOWS = 0.2, 3


@dataclasses.dataclass(frozen=True)
class Times:
    """One contender's windows in one round, milliseconds per call."""

    samples: tuple[float, ...]

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)

    @property
    def noise(self) -> float:
        """Median distance of the windows to their median, as a fraction of it."""
        return statistics.median(abs(x - self.ms) for x in self.samples) / self.ms


@dataclasses.dataclass(frozen=True)
class Round:
    """What a task measured.

    Attributes:
      times: of every contender that worked.
      failures: why the others did not.
      matmul_ms: median of the matmul beside them.
      least_noise: of any comparison, as a fraction.
    """

    times: dict[Candidate, Times]
    failures: dict[Candidate, str]
    matmul_ms: float
    least_noise: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Who won.

    Attributes:
      row: measured just now: of the winner if it is better, else of the table's choice.
      is_better: whether the winner beats the table's choice by more than the noise of both.
      text: who won and by how much.
    """

    row: table.Row
    is_better: bool
    text: str


def brief(candidate: Candidate) -> str:
    """A contender in a few words."""
    if candidate is None:
        return "XLA"
    names = {"block_m": "block_m", "num_stages": "stages", "epilogue_rows": "epilogue"}
    fields = dataclasses.asdict(candidate)
    return " ".join(f"{names.get(name, name)} {value}" for name, value in fields.items())


def choices_of_table(problem: Problem) -> tuple[Candidate, Candidate]:
    """What runs `problem` now, and what would without the user's cache; None is XLA."""
    found = []
    for with_user_rows in (True, False):
        choice = table.lookup(problem, with_user_rows=with_user_rows)
        # The op runs its kernel beside a measured row only.
        is_xla = isinstance(problem, GdpaProblem) and choice.source == "default"
        found.append(None if is_xla else choice.config)
    return found[0], found[1]


class Contest:
    """A contest of configurations of one problem; `play` it, then ask for the `verdict`.

    Attributes:
      contenders: all that a task may name: XLA, the table's choices, the candidates.
    """

    def __init__(self, problem: Problem, limit: int | None, report: Progress) -> None:
        """Asks the table.

        Args:
          problem: sizes of the inputs.
          limit: takes at most this many candidates, the likeliest first; the table's choices and
            XLA take part in any case.
          report: called with (done, total, text) after every round.
        """
        self._problem, self._report = problem, report
        self._incumbent, shipped = choices_of_table(problem)
        self._fixed = tuple(dict.fromkeys((self._incumbent, shipped)))
        every = rules.of(problem).candidate_configs(problem)
        candidates = itertools.islice(every, limit)
        self.contenders: tuple[Candidate, ...] = tuple(
            dict.fromkeys((None, *self._fixed, *candidates))
        )
        self._rounds: list[Round] = []
        self._failures: dict[Candidate, str] = {}
        self._device, self._jax, self._xla_ms = "", "", math.nan

    def play(self, run: Callable[[Task], dict[str, Any]]) -> None:
        """Runs all rounds.

        Args:
          run: measures a task: `Bench.measure`, or {"failure": why}.

        Raises:
          RuntimeError: the device is not a Hopper GPU, or even the XLA path fails on it.
        """
        self._begin(run(Task(self._problem, (None,), FINAL_WINDOW_S, HEAT_WINDOWS)))
        alive: list[Config] = [c for c in self.contenders if c is not None]
        heats = 0
        while (1 << heats) * FINALISTS < len(alive):
            heats += 1
        for heat in range(heats):
            if len(alive) <= FINALISTS:
                break
            window_s = FIRST_WINDOW_S * 2**heat
            entrants = tuple(dict.fromkeys((*self._fixed, *alive)))
            task = Task(self._problem, entrants, window_s, HEAT_WINDOWS)
            times = self._played(task, run(task))
            alive = sorted((c for c in alive if c in times), key=lambda c: times[c].ms)
            working = len(alive)
            alive = alive[: max(FINALISTS, -(-len(alive) // 2))]
            text = f"{working} timed for {window_s * 1e3:.0f} ms each, {len(alive)} go on"
            if alive:
                text += f"; fastest {times[alive[0]].ms:.4g} ms: {brief(alive[0])}"
            self._report(heat + 1, heats + 1, text)
        entrants = tuple(
            c for c in dict.fromkeys((None, *self._fixed, *alive)) if c not in self._failures
        )
        task = Task(self._problem, entrants, FINAL_WINDOW_S, FINAL_WINDOWS)
        times = self._played(task, run(task))
        for contender, time in times.items():
            text = f"final: {brief(contender)}: {time.ms:.4g} ms ± {time.noise:.1%}"
            self._report(heats + 1, heats + 1, text)

    def _begin(self, answer: dict[str, Any]) -> None:
        """Reads what XLA alone took, and on which device."""
        failure = answer.get("failure") or answer["results"][0].get("failure")
        if failure is not None:
            raise RuntimeError(f"the XLA path cannot be timed here: {failure}")
        if answer["compute_capability"] != "9.0":
            raise RuntimeError(
                f"tuning needs a Hopper GPU (compute capability 9.0); this is {answer['device']}"
            )
        self._device, self._jax = answer["device"], answer["jax"]
        self._xla_ms = statistics.median(answer["results"][0]["ms"])
        self._report(1, 1, f"XLA: {self._xla_ms:.4g} ms")

    def _played(self, task: Task, answer: dict[str, Any]) -> dict[Candidate, Times]:
        """Keeps a round; returns the times of those that worked."""
        if "failure" in answer:
            # The whole task failed: earlier rounds decide.
            self._report(1, 1, f"a round failed: {answer['failure']}")
            return {}
        times, failures = {}, {}
        for candidate, result in zip(task.candidates, answer["results"], strict=True):
            if "failure" in result:
                failures[candidate] = result["failure"]
            elif result["ms"]:
                times[candidate] = Times(tuple(result["ms"]))
        for candidate, text in failures.items():
            if candidate not in self._failures:
                self._report(1, 1, f"out: {brief(candidate)}: {text}")
        self._failures |= failures
        if answer["matmul_ms"]:
            matmul_ms = statistics.median(answer["matmul_ms"])
            least_noise = HEAT_NOISE if task.windows < FINAL_WINDOWS else 0.0
            self._rounds.append(Round(times, failures, matmul_ms, least_noise))
        return times

    def keep(self, task: Task, answer: dict[str, Any]) -> None:
        """Keeps what an interrupted round measured, as far as its windows show a noise."""
        results = [
            result if len(result.get("ms", ())) >= HEAT_WINDOWS else {"ms": []}
            for result in answer["results"]
        ]
        self._played(task, answer | {"results": results})

    def verdict(self) -> Verdict | None:
        """Compares the fastest with the table's choice in the last round that had both.

        Returns None if there was no such round. A contender that failed cannot win; if the table's
        choice failed, whoever is fastest beats it.
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

    def _winner(self, times: dict[Candidate, Times]) -> Candidate:
        """The fastest kernel, or XLA where that is faster by more than the margin."""
        kernels = [c for c in times if c is not None]
        best = min(kernels, key=lambda c: times[c].ms, default=None)
        xla = times.get(None)
        is_kernel = best is not None and (
            xla is None or times[best].ms <= xla.ms * (1 + XLA_MARGIN)
        )
        return best if is_kernel else None

    def _row(self, config: Candidate, ms: float, matmul_ms: float, xla_ms: float) -> table.Row:
        size = Task(self._problem, ()).matmul_size
        rate = 2 * size**3 / matmul_ms
        fraction = trials_of(self._problem).flops(self._problem) / ms / rate
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        numbers = (_digits(x) for x in (ms, fraction, xla_ms))
        return table.Row(self._problem, config, self._device, today, self._jax, *numbers)


def _digits(value: float) -> float:
    """Five significant digits: decimals would make a small problem's fraction 0."""
    return float(f"{value:.5g}")
