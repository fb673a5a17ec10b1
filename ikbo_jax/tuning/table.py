"""The dispatch table: chooses a configuration of the kernel, or XLA, for a problem.

`lookup` uses the first of these that exists:

1. the user's cache (written by the autotuner): a row for exactly this problem;
2. `sm90.json`: a row of the same shape class (`Problem.shape_class`) and dtype;
3. `sm90.json`: the nearest row of the op by `distance`, rows of the same dtype first, whose
   configuration is legal for the problem and fits it (`Problem.fits`). A row that prefers XLA is
   used only for the same dtype and within `XLA_MAX_DISTANCE`;
4. XLA if `Problem.why_xla` gives a reason, or `Problem.default_config`, the most promising
   configuration, both by a cost model;
5. XLA, if no configuration of the kernel is legal.

Steps 2 and 3 also search the user's cache if the problem has `user_rows_generalise`: its rows
of the shape class come first, and its rows win ties of distance.

Cards differ in the speed of their memory. So in steps 1 and 2 rows that the card at hand measured
come first, and in step 3 they win ties of distance.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ikbo_jax.problems import Config, Problem
from ikbo_jax.tuning.table_rows import Row, builtin_rows, model
from ikbo_jax.tuning.user_cache import user_rows

#: Largest `distance` at which a row that prefers XLA is used, e.g. the finest K times √2.
XLA_MAX_DISTANCE = 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """The table's choice for a problem.

    Attributes:
      config: configuration of the kernel; None if XLA is faster or no configuration is legal.
      source: "user cache", "sm90.json", "default" or "none".
      exact: whether a measured row for this problem or its shape class was found.
      reason: one line of text: which row was used, and where it was measured.
    """

    config: Any
    source: str
    exact: bool
    reason: str


def distance(a: Problem, b: Problem) -> float:
    """Distance of two problems in doublings of a size, ignoring dtypes; infinite between ops."""
    return a.distance(b) if isinstance(b, type(a)) else math.inf


def devices() -> tuple[str, ...]:
    """Names of the cards that measured rows."""
    return tuple(dict.fromkeys(row.device for row in (*builtin_rows(), *user_rows())))


def lookup(problem: Problem, *, device: str = "", with_user_rows: bool = True) -> Choice:
    """Chooses a configuration, or XLA, for `problem`; see the module's docstring for the order.

    Args:
      problem: sizes and dtype.
      device: name of the card at hand; "" prefers no card.
      with_user_rows: whether to search the user's cache.
    """
    cached = user_rows() if with_user_rows else ()
    choice = _lookup(problem, device, cached)
    of_problem = [row.config for row in cached if row.problem == problem]
    if choice.source == "none" or any(_is_legal(problem, config) for config in of_problem):
        return choice
    # The row of an older version may hold what the kernel has ceased to take.
    for config in of_problem[:1]:
        why = config.illegal_reason(problem)
        reason = f"{choice.reason}; the user cache's row of these sizes is ignored: {why}"
        choice = dataclasses.replace(choice, reason=reason)
    return choice


def _lookup(problem: Problem, device: str, cached: tuple[Row, ...]) -> Choice:
    """`lookup` with these rows of the user's cache."""

    def is_other(row: Row) -> bool:
        """Whether another card than that at hand measured a row."""
        return bool(device) and model(row.device) != model(device)

    default_config = problem.default_config()
    if default_config is None:
        reason = problem.config_type().illegal_reason(problem)
        return Choice(None, "none", False, f"no legal configuration of the kernel: {reason}")
    for row in sorted(cached, key=is_other):
        if row.problem == problem and _is_legal(problem, row.config):
            return Choice(row.config, "user cache", True, f"user cache, {row.describe()}")
    files = {
        "user cache": cached if problem.user_rows_generalise else (),
        "sm90.json": builtin_rows(),
    }
    op_rows = {
        source: [row for row in rows if isinstance(row.problem, type(problem))]
        for source, rows in files.items()
    }
    for source, rows in op_rows.items():
        same_class = [
            row
            for row in rows
            if row.problem.dtype == problem.dtype
            and row.problem.shape_class() == problem.shape_class()
        ]
        for row in sorted(same_class, key=lambda r: (is_other(r), distance(r.problem, problem))):
            if _is_legal(problem, row.config):
                return Choice(row.config, source, True, f"{source}, {row.describe()}")
    all_rows = [(source, row) for source, rows in op_rows.items() for row in rows]
    all_rows.sort(key=lambda entry: (*_preference(entry[1], problem), is_other(entry[1])))
    for source, row in all_rows:
        if _is_usable(row, problem):
            row_distance = distance(row.problem, problem)
            reason = f"{source}, nearest row at distance {row_distance:.2f}, {row.describe()}"
            config = None if row.config is None else problem.adapt(row.config)
            return Choice(config, source, False, reason)
    if reason := problem.why_xla():
        return Choice(None, "default", False, f"{reason}; no measured row is near")
    rule = problem.default_rule()
    reason = "default configuration: no measured row is near" + (rule and f"; {rule}")
    return Choice(default_config, "default", False, reason)


def _is_legal(problem: Problem, config: Config | None) -> bool:
    return config is None or config.illegal_reason(problem) is None


def _preference(row: Row, problem: Problem) -> tuple[bool, float]:
    return row.problem.dtype != problem.dtype, distance(row.problem, problem)


def _is_usable(row: Row, problem: Problem) -> bool:
    """Whether a row of another shape class may be used for `problem`."""
    row_distance = distance(row.problem, problem)
    if row.config is None:
        return row.problem.dtype == problem.dtype and row_distance <= XLA_MAX_DISTANCE
    is_comparable = row_distance < math.inf and _is_legal(problem, row.config)
    return is_comparable and problem.fits(row.config)
