"""The autotuner's worker process: reads tasks from stdin, writes events to stdout.

A CUDA error makes a process unusable, and a kernel that hangs can only be killed with its process.
`session` starts the worker.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from ikbo_jax.autotuner.bench import Bench, Emit, Task, first_line

#: Prefix of a line that holds an event.
MARK = "ikbo-autotune "


def serve(lines: Iterable[str], emit: Emit) -> int:
    """Compiles the contenders in the first of `lines`, then runs the tasks in the others.

    The first line is a JSON object with "task", a task with all contenders, and "alone", indices of
    the contenders to compile one at a time; the others are tasks. `emit` takes the events of
    `Bench`; "answer", with the result of a task; and "end", with the failure that ends the process.
    Returns the exit status.
    """
    tasks = iter(lines)
    setup = json.loads(next(tasks))
    first_task = Task.from_json(setup["task"])
    bench = Bench(first_task.problem, first_task.contenders, emit)
    try:
        bench.prepare([first_task.contenders[position] for position in setup["alone"]])
        for line in tasks:
            emit({"event": "answer", "answer": bench.measure(Task.from_json(line))})
    except Exception as error:
        emit({"event": "end", "failure": first_line(error)})
        return 1
    return 0


def _lines_until_the_end() -> Iterator[str]:
    """Yields lines of stdin; when stdin ends, the parent has ended: kills this process group."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        # The group holds this process and the processes that it started; `session` created it.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, None)


def main() -> int:
    """Serves tasks from stdin; the entry point of the process."""
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        with lock:
            print(MARK + json.dumps(event), flush=True)

    return serve(_lines_until_the_end(), emit)


if __name__ == "__main__":
    sys.exit(main())
