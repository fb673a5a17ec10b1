"""A process of the autotuner: reads tasks from its standard input, tells events on its output.

The first line names the contenders, which the process compiles; every other one is a task. A CUDA
error poisons the process that it happens in and a kernel that hangs can only be killed with its
process, so this is never the user's own; `session` starts it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from ikbo_jax.tuning.bench import Bench, Say, Task, first_line

#: What a line that holds an event begins with.
MARK = "ikbo-autotune "


def serve(lines: Iterable[str], say: Say) -> int:
    """Prepares what the first of `lines` names, then runs the tasks of the others.

    Args:
      lines: first a task whose candidates are all contenders, as JSON under "task", and beside it
        positions of those to be compiled one by one, "alone"; then tasks as JSON.
      say: takes events: those of `Bench`, and "answer", what a task measured.

    Returns:
      The exit status.
    """
    tasks = iter(lines)
    setup = json.loads(next(tasks))
    every = Task.from_json(setup["task"])
    bench = Bench(every.problem, every.candidates, say)
    try:
        bench.prepare([every.candidates[position] for position in setup["alone"]])
        for line in tasks:
            say({"event": "answer", "answer": bench.measure(Task.from_json(line))})
    except Exception as error:
        say({"event": "end", "failure": first_line(error)})
        return 1
    return 0


def _lines_until_the_end() -> Iterator[str]:
    """Lines of the standard input, whose end is the user's process': it ends this one at once."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        # Also the processes that this one started; `session` gave them a group of their own.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, None)


def main() -> int:
    """Entry point of the process."""
    lock = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with lock:
            print(MARK + json.dumps(event), flush=True)

    return serve(_lines_until_the_end(), say)


if __name__ == "__main__":
    sys.exit(main())
