"""The calls of the layers, which those for NNX and those for Linen share.

A layer has the options of its function in `functional` as attributes. Its method `_parameters`
takes the inputs, from which Linen may take sizes, and returns the parameters by name.
"""

from typing import Any

import jax

from ikbo_jax.layers import functional, hstu
from ikbo_jax.masks import Mask


def _options(layer: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("dtype", "precision", *names)}


class LinearCompression:
    """Calls `functional.compress`."""

    def __call__(
        self: Any, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array
    ) -> jax.Array:
        """Compresses the embeddings; arguments and result are as in `functional.compress`."""
        params, options = self._parameters(e_user, e_cand), _options(self)
        return functional.compress(params, e_user, e_cand, cand_to_user, **options)


class LookUp:
    """Calls `functional.look_up`."""

    def __call__(self: Any, index: jax.Array, *, indices_are_sorted: bool = False) -> jax.Array:
        """Looks up rows; arguments and result are as in `functional.look_up`."""
        return functional.look_up(
            self._parameters(index), index, indices_are_sorted=indices_are_sorted, dtype=self.dtype
        )


class CandidateAttention:
    """Calls `functional.attend`."""

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
            self._parameters(x_cand, x_user),
            x_cand,
            x_user,
            cand_to_user,
            key_value_seq_lengths=key_value_seq_lengths,
            key_value_ranges=key_value_ranges,
            indices_are_sorted=indices_are_sorted,
            **_options(self, "logit_cap"),
        )


class PMA:
    """Calls `functional.pma`."""

    def __call__(
        self: Any,
        x: jax.Array,
        cu_seqlens: jax.Array,
        *,
        max_seqlen: int | None = None,
        mask: Mask | None = None,
    ) -> jax.Array:
        """Pools every sequence; arguments and result are as in `functional.pma`."""
        return functional.pma(
            self._parameters(x),
            x,
            cu_seqlens,
            max_seqlen=max_seqlen,
            mask=mask,
            **_options(self, "activation", "output_scale", "logit_cap"),
        )


class PFFN:
    """Calls `functional.pffn`."""

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
            self._parameters(x, memory),
            x,
            memory,
            cu_seqlens,
            cu_seqlens_memory,
            x_to_memory,
            max_seqlen=max_seqlen,
            max_seqlen_memory=max_seqlen_memory,
            **_options(self, "activation", "output_scale"),
        )


class HSTU:
    """Calls `hstu.hstu_layer`."""

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
        names = "num_heads activations scale output_scale approx concat group_norm eps"
        return hstu.hstu_layer(
            self._parameters(x),
            x,
            cu_seqlens,
            mask=mask,
            max_seqlen=max_seqlen,
            dropout_key=dropout_key,
            cache=cache,
            return_cache=return_cache,
            **_options(self, *names.split(), "dropout_rate", "recompute"),
        )
