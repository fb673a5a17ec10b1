"""The autotuner: finds the fastest configuration on this device and writes it to the user's cache.

A worker process compiles all contenders in parallel, checks each against the oracle and times them
(`session`, `worker`, `bench`), so that a CUDA error or a kernel that hangs ends the worker and not
the caller. `contest` says how the winner is found.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ikbo_jax.autotuner.bench import Task
from ikbo_jax.autotuner.contest import Contest, Verdict
from ikbo_jax.autotuner.session import Interrupted, Progress, Session
from ikbo_jax.problems import GdpaBackwardProblem, GdpaProblem, Problem
from ikbo_jax.tuning import user_cache


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
