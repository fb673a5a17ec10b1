"""A progress bar on a terminal, and plain lines in a pipe."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO


class Advance(Protocol):
    """Counts one more step, with the loss to show."""

    def __call__(self, *, loss: float) -> None: ...


class Progress:
    """Shows how far a run is, on stderr.

    Args:
      every_s: seconds between two lines where stderr is not a terminal.
      file: where to write; None means stderr.
      quiet: whether to write nothing.
    """

    def __init__(self, every_s: float = 10.0, file: TextIO | None = None, quiet: bool = False):
        self.file = sys.stderr if file is None else file
        self.every_s, self.quiet = every_s, quiet
        self._bar: object = None

    def note(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)  # type: ignore[attr-defined]
        else:
            print(text, file=self.file, flush=True)

    @contextlib.contextmanager
    def bar(self, name: str, done: int, total: int) -> Iterator[Advance]:
        """Yields a function that counts a step of `total`, of which `done` are done before."""
        if self.quiet:
            yield lambda *, loss: None
        elif self.file.isatty():
            with self._rich(name, done, total) as advance:
                yield advance
        else:
            yield self._lines(name, done, total)

    def _lines(self, name: str, done: int, total: int) -> Advance:
        start = shown = time.perf_counter()
        first = done + 1

        def advance(*, loss: float) -> None:
            nonlocal done, shown, start
            done += 1
            now = time.perf_counter()
            if done == first:
                # The first step compiles: minutes, of which no other step tells.
                start = now
            if done < total and (now - shown < self.every_s or done == first):
                return
            shown = now
            text = f"{name}: step {done}/{total}, loss {loss:.4f}"
            if done > first:
                rate = (done - first) / (now - start)
                text += f", {rate:.1f} steps/s, {(total - done) / rate:.0f} s left"
            self.note(text)

        return advance

    @contextlib.contextmanager
    def _rich(self, name: str, done: int, total: int) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(file=self.file)) as bar:
            task = bar.add_task(name, completed=done, total=total, loss=float("nan"))
            self._bar = bar
            try:
                yield lambda *, loss: bar.update(task, advance=1, loss=loss)
            finally:
                self._bar = None
