"""Runs the autotuner's worker process: sends tasks, reads events, replaces a worker that dies."""

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
from typing import Any, Self

from ikbo_jax.autotuner.bench import Contender, Task, brief
from ikbo_jax.autotuner.worker import MARK
from ikbo_jax.problems import Problem

#: Called with (number done, total number, text about the last step).
Progress = Callable[[int, int, str], None]

#: Command line of a worker.
COMMAND = (sys.executable, "-m", "ikbo_jax.autotuner.worker")
#: Seconds without an event after which a worker counts as hung. XLA may take 50 s to try all GEMM
#: algorithms for an oracle.
SILENCE_S = 150.0


class Interrupted(KeyboardInterrupt):
    """Reports Ctrl-C while `task` ran; `answer` holds the samples measured before."""

    def __init__(self, task: Task, answer: dict[str, Any]) -> None:
        super().__init__("interrupted")
        self.task, self.answer = task, answer


class WorkerDiedError(Exception):
    """Reports that the worker ended or hung, and why."""


class Session:
    """Runs a worker process with the contenders of one problem; a call measures a task.

    If the worker dies while it compiles, checks or times a contender, the contender counts as
    failed, and a new worker continues with the others.
    """

    def __init__(
        self,
        problem: Problem,
        contenders: Sequence[Contender],
        progress: Progress,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Stores the arguments; the first call starts the worker.

        `progress` is called with (done, total, text) after every compilation and every check; after
        `silence_s` seconds without an event, the worker counts as hung.
        """
        self._problem, self._contenders = problem, tuple(contenders)
        self._progress, self._silence_s = progress, silence_s
        # JAX's compilation cache, which a second worker reuses.
        self._cache = tempfile.TemporaryDirectory(prefix="ikbo-jax-tune-")
        self._failures: dict[Contender, str] = {}
        self._suspects: set[Contender] = set()
        self._reported: dict[str, set[Contender]] = {"compiled": set(), "checked": set()}
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_worker()
        self._cache.cleanup()

    def __call__(self, task: Task) -> dict[str, Any]:
        """Measures a task; returns the result of `Bench.measure`, or {"failure": text}.

        Raises Interrupted for Ctrl-C. The worker has been killed; another call starts a new one.
        """
        while True:
            alive = tuple(c for c in task.contenders if c not in self._failures)
            if not alive:
                return {"failure": self._failures[task.contenders[0]]}
            attempt = _Attempt(dataclasses.replace(task, contenders=alive))
            try:
                answer = self._ask(attempt)
            except WorkerDiedError as death:
                self._end_worker()
                if not self._blame(attempt.active, str(death)):
                    return {"failure": str(death)}
                continue
            except KeyboardInterrupt:
                self._end_worker()
                answer = self._with_failures(task, alive, attempt.answer())
                raise Interrupted(task, answer) from None
            return self._with_failures(task, alive, answer)

    def _with_failures(
        self, task: Task, alive: tuple[Contender, ...], answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Adds to the answer the failures of the task's contenders that are not in `alive`."""
        results = dict(zip(alive, answer["results"], strict=True))
        results |= {c: {"failure": text} for c, text in self._failures.items()}
        return answer | {"results": [results[contender] for contender in task.contenders]}

    def _ask(self, attempt: _Attempt) -> dict[str, Any]:
        if self._worker is None:
            contenders = tuple(c for c in self._contenders if c not in self._failures)
            setup = Task(self._problem, contenders).to_json()
            alone = [contenders.index(c) for c in self._suspects if c in contenders]
            self._worker = _Worker(contenders, self._cache.name)
            self._worker.send(json.dumps({"task": setup, "alone": alone}))
        worker = self._worker
        worker.send(attempt.task.to_json())
        while True:
            event = worker.next_event(self._silence_s)
            kind, position = event["event"], event.get("contender")
            if kind == "answer":
                return event["answer"]
            contender = None if position is None else worker.contenders[position]
            attempt.record(event, contender)
            if kind in ("lost", "end"):
                raise WorkerDiedError(event["failure"])
            if kind in self._reported and contender not in self._reported[kind]:
                reported = self._reported[kind]
                reported.add(contender)
                text = f"{kind} {brief(contender)}"
                if "failure" in event:
                    text = f"failed {brief(contender)}: {event['failure']}"
                self._progress(len(reported), len(self._contenders), text)

    def _blame(self, active: set[Contender], why: str) -> bool:
        """Decides which contenders failed after the worker died with `active` contenders running.

        A single active contender has failed; several become suspects, and fail if the worker dies
        with suspects alone. Returns whether a new worker can continue.
        """
        if len(active) == 1 or (active and active <= self._suspects):
            self._failures |= dict.fromkeys(active, why)
            return True
        self._suspects |= active
        return bool(active)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class _Attempt:
    """Records a task that a worker runs: the active contenders, and the samples so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.active: set[Contender] = set()
        self._samples: dict[Contender, list[float]] = {c: [] for c in task.contenders}
        self._matmul_ms: list[float] = []

    def record(self, event: dict[str, Any], contender: Contender) -> None:
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
        results = [{"ms": self._samples[contender]} for contender in self.task.contenders]
        return {"matmul_ms": self._matmul_ms, "results": results}


class _Worker:
    """Runs a process, and a thread that reads its output."""

    def __init__(self, contenders: tuple[Contender, ...], cache_dir: str) -> None:
        self.contenders = contenders
        # The parent may hold device memory too, so a worker must not preallocate it.
        env = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": cache_dir,
        }
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 (open while the process runs)
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
            # In a new process group, so that Ctrl-C reaches the parent only, and `kill` ends the
            # worker with the processes that it started.
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # The stream was closed.
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        # If the worker is dead, `next_event` reports it.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def next_event(self, silence_s: float) -> dict[str, Any]:
        """Waits for an event; raises WorkerDiedError if the worker has ended or is silent."""
        deadline = time.monotonic() + silence_s
        while True:
            is_over = self._process.poll() is not None
            try:
                line = self._lines.get(timeout=min(silence_s, 1.0))
            except queue.Empty:
                if is_over:
                    # A process that the worker started may keep the output open.
                    raise WorkerDiedError(self._exit_message()) from None
                if time.monotonic() > deadline:
                    raise WorkerDiedError(f"no answer after {silence_s:.0f} s") from None
                continue
            if line is None:
                raise WorkerDiedError(self._exit_message())
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))

    def _exit_message(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no output"])[-1]
        return f"worker ended with status {status}: {last[:300]}"

    def kill(self) -> None:
        """Ends the worker and the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
