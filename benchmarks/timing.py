"""The reference matmul, ceilings of the device, and results files.

A GPU throttles by power, so every figure is sustained: the median over several windows of launches
back to back, with all providers interleaved in one process. Every point also times an 8192^3 bf16
matmul. A provider's *fraction* is its useful FLOP/s divided by the FLOP/s of this matmul; bars are
fractions.
"""

import datetime
import functools
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax._timing import interleaved_ms

SCHEMA = 1
MATMUL_SIZE = 8192
COPY_BYTES = 4 * 2**30
#: Environment variable with the commit for results files, for a source tree without git history.
COMMIT_VARIABLE = "IKBO_COMMIT"

Thunk = Callable[[], Any]


@functools.cache
def matmul_thunk(size: int = MATMUL_SIZE) -> Thunk:
    """Makes a thunk of a size^3 bf16 matmul of random numbers; zeros would draw less power."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul).lower(a, b).compile()
    return lambda: matmul(a, b)


def matmul_tflops(ms: float, size: int = MATMUL_SIZE) -> float:
    """Converts the time of a size^3 matmul to TFLOP/s."""
    return tflops(2 * size**3, ms)


def tflops(flops: float, ms: float) -> float:
    """Converts FLOPs in `ms` milliseconds to TFLOP/s."""
    return flops / ms / 1e9


def copy_ceiling(window_s: float, rounds: int) -> dict[str, Any]:
    """Times a copy within device memory; the rate counts bytes read and bytes written."""
    num_bytes = COPY_BYTES if jax.default_backend() == "gpu" else 2**12
    source = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    copy = jax.jit(jnp.copy).lower(source).compile()
    ms = interleaved_ms({"copy": lambda: copy(source)}, window_s=window_s, rounds=rounds)["copy"]
    rate = 2 * source.nbytes / statistics.median(ms) / 1e9
    return {"bytes": source.nbytes, "ms": ms, "tb_per_s": rate}


def environment() -> dict[str, Any]:
    """Makes the field "environment" of a results file: device, versions, commit and date."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    is_gpu = jax.default_backend() == "gpu"
    return {
        "device": str(jax.devices()[0].device_kind),
        "platform": jax.default_backend(),
        "driver": (_output(*query) or "unknown").splitlines()[0] if is_gpu else None,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """Reads the checked-out commit, with "-dirty" if the tree differs; "unknown" without git."""
    if override := os.environ.get(COMMIT_VARIABLE):
        return override
    root = pathlib.Path(__file__).resolve().parent.parent
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("-dirty" if _output("git", "-C", str(root), "status", "--porcelain") else "")


def make_folder_of(path: pathlib.Path) -> None:
    """Creates the folder of a file if it is missing, and prints a message."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
        print(f"made the folder {path.parent}, which did not exist", file=sys.stderr)


def write_results(path: pathlib.Path, results: Mapping[str, Any]) -> None:
    """Writes a results file atomically, with every list of samples on one line for short diffs."""
    make_folder_of(path)
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps({"schema": SCHEMA, **results}, indent=2)
    numbers_on_a_line = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda x: " ".join(x[0].split()), text)
    temporary.write_text(numbers_on_a_line + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_results(path: pathlib.Path) -> dict[str, Any]:
    """Reads a results file; raises ValueError if it has another schema."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {results.get('schema')!r}, expected {SCHEMA}")
    return results


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
