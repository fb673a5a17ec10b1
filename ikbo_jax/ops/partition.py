"""How an op divides over the devices of a mesh: which axes of its arrays, and what must move.

A `Rule` names every dimension of an op's operands and results. A dimension whose name is in `split`
can be divided: every device then computes its part alone. All other dimensions are gathered. A
result that lacks a divided dimension is a sum over the devices along it: the gradient of a user's
keys, for example, over the devices that hold that user's candidates.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

#: The names of one dimension, the major one first: ("k", "g") for N = K · group heads.
Dimension = tuple[str, ...]
Dimensions = tuple[Dimension, ...]


def dimensions(text: str) -> Dimensions:
    """Parses names of dimensions, "b t (k g) h"; parentheses hold the names of one dimension."""
    words = re.findall(r"\([^)]*\)|\S+", text)
    return tuple(tuple(word.strip("()").split()) for word in words)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The dimensions of an op's operands and results.

    Attributes:
      names: the operands' names, for `explain`.
      split: the dimensions that can be divided, and what they are called in `explain`.
      problems: the dimensions of `vmap`, the innermost first, and their sizes. All results have
        them, and none is a sum along them.
    """

    names: tuple[str, ...]
    operands: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    split: tuple[tuple[str, str], ...]
    problems: tuple[tuple[str, int], ...] = ()

    @property
    def arrays(self) -> tuple[Dimensions, ...]:
        """The dimensions of the operands and of the results."""
        return self.operands + self.results

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Finds the size of every dimension, from the operands' shapes.

        The minor part of a dimension with two names follows from the major part, which has a
        dimension of its own in another operand.
        """
        sizes: dict[str, int] = {}
        pairs = [
            pair
            for dims, shape in zip(self.operands, shapes, strict=True)
            for pair in zip(dims, shape, strict=True)
        ]
        sizes.update({dim[0]: size for dim, size in pairs if len(dim) == 1})
        for dim, size in pairs:
            if len(dim) == 2:
                sizes[dim[1]] = size // sizes[dim[0]]
        return sizes

    def batched(self, size: int, batched: Sequence[bool]) -> Rule:
        """Makes the rule of `vmap` of `size` problems over the operands that are `batched`."""
        name = f"problem{len(self.problems)}"
        operands = tuple(
            ((name,), *dims) if is_batched else dims
            for dims, is_batched in zip(self.operands, batched, strict=True)
        )
        return dataclasses.replace(
            self,
            operands=operands,
            results=tuple(((name,), *dims) for dims in self.results),
            split=(*self.split, (name, "problems")),
            problems=(*self.problems, (name, size)),
        )

    def gradient(self, wanted: Sequence[bool]) -> Rule:
        """Makes the rule of the gradients of the `wanted` operands; cotangents come last."""
        return dataclasses.replace(
            self,
            names=(*self.names, *(f"cotangent {n}" for n in range(len(self.results)))),
            operands=self.arrays,
            results=tuple(
                dims for dims, is_wanted in zip(self.operands, wanted, strict=True) if is_wanted
            ),
        )


@dataclasses.dataclass(frozen=True)
class Move:
    """Bytes that devices exchange: an array, the mesh axes, the array's size in bytes."""

    name: str
    axes: tuple[str, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Division:
    """A decision how one call divides over a mesh.

    Attributes:
      axes: the mesh axes of every divided dimension, the major axis first.
      regained: the mesh axes of dimensions that were gathered, for results that have them.
      gathered: operands that every device needs whole along an axis that they are divided over.
      summed: operands whose gradient is a sum over devices.
    """

    rule: Rule
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    mesh_sizes: tuple[tuple[str, int], ...]
    regained: tuple[tuple[str, tuple[str, ...]], ...]
    gathered: tuple[Move, ...]
    summed: tuple[Move, ...]

    def joined(self, inner: Division | None) -> Division:
        """Joins this division with one of its parts over other mesh axes."""
        if inner is None:
            return self
        axes = dict(self.axes)
        for name, found in inner.axes:
            axes[name] = axes.get(name, ()) + found
        return dataclasses.replace(
            self,
            axes=tuple(axes.items()),
            mesh_sizes=self.mesh_sizes + inner.mesh_sizes,
            gathered=self.gathered + inner.gathered,
            summed=self.summed + inner.summed,
        )

    def spec(self, dims: Dimensions, *, again: bool = False) -> PartitionSpec:
        """Returns the mesh axes of an array; `again` divides gathered dimensions again."""
        axes = {**dict(self.axes), **(dict(self.regained) if again else {})}
        entries = [sum((axes.get(name, ()) for name in dim), ()) for dim in dims]
        return PartitionSpec(*(_entry(found) for found in entries))

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that divide a dimension."""
        return dict(self.axes).get(name, ())

    def parts(self, axes: tuple[str, ...]) -> int:
        """Counts the devices along mesh axes."""
        sizes = dict(self.mesh_sizes)
        return math.prod(sizes[axis] for axis in axes)

    def sums(self, dims: Dimensions) -> tuple[str, ...]:
        """Returns the mesh axes over which a result with these dimensions is summed."""
        present = {name for dim in dims for name in dim}
        return sum((axes for name, axes in self.axes if name not in present), ())

    def sum(self, part: jax.Array, dims: Dimensions) -> jax.Array:
        """Sums one problem's part over the devices along dimensions that it lacks."""
        axes = self.sums((*((name,) for name, _ in self.rule.problems), *dims))
        return jax.lax.psum(part, axes) if axes else part

    def __str__(self) -> str:
        words = dict(self.rule.split)
        over: dict[str, tuple[str, ...]] = {}
        for name, axes in self.axes:
            over[words[name]] = over.get(words[name], ()) + axes
        parts = [
            f"{word} over {_quoted(axes)} ({n} device{'s' * (n != 1)})"
            for word, axes in over.items()
            for n in (self.parts(axes),)
        ] or ["not divided: every device computes all of it"]
        for verb, moves in (("gathers", self.gathered), ("the gradient sums", self.summed)):
            parts += [
                f"{verb} {move.name} over {_quoted(move.axes)}, {move.nbytes:,} bytes"
                for move in moves
            ]
        return "; ".join(parts)


def divide(
    rule: Rule, arrays: Sequence[Any], specs: Sequence[PartitionSpec], mesh_sizes: Mapping[str, int]
) -> Division:
    """Decides which mesh axes divide which dimensions.

    The first operand or result that is divided along a dimension decides; a mesh axis divides one
    dimension. Axes that do not divide a dimension's size, or divide a dimension that is not in
    `rule.split`, are gathered. `specs` say how the operands are divided, and then, where that is
    known, the results; `mesh_sizes` are the numbers of devices along every mesh axis.
    """
    sizes = rule.sizes([array.shape for array in arrays])
    can_split = dict(rule.split)
    axes_of: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    present = [_normalised(spec, dims) for spec, dims in zip(specs, rule.arrays, strict=False)]
    for dims, spec in zip(rule.arrays, present, strict=False):
        for dim, axes in zip(dims, spec, strict=True):
            left = list(axes)
            for name in dim:
                if name not in can_split:
                    break
                if name not in axes_of:
                    taken: tuple[str, ...] = ()
                    parts = 1
                    while left and left[0] not in used:
                        parts *= mesh_sizes[left[0]]
                        if sizes[name] % parts:
                            break
                        taken += (left.pop(0),)
                    if taken:
                        axes_of[name] = taken
                        used.update(taken)
                elif tuple(left[: len(axes_of[name])]) == axes_of[name]:
                    del left[: len(axes_of[name])]
                # The minor part is contiguous on a device only if the major part is divided to
                # single entries.
                if math.prod(mesh_sizes[axis] for axis in axes_of.get(name, ())) != sizes[name]:
                    break
    regained: dict[str, tuple[str, ...]] = {}
    for dims, spec in zip(rule.operands, present, strict=False):
        for dim, axes in zip(dims, spec, strict=True):
            is_new = len(dim) == 1 and dim[0] not in (axes_of | regained)
            if axes and is_new and not used.intersection(axes):
                regained[dim[0]] = axes
                used.update(axes)
    division = Division(
        rule, tuple(axes_of.items()), tuple(mesh_sizes.items()), tuple(regained.items()), (), ()
    )
    gathered, summed = [], []
    operands = zip(rule.names, rule.operands, arrays, present, strict=False)
    for name, dims, array, spec in operands:
        kept = _normalised(division.spec(dims), dims)
        lost = tuple(a for old, new in zip(spec, kept, strict=True) for a in old if a not in new)
        nbytes = math.prod(array.shape) * array.dtype.itemsize
        if lost:
            gathered.append(Move(name, lost, nbytes))
        if (axes := division.sums(dims)) and jnp.issubdtype(array.dtype, jnp.floating):
            summed.append(Move(name, axes, nbytes))
    return dataclasses.replace(division, gathered=tuple(gathered), summed=tuple(summed))


def _normalised(spec: Any, dims: Dimensions) -> tuple[tuple[str, ...], ...]:
    """Lists the mesh axes of every dimension; unconstrained dimensions have none."""
    entries = tuple(spec) + (None,) * (len(dims) - len(spec))
    return tuple(
        (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        for entry in entries
    )


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def _quoted(axes: tuple[str, ...]) -> str:
    return ", ".join(f"'{axis}'" for axis in axes)


#: An op's computation: takes the operands of one device, and how the call is divided (None: it is
#: not); returns the results.
Local = Callable[[Sequence[Any], Division | None], Sequence[Any]]


def vmapped(local: Local, batched: Sequence[bool]) -> Local:
    """Runs `local` for the problems of a `vmap` over the operands that are `batched`."""
    axes = tuple(0 if is_batched else None for is_batched in batched)

    def problems(parts: Sequence[Any], division: Division | None) -> Any:
        return jax.vmap(lambda *one: tuple(local(one, division)), axes)(*parts)

    return problems


def map_sequentially(fn: Callable[..., Any], batched: Any, arguments: Any) -> Any:
    """Runs a vmap as a loop, which needs the memory of one problem.

    `fn` takes a tree like `arguments` without batch axes; `batched` is such a tree of bools: which
    arrays have a leading batch axis. Results are stacked along a leading axis.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)

    def call_slice(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        pairs = zip(leaves, flags, strict=True)
        return fn(jax.tree.unflatten(treedef, [next(rest) if b else x for x, b in pairs]))

    return jax.lax.map(call_slice, [x for x, b in zip(leaves, flags, strict=True) if b])
