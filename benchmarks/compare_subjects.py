"""What `benchmarks.compare` compares: the sizes of the other benchmarks, by the public functions.

A subject takes the library as an argument, so that two versions of it compute from the same inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import (
    attention,
    gdpa,
    linear_compression,
    linear_compression_gradient,
    ranking,
)
from benchmarks.harness import Benchmark, Point
from ikbo_jax.cases.attention import Inputs as AttentionInputs
from ikbo_jax.cases.linear_compression import Inputs as LinearCompressionInputs
from ikbo_jax.reference.gdpa import Arrays

#: Takes the library; returns a function of the inputs.
Call = Callable[[ModuleType], Callable[[Any], Any]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """One program at one set of sizes.

    Attributes:
      sweep: name in `GROUPS`, and name of the sweep of that benchmark.
      label: name of the point in the sweep.
      sizes: the sizes, by which equal points of several sweeps are recognised.
      inputs: makes the inputs, a tree of arrays; may be traced.
      call: see `Call`.
    """

    sweep: str
    label: str
    sizes: Any
    inputs: Callable[[], Any]
    call: Call

    @property
    def name(self) -> str:
        return f"{self.sweep} {self.label}"


def _normal_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.normal(jax.random.key(1), x.shape, x.dtype)


def _gradients(fn: Callable[..., Any], arrays: Sequence[Any], cotangent: Any) -> Any:
    """The gradients of `fn(*arrays)` alone: XLA removes what only the result needs."""
    return jax.vjp(fn, *arrays)[1](cotangent)


def _linear_compression(library: ModuleType, inputs: LinearCompressionInputs) -> Any:
    return library.linear_compression(*inputs.arguments)


def _linear_compression_gradient(library: ModuleType, inputs: Any) -> Any:
    (weights, embeddings, parents), cotangent = inputs

    def op(weights: Any, embeddings: Any) -> Any:
        return _linear_compression(library, LinearCompressionInputs(weights, embeddings, parents))

    return _gradients(op, (weights, embeddings), cotangent)


def _attend(library: ModuleType, inputs: AttentionInputs, *, is_sorted: bool) -> Any:
    return library.attention(
        *inputs[:4], key_value_seq_lengths=inputs.lengths, indices_are_sorted=is_sorted
    )


def _attention_gradient(library: ModuleType, inputs: Any, *, is_sorted: bool) -> Any:
    arrays, cotangent = inputs

    def op(query: Any, key: Any, value: Any) -> Any:
        replaced = arrays._replace(query=query, key=key, value=value)
        return _attend(library, replaced, is_sorted=is_sorted)

    return _gradients(op, arrays[:3], cotangent)


def _gdpa(library: ModuleType, arrays: Arrays, settings: dict[str, Any]) -> Any:
    return library.gdpa(*arrays[:5], q_to_kv=arrays.q_to_kv, **settings)


def _gdpa_gradient(library: ModuleType, inputs: Any, settings: dict[str, Any]) -> Any:
    arrays, cotangent = inputs

    def op(query: Any, key: Any, value: Any) -> Any:
        replaced = arrays._replace(query=query, key=key, value=value)
        return _gdpa(library, replaced, settings)

    return _gradients(op, arrays[:3], cotangent)


def _network(library: ModuleType, inputs: Any, *, is_rewritten: bool) -> Any:
    model = importlib.import_module(f"{library.__name__}.models.ranking")
    if is_rewritten:
        return library.rewrite(model.materialised)(*inputs)
    return model.co_designed(*inputs)


def _call(fn: Callable[..., Any], **options: Any) -> Call:
    return lambda library: functools.partial(fn, library, **options)


def _of_linear_compression(points: Iterable[Point], *, is_gradient: bool) -> Iterator[Subject]:
    for point in points:
        p = point.case.problem
        shape = (p.batches[-1], p.m, p.n)
        call = _linear_compression_gradient if is_gradient else _linear_compression
        yield _subject(point, shape if is_gradient else None, call)


def _of_attention(points: Iterable[Point], *, is_gradient: bool) -> Iterator[Subject]:
    for point in points:
        p = point.case.problem
        shape = (p.batch, p.q_len, p.q_heads, p.head_dim)
        call = _attention_gradient if is_gradient else _attend
        is_sorted = point.case.is_sorted
        yield _subject(point, shape if is_gradient else None, call, is_sorted=is_sorted)


def _subject(
    point: Point, cotangent: tuple[int, ...] | None, fn: Callable[..., Any], **options: Any
) -> Subject:
    """The subject of a case; its inputs have a cotangent of this shape, unless it is None."""
    inputs = point.case.inputs
    if cotangent is not None:
        like = jax.ShapeDtypeStruct(cotangent, jnp.dtype(point.problem.dtype))
        inputs = functools.partial(_both, inputs, lambda: _normal_like(like))
    return Subject(point.sweep, point.label, point.case, inputs, _call(fn, **options))


def _of_gdpa(points: Iterable[Point]) -> Iterator[Subject]:
    for point in points:
        sizes, case = point.case, point.case.case
        inputs, is_gradient = case.inputs, point.direction == "backward"
        settings = case.settings._asdict()
        settings["activation"] = settings.pop("activations")
        settings["implementation"] = "mosaic_gpu" if _on_gpu() else None
        if is_gradient:
            inputs = functools.partial(_both, case.inputs, case.cotangent)
        call = _call(_gdpa_gradient if is_gradient else _gdpa, settings=settings)
        yield Subject(point.sweep, gdpa.name_of(point), sizes, inputs, call)


def _of_ranking(points: Iterable[Point]) -> Iterator[Subject]:
    for point in points:
        inputs = functools.partial(ranking.inputs_of, point.case)
        for is_rewritten, form in ((False, "layers"), (True, "rewritten")):
            call = _call(_network, is_rewritten=is_rewritten)
            label = f"{point.label} {form}"
            yield Subject(point.sweep, label, (point.case, form), inputs, call)


def _both(inputs: Callable[[], Any], cotangent: Callable[[], Any]) -> Any:
    return inputs(), cotangent()


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _points(benchmark: Benchmark, *options: str) -> Iterator[Point]:
    """The points of a benchmark, with sizes for this device."""
    for point in benchmark.points(benchmark.parse(["--out", os.devnull, *options])):
        yield point if _on_gpu() else benchmark.shrink(point)


def _group(
    make: Callable[..., Iterator[Subject]], benchmark: Benchmark, *options: str, **changes: bool
) -> Callable[[], Iterator[Subject]]:
    return lambda: make(_points(benchmark, *options), **changes)


#: Benchmarks by name.
GROUPS: dict[str, Callable[[], Iterator[Subject]]] = {
    "linear_compression": _group(
        _of_linear_compression, linear_compression.BENCHMARK, is_gradient=False
    ),
    "attention": _group(_of_attention, attention.BENCHMARK, is_gradient=False),
    "gdpa": _group(_of_gdpa, gdpa.BENCHMARK, "--direction", "forward"),
    "gdpa_backward": _group(_of_gdpa, gdpa.BENCHMARK, "--direction", "backward"),
    "ranking": _group(_of_ranking, ranking.BENCHMARK),
    "linear_compression_gradient": _group(
        _of_linear_compression, linear_compression_gradient.BENCHMARK, is_gradient=True
    ),
    "attention_gradient": _group(_of_attention, attention.BENCHMARK, is_gradient=True),
}


def chosen(names: Sequence[str]) -> list[Subject]:
    """The subjects of groups, or those whose names begin with one of `names`.

    A name is "GROUP", "GROUP SWEEP" or "GROUP SWEEP LABEL"; equal sizes of one group occur once.
    The groups take turns, so that a run that is cut short has points of each.

    Raises:
      ValueError: no subject has one of the names.
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
