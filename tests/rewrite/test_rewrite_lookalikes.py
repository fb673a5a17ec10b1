"""Programs that resemble what `ikbo.rewrite` knows: values and gradients are the original's.

`lookalike_grammar` draws them, by number: activations with caps, thresholds, shifts, slopes and
stops; softmax and its relatives, with masks, fills and scalings; index modes and indices out of
bounds; in float32, bfloat16 and float16. `rounding_rule` compares them. A failure prints each
program that differs, with its number; `IKBO_REWRITE_EXAMPLES=2000` draws as many.
"""

from __future__ import annotations

import os
import random

import pytest
from lookalike_grammar import draw
from lookalikes import ATTENTION, LOOKUPS
from rounding_rule import describe, faults

EXAMPLES = int(os.environ.get("IKBO_REWRITE_EXAMPLES", "120"))
#: Of one test. Pytest's workers take a test each.
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, EXAMPLES, AT_ONCE))
def test_a_drawn_program_stays_what_it_is(first: int) -> None:
    cases = [draw(number) for number in range(first, min(first + AT_ONCE, EXAMPLES))]
    found = faults(cases)
    assert not found, f"{len(found)} of {len(cases)}\n\n{describe(found)}\n{ATTENTION}{LOOKUPS}"


def test_a_drawn_program_stays_what_it_is_when_compiled() -> None:
    """XLA instead of NumPy, for some."""
    numbers = random.Random(0).sample(range(EXAMPLES), min(12, EXAMPLES))
    found = faults([draw(number) for number in numbers], compiled=True)
    assert not found, describe(found)
