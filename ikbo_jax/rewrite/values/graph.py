"""The values of a traced program as a graph, across the calls of jitted functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend import core


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """Describes a value of a program.

    Attributes:
      aval: its type.
      eqn: the producing equation, which calls no jitted function; None for arguments, constants and
        literals.
      operands: the operands of the equation.
      literal: of a literal, its value.
      number: the number that all elements are; None if it is not known to be one number.
      position: the index of the program's equation that returns the value; -1 for arguments and
        constants; None if only a called function has the value.
      readers: the values that are computed from it; None among them: the program returns it.
    """

    aval: Any
    eqn: Any = None
    operands: tuple[Node, ...] = ()
    literal: Any = None
    position: int | None = None

    def __post_init__(self) -> None:
        self.name = "" if self.eqn is None else self.eqn.primitive.name
        self.shape: tuple[Any, ...] = tuple(getattr(self.aval, "shape", ()))
        self.dtype = str(getattr(self.aval, "dtype", ""))
        self.readers: list[Node | None] = []
        self.number: float | None = None
        numbers = [x.number for x in self.operands] if self.name in _OF_NUMBERS else [None]
        found = self.literal
        if None not in numbers:
            with np.errstate(all="ignore"):  # A fill of -1e9 overflows float16.
                found = np.asarray(_OF_NUMBERS[self.name](*numbers)).astype(self.aval.dtype)
        if found is not None and not np.ndim(found) and not self.dtype.startswith("complex"):
            self.number = float(found)


#: Equations whose result is known if their operands are numbers; `jnp.var` divides by N - ddof.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("broadcast_in_dim", "convert_element_type"), lambda x: x),
    "gt": lambda a, b: a > b,
    "sub": lambda a, b: a - b,
}


def graph_of(program: core.Jaxpr) -> tuple[dict[core.Var, Node], list[Node]]:
    """Returns the node of every variable, and the products, also those in called functions."""
    nodes = {v: Node(v.aval, position=-1) for v in (*program.constvars, *program.invars)}
    products: list[Node] = []
    for x in _run(program, nodes, products, is_outermost=True):
        x.readers.append(None)
    return nodes, products


def _run(
    program: Any, nodes: dict[core.Var, Node], products: list[Node], *, is_outermost: bool = False
) -> list[Node]:
    """Adds the nodes of a program's variables; returns those of its results."""

    def read(v: Any) -> Node:
        return Node(v.aval, literal=v.val) if isinstance(v, core.Literal) else nodes[v]

    for position, eqn in enumerate(program.eqns):
        operands = tuple(map(read, eqn.invars))
        params, results = eqn.params, [Node(v.aval, eqn, operands) for v in eqn.outvars]
        placed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        if eqn.primitive.name == "jit" and {type(x).__name__ for x in placed} <= _UNPLACED:
            inner = params["jaxpr"]
            inside = {v: Node(v.aval) for v in inner.constvars}
            inside |= zip(inner.invars, operands, strict=True)
            results = _run(inner, inside, products)
        else:
            for x in operands:
                x.readers += results or [None]
            products += results if eqn.primitive.name == "dot_general" else ()
        for v, x in zip(eqn.outvars, results, strict=True):
            nodes[v] = x
            x.position = position if is_outermost and x.position is None else x.position
    return [read(v) for v in program.outvars]


#: Shardings of a call that places nothing on devices.
_UNPLACED = {"UnspecifiedValue"}
