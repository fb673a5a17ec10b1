"""The dispatch table: chooses a configuration of the kernel, or XLA, for a problem.

`problem.ranked` orders the ways to run a problem, by cost models and rules; the first one is the
choice unless a measured row overrides it. That is

1. a row for exactly this problem, or else
2. the nearest row within `MAX_DISTANCE` whose configuration is one of those that `ranked` deems
   worth timing for this problem.

Rows of the user's cache, which the autotuner writes, come before those of `sm90.json`. If the card
at hand is known, only rows that a card of this model measured count: on an H100, the ranking's
choice took 0.949 of the time with the rows of an H200 for attention (13 sizes, geometric mean), and
0.996 for linear compression and gdpa (10 and 17).
"""

import dataclasses

from ikbo_jax.problems import Config, Problem
from ikbo_jax.problems.problem import Ranked, ranked
from ikbo_jax.tuning.table_rows import Row, builtin_rows, model
from ikbo_jax.tuning.user_cache import source_of_user_rows, user_rows

#: Largest `distance` of a row that speaks for another problem, e.g. the batch times √2.
MAX_DISTANCE = 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """Holds the table's choice for a problem.

    Attributes:
      config: configuration of the kernel; None if XLA is faster or no configuration is legal.
      source: "user cache", "sm90.json", "default" or "none".
      reason: one line of text: which row was used, and where it was measured.
    """

    config: Config | None
    source: str
    exact: bool
    reason: str


def devices() -> tuple[str, ...]:
    """Names the cards that measured rows."""
    return tuple(dict.fromkeys(row.device for row in (*builtin_rows(), *user_rows())))


def lookup(problem: Problem, *, device: str = "", with_user_rows: bool = True) -> Choice:
    """Chooses a configuration, or XLA, for `problem`, in the order of the module's docstring.

    `device` "" takes rows of all cards; `with_user_rows`: whether to search the user's cache.
    """
    ways = ranked(problem)
    if problem.default_config() is None:
        reason = problem.config_type().illegal_reason(problem)
        return Choice(None, "none", False, f"no legal configuration of the kernel: {reason}")
    cached = user_rows() if with_user_rows else ()
    choice = _measured(problem, ways, device, cached) or _default(ways)
    # A row of an older version may have a configuration that is no longer legal.
    for row in cached:
        if row.problem == problem and choice.source != "user cache":
            why = f"an {row.device} measured it"
            if _speaks(row, device):
                why = row.config.illegal_reason(problem)
            reason = f"{choice.reason}; the user cache's row of these sizes is ignored: {why}"
            return dataclasses.replace(choice, reason=reason)
    return choice


def _measured(
    problem: Problem, ways: tuple[Ranked, ...], device: str, cached: tuple[Row, ...]
) -> Choice | None:
    """Chooses by a measured row; None if no row speaks for the problem."""
    worth_timing = {None, *(way.config for way in ways)}
    found = []
    for source, rows in ("user cache", cached), ("sm90.json", builtin_rows()):
        for row in rows:
            away = row.problem.distance(problem)
            if away > MAX_DISTANCE or not _speaks(row, device):
                continue
            if row.config not in worth_timing and (
                away or row.config.illegal_reason(problem) is not None
            ):
                continue
            found.append(((away > 0, source != "user cache", away), source, row))
    if not found:
        return None
    (*_, away), source, row = min(found, key=lambda entry: entry[0])
    near = f", nearest row at distance {away:.2f}" if away else ""
    name = source_of_user_rows() if source == "user cache" else source
    return Choice(row.config, source, not away, f"{name}{near}, {row.describe()}")


def _speaks(row: Row, device: str) -> bool:
    """Whether a card of this model measured the row, or the card is unknown."""
    return not device or model(row.device) == model(device)


def _default(ways: tuple[Ranked, ...]) -> Choice:
    """Chooses the first of the ranking, without a measured row."""
    first = ways[0]
    if first.config is None:
        return Choice(None, "default", False, f"{first.why}; no measured row is near")
    reason = "default configuration: no measured row is near" + (first.why and f"; {first.why}")
    return Choice(first.config, "default", False, reason)
