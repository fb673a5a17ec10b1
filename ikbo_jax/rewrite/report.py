"""What a rewrite found and did, collected while it runs and told in the user's own source lines."""

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
      line: where the program makes it, `model.py:12 (fn)`.
      what: its shapes, and by what it is looked up.
      became: what happened instead, each with its line.
      flops_saved: floating-point operations not done, because they ran at the smaller batch. Work
        on values that stem from several broadcasts counts for the first alone.
      bytes_saved: bytes of the copy that are no longer written.
    """

    line: str
    what: str
    became: tuple[str, ...]
    flops_saved: int
    bytes_saved: int

    def __str__(self) -> str:
        lines = [f"{self.line}: {self.what}"]
        lines += [f"  -> {what}" for what in self.became or ("unused",)]
        return "\n".join([*lines, f"  saves {_saved(self.flops_saved, self.bytes_saved)}"])


@dataclasses.dataclass(frozen=True)
class Materialisation:
    """One place at which a broadcast had to be carried out after all.

    Attributes:
      line: where.
      what: dtype and shape of the copy.
      reason: why.
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
      line: where the program makes it.
      what: its shapes.
      outcome: "removed" if work on its rows is done before them, "kept" if there is nothing to
        gain, "refused" if a rule could not.
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
    """What a rewrite found and did; `str` makes plain text of it.

    Attributes:
      changed: whether the rewritten program runs; False if it is the original.
      broadcasts: what was found, in program order.
      materialised: what had to be carried out, in program order.
      lookups: every lookup of the original program, and what became of it.
      repetitions: how many dimensions of size 1 are repeated besides, as those of biases are.
      reason: why the original runs although something was found; "" if nothing else is to be said.
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
        lines = [f"rewrite: {self._summary()}"]
        if not self.changed:
            lines[0] += "; the original function runs" + (f": {self.reason}" if self.reason else "")
        lines += _once(self.broadcasts)
        if self.materialised:
            lines += ["materialised:", *_once(self.materialised)]
        left = [lookup for lookup in self.lookups if lookup.outcome != "removed"]
        if left:
            lines += ["lookups left as they are:", *_once(left)]
        return "\n".join(lines)

    def _summary(self) -> str:
        count = len(self.broadcasts)
        if count:
            found = f"{count} broadcast{'s' * (count != 1)} found"
            if not self.changed:
                return found + ("" if self.reason else ", nothing gained")
            return f"{found}; saves {_saved(self.flops_saved, self.bytes_saved)}"
        if self.lookups:
            return f"{len(self.lookups)} lookup{'s' * (len(self.lookups) != 1)} found, none removed"
        return "nothing gained from what is repeated" if self.repetitions else "no broadcast found"


def _saved(flops: int, nbytes: int) -> str:
    return f"{_count(flops)}FLOP, {_count(nbytes)}B not written"


def _once(entries: Sequence[Any]) -> list[str]:
    """The entries' texts; those that are equal, as those of a model's layers, as one."""
    counts = collections.Counter(entries)
    texts = (str(x) if n == 1 else f"{n} times {x} each" for x, n in counts.items())
    return [_indent(text) for text in texts]


class Broadcast:
    """A `FoundBroadcast` in the making."""

    def __init__(self, line: str, what: str, copy_bytes: int, certain: bool) -> None:
        self.line = line
        self.what = what
        self.copy_bytes = copy_bytes
        # A lookup by an index is a broadcast. Of dimensions of size 1, of which every bias has
        # some, only those are worth telling that saved a product.
        self.certain = certain
        self.became: dict[str, int] = {}
        self.flops_saved = 0
        self.bytes_written = 0

    def freeze(self) -> FoundBroadcast:
        became = tuple(
            text if times == 1 else f"{text} ({times} times)" for text, times in self.became.items()
        )
        saved = max(0, self.copy_bytes - self.bytes_written)
        return FoundBroadcast(self.line, self.what, became, self.flops_saved, saved)


@dataclasses.dataclass
class _Repeated:
    """Calls that are recorded like an earlier one; `record(times)` does so for all of them."""

    known: Any
    record: Callable[[int], None]
    times: int = 0


class Recorder:
    """Collects what one rewrite finds and does."""

    #: Where an equation stands that no line of the user's is known of.
    UNKNOWN = "unknown line"

    def __init__(self) -> None:
        self.broadcasts: list[Broadcast] = []
        self.materialised: list[Materialisation] = []
        self.changed = False
        # Whether a rule took a form whose derivative is not the original's.
        self.gradient_differs = False
        self.muted = 0
        self.reason = ""
        # Equations that call the program that runs. One traced by a jitted library function may
        # know no line of the user's; that of the call then stands for it.
        self.calls: list[Any] = []
        self._repeated: dict[Any, _Repeated] = {}
        # Why the original runs although something was found.
        self.refusal = ""
        # What becomes of the original's lookups, by the identity of their equations.
        self._lookups: dict[int, Lookup] = {}

    def expect(self, program: Any, is_lookup: Callable[[Any], bool]) -> None:
        """Notes all lookups of the original program, also those that no rule will come to."""
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
        """Records what became of a lookup of the original; of several calls the last counts."""
        if id(eqn) in self._lookups:
            known = self._lookups[id(eqn)]
            changed = dataclasses.replace(known, outcome=outcome, reason=reason)
            self._lookups[id(eqn)] = changed

    @contextlib.contextmanager
    def inside(self, eqn: Any) -> Iterator[None]:
        """Inside the program that an equation calls."""
        self.calls.append(eqn)
        try:
            yield
        finally:
            self.calls.pop()

    @contextlib.contextmanager
    def because(self, reason: str) -> Iterator[None]:
        """What is written inside is so for this reason, the outermost one."""
        outer, self.reason = self.reason, self.reason or reason
        try:
            yield
        finally:
            self.reason = outer

    def line(self, eqn: Any) -> str:
        """The user's line that an equation stems from; a line itself."""
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
        """Records that broadcasts which were not certain are lookups."""
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
          eqn: the program's equation.
          origins: the broadcasts that the work's operands stem from.
          became: what the equation became.
          flops: operations not done.
          product: whether it is a product, whose line is told; other work is only counted.
          times: how often it was.
        """
        if self.muted or not origins:
            return
        text = f"{became}, {self.line(eqn)}" if product else became
        for origin in origins:
            origin.certain |= product
            origin.became[text] = origin.became.get(text, 0) + times
            self.changed |= origin.certain
        self._first(origins).flops_saved += flops

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool, times: int = 1) -> None:
        """Records that a value was carried out at the larger batch; `copied` unless fused."""
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

    def _first(self, origins: frozenset) -> Any:
        if len(origins) == 1:
            return next(iter(origins))
        return min(origins, key=self.broadcasts.index, default=None)

    def remember(self, key: Any, known: Any, record: Callable[[int], None]) -> None:
        """Lets further calls be recorded together, at the end, if they are the same as the last.

        Args:
          key: what tells a call from others.
          known: what `again` returns at those calls.
          record: records a number of them.
        """
        if not self.muted:
            self._repeated[key] = _Repeated(known, record)

    def again(self, key: Any, times: int = 1) -> Any:
        """Records calls as an earlier one, and returns what is known of it; None if unknown."""
        repeated = None if self.muted else self._repeated.get(key)
        if repeated is None:
            return None
        repeated.times += times
        return repeated.known

    def settle(self) -> None:
        """Records the calls that were the same as others."""
        for repeated in self._repeated.values():
            if repeated.times:
                repeated.record(repeated.times)
                repeated.times = 0

    def report(self) -> RewriteReport:
        self.settle()
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
    """What a lookup does, as in the report of a broadcast."""
    operand, result = (v.aval.str_short() for v in (eqn.invars[0], eqn.outvars[0]))
    if len(eqn.invars) == 1:
        return f"{operand} tiled -> {result}"
    count = lineage.size_of(eqn.invars[1].aval.shape[:-1])
    return f"{operand} looked up by {count} indices -> {result}"


_PACKAGE = pathlib.Path(__file__).parents[1]
#: Folders of this package whose frames stand between a model and the primitive.
_BETWEEN = tuple(str(_PACKAGE / name) + os.sep for name in ("layers", "ops", "rewrite"))


@functools.cache
def _is_users(file_name: str) -> bool:
    """Whether a frame of this file is the user's: not JAX's, Flax's or that of an op."""
    libraries = [sys.modules[name] for name in ("jax", "flax") if name in sys.modules]
    folders = [str(pathlib.Path(str(m.__file__)).parent) + os.sep for m in libraries]
    return not file_name.startswith((*_BETWEEN, *folders))


def source_line(eqn: Any) -> str | None:
    """The user's line that an equation stems from: `model.py:12 (fn)`; None if it knows none."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if _is_users(frame.file_name):
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
