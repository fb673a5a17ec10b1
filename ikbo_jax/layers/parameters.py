"""Checks of a layer's parameters, and initialisers that Flax boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ikbo_jax.ops import arguments

#: Axes of the parameters of the layers that attend; an axis has one size in all of them. Query
#: heads N may be more than key heads K.
ATTENTION = {"w_query": "F N H", "w_key": "G K H", "w_value": "G K H", "w_out": "N H F_out"}
#: Those of the other layers.
PMA = {"seeds": "T F", **ATTENTION}
COMPRESSION = {"w_user": "M K_user", "w_cand": "M K_cand"}


def check(layer: str, params: Mapping[str, Any], axes: Mapping[str, str]) -> None:
    """Raises ValueError, naming both values, unless the parameters fit each other.

    Args:
      layer: the layer's name.
      params: the parameters by name.
      axes: the names of every parameter's axes.
    """
    sizes: dict[str, tuple[str, int]] = {}
    for name, names in axes.items():
        if name not in params:
            raise ValueError(f"{layer} has no parameter {name!r}, only {sorted(params)}")
        param, letters = params[name], names.split()
        text = f"[{', '.join(letters)}]"
        shape = getattr(param, "shape", None)
        if shape is None:
            found = arguments.describe(param)
            raise ValueError(f"{layer}: {name} must be an array of shape {text}, but is {found}")
        if len(shape) != len(letters):
            raise ValueError(f"{layer}: {name} must have shape {text}, but has shape {shape}")
        for letter, size in zip(letters, shape, strict=True):
            first, expected = sizes.setdefault(letter, (name, size))
            if size != expected:
                raise ValueError(
                    f"{layer}: {first} has {letter}={expected} but {name} has {letter}={size}"
                )


class Unboxed:
    """An initialiser of matrices without the metadata that Flax boxes them with.

    Of each Flax API, a subclass has a method `boxed`, which gives the metadata of the last matrix
    to a parameter that was made of it.
    """

    def __init__(self, init: Callable[..., Any]) -> None:
        self._init = init
        self._box: Any = None

    def __call__(self, shape: tuple[int, ...]) -> jax.Array:
        value: Any = self._init(shape)
        if self._is_box(value):
            self._box, value = value, self._value_in(value)
        made: jax.Array = value
        return made

    def _is_box(self, value: Any) -> bool:
        raise NotImplementedError

    def _value_in(self, box: Any) -> Any:
        raise NotImplementedError
