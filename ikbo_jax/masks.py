"""Masks of `gdpa`: which keys of its sequence a query row sees.

Every mask is one description: a row sees the keys in at most two intervals, counted from the first
key of its sequence. A mask is a pytree. Its arrays may be traced, so other targets or intervals
retrace nothing; its kind and its numbers are static.

Queries are aligned with the end of the keys: the last query of a sequence has the position of the
last key, also where there are fewer queries than keys (a cached prefix). With more queries than
keys, the first queries stand before the first key and see nothing. A row that sees nothing has
result 0, and its gradients are 0.
"""

import abc
import dataclasses
import json
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ikbo_jax.integers import integer
from ikbo_jax.reference import hstu as hstu_rule

#: Larger numbers than any length have the same effect, but sums with them would leave int32.
LARGEST = 2**30


class Rows(NamedTuple):
    """The query rows of a call: [rows] int32 each.

    Attributes:
      position: position of the row among the keys of its sequence; negative before the first key.
      length: number of keys of the sequence.
      sequence: number of the row's sequence of queries.
    """

    position: jax.Array
    length: jax.Array
    sequence: jax.Array


class Mask(abc.ABC):
    """A rule which keys every query row sees; `causal`, `hstu` and `intervals` make one."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Names the kind and the static numbers in a few words, for `explain`."""

    @abc.abstractmethod
    def check(self, rows: int, sequences: int) -> None:
        """Raises ValueError unless the mask fits so many result rows and query sequences."""

    @abc.abstractmethod
    def intervals(self, rows: Rows) -> jax.Array:
        """Computes [rows, 4] int32: begin and end of both intervals of keys that a row sees.

        Intervals lie in [0, length]; an interval is empty unless its begin is below its end.
        """


def causal(window: int | None = None) -> Mask:
    """Makes the mask with which a row sees the key at its own position and earlier keys.

    Args:
      window: how many earlier keys a row sees at most; None: all.

    Raises:
      ValueError: `window` is not an integer of at least 0.
    """
    return hstu(window=window)


def hstu(
    num_targets: jax.Array | None = None,
    *,
    contextual: int | jax.Array = 0,
    window: int | None = None,
    full_tail: int = 0,
    target_group_size: int = 1,
    causal: bool = True,
) -> Mask:
    """Makes the mask of HSTU, for sequences of contextual tokens, history and targets.

    A sequence of L keys has c contextual tokens first and t targets last. All contextual tokens
    have time 0, the history has times 1, 2, ... (without contextual tokens 0, 1, ...), and all
    targets have the time after the history's last one. Row i sees

    - the key at its own position;
    - the keys of earlier times, at most `window` earlier; with a `full_tail`, targets and rows in
      the last `full_tail` times of the history have no window;
    - if i is a contextual token: all contextual tokens and the history;
    - if i is a target: the earlier targets of its group of `target_group_size`.

    So targets see the history, and never the targets of other groups.

    Source: `_get_valid_attn_mask` of Meta's generative-recommenders; for `target_group_size`, the
    mask of NVIDIA's recsys-examples.

    Args:
      num_targets: [batch] int32, targets of every sequence of queries; None: none. Numbers outside
        [0, L − c] are clamped; `ikbo_jax.debug.check_offsets` finds those outside [0, L].
      contextual: number of contextual tokens of all sequences, or [batch] int32; clamped to [0, L].
      window: how much earlier a key may be than its row; None: by any number.
      full_tail: how many of the last times of the history have no window; 0: targets have one, too.
      target_group_size: targets of a group; the last group of a sequence may have fewer.
      causal: False: rows also see later times, at most `window` later, and all targets of a group
        see each other.

    Raises:
      ValueError: an array is not int32; a number is not an integer, or is too small; `causal` is
        not a bool.
    """
    is_array = getattr(contextual, "ndim", 0) > 0
    return Hstu(
        num_targets=None if num_targets is None else _int32("num_targets", num_targets),
        contextual=_int32("contextual", contextual) if is_array else None,
        rule=hstu_rule.Rule(
            contextual=None if is_array else _number("contextual", contextual),
            has_targets=num_targets is not None,
            window=None if window is None else _number("window", window),
            full_tail=_number("full_tail", full_tail),
            target_group_size=_number("target_group_size", target_group_size, least=1),
            causal=_flag("causal", causal),
        ),
    )


def intervals(begin: jax.Array, end: jax.Array) -> Mask:
    """Makes the mask with which row i sees the keys from begin[i] to end[i] - 1.

    With two columns, a row sees the keys in either interval. Keys are counted from the first one of
    the row's sequence. Values outside the sequence are clamped to it.

    Args:
      begin: [total_q, 1 or 2] int32; with broadcast queries [batch · T, 1 or 2], sequence after
        sequence.
      end: int32, the same shape; an interval whose end is not above its begin is empty.

    Raises:
      ValueError: an array is not int32, has another number of columns, or their shapes differ.
    """
    begin, end = _int32("begin", begin), _int32("end", end)
    if begin.shape != end.shape:
        raise ValueError(f"begin has shape {begin.shape} but end has shape {end.shape}")
    if begin.ndim < 2 or begin.shape[-1] not in (1, 2):
        raise ValueError(f"begin and end must have shape [total_q, 1 or 2], but have {begin.shape}")
    return Intervals(begin, end)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Hstu(Mask):
    """The mask that `hstu` makes: its arrays, and the rule of its static numbers."""

    num_targets: jax.Array | None
    contextual: jax.Array | None
    rule: hstu_rule.Rule = dataclasses.field(metadata={"static": True})

    def describe(self) -> str:
        words = ["causal" if self.rule.causal else "bidirectional"]
        if self.rule.contextual != 0:
            words.append("contextual")
        if self.rule.has_targets:
            words.append("targets")
        if self.rule.window is not None:
            words.append(f"window={self.rule.window}")
        return "+".join(words)

    def check(self, rows: int, sequences: int) -> None:
        arrays = {"num_targets": self.num_targets, "contextual": self.contextual}
        for name, array in arrays.items():
            if array is not None and array.shape != (sequences,):
                raise ValueError(
                    f"mask has {name} of shape {array.shape} but the queries have "
                    f"batch={sequences} sequences"
                )

    def intervals(self, rows: Rows) -> jax.Array:
        contextual, targets = (
            0 if array is None else array[rows.sequence]
            for array in (self.contextual, self.num_targets)
        )
        sequence = hstu_rule.Sequence(rows.length, contextual, targets).clamped(self.rule)
        begin, end, *gap = hstu_rule.seen(self.rule, rows.position, sequence)
        gap_begin, gap_end = (jnp.minimum(x, end) for x in gap)
        has_gap = gap_begin < gap_end
        found = (
            begin + 0 * end,
            jnp.where(has_gap, gap_begin, end),
            jnp.where(has_gap, gap_end, 0),
            jnp.where(has_gap, end, 0),
        )
        return jnp.stack(found, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Intervals(Mask):
    """The mask that `intervals` makes; its fields are the arguments of `intervals`."""

    begin: jax.Array
    end: jax.Array

    def describe(self) -> str:
        return "intervals"

    def check(self, rows: int, sequences: int) -> None:
        if self.begin.ndim != 2 or self.begin.shape[0] != rows:
            raise ValueError(
                f"mask has intervals of shape {self.begin.shape} but the result has {rows} rows"
            )

    def intervals(self, rows: Rows) -> jax.Array:
        ends = jnp.stack((self.begin, self.end), axis=-1)
        clamped = jnp.clip(ends, 0, rows.length[:, None, None]).reshape(ends.shape[0], -1)
        return jnp.pad(clamped, ((0, 0), (0, 4 - clamped.shape[1])))


for _kind in (Hstu, Intervals):
    # Artefacts of `jax.export` may take masks as arguments.
    jax.export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"ikbo_jax.masks.{_kind.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: tuple(hstu_rule.Rule(*x) for x in json.loads(data)),
    )


def _int32(name: str, array: Any) -> Any:
    """Returns `array`; raises ValueError unless it is an int32 array with an axis."""
    if getattr(array, "dtype", None) != "int32" or not array.ndim:
        kind = f"{array.dtype}{list(array.shape)}" if hasattr(array, "shape") else repr(array)
        if "int" in kind and getattr(array, "ndim", 0) > 0:
            kind += "; convert it by .astype(np.int32)"
        raise ValueError(
            f"{name} must be an int32 array with an entry a sequence or row, not {kind}"
        )
    return array


def _number(name: str, value: Any, least: int = 0) -> int:
    return min(integer(name, value, least), LARGEST)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be a bool, but is {value!r:.80}")
    return bool(value)
