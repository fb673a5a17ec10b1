"""The report of a rewrite, collected while it runs, with the source lines of the model."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ikbo_jax.rewrite import jaxprs, lineage


@dataclasses.dataclass(frozen=True)
class FoundBroadcast:
    """One broadcast of the original program.

    Attributes:
      line: the source line of the broadcast, as `model.py:12 (fn)`.
      what: its shapes, and the number of indices of a lookup.
      became: what replaced it, each entry with its line.
      flops_saved: the floating-point operations that the original computes at candidate batch and
        the rewritten program does not. Work on values that stem from several broadcasts counts for
        the first of them only.
      bytes_saved: bytes of the copy that are no longer written.
      kept: what keeps the rest: every value that is copied, with the line that needs it, its size
        and the reason.
    """

    line: str
    what: str
    became: tuple[str, ...]
    flops_saved: int
    bytes_saved: int
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.line}: {self.what}"]
        lines.append(f"  saves {_saved(self.flops_saved, self.bytes_saved)}")
        return "\n".join(lines + [f"  copied by {text}" for text in self.kept])

    @property
    def details(self) -> str:
        """The text with everything that replaced the broadcast."""
        lines = [f"{self.line}: {self.what}"]
        lines += [f"  -> {what}" for what in self.became or ("unused",)]
        return "\n".join([*lines, f"  saves {_saved(self.flops_saved, self.bytes_saved)}"])


@dataclasses.dataclass(frozen=True)
class Materialisation:
    """One value that the rewritten program had to materialise.

    Attributes:
      line: the source line of the equation that needs the copy.
      what: dtype and shape of the copy.
      reason: why the copy is needed.
      nbytes: size of the copy, in bytes.
    """

    line: str
    what: str
    reason: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.line}: {self.what} ({_count(self.nbytes)}B): {self.reason}"


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One lookup of rows, or one repetition of them, in the original program.

    Attributes:
      line: the source line of the lookup.
      what: its shapes.
      outcome: "removed" if work on its rows is done before it, "kept" if there is nothing to gain,
        "refused" if a rule could not rewrite it.
      reason: why it was kept or refused; "" if it was removed.
    """

    line: str
    what: str
    outcome: str
    reason: str

    def __str__(self) -> str:
        return f"{self.line}: {self.what}: {self.outcome}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """The report of a rewrite; `str` returns it as plain text, `details` with more of it.

    Attributes:
      changed: whether the rewritten program runs; False if the original runs.
      broadcasts: the broadcasts that were found, in program order.
      materialised: the values that were materialised, in program order.
      lookups: every lookup of the original program, with its outcome.
      repetitions: the number of further broadcasts of dimensions of size 1, such as biases.
      reason: why the original runs, if the rewriting failed or would cost more; otherwise "".
    """

    changed: bool
    broadcasts: tuple[FoundBroadcast, ...] = ()
    materialised: tuple[Materialisation, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    repetitions: int = 0
    reason: str = ""

    @property
    def flops_saved(self) -> int:
        return sum(found.flops_saved for found in self.broadcasts)

    @property
    def bytes_saved(self) -> int:
        return sum(found.bytes_saved for found in self.broadcasts)

    def __str__(self) -> str:
        return "\n".join([self._headline(), *_once(self.broadcasts), *self._left()])

    @property
    def details(self) -> str:
        """The report with everything that replaced each broadcast, and all copies."""
        texts = [_indent(text) for text in _counted(self.broadcasts, lambda x: x.details)]
        if self.materialised:
            texts += ["materialised:", *_once(self.materialised)]
        return "\n".join([self._headline(), *texts, *self._left()])

    def _headline(self) -> str:
        text = f"rewrite: {self._summary()}"
        if self.changed:
            return text
        return text + "; the original function runs" + (f": {self.reason}" if self.reason else "")

    def _left(self) -> list[str]:
        left = [lookup for lookup in self.lookups if lookup.outcome != "removed"]
        return ["lookups left as they are:", *_once(left)] if left else []

    def _summary(self) -> str:
        count = len(self.broadcasts)
        if count:
            found = f"{count} broadcast{'s' * (count != 1)} found"
            if not self.changed:
                return found + ("" if self.reason else ", nothing gained")
            return f"{found}; saves {_saved(self.flops_saved, self.bytes_saved)}"
        if self.lookups:
            return f"{len(self.lookups)} lookup{'s' * (len(self.lookups) != 1)} found, none removed"
        return (
            "nothing gained from repeated dimensions" if self.repetitions else "no broadcast found"
        )


def _saved(flops: int, nbytes: int) -> str:
    return f"{_count(flops)}FLOP, {_count(nbytes)}B not written"


def _once(entries: Sequence[Any]) -> list[str]:
    """The entries as indented texts; equal ones, such as a model's layers make, are one text."""
    return [_indent(text) for text in _counted(entries, str)]


def _counted(entries: Sequence[Any], text: Callable[[Any], str]) -> list[str]:
    counts = collections.Counter(entries)
    return [text(x) if n == 1 else f"{n} times {text(x)} each" for x, n in counts.items()]


def _with_times(texts: dict[str, int]) -> tuple[str, ...]:
    return tuple(text if n == 1 else f"{text} ({n} times)" for text, n in texts.items())


class Broadcast:
    """A `FoundBroadcast` that is still being recorded."""

    def __init__(self, line: str, what: str, copy_bytes: int, certain: bool) -> None:
        self.line = line
        self.what = what
        self.copy_bytes = copy_bytes
        # Whether the report lists it. A lookup by an index is always listed. A broadcast dimension
        # of size 1, which every bias has, is listed only if it saved a product.
        self.certain = certain
        self.became: dict[str, int] = {}
        self.flops_saved = 0
        self.bytes_written = 0
        self.kept: dict[str, int] = {}

    def freeze(self) -> FoundBroadcast:
        saved = max(0, self.copy_bytes - self.bytes_written)
        texts = _with_times(self.became), _with_times(self.kept)
        return FoundBroadcast(self.line, self.what, texts[0], self.flops_saved, saved, texts[1])


@dataclasses.dataclass
class _Repeated:
    """Calls that record the same as an earlier call; `record(times)` records all of them.

    `origins` are the broadcasts that each result of these calls stems from.
    """

    origins: Any
    record: Callable[[int], None]
    times: int = 0


class Recorder:
    """Collects the report of one rewrite."""

    #: The line of an equation whose line in the model is unknown.
    UNKNOWN = "unknown line"

    def __init__(self) -> None:
        self.broadcasts: list[Broadcast] = []
        self.materialised: list[Materialisation] = []
        self.changed = False
        # Whether a rule took a form with another derivative than the original.
        self.gradient_differs = False
        self.muted = 0
        self.reason = ""
        # The equations that call the program being interpreted, outermost first. If an equation was
        # traced inside a jitted library function, its line may be unknown; then the line of the
        # innermost call with a line is used.
        self.calls: list[Any] = []
        self._repeated: dict[Any, _Repeated] = {}
        # Why the original runs although broadcasts were found.
        self.refusal = ""
        # The outcomes of the original's lookups, by the identity of their equations.
        self._lookups: dict[int, Lookup] = {}

    def list_lookups(self, program: Any, is_lookup: Callable[[Any], bool]) -> None:
        """Lists all lookups of the original program, including those that no rule is called for."""
        seen = set()

        def search(program: Any, inside: str) -> None:
            for eqn in program.eqns:
                if is_lookup(eqn):
                    what = _lookup_text(eqn)
                    reason = f"it is inside {inside}, which stays as it is"
                    self._lookups[id(eqn)] = Lookup(self.line(eqn), what, "kept", reason)
                for inner in jaxprs.inner_programs(eqn):
                    if id(inner) not in seen:
                        seen.add(id(inner))
                        with self.inside(eqn):
                            search(inner, eqn.primitive.name)

        search(program, "the function")

    def looked_up(self, eqn: Any, outcome: str, reason: str) -> None:
        """Records the outcome of a lookup of the original; the last of several calls counts."""
        if id(eqn) in self._lookups:
            lookup = self._lookups[id(eqn)]
            self._lookups[id(eqn)] = dataclasses.replace(lookup, outcome=outcome, reason=reason)

    @contextlib.contextmanager
    def inside(self, eqn: Any) -> Iterator[None]:
        """A context manager for the interpretation of the program that an equation calls."""
        self.calls.append(eqn)
        try:
            yield
        finally:
            self.calls.pop()

    @contextlib.contextmanager
    def because(self, reason: str) -> Iterator[None]:
        """A context manager that sets the reason of all values materialised in it.

        The outermost reason counts.
        """
        outer, self.reason = self.reason, self.reason or reason
        try:
            yield
        finally:
            self.reason = outer

    def line(self, eqn: Any) -> str:
        """The model's line that an equation stems from; a string unchanged."""
        if eqn is None:
            return "the function's result"
        if isinstance(eqn, str):
            return eqn
        lines = (source_line(e) for e in (eqn, *reversed(self.calls)) if e is not None)
        return next((line for line in lines if line), self.UNKNOWN)

    def found(self, eqn: Any, what: str, copy_bytes: int, certain: bool) -> Broadcast:
        broadcast = Broadcast(self.line(eqn), what, copy_bytes, certain)
        if not self.muted:
            self.broadcasts.append(broadcast)
        return broadcast

    def confirmed(self, origins: frozenset) -> None:
        """Records that broadcasts are lookups, so that the report lists them."""
        for origin in origins:
            origin.certain = True

    def saved(
        self,
        eqn: Any,
        origins: frozenset,
        became: str,
        flops: int,
        product: bool,
        times: int = 1,
    ) -> None:
        """Records work done at the smaller batch instead of the larger one.

        Args:
          eqn: the equation of the original program.
          origins: the broadcasts that its operands stem from.
          became: what replaced the equation.
          flops: the operations that are saved.
          product: whether it is a product, whose line is reported; other work is only counted.
          times: how often this was recorded.
        """
        if self.muted or not origins:
            return
        text = f"{became}, {self.line(eqn)}" if product else became
        for origin in origins:
            origin.certain |= product
            origin.became[text] = origin.became.get(text, 0) + times
            self.changed |= origin.certain
        # Symbolic numbers are not added up.
        self._first(origins).flops_saved += flops if isinstance(flops, int) else 0

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool, times: int = 1) -> None:
        """Records that a value was materialised; `copied` is False if XLA fuses the lookup."""
        reason = self.reason or reason
        origins = [origin for origin in value.origins if origin.certain]
        if self.muted or not origins:
            return
        size = lineage.nbytes(value.shape, value.dtype)
        for origin in origins:
            text = f"{'materialised' if copied else 'looked up in place'}, {self.line(eqn)}"
            origin.became[text] = origin.became.get(text, 0) + times
        if copied:
            self._first(frozenset(origins)).bytes_written += size * times
            place = Materialisation(self.line(eqn), lineage.text(value), reason, size)
            self.materialised += [place] * times
            for origin in origins:
                origin.kept[str(place)] = origin.kept.get(str(place), 0) + times

    def _first(self, origins: frozenset) -> Any:
        if len(origins) == 1:
            return next(iter(origins))
        return min(origins, key=self.broadcasts.index, default=None)

    def remember(self, key: Any, origins: Any, record: Callable[[int], None]) -> None:
        """Prepares `again`, by which calls that record the same are recorded together at the end.

        Args:
          key: equal for calls that record the same.
          origins: what `again` returns for such a call.
          record: records a number of such calls.
        """
        if not self.muted:
            self._repeated[key] = _Repeated(origins, record)

    def again(self, key: Any, times: int = 1) -> Any:
        """Counts calls with this key and returns their origins; None if it is not remembered."""
        repeated = None if self.muted else self._repeated.get(key)
        if repeated is None:
            return None
        repeated.times += times
        return repeated.origins

    def record_repeated(self) -> None:
        """Records the calls that `again` has counted."""
        for repeated in self._repeated.values():
            if repeated.times:
                repeated.record(repeated.times)
                repeated.times = 0

    def report(self) -> RewriteReport:
        self.record_repeated()
        changed = self.changed and not self.refusal
        broadcasts = tuple(b.freeze() for b in self.broadcasts if b.certain)
        lookups = tuple(self._lookups.values())
        if not changed:
            why = self.refusal or "nothing is gained by it"
            lookups = tuple(
                dataclasses.replace(x, outcome="kept", reason=why) if x.outcome == "removed" else x
                for x in lookups
            )
        return RewriteReport(
            changed,
            broadcasts,
            tuple(self.materialised) if broadcasts else (),
            lookups,
            sum(not b.certain for b in self.broadcasts),
            self.refusal,
        )


def _lookup_text(eqn: Any) -> str:
    """A lookup in words, as in the report of a broadcast."""
    operand, result = (v.aval.str_short() for v in (eqn.invars[0], eqn.outvars[0]))
    if len(eqn.invars) == 1:
        return f"{operand} tiled -> {result}"
    count = lineage.size_of(eqn.invars[1].aval.shape[:-1])
    return f"{operand} looked up by {count} indices -> {result}"


_PACKAGE = pathlib.Path(__file__).parents[1]
#: Folders of this package whose stack frames are not the model's.
_LIBRARY = tuple(str(_PACKAGE / name) + os.sep for name in ("layers", "ops", "rewrite"))


@functools.cache
def _is_model(file_name: str) -> bool:
    """Whether a stack frame of this file is the model's: not of JAX, Flax or this library."""
    libraries = [sys.modules[name] for name in ("jax", "flax") if name in sys.modules]
    folders = [str(pathlib.Path(str(m.__file__)).parent) + os.sep for m in libraries]
    return not file_name.startswith((*_LIBRARY, *folders))


def source_line(eqn: Any) -> str | None:
    """The model's line that an equation stems from, `model.py:12 (fn)`; None if it is unknown."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if _is_model(frame.file_name):
            function = frame.function_name.rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({function})"
    return None


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} "


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
