"""What tests of commands share."""

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]

_EXECUTE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def heeding_interrupts(command: list[str]) -> list[str]:
    """A command that does not ignore SIGINT, even if this process does.

    A shell without job control starts what runs in its background with SIGINT ignored, processes of
    these inherit that, and Python then installs no handler. `preexec_fn` would fork this process,
    of which JAX warns.
    """
    return [sys.executable, "-c", _EXECUTE, *command]


def child_environment(
    *folders: pathlib.Path, without: str | None = None, **variables: str
) -> dict[str, str]:
    """Returns this process's environment for a child process.

    Args:
      *folders: folders that PYTHONPATH begins with. What it has already follows: packages may come
        from there.
      without: the child does not inherit variables whose names start with this.
      **variables: variables of the child.
    """
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {k: v for k, v in os.environ.items() if without is None or not k.startswith(without)}
    return kept | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def until(condition: Callable[[], object], limit_s: float) -> bool:
    """Waits for a condition; returns whether it came true within the limit."""
    end = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(found)


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Returns the commands of all processes whose environment has a variable, by process id.

    Children inherit the variable, wherever they go.
    """
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"{variable}={value}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_text(errors="replace")
        except OSError:
            continue
    return found


#: Reads a task from each line of its input, and forks a process for each of the task's programs.
#: The programs find nothing but modules: names in functions are not theirs.
_FORKS = """
def next_program():
    import json, os, signal, sys, warnings
    import jax, jax.numpy, numpy, ikbo_jax, ikbo_jax.serving

    def fork():
        with warnings.catch_warnings():
            # JAX warns for the sake of threads that it starts with its first device.
            warnings.simplefilter("ignore")
            return os.fork()

    for line in sys.stdin:
        task = json.loads(line)
        pids = []
        for program in task["programs"]:
            if (pid := fork()) == 0:
                signal.alarm(task["seconds"])
                os.environ.update(task["variables"])
                os.chdir(task["folder"])
                for number, name in enumerate((os.devnull, program["out"], program["err"])):
                    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
                return program["code"]
            pids.append(pid)
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
    sys.exit()

exec(next_program())
"""


class Finished(NamedTuple):
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def _forks() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS],
        env=child_environment(ROOT, ROOT / "tests" / "support"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # Its input ends, and so does the process.
    return process


def run_forked(
    programs: Sequence[str], folder: pathlib.Path, *, seconds: int = 200, **variables: str
) -> list[Finished]:
    """Runs programs side by side, each in a process that has imported JAX and the library already.

    The imports take 2 s of a processor. No device is initialised, and no variable exists.

    Args:
      programs: Python code.
      folder: working folder of the processes, in which their output is kept.
      seconds: a process that runs longer ends with SIGALRM.
      **variables: environment variables of the processes, beside those of this process.
    """
    logs = [(folder / f"{n}.out", folder / f"{n}.err") for n in range(len(programs))]
    task = {
        "folder": str(folder),
        "seconds": seconds,
        "variables": variables,
        "programs": [
            {"code": code, "out": str(out), "err": str(err)}
            for code, (out, err) in zip(programs, logs, strict=True)
        ],
    }
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(json.dumps(task) + "\n")
    forks.stdin.flush()
    codes = json.loads(forks.stdout.readline())
    return [
        Finished(code, out.read_text(), err.read_text())
        for code, (out, err) in zip(codes, logs, strict=True)
    ]
