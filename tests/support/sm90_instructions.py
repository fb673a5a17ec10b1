"""The instructions that `sm90.Machine` executes."""

from __future__ import annotations

import re
from typing import Any

import sm90_arithmetic
import sm90_async
import sm90_memory
import sm90_products
from sm90_decoder import Decoder

_TABLE = [
    (re.compile(pattern), make)
    for module in (sm90_arithmetic, sm90_memory, sm90_async, sm90_products)
    for pattern, make in module.TABLE
]


def decode(machine: Any) -> None:
    """Gives every instruction of the machine's program its function."""
    decoder = Decoder(machine)
    for ins in machine.program.instructions:
        if ins.name not in ("bra", "ret"):
            ins.run = decoder.decode(ins, _TABLE)
    machine.first = [None] * machine.program.registers + decoder.extra
