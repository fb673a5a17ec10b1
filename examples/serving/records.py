"""Results files: where and when a measurement was made, and with which settings."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

from examples.serving.settings import Settings

ROOT = pathlib.Path(__file__).resolve().parents[2]


def surroundings(*packages: str) -> dict[str, Any]:
    """Where and when a measurement was made, with the versions of packages."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("IKBO_COMMIT") or commit.stdout.strip(),
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


def write(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
