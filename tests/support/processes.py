"""What tests of commands share."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """`preexec_fn` of a process that is sent SIGINT.

    A shell without job control starts what runs in its background with SIGINT ignored, processes of
    these inherit that, and Python then installs no handler.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
