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
from ikbo_jax.rewrite.work import BothCosts, Work, count


@dataclasses.dataclass(frozen=True)
class FoundBroadcast:
    """One broadcast of the original program.

    Attributes:
      line: the source line of the broadcast, as `model.py:12 (fn)`.
      what: its shapes, and the number of indices of a lookup.
      became: what replaced it, each entry with its line.
      costs: what the equations on its values cost, before and after; None if the original runs.
        Equations on values of several broadcasts count for the first of them only.
      kept: what keeps the rest: every value that is copied, with the line that needs it, its size
        and the reason.
    """

    line: str
    what: str
    became: tuple[str, ...]
    costs: BothCosts | None = None
    kept: tuple[str, ...] = ()

    @property
    def flops_saved(self) -> int:
        """The floating-point operations of products that the rewrite removed."""
        return self.costs.flops_saved if self.costs else 0

    @property
    def bytes_saved(self) -> int:
        """The bytes that are no longer read and written; below 0 if the rewrite moves more."""
        return self.costs.bytes_saved if self.costs else 0

    def __str__(self) -> str:
        return self._text(())

    @property
    def details(self) -> str:
        """The text with everything that replaced the broadcast."""
        return self._text(self.became or ("unused",))

    def _text(self, became: Sequence[str]) -> str:
        lines = [f"{self.line}: {self.what}", *(f"  -> {text}" for text in became)]
        if self.costs is not None:
            above = "  its work counts for a broadcast above"
            lines.append(above if self.costs == BothCosts() else f"  saves {self.costs}")
        return "\n".join(lines + [f"  copied by {text}" for text in self.kept])


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
        return f"{self.line}: {self.what} ({count(self.nbytes)}B): {self.reason}"


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
      costs: what the whole program costs, before and after.
      work: what `lines` is computed from.
    """

    changed: bool
    broadcasts: tuple[FoundBroadcast, ...] = ()
    materialised: tuple[Materialisation, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    repetitions: int = 0
    reason: str = ""
    costs: BothCosts = BothCosts()
    work: Work = dataclasses.field(default_factory=Work, compare=False, repr=False)

    @property
    def flops_saved(self) -> int:
        """The floating-point operations of products that the rewrite removed."""
        return self.costs.flops_saved

    @property
    def bytes_saved(self) -> int:
        """The bytes that are no longer read and written; below 0 if the rewrite moves more."""
        return self.costs.bytes_saved

    @property
    def lines(self) -> dict[str, BothCosts]:
        """The costs of the model's lines that compute with values of broadcasts, by line.

        The last entry, "all other lines", is the rest of the program.
        """
        if not self.changed:
            return {}

        def line_of(tracebacks: tuple[Any, ...]) -> str:
            return next(filter(None, map(_model_line, tracebacks)), Recorder.UNKNOWN)

        lines = self.work.by_line(line_of)
        rest = self.costs
        for costs in lines.values():
            rest -= costs
        return lines | ({"all other lines": rest} if rest != BothCosts() else {})

    def __str__(self) -> str:
        return "\n".join([self._headline(), *_once(self.broadcasts), *self._left()])

    @property
    def details(self) -> str:
        """The report with everything that replaced each broadcast, and the costs by line."""
        texts = [_indent(text) for text in _counted(self.broadcasts, lambda x: x.details)]
        if self.changed:
            texts.append("costs by line, before -> after:")
            texts += [f"  {line}: {costs.before_and_after}" for line, costs in self.lines.items()]
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
            return f"{found}; saves {self.costs}"
        if self.lookups:
            return f"{len(self.lookups)} lookup{'s' * (len(self.lookups) != 1)} found, none removed"
        return (
            "nothing gained from repeated dimensions" if self.repetitions else "no broadcast found"
        )


def _once(entries: Sequence[Any]) -> list[str]:
    """The entries as indented texts; equal ones, such as a model's layers make, are one text."""
    return [_indent(text) for text in _counted(entries, str)]


def _counted(entries: Sequence[Any], text: Callable[[Any], str]) -> list[str]:
    counts = collections.Counter(entries)
    return [text(x) if n == 1 else f"{n} times, each: {text(x)}" for x, n in counts.items()]


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
        self.kept: dict[str, int] = {}

    def freeze(self, costs: BothCosts | None) -> FoundBroadcast:
        texts = _with_times(self.became), _with_times(self.kept)
        return FoundBroadcast(self.line, self.what, texts[0], costs, texts[1])


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
        self.work = Work()
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

    def computed(self, eqn: Any, origins: frozenset) -> None:
        """Records the broadcasts that the operands and results of an equation stem from."""
        if origins and not self.muted:
            self.work.own(eqn, self.calls, origins)

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
            place = Materialisation(self.line(eqn), lineage.text(value), reason, size)
            self.materialised += [place] * times
            for origin in origins:
                origin.kept[str(place)] = origin.kept.get(str(place), 0) + times

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
        numbers = {b: n for n, b in enumerate(self.broadcasts) if b.certain}

        def first(origins: frozenset) -> Any:
            return min((x for x in origins if x in numbers), key=numbers.__getitem__, default=None)

        costs = self.work.by_owner(first)
        broadcasts = tuple(
            b.freeze(costs.get(b, BothCosts()) if changed else None) for b in numbers
        )
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
            self.work.whole if changed else BothCosts(),
            self.work,
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
    return _model_line(eqn.source_info.traceback)


def _model_line(traceback: Any) -> str | None:
    for frame in traceback.frames if traceback else ():
        if _is_model(frame.file_name):
            function = frame.function_name.rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({function})"
    return None


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
