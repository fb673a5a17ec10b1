"""The check of integers that a program is compiled for, such as sizes."""

import math
import operator
from typing import Any


def integer(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """Returns `value` as an int.

    Raises ValueError, quoting the value, unless it is an integer from `least` to `most` that is
    known while tracing. A bool is none.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        known = ", known while tracing" * (number is None)
        bounds = f"of at least {least}" + f" and at most {most}" * (most < math.inf)
        raise ValueError(f"{name} must be an integer {bounds}{known}, but is {value!r:.80}")
    return number
