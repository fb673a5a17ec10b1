"""Programs that resemble what `ikbo.rewrite` knows: values and gradients are the original's.

`lookalike_grammar` draws them, by number: activations with caps, thresholds, shifts, slopes and
stops; softmax and its relatives, with masks, fills and scalings; index modes and indices out of
bounds; in float32, bfloat16 and float16; and towers of float32 parameters that compute in another
dtype, for up to 4,096 candidates a user. `rounding_rule` compares them. A failure prints each
program that differs, with its number; `IKBO_REWRITE_EXAMPLES=2000` draws as many.
"""

import os
import random
from typing import Any

import jax
import pytest
from jax.experimental import checkify
from lookalike_grammar import draw
from lookalike_rows import ROW_STEPS, SOURCES, draw_lookup, step_of
from lookalikes import ATTENTION, LOOKUPS, MIXED
from rounding_rule import AS_WRITTEN, Case, assert_same, describe, faults, pullback

import ikbo_jax as ikbo

EXAMPLES = int(os.environ.get("IKBO_REWRITE_EXAMPLES", "120"))
#: Of one test. Pytest's workers take a test each.
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, EXAMPLES, AT_ONCE))
def test_a_drawn_program_stays_what_it_is(first: int) -> None:
    cases = [draw(number) for number in range(first, min(first + AT_ONCE, EXAMPLES))]
    found = faults([case for case in cases if not case.is_mixed])
    # NumPy rounds a sum once, but XLA adds in bfloat16.
    found |= faults([case for case in cases if case.is_mixed], compiled=True)
    assert not found, (
        f"{len(found)} of {len(cases)}\n\n{describe(found)}\n{ATTENTION}{LOOKUPS}{MIXED}"
    )


def test_a_drawn_program_stays_what_it_is_when_compiled() -> None:
    """XLA instead of NumPy, for some."""
    numbers = random.Random(0).sample(range(EXAMPLES), min(12, EXAMPLES))
    assert_same([draw(number) for number in numbers], compiled=True)


@pytest.mark.parametrize("source", SOURCES)
def test_every_step_from_every_source(source: str) -> None:
    """Each step rewritten by itself; most gain something."""
    cases = [step_of(source, step) for step in ROW_STEPS]
    assert_same(cases)
    notes = [ikbo.explain(ikbo.rewrite(case.fn), *case.args).notes for case in cases]
    assert sum(note.changed for (note,) in notes) >= (58 if source == "one" else 74)


def test_checks_find_what_they_find_in_the_original() -> None:
    """Values and gradients of lookups out of bounds."""
    found = {}
    for case in map(draw_lookup, range(EXAMPLES // 12)):
        try:
            expected = _error(case, case.fn)
        except IndexError:  # `checkify` raises it at the gradients of some gathers.
            continue
        found[case.name] = expected, _error(case, ikbo.rewrite(case.fn))
    assert {name: errors for name, errors in found.items() if errors[0] != errors[1]} == {}
    assert len({error for error, _ in found.values()}) > 1


def _error(case: Case, fn: Any) -> bool:
    """Whether a check fails."""
    run = pullback(lambda *args: fn(*args, *case.statics), case.args)
    checked = checkify.checkify(run, errors=checkify.index_checks | checkify.nan_checks)
    error, _ = jax.jit(checked, compiler_options=AS_WRITTEN)(*case.args)
    return error.get() is not None
