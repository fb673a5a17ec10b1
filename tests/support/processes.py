"""What tests of commands share."""

from __future__ import annotations

import sys

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
