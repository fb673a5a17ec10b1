"""What the layers for NNX and those for Linen share: options, sizes and calls.

A layer has the options of its function in `functional` as attributes. `widths` says which of its
attributes are sizes of inputs, and which sizes of parameters these are; `_specs` takes them. Its
method `_parameters` takes the inputs, from which Linen may take sizes, and returns the parameters
by name.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax

from ikbo_jax.layers import functional, hstu, parameters
from ikbo_jax.masks import Mask


class Width(NamedTuple):
    """An attribute that is the size of an input, and of axis `axis` of a parameter."""

    attribute: str
    input: parameters.Input
    param: str
    axis: int


def _options(layer: Any, kind: type | None = None) -> dict[str, Any]:
    """Returns the options of a layer that `kind` declares, and those of all layers."""
    own = () if kind is None else (field.name for field in dataclasses.fields(kind))
    return {name: getattr(layer, name) for name in ("dtype", "precision", *own)}


class LinearCompression:
    """Calls `functional.compress`."""

    widths: ClassVar = (
        Width("user_rows", parameters.E_USER, "w_user", 1),
        Width("cand_rows", parameters.E_CAND, "w_cand", 1),
    )

    def _specs(self: Any, user_rows: int, cand_rows: int) -> dict[str, parameters.Spec]:
        return parameters.compression_specs(user_rows, cand_rows, self.features)

    def __call__(
        self: Any, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array
    ) -> jax.Array:
        """Compresses the embeddings; arguments and result are as in `functional.compress`."""
        params, options = self._parameters(e_user, e_cand), _options(self)
        return functional.compress(params, e_user, e_cand, cand_to_user, **options)


class LookUp:
    """Calls `functional.look_up`."""

    widths: ClassVar = ()

    def _specs(self: Any) -> dict[str, parameters.Spec]:
        return parameters.look_up_specs(self.num_rows, self.features)

    def __call__(self: Any, index: jax.Array, *, indices_are_sorted: bool = False) -> jax.Array:
        """Looks up rows; arguments and result are as in `functional.look_up`."""
        return functional.look_up(
            self._parameters(index), index, indices_are_sorted=indices_are_sorted, dtype=self.dtype
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class CandidateAttention:
    """Calls `functional.attend`."""

    widths: ClassVar = (
        Width("cand_features", parameters.X_CAND, "w_query", 0),
        Width("user_features", parameters.X_USER, "w_key", 0),
    )

    logit_cap: float | None = None

    def _specs(self: Any, cand_width: int, user_width: int) -> dict[str, parameters.Spec]:
        out = cand_width if self.out_features is None else self.out_features
        heads = (self.num_heads, self.head_dim)
        return parameters.attention_specs(cand_width, user_width, out, *heads)

    def __call__(
        self: Any,
        x_cand: jax.Array,
        x_user: jax.Array,
        cand_to_user: jax.Array,
        *,
        key_value_seq_lengths: jax.Array | None = None,
        key_value_ranges: jax.Array | None = None,
        indices_are_sorted: bool = False,
    ) -> jax.Array:
        """Attends; arguments and result are as in `functional.attend`."""
        return functional.attend(
            *(self._parameters(x_cand, x_user), x_cand, x_user, cand_to_user),
            key_value_seq_lengths=key_value_seq_lengths,
            key_value_ranges=key_value_ranges,
            indices_are_sorted=indices_are_sorted,
            **_options(self, CandidateAttention),
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PMA:
    """Calls `functional.pma`."""

    widths: ClassVar = (Width("in_features", parameters.PMA_X, "w_key", 0),)

    activation: str | tuple[str, ...] = "softmax"
    output_scale: float = 1.0
    logit_cap: float | None = None

    def _specs(self: Any, width: int) -> dict[str, parameters.Spec]:
        out = width if self.out_features is None else self.out_features
        return parameters.pma_specs(self.num_seeds, width, out, self.num_heads, self.head_dim)

    def __call__(
        self: Any,
        x: jax.Array,
        cu_seqlens: jax.Array,
        *,
        max_seqlen: int | None = None,
        mask: Mask | None = None,
    ) -> jax.Array:
        """Pools every sequence; arguments and result are as in `functional.pma`."""
        params, options = self._parameters(x), _options(self, PMA)
        return functional.pma(params, x, cu_seqlens, max_seqlen=max_seqlen, mask=mask, **options)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PFFN:
    """Calls `functional.pffn`."""

    widths: ClassVar = (
        Width("features", parameters.PFFN_X, "w_query", 0),
        Width("memory_features", parameters.PFFN_MEMORY, "w_key", 0),
    )

    activation: str | tuple[str, ...] = "gelu"
    output_scale: float = 1.0

    def _specs(self: Any, width: int, memory_width: int) -> dict[str, parameters.Spec]:
        return parameters.pffn_specs(width, memory_width, self.num_heads, self.head_dim)

    def __call__(
        self: Any,
        x: jax.Array,
        memory: jax.Array,
        cu_seqlens: jax.Array,
        cu_seqlens_memory: jax.Array,
        x_to_memory: jax.Array | None = None,
        *,
        max_seqlen: int | None = None,
        max_seqlen_memory: int | None = None,
    ) -> jax.Array:
        """Applies the net of its sequence to every row; see `functional.pffn`."""
        return functional.pffn(
            *(self._parameters(x, memory), x, memory, cu_seqlens, cu_seqlens_memory, x_to_memory),
            max_seqlen=max_seqlen,
            max_seqlen_memory=max_seqlen_memory,
            **_options(self, PFFN),
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class HSTU:
    """Calls `hstu.hstu_layer`."""

    widths: ClassVar = (Width("features", parameters.HSTU_X, "uvqk_weight", 0),)

    concat: bool = True
    group_norm: bool = False
    activations: tuple[str, ...] = hstu.ACTIVATIONS
    scale: float | None = None
    output_scale: float | None = None
    approx: str | None = None
    eps: float = 1e-6
    dropout_rate: float = 0.0
    recompute: tuple[str, ...] = ()

    def _specs(self: Any, width: int) -> dict[str, parameters.Spec]:
        hidden = self.attention_dim if self.hidden_dim is None else self.hidden_dim
        sizes = (width, self.num_heads, self.attention_dim, hidden)
        return parameters.hstu_specs(*sizes, concat=self.concat, group_norm=self.group_norm)

    def __call__(
        self: Any,
        x: jax.Array,
        cu_seqlens: jax.Array,
        *,
        mask: Mask | None = None,
        max_seqlen: int | None = None,
        dropout_key: jax.Array | None = None,
        cache: hstu.HstuCache | None = None,
        return_cache: bool = False,
    ) -> Any:
        """Applies the layer; arguments and result are as in `ikbo_jax.layers.hstu_layer`."""
        return hstu.hstu_layer(
            *(self._parameters(x), x, cu_seqlens),
            num_heads=self.num_heads,
            mask=mask,
            max_seqlen=max_seqlen,
            dropout_key=dropout_key,
            cache=cache,
            return_cache=return_cache,
            **_options(self, HSTU),
        )
