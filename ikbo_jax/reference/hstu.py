"""HSTU's rule: which keys a row sees, by its position. Also for causal masks and windows.

The functions take arrays of any shape, or numbers of one tile inside of a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Rule(NamedTuple):
    """The static numbers of `ikbo_jax.masks.hstu`.

    Attributes:
      contextual: number of contextual tokens of all sequences; None: every sequence has a number.
      has_targets: whether every sequence has a number of targets; otherwise there are none.
      window: how much earlier a key may be than its row; None: by any number.
      full_tail: how many of the last times of the history have no window.
      target_group_size: targets of a group.
      causal: whether rows see no later times.
    """

    contextual: int | None = 0
    has_targets: bool = False
    window: int | None = None
    full_tail: int = 0
    target_group_size: int = 1
    causal: bool = True


class Sequence(NamedTuple):
    """Numbers of a row's sequence.

    Attributes:
      length: of its keys.
      contextual: tokens, unclamped; ignored if all sequences have as many.
      targets: likewise; ignored if there are none.
    """

    length: Any
    contextual: Any = 0
    targets: Any = 0

    def clamped(self, rule: Rule) -> Sequence:
        """Limits contextual tokens to [0, length], and targets to the rest."""
        contextual: Any = self.contextual if rule.contextual is None else rule.contextual
        if not isinstance(contextual, int) or contextual:
            contextual = jnp.clip(contextual, 0, self.length)
        targets: Any = 0
        if rule.has_targets:
            targets = jnp.clip(self.targets, 0, self.length - contextual)
        return Sequence(self.length, contextual, targets)


class Seen(NamedTuple):
    """The keys [begin, end) that rows see, except [gap_begin, gap_end); 0 if static."""

    begin: Any
    end: Any
    gap_begin: Any = 0
    gap_end: Any = 0


def seen(rule: Rule, position: Any, sequence: Sequence) -> Seen:
    """Finds the keys that rows see.

    Args:
      position: of the row among the keys of its sequence; a negative one sees nothing.
      sequence: clamped numbers.
    """
    return Seen(*_range(rule, position, sequence), *_gap(rule, position, sequence))


def _range(rule: Rule, position: Any, sequence: Sequence) -> tuple[Any, Any]:
    length, contextual, targets = sequence
    is_plain = isinstance(contextual, int) and not contextual
    begin: Any = 0
    end = position + 1 if rule.causal else length + 0 * position
    # A key j ≥ c has time j − shift; `last` is the time of the targets.
    shift = 0 if is_plain else jnp.maximum(contextual - 1, 0)
    first_target = length - targets
    last = first_target - shift
    time = jnp.clip(position - shift, 0, last)

    def first_of(time: Any) -> Any:
        return jnp.maximum(time, 0) if is_plain else jnp.where(time > 0, time + shift, 0)

    if rule.window is not None:
        begin = first_of(time - rule.window)
        ends_early = time + rule.window < last
        if rule.full_tail:
            is_full = time >= last - rule.full_tail
            # In a kernel, a plain 0 would make begins unsigned: see `per_thread.select`.
            begin, ends_early = jnp.where(is_full, 0 * position, begin), ends_early & ~is_full
        if not rule.causal:
            end = jnp.where(ends_early, first_of(time + rule.window + 1), length)
    if not is_plain:
        end = jnp.where(position < contextual, jnp.maximum(end, first_target), end)
    if rule.has_targets and not rule.causal:
        group = _group(rule, position, first_target)
        group_end = jnp.minimum(group + rule.target_group_size, length)
        end = jnp.where(position >= first_target, group_end, end)
    return begin, jnp.where(position >= 0, end, 0)


def _group(rule: Rule, position: Any, first_target: Any) -> Any:
    """Finds the first key of a target's group."""
    size = rule.target_group_size
    if size == 1:
        return position
    place = position - first_target
    return first_target + lax.div(place, jnp.full_like(place, size)) * size


def _gap(rule: Rule, position: Any, sequence: Sequence) -> tuple[Any, Any]:
    """Finds the targets before a target's group."""
    if not rule.has_targets:
        return 0, 0
    first_target = sequence.length - sequence.targets
    group = _group(rule, position, first_target)
    # With a window of 0, targets see no history, and their range begins at the first target.
    return first_target, jnp.where(position >= first_target, group, first_target)
