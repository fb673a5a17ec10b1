"""The check of integers that a program is compiled for, such as sizes."""

import operator
from typing import Any


def integer(name: str, value: Any, least: int = 0) -> int:
    """Returns `value` as an int.

    Raises ValueError, quoting the value, unless it is an integer of at least `least` that is known
    while tracing. A bool is none.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        known = ", known while tracing" * (number is None)
        raise ValueError(
            f"{name} must be an integer of at least {least}{known}, but is {value!r:.80}"
        )
    return number
