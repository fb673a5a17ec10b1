"""Primitives that `checkify` takes for calls of the program that they stand for."""

import functools
from collections.abc import Callable
from typing import Any

from jax.extend import core


class CheckedPrimitive(core.Primitive):
    """Defines a primitive of several results whose parameter `call_jaxpr` is a `Checked`.

    `checkify` goes through the equations of a traced function. It takes an equation with a
    parameter of this name for a call, and adds checks to the program.
    """

    multiple_results = True

    def bind(self, *inputs: Any, **params: Any) -> Any:
        if "subfuns" in params:
            return params["subfuns"][0].call_wrapped(*inputs)
        return super().bind(*inputs, **params)


class Checked:
    """Stands for a program whose attributes `checkify` reads, and which is traced at its first use.

    It is no jaxpr: whatever searches equations for programs passes it over.
    """

    def __init__(self, make: Callable[[], core.Jaxpr]) -> None:
        """Takes the function that traces the program, without constants."""
        self._make = make

    @functools.cached_property
    def _program(self) -> core.Jaxpr:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __repr__(self) -> str:
        return "..."
