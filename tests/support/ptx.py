"""Reads a kernel's PTX, as LLVM writes it, into instructions with numbered registers."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

LANES = 32
#: Registers that only the machine writes, once for every warp.
SPECIAL = ("%tid.x", "%laneid", "%lanemask_lt", "%ctaid.x", "%nctaid.x", "%ntid.x")


@dataclasses.dataclass(frozen=True)
class Memory:
    """`[base + offset]`; of a tensor copy also the numbers of the registers of coordinates."""

    base: int
    offset: int
    coordinates: tuple[int, ...] = ()


#: An operand: a register's number (constants have registers, too), numbers of `{a, b}` or `a|b`, an
#: address, or None for `_`. The instruction's name says which.
Operand = Any


@dataclasses.dataclass
class Instruction:
    """One instruction.

    Attributes:
      name: with its modifiers.
      operands: of it.
      predicate: number of a predicate's register; -1: none.
      is_negated: whether it is executed where the predicate is false.
      target: of a branch, the number of an instruction.
      line: in the text.
    """

    name: str
    operands: tuple[Operand, ...]
    predicate: int
    is_negated: bool
    line: int
    target: int = -1
    run: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
      name: of the kernel.
      params: where each parameter is.
      threads: of a thread block.
      registers: how many registers a warp needs, constants and special ones included.
      constants: value of each constant's register, an integer.
      special: number of each special register.
      wide: numbers of registers of 64 bits.
      instructions: in order.
      shared: names of symbols in shared memory, which all are the dynamic shared memory.
    """

    name: str
    params: tuple[int, ...]
    threads: int
    registers: int
    constants: dict[int, int]
    special: dict[str, int]
    wide: frozenset[int]
    instructions: list[Instruction]


class PtxError(ValueError):
    """The text has what this reader does not know."""


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(.*?)\n\{(.*)\n\}", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[]*?(?:\[(\d+)\])?\s*(?:,|$)", re.S)
_LABEL = re.compile(r"([$\w]+):")
_SIZES = {"b8": 1, "u8": 1, "u16": 2, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8}


class _Reader:
    def __init__(self, symbols: dict[str, int]) -> None:
        self.numbers: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.symbols = symbols
        self.scopes: list[dict[str, str]] = []
        self.count = 0

    def register(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def constant(self, value: int) -> int:
        number = self.register(f"constant {value}")
        self.constants[number] = value
        return number

    def local(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text == "_":
            return None
        if text.startswith("{"):
            return tuple(self.scalar(x) for x in split(text[1:-1]))
        if text.startswith("["):
            return self.address(text[1:-1])
        if "|" in text:
            return tuple(self.scalar(x) for x in text.split("|"))
        return self.scalar(text)

    def scalar(self, text: str) -> int:
        text = self.local(text.strip())
        if text in self.symbols:
            return self.constant(self.symbols[text])
        if text.startswith(("0f", "0F", "0d", "0D")):
            return self.constant(int(text[2:], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return self.constant(int(text.rstrip("U"), 0))
        if re.fullmatch(r"%[\w.]+|local \d+ \w+", text):
            return self.register(text)
        raise PtxError(f"unknown operand {text!r}")

    def address(self, text: str) -> Memory:
        parts = split(text)
        base, _, offset = parts[0].partition("+")
        base, number = base.strip(), int(offset or 0)
        if base in self.symbols:
            memory = Memory(self.constant(0), self.symbols[base] + number)
        else:
            memory = Memory(self.scalar(base), number)
        if len(parts) > 1:
            inner = parts[1].strip()
            coordinates = tuple(self.scalar(x) for x in split(inner[1:-1]))
            memory = dataclasses.replace(memory, coordinates=coordinates)
        return memory

    def begin(self) -> None:
        self.scopes.append({})
        self.count += 1

    def declare(self, text: str) -> None:
        """Names of a scope's own registers; the function's have unique names already."""
        if len(self.scopes) == 0:
            return
        for name in text.split(None, 2)[2].split(","):
            self.scopes[-1][name.strip()] = f"local {self.count} {name.strip()}"


def split(text: str) -> list[str]:
    """Parts between commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{") - (c in "]}")
        if c == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def _statements(body: str, first_line: int) -> Iterator[tuple[str, int]]:
    """'{', '}', labels with their colon, and instructions, each with its line."""
    at, line = 0, first_line
    while at < len(body):
        c = body[at]
        if c.isspace():
            line += c == "\n"
            at += 1
        elif c in "{}":
            yield c, line
            at += 1
        elif found := _LABEL.match(body, at):
            yield found.group(0), line
            at = found.end()
        else:
            end = body.index(";", at)
            statement = body[at:end]
            yield " ".join(statement.split()), line
            line += statement.count("\n")
            at = end + 1


def read(text: str, *, shared_base: int, param_base: int) -> Program:
    """Reads the only kernel in `text`.

    Args:
      text: PTX.
      shared_base: where the dynamic shared memory begins, in shared addresses.
      param_base: where the parameters begin, in addresses of parameters.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.(loc|file|pragma|section)\b[^\n]*$", "", text, flags=re.M)
    found = _ENTRY.search(text)
    if found is None:
        raise PtxError("no kernel in the text")
    name, params, directives, body = found.groups()
    symbols, places, at = {}, [], param_base
    for i, (kind, count) in enumerate(
        (m.group(1), m.group(2)) for m in map(_PARAM.search, split(params)) if m
    ):
        size = _SIZES[kind] * int(count or 1)
        at = -(-at // 64) * 64
        symbols[f"{name}_param_{i}"] = at
        places.append(at)
        at += size
    for symbol in re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)", text):
        symbols[symbol] = shared_base
    reader = _Reader(symbols)
    special = {x: reader.register(x) for x in SPECIAL}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    branches: list[tuple[Instruction, str]] = []
    tables: dict[str, list[str]] = {}
    label = ""
    stack: list[int] = []
    for statement, line in _statements(body, text[: found.start(4)].count("\n") + 1):
        if statement == "{":
            reader.begin()
            stack.append(reader.count)
        elif statement == "}":
            reader.scopes.pop()
            stack.pop()
        elif statement.endswith(":"):
            label = _in_scope(statement[:-1], stack)
            labels[label] = len(instructions)
        elif statement.startswith(".reg"):
            reader.declare(statement)
        elif statement.startswith(".branchtargets"):
            tables[label] = [x.strip() for x in statement.split(None, 1)[1].split(",")]
        elif statement.startswith("brx.idx"):
            index, table = split(statement.split(None, 1)[1])
            for instruction, target in _jumps(
                reader, index, tables[_in_scope(table.strip(), stack)], line
            ):
                instructions.append(instruction)
                if target:
                    branches.append((instruction, target))
        elif not statement.startswith("."):
            instruction, target = _instruction(reader, statement, line)
            instructions.append(instruction)
            if target:
                branches.append((instruction, _in_scope(target, stack)))
    for instruction, target in branches:
        instruction.target = labels[target]
    threads = re.search(r"\.maxntid\s+(\d+)", directives)
    assert threads is not None
    return Program(
        name,
        tuple(places),
        int(threads.group(1)),
        len(reader.numbers),
        reader.constants,
        special,
        frozenset(n for x, n in reader.numbers.items() if x.startswith("%rd")),
        instructions,
    )


def _in_scope(label: str, stack: list[int]) -> str:
    return label if label.startswith("$") or not stack else f"{stack[-1]} {label}"


def _jumps(
    reader: _Reader, index: str, targets: list[str], line: int
) -> Iterator[tuple[Instruction, str]]:
    """A branch by a table as a comparison and a branch for each of its labels, and the labels."""
    number = reader.scalar(index)
    for i, target in enumerate(targets):
        is_equal = reader.register(f"target {i} of the branch in line {line}")
        operands = (is_equal, number, reader.constant(i))
        yield Instruction("setp.eq.b32", operands, -1, False, line), ""
        yield Instruction("bra", (), is_equal, False, line), target


def _instruction(reader: _Reader, text: str, line: int) -> tuple[Instruction, str]:
    """An instruction, and the label that it branches to."""
    predicate, is_negated = -1, False
    if text[0] == "@":
        guard, text = text[1:].split(None, 1)
        is_negated = guard[0] == "!"
        predicate = reader.scalar(guard.lstrip("!"))
    name, _, rest = text.partition(" ")
    if name in ("bra", "bra.uni"):
        return Instruction("bra", (), predicate, is_negated, line), rest.strip()
    operands = tuple(reader.operand(x) for x in split(rest)) if rest.strip() else ()
    return Instruction(name, operands, predicate, is_negated, line), ""


def splat(value: int, dtype: Any) -> np.ndarray:
    """A constant in every lane."""
    bits = np.dtype(dtype).itemsize * 8
    return np.full(LANES, value & ((1 << bits) - 1), dtype)
