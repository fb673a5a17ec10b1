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

from ikbo_jax.layers import calls, hstu, inputs, nnx, parameters


class LinearCompression(linen.Module):
    """Implements `nnx.LinearCompression` for Linen; requires `features`."""

    user_rows: int | None = None
    cand_rows: int | None = None
    features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    __call__ = calls.LinearCompression.__call__

    @linen.compact
    def _parameters(self, e_user: jax.Array, e_cand: jax.Array) -> dict[str, jax.Array]:
        specs = parameters.compression_specs(
            _size(self, self.user_rows, inputs.E_USER, e_user, "w_user", 1),
            _size(self, self.cand_rows, inputs.E_CAND, e_cand, "w_cand", 1),
            self.features,
        )
        # Both parameters are parts of one matrix and need one key; `self.param` passes two keys.
        key = self.make_rng("params") if self.is_initializing() else None
        return _initialised(self, specs, key)


class LookUp(linen.Module):
    """`nnx.LookUp` for Linen; attributes are its arguments, and both sizes are required."""

    num_rows: int | None = None
    features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init

    __call__ = calls.LookUp.__call__

    @linen.compact
    def _parameters(self, index: jax.Array) -> dict[str, jax.Array]:
        return _initialised(self, parameters.look_up_specs(self.num_rows, self.features))


class CandidateAttention(linen.Module):
    """Implements `nnx.CandidateAttention` for Linen; requires `num_heads` and `head_dim`."""

    cand_features: int | None = None
    user_features: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None
    logit_cap: float | None = None

    __call__ = calls.CandidateAttention.__call__

    @linen.compact
    def _parameters(self, x_cand: jax.Array, x_user: jax.Array) -> dict[str, jax.Array]:
        width = _size(self, self.cand_features, inputs.X_CAND, x_cand, "w_query", 0)
        user_width = _size(self, self.user_features, inputs.X_USER, x_user, "w_key", 0)
        out = width if self.out_features is None else self.out_features
        specs = parameters.attention_specs(width, user_width, out, self.num_heads, self.head_dim)
        return _initialised(self, specs)


class PMA(linen.Module):
    """Implements `nnx.PMA` for Linen; requires `num_seeds`, `num_heads` and `head_dim`."""

    in_features: int | None = None
    num_seeds: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    activation: str | tuple[str, ...] = "softmax"
    output_scale: float = 1.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None
    logit_cap: float | None = None

    __call__ = calls.PMA.__call__

    @linen.compact
    def _parameters(self, x: jax.Array) -> dict[str, jax.Array]:
        width = _size(self, self.in_features, inputs.PMA_X, x, "w_key", 0)
        out = width if self.out_features is None else self.out_features
        specs = parameters.pma_specs(self.num_seeds, width, out, self.num_heads, self.head_dim)
        return _initialised(self, specs)


class PFFN(linen.Module):
    """Implements `nnx.PFFN` for Linen; requires `num_heads` and `head_dim`."""

    features: int | None = None
    memory_features: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    activation: str | tuple[str, ...] = "gelu"
    output_scale: float = 1.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    __call__ = calls.PFFN.__call__

    @linen.compact
    def _parameters(self, x: jax.Array, memory: jax.Array) -> dict[str, jax.Array]:
        width = _size(self, self.features, inputs.PFFN_X, x, "w_query", 0)
        memory_width = _size(self, self.memory_features, inputs.PFFN_MEMORY, memory, "w_key", 0)
        specs = parameters.pffn_specs(width, memory_width, self.num_heads, self.head_dim)
        return _initialised(self, specs)


class HSTU(linen.Module):
    """Implements `nnx.HSTU` for Linen; requires `num_heads` and `attention_dim`."""

    features: int | None = None
    num_heads: int | None = None
    attention_dim: int | None = None
    hidden_dim: int | None = None
    concat: bool = True
    group_norm: bool = False
    activations: tuple[str, ...] = hstu.ACTIVATIONS
    scale: float | None = None
    output_scale: float | None = None
    approx: str | None = None
    eps: float = 1e-6
    dropout_rate: float = 0.0
    recompute: tuple[str, ...] = ()
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nnx.default_kernel_init
    precision: str | jax.lax.Precision | None = None

    __call__ = calls.HSTU.__call__

    @linen.compact
    def _parameters(self, x: jax.Array) -> dict[str, jax.Array]:
        width = _size(self, self.features, inputs.HSTU_X, x, "uvqk_weight", 0)
        hidden = self.attention_dim if self.hidden_dim is None else self.hidden_dim
        sizes = (width, self.num_heads, self.attention_dim, hidden)
        options = {"concat": self.concat, "group_norm": self.group_norm}
        return _initialised(self, parameters.hstu_specs(*sizes, **options))


def _size(
    module: linen.Module,
    attribute: int | None,
    spec: inputs.Input,
    array: jax.Array,
    param: str,
    axis: int,
) -> int:
    """Returns `attribute` if not None, else the size of axis `axis` of `param`, else of `array`."""
    if attribute is not None:
        return attribute
    if module.has_variable("params", param):
        size: int = linen.meta.unbox(module.get_variable("params", param)).shape[axis]
        return size
    return spec.size_of(array)


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
