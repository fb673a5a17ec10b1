"""Makes the parameters of the layers; checks parameters and inputs, by their names and shapes."""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ikbo_jax.integers import integer
from ikbo_jax.ops import arguments

#: Axes of the parameters of the layers that attend; one letter has one size in all parameters.
#: There may be more query heads N than key heads K.
ATTENTION = {"w_query": "F N H", "w_key": "G K H", "w_value": "G K H", "w_out": "N H F_out"}
#: Axes of the parameters of the other layers.
PMA = {"seeds": "T F", **ATTENTION}
COMPRESSION = {"w_user": "M K_user", "w_cand": "M K_cand"}
#: C: columns of u, v, q and k; K: columns of what the output is projected from; V: of its norm.
HSTU_REQUIRED = {"uvqk_weight": "F C", "output_weight": "K F"}
HSTU = {
    **HSTU_REQUIRED,
    "uvqk_beta": "C",
    "input_norm_weight": "F",
    "input_norm_bias": "F",
    "output_norm_weight": "V",
    "output_norm_bias": "V",
}
#: A size before its check, which refuses None like 0.
Size = int | None


class Input(NamedTuple):
    """Describes an input of a layer by the names of the layer's documentation.

    Attributes:
      layer: the layer's name.
      name: the argument's name.
      axes: the argument's shape, e.g. "[B, T, cand_features]".
      size: the axis whose size the parameters fix.
      letter: the letter of this axis in `linear_compression`; empty if it has none.
    """

    layer: str
    name: str
    axes: str
    size: str
    letter: str = ""

    def size_of(self, array: jax.Array) -> int:
        """Returns the size of axis `size`; raises ValueError if `array` has another rank."""
        axes = self.axes.strip("[]").split(", ")
        if not hasattr(array, "shape"):
            raise ValueError(
                f"{self.layer}: {self.name} must be an array of shape {self.axes}, but is "
                f"{arguments.describe(array)}"
            )
        if jnp.ndim(array) != len(axes):
            raise ValueError(
                f"{self.layer}: {self.name} must have shape {self.axes}, but has shape "
                f"{jnp.shape(array)}"
            )
        size: int = array.shape[axes.index(self.size)]
        return size

    def check(self, array: jax.Array, expected: int) -> None:
        """Raises ValueError, naming both sizes, unless axis `size` has the size `expected`."""
        size = self.size_of(array)
        if size != expected:
            wanted = f" ({self.letter}={expected})" if self.letter else ""
            found = f", {self.letter}={size}" if self.letter else ""
            raise ValueError(
                f"{self.layer} expects {self.size}={expected}{wanted}, "
                f"but {self.name} has shape {array.shape}{found}"
            )


E_USER = Input("LinearCompression", "e_user", "[U, user_rows, N]", "user_rows", "K")
E_CAND = Input("LinearCompression", "e_cand", "[B, cand_rows, N]", "cand_rows", "K")
X_CAND = Input("CandidateAttention", "x_cand", "[B, T, cand_features]", "cand_features")
X_USER = Input("CandidateAttention", "x_user", "[U, S, user_features]", "user_features")
PMA_X = Input("PMA", "x", "[total, in_features]", "in_features")
PFFN_X = Input("PFFN", "x", "[total, features]", "features")
PFFN_MEMORY = Input("PFFN", "memory", "[total_memory, memory_features]", "memory_features")
HSTU_X = Input("HSTU", "x", "[total, features]", "features")


class Spec(NamedTuple):
    """Describes how a parameter is made.

    Attributes:
      shape: the parameter's shape.
      make: makes an array of this shape with an initialiser of matrices.
      axes: for every axis of the parameter, its axis of the matrix, or None. Where an axis of the
        matrix holds N heads of width H, axis N of the parameter takes it.
    """

    shape: tuple[int, ...]
    make: Callable[[Callable[..., jax.Array]], jax.Array]
    axes: tuple[int | None, ...] = (0, 1)


def names_of_axes(axes: tuple[int | None, ...], of_matrix: Any) -> tuple[Any, ...]:
    """Names a parameter's axes, such as mesh axes, after the axes of its matrix.

    Args:
      axes: as in `Spec`.
      of_matrix: at most two names of the matrix that `kernel_init` initialises; else ValueError.
    """
    if not isinstance(of_matrix, (tuple, list, PartitionSpec)) or len(of_matrix) > 2:
        raise ValueError(
            f"kernel_init names the axes {of_matrix!r}, but initialises matrices, which have 2 axes"
        )
    both = (*of_matrix, None, None)
    return tuple(None if axis is None else both[axis] for axis in axes)


def check_sizes(layer: str, **sizes: int | None) -> tuple[int, ...]:
    """Returns the sizes; raises ValueError, naming size and value, unless all are integers > 0."""
    named = sizes.items()
    return tuple(integer(f"{name} of {layer}", size, least=1) for name, size in named)


def matrix(shape: tuple[int, ...], *, to_heads: bool) -> Spec:
    """Makes the spec of a projection to heads, [features, N, H], or from heads, [N, H, features].

    The initialiser gets the shape of a matrix, so that results have the variance of a dense layer.
    """
    flat = (shape[0], math.prod(shape[1:])) if to_heads else (math.prod(shape[:-1]), shape[-1])
    axes = (0, 1, None) if to_heads else (0, None, 1)
    return Spec(shape, lambda init: init(flat).reshape(shape), axes)


# The names of the arguments are the names of the sizes in errors.


def compression_specs(user_rows: Size, cand_rows: Size, features: Size) -> dict[str, Spec]:
    """Returns specs for `compress`; raises ValueError unless all sizes are positive.

    Both parameters are transposed parts of one matrix: `make` needs the same matrix for both.
    """
    user, cand, out = check_sizes("LinearCompression", **locals())
    whole = (user + cand, out)
    return {
        "w_user": Spec((out, user), lambda init: init(whole)[:user].T, axes=(1, 0)),
        "w_cand": Spec((out, cand), lambda init: init(whole)[user:].T, axes=(1, 0)),
    }


def attention_specs(
    cand_features: Size, user_features: Size, out_features: Size, num_heads: Size, head_dim: Size
) -> dict[str, Spec]:
    """Returns specs for `attend`; raises ValueError unless all sizes are positive."""
    return _attention_specs(*check_sizes("CandidateAttention", **locals()))


def look_up_specs(num_rows: Size, features: Size) -> dict[str, Spec]:
    """Specs of the parameter of `look_up`; raises ValueError unless both sizes are positive.

    A row has the variance of a dense layer's weights for one output.
    """
    rows, width = check_sizes("LookUp", num_rows=num_rows, features=features)
    return {"table": Spec((rows, width), lambda init: init((width, rows)).T, (1, 0))}


def pma_specs(
    num_seeds: Size, in_features: Size, out_features: Size, num_heads: Size, head_dim: Size
) -> dict[str, Spec]:
    """Returns specs for `pma`; raises ValueError unless all sizes are positive."""
    rows, width, out, *heads = check_sizes("PMA", **locals())
    seeds = Spec((rows, out), lambda init: init((rows, out)))
    return {"seeds": seeds, **_attention_specs(out, width, out, *heads)}


def pffn_specs(
    features: Size, memory_features: Size, num_heads: Size, head_dim: Size
) -> dict[str, Spec]:
    """Returns specs for `pffn`; raises ValueError unless all sizes are positive."""
    width, memory_width, *heads = check_sizes("PFFN", **locals())
    return _attention_specs(width, memory_width, width, *heads)


def hstu_specs(
    features: Size,
    num_heads: Size,
    attention_dim: Size,
    hidden_dim: Size,
    *,
    concat: bool,
    group_norm: bool,
) -> dict[str, Spec]:
    """Returns specs for `hstu_layer`; raises ValueError unless all sizes are positive."""
    width, heads, *dims = check_sizes(
        "HSTU",
        features=features,
        num_heads=num_heads,
        attention_dim=attention_dim,
        hidden_dim=hidden_dim,
    )
    columns, hidden = 2 * heads * sum(dims), heads * dims[1]
    normed = heads if group_norm else hidden
    whole, back = (width, columns), ((3 if concat else 1) * hidden, width)
    return {
        "uvqk_weight": Spec(whole, lambda init: init(whole)),
        "uvqk_beta": _vector(columns, 0.0, 1),
        "input_norm_weight": _vector(width, 1.0, 0),
        "input_norm_bias": _vector(width, 0.0, 0),
        "output_weight": Spec(back, lambda init: init(back)),
        "output_norm_weight": _vector(normed, 1.0, 0),
        "output_norm_bias": _vector(normed, 0.0, 0),
    }


def _vector(size: int, value: float, axis: int) -> Spec:
    """Makes the spec of a constant vector, which is divided as the axis of a matrix is."""
    shape = (size, 1) if axis == 0 else (1, size)
    # The initialiser knows the dtype, and the names of the matrix's axes.
    return Spec((size,), lambda init: jnp.full_like(init(shape), value).reshape(size), (axis,))


def _attention_specs(query: int, key: int, out: int, *heads: int) -> dict[str, Spec]:
    return {
        "w_query": matrix((query, *heads), to_heads=True),
        "w_key": matrix((key, *heads), to_heads=True),
        "w_value": matrix((key, *heads), to_heads=True),
        "w_out": matrix((*heads, out), to_heads=False),
    }


def check(
    layer: str,
    params: Mapping[str, Any],
    axes: Mapping[str, str],
    required: Container[str] | None = None,
) -> None:
    """Raises ValueError, naming both values, unless the parameters have the `axes` by name.

    Names that the layer does not know are refused: it would compute as if they were not there.
    `required` are the names that must be there; None: all.
    """
    if not isinstance(params, Mapping):
        raise ValueError(
            f"{layer}: params must be a mapping from names to arrays, but is "
            f"{arguments.describe(params)}"
        )
    for name in params:
        if name not in axes:
            raise ValueError(f"{layer} takes no parameter {name!r}; known: {sorted(axes)}")
    sizes: dict[str, tuple[str, int]] = {}
    for name, names in axes.items():
        if name not in params:
            if required is not None and name not in required:
                continue
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
    """Initialises matrices without Flax's boxes; a subclass has `boxed`.

    `boxed(value, axes)` returns a parameter with the metadata of the last matrix; `axes` are those
    of the parameter's `Spec`.
    """

    box_type: type
    value_of: Callable[[Any], jax.Array]

    def __init__(self, init: Callable[..., Any]) -> None:
        self._init = init
        self._box: Any = None

    def __call__(self, shape: tuple[int, ...]) -> jax.Array:
        value: Any = self._init(shape)
        if not isinstance(value, self.box_type):
            return value
        self._box = value
        return type(self).value_of(value)
