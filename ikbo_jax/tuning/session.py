"""The autotuner's side of its worker process: sends tasks, reads events, survives its death."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from ikbo_jax.tuning.bench import Candidate, Task
from ikbo_jax.tuning.rules import Problem
from ikbo_jax.tuning.worker import MARK

#: Called with (done, total, what was done).
Progress = Callable[[int, int, str], None]

#: What starts a worker.
COMMAND = (sys.executable, "-m", "ikbo_jax.tuning.worker")
#: Seconds without an event after which a worker counts as hung: XLA may try every way of
#: multiplying an oracle's matrices for 50.
SILENCE_S = 150.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while `task` ran; `answer` is what had been measured of it by then."""

    def __init__(self, task: Task, answer: dict[str, Any]) -> None:
        super().__init__("interrupted")
        self.task, self.answer = task, answer


class WorkerDiedError(Exception):
    """The worker ended or hung; says why."""


class Session:
    """A worker process that holds the contenders of one problem; call it with tasks of them.

    A contender in whose compilation, check or timing the worker dies is a failure, and another
    worker goes on with the others.
    """

    def __init__(
        self,
        problem: Problem,
        contenders: Sequence[Candidate],
        *,
        describe: Callable[[Candidate], str],
        progress: Progress,
        cache_dir: str | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Starts nothing yet.

        Args:
          problem: sizes of the inputs.
          contenders: all that tasks will name.
          describe: names a contender for people.
          progress: called after every compilation and every check with (done, total, text).
          cache_dir: of JAX's compilation cache, which a second worker profits from.
          silence_s: seconds without an event after which a worker counts as hung.
        """
        self._problem, self._contenders = problem, tuple(contenders)
        self._describe, self._progress = describe, progress
        self._cache_dir, self._silence_s = cache_dir, silence_s
        self._failures: dict[Candidate, str] = {}
        self._suspects: set[Candidate] = set()
        self._seen: dict[str, set[Candidate]] = {"compiled": set(), "checked": set()}
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def __call__(self, task: Task) -> dict[str, Any]:
        """Measures a task; returns what `Bench.measure` does, or {"failure": why}.

        Raises:
          Interrupted: Ctrl-C; the worker is gone, and a further call would start another.
        """
        while True:
            alive = tuple(c for c in task.candidates if c not in self._failures)
            if not alive:
                return {"failure": self._failures[task.candidates[0]]}
            attempt = _Attempt(dataclasses.replace(task, candidates=alive))
            try:
                answer = self._ask(attempt)
            except WorkerDiedError as death:
                self._end()
                if not self._blame(attempt.active, str(death)):
                    return {"failure": str(death)}
                continue
            except KeyboardInterrupt:
                self._end()
                answer = self._in_full(task, alive, attempt.answer())
                raise Interrupted(task, answer) from None
            return self._in_full(task, alive, answer)

    def _in_full(
        self, task: Task, alive: tuple[Candidate, ...], answer: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer with the failures of those that the task asked for and no worker ran."""
        results = dict(zip(alive, answer["results"], strict=True))
        results |= {c: {"failure": text} for c, text in self._failures.items()}
        return answer | {"results": [results[candidate] for candidate in task.candidates]}

    def _ask(self, attempt: _Attempt) -> dict[str, Any]:
        if self._worker is None:
            contenders = tuple(c for c in self._contenders if c not in self._failures)
            setup = Task(self._problem, contenders).to_json()
            alone = [contenders.index(c) for c in self._suspects if c in contenders]
            self._worker = _Worker(contenders, self._cache_dir)
            self._worker.send(json.dumps({"task": setup, "alone": alone}))
        worker = self._worker
        worker.send(attempt.task.to_json())
        while True:
            event = worker.next_event(self._silence_s)
            kind, position = event["event"], event.get("contender")
            if kind == "answer":
                answer: dict[str, Any] = event["answer"]
                return answer
            contender = None if position is None else worker.contenders[position]
            attempt.note(event, contender)
            if kind in ("lost", "end"):
                raise WorkerDiedError(event["failure"])
            if kind in self._seen and contender not in self._seen[kind]:
                seen = self._seen[kind]
                seen.add(contender)
                text = f"{kind} {self._describe(contender)}"
                if "failure" in event:
                    text = f"failed {self._describe(contender)}: {event['failure']}"
                self._progress(len(seen), len(self._contenders), text)

    def _blame(self, active: set[Candidate], why: str) -> bool:
        """Whether another worker can go on: without whoever was at work, if that is known."""
        if len(active) == 1 or (active and active <= self._suspects):
            self._failures |= dict.fromkeys(active, why)
            return True
        self._suspects |= active
        return bool(active)

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class _Attempt:
    """A task at a worker: who is at work, and what has been measured so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.active: set[Candidate] = set()
        self._samples: dict[Candidate, list[float]] = {c: [] for c in task.candidates}
        self._matmul_ms: list[float] = []

    def note(self, event: dict[str, Any], contender: Candidate) -> None:
        kind = event["event"]
        if kind == "matmul":
            self._matmul_ms.append(event["ms"])
        elif kind == "start":
            self.active.add(contender)
        elif kind in ("compiled", "checked", "sample"):
            self.active.discard(contender)
        elif kind == "lost":
            self.active = {contender}
        if kind == "sample" and "ms" in event and contender in self._samples:
            self._samples[contender].append(event["ms"])

    def answer(self) -> dict[str, Any]:
        results = [{"ms": self._samples[candidate]} for candidate in self.task.candidates]
        return {"matmul_ms": self._matmul_ms, "results": results}


class _Worker:
    """A process, and a thread that reads what it says."""

    def __init__(self, contenders: tuple[Candidate, ...], cache_dir: str | None) -> None:
        self.contenders = contenders
        # The parent may hold device memory of its own, so a worker takes only what it needs.
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if cache_dir is not None:
            env["JAX_COMPILATION_CACHE_DIR"] = cache_dir
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 (open as long as the process)
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            COMMAND,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            # A group of its own: Ctrl-C is the parent's, and the group dies as one.
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # Closed meanwhile.
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        # If it is dead already, the next event says so.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def next_event(self, silence_s: float) -> dict[str, Any]:
        """Waits for an event; raises WorkerDiedError if the worker has ended or says nothing."""
        deadline = time.monotonic() + silence_s
        while True:
            is_over = self._process.poll() is not None
            try:
                line = self._lines.get(timeout=min(silence_s, 1.0))
            except queue.Empty:
                if is_over:
                    # Processes that it started may keep its output open.
                    raise WorkerDiedError(self._last_words()) from None
                if time.monotonic() > deadline:
                    raise WorkerDiedError(f"no answer after {silence_s:.0f} s") from None
                continue
            if line is None:
                raise WorkerDiedError(self._last_words())
            if line.startswith(MARK):
                event: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return event

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no output"])[-1]
        return f"worker ended with status {status}: {last[:300]}"

    def kill(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
