"""Exact gradients of functions that NumPy computes, by a step along the imaginary axis."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: Its square vanishes beside 1, and the step's size cancels no digit.
STEP = 1e-30


def gradients(
    fn: Callable[..., Any], arrays: Mapping[str, np.ndarray | None]
) -> dict[str, np.ndarray | None]:
    """The gradients of `fn(**arrays)`, a real number that is analytic in all arrays, in float64."""
    found: dict[str, np.ndarray | None] = {}
    for name, array in arrays.items():
        if array is None:
            found[name] = None
            continue
        moved = np.array(array, np.complex128)
        gradient = np.zeros(array.shape)
        for place in np.ndindex(array.shape):
            moved[place] += 1j * STEP
            gradient[place] = np.imag(fn(**{**arrays, name: moved})) / STEP
            moved[place] -= 1j * STEP
        found[name] = gradient
    return found
