"""A cost model of traced programs: a rewritten program runs only if it does not cost more.

The costs are the floating-point operations of products, the bytes that kernels read and write, and
the number of kernels, by the model in docs/rewrite.md, which counts the kernels that a GPU runs. On
a CPU, where to compile a program takes little time, XLA counts the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ikbo_jax.rewrite.report import compiled, kernels
from ikbo_jax.rewrite.values import lineage

#: By how much the products of a rewritten program may exceed the original's: percent, and the
#: operations that a GPU covers in the time of one launch.
_FLOPS_SLACK = (1, 1_000_000)
#: On a CPU, a program runs that saves this part of the time by the quicker count. Of 885 programs,
#: XLA then counts 315; of the others, 9 take over 1.05 of the original's time by XLA's bytes.
_CLEAR_PERCENT = 20


class Cost(NamedTuple):
    """Holds the cost of a program; expressions if its dimensions are symbolic.

    Attributes:
      flops: floating-point operations of products (all, where XLA counts); a multiply-add is two.
      nbytes: bytes read and written.
      launches: kernels; 0 where XLA counts.
      computing: femtoseconds that a GPU's products take longer than their bytes; 0 on a CPU.
    """

    flops: int = 0
    nbytes: int = 0
    launches: int = 0
    computing: int = 0


class _Device(NamedTuple):
    """Holds the rates of a device, and what a rewritten program must save of the original's time.

    Attributes:
      flop, byte, kernel: femtoseconds of each. A GPU computes while it moves bytes: `computing`.
      percent: the most that a rewritten program may take, in percent of the original's time.
      slack: femtoseconds that it may take besides.
    """

    name: str
    flop: int
    byte: int
    kernel: int
    percent: int
    slack: int


#: 3.1 TB/s, and 3 us for each kernel, which small models mostly consist of. The ratio of rewritten
#: to original, as estimated, is within 14 % of the measured one for most of 210 programs of 66
#: models (H200). Of 35 estimated at 89 % or more, six took 1.06 to 1.18 of the original's time.
_GPU = _Device("GPU", 0, kernels.BYTE, 3_000_000_000, 88, 0)
#: Programs of up to 160 us find much of what they read in the L2 cache, at 7.7 TB/s. Attention with
#: a mask and heads of 16, which has no kernel, took 52 -> 80 us, estimated at 79 % by `_GPU`.
_SHORT, _GPU_SHORT = 160_000_000_000, _GPU._replace(byte=130, kernel=2_000_000_000, percent=93)
#: Two cores of a server execute 60 GFLOP/s in float32 and move 5 GB/s. MaskNet moves 24 % more
#: bytes there, and takes 72 ms instead of 108. Wukong in float32, whose time should be 98 %, took
#: 1.1 to 1.3 times as long.
_CPU = _Device("CPU", 16_667, 200_000, 0, 97, 50_000_000_000)


def femtoseconds(cost: Cost, device: _Device | None = None) -> Any:
    """Estimates a program's time, on an H200 or on two cores of a CPU."""
    device = device or (_GPU if kernels.on_gpu() else _CPU)
    # A symbolic dimension may be large: kernels count for nothing beside it.
    known = isinstance(cost.flops, int) and isinstance(cost.nbytes, int)
    moving = device.byte * cost.nbytes + device.kernel * cost.launches * known
    return device.flop * cost.flops + cost.computing + moving


def refusal(new: Cost, old: Cost) -> str:
    """Says why a rewritten program costs too much to run; "" if it does not."""
    percent, flops = _FLOPS_SLACK
    # Integers, since symbolic dimensions are compared with integers alone.
    if not lineage.is_at_least((100 + percent) * old.flops + 100 * flops, 100 * new.flops):
        return f"{PRODUCTS} {_text(new.flops)} FLOP instead of {_text(old.flops)}"
    device = _GPU if kernels.on_gpu() else _CPU
    is_short = device is _GPU and lineage.is_at_least(_SHORT, femtoseconds(old, _GPU))
    if _saves(new, old, device) and (not is_short or _saves(new, old, _GPU_SHORT)):
        return ""
    kinds = (new.launches, old.launches, "kernels"), (new.flops, old.flops, "FLOP")
    ours, theirs, unit = kinds[not device.kernel]
    return (
        f"{LONGER} {device.name}: with {_text(ours)} {unit} instead of {_text(theirs)}, and "
        f"{_text(new.nbytes)} bytes instead of {_text(old.nbytes)}"
    )


def _saves(new: Cost, old: Cost, device: _Device) -> bool:
    allowed = device.percent * femtoseconds(old, device) + 100 * device.slack
    return lineage.is_at_least(allowed, 100 * femtoseconds(new, device))


def takes_longer(new: Cost, old: Cost) -> bool:
    """Whether a GPU computes more products, or takes half as long again."""
    if not kernels.on_gpu():
        return False
    # Of 17 programs that take up to 1.4 of the time, no derivative was slower (H200, bfloat16).
    is_longer = lineage.is_at_least(2 * femtoseconds(new), 3 * femtoseconds(old))
    return is_longer or refusal(new, old).startswith(PRODUCTS)


def saves_lookups_alone(new: Cost, old: Cost, has_gathers: bool) -> bool:
    """Whether a GPU computes nearly the same products, and saves less than 7.5 us besides.

    What is saved are lookups, whose gradient in float32 is a scatter that XLA fuses with what it
    adds, or products with one-hot vectors, whose gradient is a product. Sums by user take more
    kernels: three small networks took 61 -> 64, 70 -> 82 and 81 -> 85 us on an H200 with their
    gradient, although their values took 16, 5 and 20 % less time. Without gathers, so that no
    gradient is a scatter, one that saves three quarters of the products took 85 -> 94 us.
    """
    if not kernels.on_gpu():
        return False
    if has_gathers and not lineage.is_at_least(10 * new.flops, 9 * old.flops):
        return False
    saved = old.computing - new.computing + _GPU.byte * (old.nbytes - new.nbytes)
    return lineage.is_at_least((5 if has_gathers else 10) * _GPU.kernel, 2 * saved)


#: These begin the reasons of programs that do not run.
LONGER, PRODUCTS = "it would take as long on a", "its products would take"


def _text(amount: Any) -> str:
    return f"{amount:,}" if isinstance(amount, int) else str(amount)


def program_cost(program: Any) -> Cost:
    """Counts the kernels that a GPU runs of a traced program."""
    return Cost(*kernels.sums_of(program))


def reported_costs(original: Any, rewritten: Any, *, known: dict[Any, Any]) -> list[Cost]:
    """Computes the costs of two programs for the report: on a CPU, as XLA counts them."""
    programs = original, rewritten
    return _costs_by_xla(programs, known) or [program_cost(x) for x in programs]


def decisive_costs(original: Any, rewritten: Any, *, known: dict[Any, Any]) -> list[Cost]:
    """Computes the costs that decide which of two programs runs, at each trace.

    On a CPU, most rewritten programs save so much, or are so small, that the kernels of a GPU
    decide, which take a hundredth of the time of a compilation to count.
    """
    costs = [program_cost(x) for x in (original, rewritten)]
    if not _is_clear(*costs) and (by_xla := _costs_by_xla((original, rewritten), known)):
        # XLA's path of an op computes groups of candidates that are padded; useful FLOPs decide.
        return [x._replace(nbytes=y.nbytes) for x, y in zip(costs, by_xla, strict=True)]
    return costs


def _is_clear(old: Cost, new: Cost) -> bool:
    """Whether a CPU need not compile programs to decide.

    An op with as many FLOPs may move more bytes in XLA than its operands and its result have.
    """
    before, after = femtoseconds(old, _CPU), femtoseconds(new, _CPU)
    allowed = (100 - _CLEAR_PERCENT) * before + 50 * _CPU.slack
    return lineage.is_at_least(allowed, 100 * after) and (
        lineage.is_at_least(_CPU.slack, 2 * after)
        or lineage.is_at_least(9 * old.flops, 10 * new.flops)
    )


def _costs_by_xla(programs: Sequence[Any], known: dict[Any, Any]) -> list[Cost]:
    """Returns what XLA counts of programs for a CPU; [] on a GPU, or if it cannot compile them."""
    try:
        return [] if kernels.on_gpu() else [Cost(*compiled.counts(x, known)[0]) for x in programs]
    except Exception:
        # They have kernels of a GPU, symbolic dimensions, or are divided over devices.
        return []
