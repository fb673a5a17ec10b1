"""What `benchmarks.compare` compares: the sizes of the other benchmarks, by the public functions.

A subject takes the library as an argument, so that two versions of it compute from the same inputs.
"""

import dataclasses
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

from benchmarks import attention, gdpa, linear_compression, ranking
from benchmarks.harness import Benchmark, Point

#: Takes the library; returns a function of the inputs.
Call = Callable[[ModuleType], Callable[[Any], Any]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """One program at one set of sizes, by which equal points of several sweeps are recognised.

    `sweep` begins with the name in `GROUPS`. `inputs` makes a tree of arrays, and may be traced.
    """

    sweep: str
    label: str
    sizes: Any
    inputs: Callable[[], Any]
    call: Call

    @property
    def name(self) -> str:
        return f"{self.sweep} {self.label}"


# Ops: each takes the library, the case and its inputs.


def _linear_compression(library: ModuleType, case: Any, inputs: Any) -> Any:
    del case
    return library.linear_compression(*inputs.arguments)


def _attention(library: ModuleType, case: Any, inputs: Any) -> Any:
    options = {"key_value_seq_lengths": inputs.lengths, "indices_are_sorted": case.is_sorted}
    return library.attention(*inputs[:4], **options)


def _gdpa(library: ModuleType, case: Any, inputs: Any) -> Any:
    implementation = "mosaic_gpu" if _on_gpu() else None
    options = case.settings.options | {"implementation": implementation}
    return library.gdpa(*inputs[:5], q_to_kv=inputs.q_to_kv, **options)


def _gradients(
    op: Callable[..., Any], number: int, library: ModuleType, case: Any, inputs: Any
) -> Any:
    """Computes gradients of the first `number` inputs alone: XLA removes the result."""
    arrays, cotangent = inputs

    def of_some(*some: Any) -> Any:
        return op(library, case, type(arrays)(*some, *arrays[number:]))

    return jax.vjp(of_some, *arrays[:number])[1](cotangent)


def _network(library: ModuleType, is_rewritten: bool, inputs: Any) -> Any:
    model = importlib.import_module(f"{library.__name__}.models.ranking")
    if is_rewritten:
        return library.rewrite(model.materialised)(*inputs)
    return model.co_designed(*inputs)


def _call(fn: Callable[..., Any], case: Any) -> Call:
    return lambda library: functools.partial(fn, library, case)


# Subjects


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _points(benchmark: Benchmark, *options: str) -> Iterator[Point]:
    """Yields the points of a benchmark, with sizes for this device."""
    for point in benchmark.points(benchmark.parse(["--out", os.devnull, *options])):
        yield point if _on_gpu() else benchmark.shrink(point)


def _case_of(sizes: Any) -> Any:
    """Returns the case of the op itself, whose `inputs` are the op's."""
    return sizes.case if isinstance(sizes, gdpa.Sizes) else getattr(sizes, "forward", sizes)


def _of_op(op: Callable[..., Any], benchmark: Benchmark, *options: str) -> Iterator[Subject]:
    for point in _points(benchmark, *options):
        case = _case_of(point.case)
        label = gdpa.name_of(point) if isinstance(point.case, gdpa.Sizes) else point.label
        yield Subject(point.sweep, label, point.case, case.inputs, _call(op, case))


def _of_gradients(
    op: Callable[..., Any], number: int, benchmark: Benchmark, *options: str
) -> Iterator[Subject]:
    def with_cotangent(subject: Subject) -> Any:
        inputs = subject.inputs()
        if isinstance(subject.sizes, gdpa.Sizes):
            return inputs, subject.sizes.case.cotangent()
        out = jax.eval_shape(subject.call(importlib.import_module("ikbo_jax")), inputs)
        return inputs, jax.random.normal(jax.random.key(1), out.shape, out.dtype)

    for subject in _of_op(op, benchmark, *options):
        call = _call(functools.partial(_gradients, op, number), _case_of(subject.sizes))
        inputs = functools.partial(with_cotangent, subject)
        yield dataclasses.replace(subject, inputs=inputs, call=call)


def _of_ranking() -> Iterator[Subject]:
    for point in _points(ranking.BENCHMARK):
        inputs = functools.partial(ranking.inputs_of, point.case)
        for is_rewritten, form in ((False, "layers"), (True, "rewritten")):
            call = _call(_network, is_rewritten)
            label = f"{point.label} {form}"
            yield Subject(point.sweep, label, (point.case, form), inputs, call)


#: Benchmarks by name.
GROUPS: dict[str, Callable[[], Iterator[Subject]]] = {
    "linear_compression": lambda: _of_op(_linear_compression, linear_compression.BENCHMARK),
    "attention": lambda: _of_op(_attention, attention.BENCHMARK),
    "gdpa": lambda: _of_op(_gdpa, gdpa.BENCHMARK, "--direction", "forward"),
    "gdpa_backward": lambda: _of_gradients(_gdpa, 3, gdpa.BENCHMARK, "--direction", "backward"),
    "ranking": _of_ranking,
    "linear_compression_gradient": lambda: _of_gradients(
        _linear_compression, 2, linear_compression.BENCHMARK, "--direction", "backward"
    ),
    "attention_gradient": lambda: _of_gradients(_attention, 3, attention.BENCHMARK),
}


def chosen(names: Sequence[str]) -> list[Subject]:
    """Selects subjects by names: "GROUP", "GROUP SWEEP" or "GROUP SWEEP LABEL".

    Equal sizes of one group occur once. The groups take turns, so that a run that is cut short has
    points of each. Raises ValueError if no subject has one of the names.
    """
    groups: list[list[Subject]] = []
    found = set()
    for group, make in GROUPS.items():
        if not any(name.split(maxsplit=1)[0] == group for name in names):
            continue
        subjects: dict[Any, Subject] = {}
        for made in make():
            subject = dataclasses.replace(made, sweep=f"{group} {made.sweep}")
            wanted = {n for n in names if f"{subject.name} ".startswith(f"{n} ")}
            found |= wanted
            if wanted:
                subjects.setdefault(subject.sizes if _on_gpu() else subject.name, subject)
        groups.append(list(subjects.values()))
    for name in names:
        if name not in found:
            raise ValueError(f"no point {name!r}; the groups are {', '.join(GROUPS)}")
    turns = itertools.zip_longest(*groups)
    return [subject for turn in turns for subject in turn if subject is not None]
