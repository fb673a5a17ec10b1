"""Layers for Flax Linen, with the same parameters as the layers in `nnx`.

The attributes of a layer are the arguments of its namesake in `nnx`. A layer takes the size of an
input from its parameters, or from its first inputs, where the attribute is None.
Every layer raises ValueError, naming the size, if a size is not an integer of at least 1, and
naming both sizes if inputs do not fit the parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from ikbo_jax.layers import calls, nnx, parameters


class _Layer(linen.Module, kw_only=True):
    """Holds the keyword arguments of all layers."""

    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    def __init_subclass__(cls: Any, **options: Any) -> None:
        cls.__call__ = cls.__call__  # Linen wraps the methods of the class itself alone.
        super().__init_subclass__(**options)

    @linen.compact
    def _parameters(self: Any, *arrays: jax.Array) -> dict[str, jax.Array]:
        pairs = zip(self.widths, arrays[: len(self.widths)], strict=True)
        specs = self._specs(*(_size(self, width, array) for width, array in pairs))
        # Parameters that are parts of one matrix need one key; `self.param` passes two keys.
        shares_key = isinstance(self, LinearCompression) and self.is_initializing()
        return _initialised(self, specs, self.make_rng("params") if shares_key else None)


class LinearCompression(calls.LinearCompression, _Layer):
    """Implements `nnx.LinearCompression` for Linen; requires `features`."""

    user_rows: int | None = None
    cand_rows: int | None = None
    features: int | None = None


class LookUp(calls.LookUp, _Layer):
    """`nnx.LookUp` for Linen; attributes are its arguments, and both sizes are required."""

    num_rows: int | None = None
    features: int | None = None


class CandidateAttention(calls.CandidateAttention, _Layer):
    """Implements `nnx.CandidateAttention` for Linen; requires `num_heads` and `head_dim`."""

    cand_features: int | None = None
    user_features: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None


class PMA(calls.PMA, _Layer):
    """Implements `nnx.PMA` for Linen; requires `num_seeds`, `num_heads` and `head_dim`."""

    in_features: int | None = None
    num_seeds: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None


class PFFN(calls.PFFN, _Layer):
    """Implements `nnx.PFFN` for Linen; requires `num_heads` and `head_dim`."""

    features: int | None = None
    memory_features: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None


class HSTU(calls.HSTU, _Layer):
    """Implements `nnx.HSTU` for Linen; requires `num_heads` and `attention_dim`."""

    features: int | None = None
    num_heads: int | None = None
    attention_dim: int | None = None
    hidden_dim: int | None = None


def _size(module: Any, width: calls.Width, array: jax.Array) -> int:
    """Returns the attribute if not None, else the size in the parameter, else in the input."""
    attribute: int | None = getattr(module, width.attribute)
    if attribute is not None:
        return attribute
    if module.has_variable("params", width.param):
        variable = module.get_variable("params", width.param)
        size: int = linen.meta.unbox(variable).shape[width.axis]
        return size
    return width.input.size_of(array)


def _initialised(
    module: Any, specs: dict[str, parameters.Spec], shared_key: jax.Array | None = None
) -> dict[str, jax.Array]:
    def param(name: str, spec: parameters.Spec) -> jax.Array:
        def init(key: jax.Array) -> Any:
            key = key if shared_key is None else shared_key
            unboxed = _Unboxed(lambda shape: module.kernel_init(key, shape, module.param_dtype))
            return unboxed.boxed(spec.make(unboxed), spec.axes)

        value: jax.Array = module.param(name, init)
        return value

    return {name: param(name, spec) for name, spec in specs.items()}


class _Unboxed(parameters.Unboxed):
    box_type = linen.meta.AxisMetadata
    value_of = staticmethod(linen.meta.unbox)

    def boxed(self, value: jax.Array, axes: tuple[int | None, ...]) -> Any:
        if not isinstance(self._box, linen.Partitioned):
            return value if self._box is None else linen.meta.replace_boxed(self._box, value)
        names = parameters.names_of_axes(axes, self._box.names)
        return self._box.replace(value=value, names=names)
