"""The report of a rewrite, with the source lines of the model."""

import collections
import dataclasses
import functools
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ikbo_jax.rewrite.report.cost import Cost
from ikbo_jax.rewrite.values import lineage

#: The estimate's precision on a GPU, as a share of the original; a smaller difference has no sign.
PRECISION = 0.05
#: The line of an equation whose line in the model is unknown.
UNKNOWN = "unknown line"


@dataclasses.dataclass(frozen=True)
class FoundBroadcast:
    """Describes one broadcast of the original program.

    Attributes:
      line: the source line of the broadcast, as `model.py:12 (fn)`.
      what: its shapes, and the number of indices of a lookup.
      became: what replaced it, each entry with its line.
      kept: what keeps the rest: every value that is copied, with the line that needs it, its size
        and the reason.
    """

    line: str
    what: str
    became: tuple[str, ...]
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self._with([])

    @property
    def details(self) -> str:
        """Text with everything that replaced the broadcast."""
        return self._with([f"  -> {text}" for text in self.became or ("unused",)])

    def _with(self, lines: list[str]) -> str:
        copies = [f"  copied by {text}" for text in self.kept]
        return "\n".join([f"{self.line}: {self.what}", *lines, *copies])


@dataclasses.dataclass(frozen=True)
class Materialisation:
    """Describes one value that the rewritten program had to materialise.

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
    """Describes one lookup of rows, or one repetition of them, in the original program.

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
class BothCosts:
    """Holds the costs of the original and of the rewritten program."""

    original: Cost = Cost()
    rewritten: Cost = Cost()

    @property
    def flops_saved(self) -> int:
        return self.original.flops - self.rewritten.flops

    @property
    def bytes_saved(self) -> int:
        return self.original.nbytes - self.rewritten.nbytes

    def __str__(self) -> str:
        """Says what is saved, of how much, what stays about the same, and what grows."""
        saved, others = [], []
        units = ("FLOP", "computes", "FLOPs"), ("B", "moves", "bytes")
        pairs = zip(self.original, self.rewritten, strict=True)
        for (unit, verb, name), (before, after) in zip(units, pairs, strict=False):
            whole, amount = f"{count(before)}{unit}", before - after
            if isinstance(amount, int) and abs(amount) < PRECISION * before:
                others.append(f"{verb} about as many {name} ({whole})")
            elif not lineage.is_at_least(amount, 0):
                others.append(f"{verb} {count(after)}{unit} instead of {whole}")
            elif before:
                saved.append(f"all {whole}" if not after else f"{count(amount)}{unit} of {whole}")
        texts = [f"saves {', '.join(saved)}"] if saved else []
        return ", but ".join([*texts, " and ".join(others)] if others else texts)


def count(number: int) -> str:
    """Formats a number with three digits and the prefix of its unit, such as `1.23 M`.

    Expressions of symbolic dimensions, which no unit is known to fit, stay as they are.
    """
    if not isinstance(number, int):
        return f"({number}) "
    if number < 0:
        return f"-{count(-number)}"
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} "


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """Holds the report of a rewrite; `str` returns it as plain text, `details` with more of it.

    Attributes:
      changed: whether the rewritten program runs; False if the original runs.
      broadcasts: the broadcasts that were found, in program order.
      materialised: the values that were materialised, in program order.
      lookups: every lookup of the original program, with its outcome.
      repetitions: the number of further broadcasts of dimensions of size 1, such as biases.
      reason: why the original runs, if the rewriting failed or would cost more; otherwise "".
      costs: what the whole program costs, before and after.
      layers: the linear layers that became ops, each with its line; `costs` counts them as written.
    """

    changed: bool
    broadcasts: tuple[FoundBroadcast, ...] = ()
    materialised: tuple[Materialisation, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    repetitions: int = 0
    reason: str = ""
    costs: BothCosts = BothCosts()
    layers: tuple[str, ...] = ()

    @property
    def flops_saved(self) -> int:
        """Number of floating-point operations that the rewrite removed, on a GPU of products."""
        return self.costs.flops_saved

    @property
    def bytes_saved(self) -> int:
        """Number of bytes that are no longer moved; below 0 if the rewrite moves more."""
        return self.costs.bytes_saved

    def __str__(self) -> str:
        return "\n".join([self._headline(), *_once(self.broadcasts), *self._left()])

    @property
    def details(self) -> str:
        """Text of the report with everything that replaced each broadcast."""
        texts = _once(self.broadcasts, lambda x: x.details)
        return "\n".join([self._headline(), *texts, *self._left()])

    def _headline(self) -> str:
        text = f"rewrite: {self._summary()}"
        if self.changed:
            return text
        has_ops = bool(self.layers) and "stay as they are" not in self.layers[0]
        text += "; the original function runs" + ", except its linear layers" * has_ops
        return text + (f": {self.reason}" if self.reason else "")

    def _left(self) -> list[str]:
        left = [lookup for lookup in self.lookups if lookup.outcome != "removed"]
        texts = ["lookups left as they are:", *_once(left)] if left else []
        layers = ["linear layers, for values without a derivative:", *_once(self.layers)]
        return [*texts, *(layers if self.layers else [])]

    def _summary(self) -> str:
        count = len(self.broadcasts)
        if count:
            found = f"{count} broadcast{'s' * (count != 1)} found"
            if not self.changed:
                return found + ("" if self.reason else ", nothing gained")
            return f"{found}; {self.costs}"
        if self.lookups:
            return f"{len(self.lookups)} lookup{'s' * (len(self.lookups) != 1)} found, none removed"
        return (
            "nothing gained from repeated dimensions" if self.repetitions else "no broadcast found"
        )


def _once(entries: Sequence[Any], text: Callable[[Any], str] = str) -> list[str]:
    """Indents the texts of entries; equal ones, such as a model's layers make, are one text."""
    counts = collections.Counter(entries).items()
    texts = (text(x) if n == 1 else f"{n} times, each: {text(x)}" for x, n in counts)
    return [textwrap.indent(x, "  ") for x in texts]


_PACKAGE = pathlib.Path(__file__).parents[2]
#: Folders of this package whose stack frames are not the model's.
_LIBRARY = tuple(str(_PACKAGE / name) + os.sep for name in ("layers", "ops", "rewrite"))


@functools.cache
def _is_model(file_name: str) -> bool:
    """Whether a stack frame of this file is the model's: not of JAX or a library of layers."""
    names = ("jax", "flax", "keras", "haiku", "equinox")
    libraries = [sys.modules[name] for name in names if name in sys.modules]
    folders = [str(pathlib.Path(str(m.__file__)).parent) + os.sep for m in libraries]
    return not file_name.startswith((*_LIBRARY, *folders))


def source_line(eqn: Any) -> str | None:
    """Returns the model's line that an equation stems from, `model.py:12 (fn)`, or None."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if _is_model(frame.file_name):
            function = frame.function_name.rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({function})"
    return None
