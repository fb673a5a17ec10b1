"""How the parameters of the layers are made and checked, and initialisers that Flax boxes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ikbo_jax.ops import arguments

#: Axes of the parameters of the layers that attend; an axis has one size in all of them. Query
#: heads N may be more than key heads K.
ATTENTION = {"w_query": "F N H", "w_key": "G K H", "w_value": "G K H", "w_out": "N H F_out"}
#: Those of the other layers.
PMA = {"seeds": "T F", **ATTENTION}
COMPRESSION = {"w_user": "M K_user", "w_cand": "M K_cand"}
#: A size, which is checked: None is refused like 0.
Size = int | None
#: `Spec.axes` of `w_user` and `w_cand`, which are transposed parts of one matrix.
TRANSPOSED = (1, 0)


class Spec(NamedTuple):
    """How a parameter is made.

    Attributes:
      shape: its shape.
      make: makes an array of this shape with an initialiser of matrices.
      axes: for every axis of the parameter, the axis of the matrix that it is, or None. Of heads
        that stand side by side in the matrix, N is the matrix's axis.
    """

    shape: tuple[int, ...]
    make: Callable[[Callable[..., jax.Array]], jax.Array]
    axes: tuple[int | None, ...] = (0, 1)


def names_of_axes(axes: tuple[int | None, ...], of_matrix: Any) -> tuple[Any, ...]:
    """Names of a parameter's axes, such as mesh axes; the matrix that makes it has others.

    Args:
      axes: as in `Spec`.
      of_matrix: at most two names, of the matrix that `kernel_init` initialises.

    Raises:
      ValueError: if these are not names of two axes; the message has them.
    """
    if not isinstance(of_matrix, (tuple, list, PartitionSpec)) or len(of_matrix) > 2:
        raise ValueError(
            f"kernel_init names the axes {of_matrix!r}, but initialises matrices, which have 2 axes"
        )
    both = (*of_matrix, None, None)
    return tuple(None if axis is None else both[axis] for axis in axes)


def check_sizes(layer: str, **sizes: int | None) -> tuple[int, ...]:
    """Returns the sizes; raises ValueError, naming size and value, unless all are integers > 0."""
    checked = []
    for name, size in sizes.items():
        is_integer = hasattr(size, "__index__") and not isinstance(size, bool)
        if size is None or not is_integer or operator.index(size) < 1:
            raise ValueError(f"{layer} needs {name} of at least 1, but {name} is {size!r}")
        checked.append(operator.index(size))
    return tuple(checked)


def matrix(shape: tuple[int, ...], *, to_heads: bool) -> Spec:
    """The spec of a projection to heads, [features, N, H], or from heads, [N, H, features].

    The initialiser gets the shape of a matrix, so that results have the variance of a dense layer.
    """
    flat = (shape[0], math.prod(shape[1:])) if to_heads else (math.prod(shape[:-1]), shape[-1])
    axes = (0, 1, None) if to_heads else (0, None, 1)
    return Spec(shape, lambda init: init(flat).reshape(shape), axes)


def compression_sizes(user_rows: Size, cand_rows: Size, features: Size) -> tuple[int, ...]:
    """Returns the sizes of `compress`; raises ValueError unless all are positive."""
    return check_sizes(
        "LinearCompression", user_rows=user_rows, cand_rows=cand_rows, features=features
    )


def attention_specs(
    cand_features: Size, user_features: Size, out_features: Size, num_heads: Size, head_dim: Size
) -> dict[str, Spec]:
    """Specs of the parameters of `attend`; raises ValueError unless all sizes are positive."""
    sizes = check_sizes(
        "CandidateAttention",
        cand_features=cand_features,
        user_features=user_features,
        out_features=out_features,
        num_heads=num_heads,
        head_dim=head_dim,
    )
    return _attention_specs(*sizes)


def look_up_specs(num_rows: Size, features: Size) -> dict[str, Spec]:
    """Specs of the parameter of `look_up`; raises ValueError unless both sizes are positive.

    A row has the variance of a dense layer's weights for one output.
    """
    rows, width = check_sizes("LookUp", num_rows=num_rows, features=features)
    return {"table": Spec((rows, width), lambda init: init((width, rows)).T, TRANSPOSED)}


def pma_specs(
    num_seeds: Size, in_features: Size, out_features: Size, num_heads: Size, head_dim: Size
) -> dict[str, Spec]:
    """Specs of the parameters of `pma`; raises ValueError unless all sizes are positive.

    Seeds have width `out_features`.
    """
    rows, width, out, *heads = check_sizes(
        "PMA",
        num_seeds=num_seeds,
        in_features=in_features,
        out_features=out_features,
        num_heads=num_heads,
        head_dim=head_dim,
    )
    seeds = (rows, out)
    return {
        "seeds": Spec(seeds, lambda init: init(seeds)),
        **_attention_specs(out, width, out, *heads),
    }


def pffn_specs(
    features: Size, memory_features: Size, num_heads: Size, head_dim: Size
) -> dict[str, Spec]:
    """Specs of the parameters of `pffn`; raises ValueError unless all sizes are positive."""
    width, memory_width, *heads = check_sizes(
        "PFFN",
        features=features,
        memory_features=memory_features,
        num_heads=num_heads,
        head_dim=head_dim,
    )
    return _attention_specs(width, memory_width, width, *heads)


def _attention_specs(query: int, key: int, out: int, num_heads: int, head_dim: int) -> dict:
    return {
        "w_query": matrix((query, num_heads, head_dim), to_heads=True),
        "w_key": matrix((key, num_heads, head_dim), to_heads=True),
        "w_value": matrix((key, num_heads, head_dim), to_heads=True),
        "w_out": matrix((num_heads, head_dim, out), to_heads=False),
    }


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
