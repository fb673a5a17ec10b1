"""Results: where and when a measurement was made, with which settings, and how long it took."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from examples.serving.settings import Settings

#: Prints a line about progress.
Say = Callable[[str], None]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def surroundings() -> dict[str, Any]:
    """Where and when a measurement was made, with the versions of what is there."""
    packages = [name for name in ("jax", "ray") if importlib.util.find_spec(name)]
    commit = os.environ.get("IKBO_COMMIT", "")
    # An image has neither git nor a history.
    if not commit and shutil.which("git"):
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def recorded(settings: Settings) -> dict[str, Any]:
    """Settings as a results file holds them: without folders of this machine."""
    fields = dataclasses.asdict(settings)
    return {name: fields[name] for name in fields.keys() - {"cache", "checkpoint", "data"}}


class Times:
    """Seconds, and seconds of CPU time, of what was done again and again."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures a block once more."""
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)
