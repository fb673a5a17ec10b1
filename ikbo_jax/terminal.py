"""Numbers, tables and progress of the command line.

In a pipe the text is plain; on a terminal, rich formats the tables and the progress.
"""

import argparse
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

#: Largest size that an argument accepts, since indices are int32.
MAX_SIZE = 2**31 - 1
#: Characters beside each column of a table of rich; least width of a last column that wraps.
PADDING, LEAST_WIDTH = 3, 16


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        # argparse's message would be "invalid _whole value", with this function's name.
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number") from None


def natural(text: str) -> int:
    """Parses an argument of a command: a whole number of at least 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text[:80]} is negative")
    return value


def positive(text: str) -> int:
    """Parses an argument of a command: a whole number from 1 to `MAX_SIZE`."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    if value > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text[:80]} is more than {MAX_SIZE}")
    return value


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: frozenset[int] = frozenset()
) -> None:
    """Prints a table; the columns in `numbers` (indices) are aligned to the right.

    On a terminal the last column may wrap. Where the others do not fit, the table is plain as in a
    pipe: rich would cut off digits.
    """
    lines = [*([headers] if any(headers) else []), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    needed = sum(width + PADDING for width in widths[:-1]) + min(widths[-1], LEAST_WIDTH) + PADDING
    if is_terminal() and needed <= shutil.get_terminal_size().columns:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=any(headers), header_style="bold", box=box.SIMPLE, pad_edge=False)
        last = len(headers) - 1
        for column, header in enumerate(headers):
            justify: Literal["left", "right"] = "right" if column in numbers else "left"
            table.add_column(header, justify=justify, no_wrap=column < last, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    for line in lines:
        cells = (
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


#: Reports a line of text about progress.
Log = Callable[[str], None]


@contextmanager
def progress() -> Iterator[Log]:
    """Yields a function that prints its argument to stderr, with the seconds since the start.

    In a pipe every text has a line; on a terminal one line shows the newest text, with a spinner.
    """
    start = time.perf_counter()

    def line(text: str) -> str:
        return f"[{time.perf_counter() - start:5.1f} s] {text}"

    if not is_terminal():

        def log(text: str) -> None:
            print(line(text), file=sys.stderr, flush=True)

        yield log
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("starting") as status:

        def show(text: str) -> None:
            status.update(Text(line(text)))

        yield show


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def escape_what_stdout_lacks() -> None:
    """Prints characters that the encoding of standard output lacks, as in a path, as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Discards later output, after the reader of the pipe, such as `head`, has gone.

    Otherwise Python would flush standard output at its end and report the error.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def bytes_text(count: int) -> str:
    """Formats a number of bytes in decimal units."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
