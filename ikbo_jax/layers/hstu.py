"""The HSTU layer as a function of a mapping from names to parameters; needs no Flax."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from ikbo_jax import masks
from ikbo_jax.integers import integer
from ikbo_jax.layers import parameters
from ikbo_jax.layers.functional import Parameters, cast, with_precision
from ikbo_jax.ops import arguments, jagged_rows
from ikbo_jax.ops.gated_linear import gated_linear
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.norm_linear import check_recompute, norm_linear

#: Activations of u, v, q and k in Meta's layer; the paper's are "silu" for all four.
ACTIVATIONS = ("silu", "identity", "identity", "identity")
#: What `jax.checkpoint` keeps of a layer whose projection is computed again.
_KEPT = ("ikbo_gdpa_out", "ikbo_gdpa_lse")


class HstuCache(NamedTuple):
    """Keys and values of the rows that a layer has seen: one layer's part of a cached prefix.

    Attributes:
      key: [total, N, H].
      value: [total, N, H].
      cu_seqlens: [batch + 1] int32, the rows of every sequence.
    """

    key: jax.Array
    value: jax.Array
    cu_seqlens: jax.Array


jax.export.register_namedtuple_serialization(HstuCache, serialized_name="ikbo_jax.layers.HstuCache")


def hstu_layer(
    params: Parameters,
    x: jax.Array,
    cu_seqlens: jax.Array,
    *,
    num_heads: int,
    mask: masks.Mask | None = None,
    max_seqlen: int | None = None,
    activations: Sequence[str] = ACTIVATIONS,
    scale: float | None = None,
    output_scale: float | jax.Array | None = None,
    approx: str | None = None,
    concat: bool = True,
    group_norm: bool = False,
    eps: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    recompute: Sequence[str] = (),
    cache: HstuCache | None = None,
    return_cache: bool = False,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> Any:
    """Applies an HSTU layer to jagged sequences, by three fused ops.

        u, v, q, k = activation(norm(x) · uvqk_weight + uvqk_beta)
        a = output_scale · Σⱼ silu(scale · q · kⱼ) · vⱼ over the keys that `mask` lets a row see
        out = x + dropout([u, a, u · norm(a)]) · output_weight

    Args:
      params: with N heads of width D (attention_dim) of queries and keys, and H (hidden_dim) of
        values and u: "uvqk_weight" [F, 2 N (H + D)], whose columns are u, v, q and k, head after
        head; "output_weight" [3 N H, F], or [N H, F] without `concat`. These may be missing:
        "uvqk_beta" [2 N (H + D)], "input_norm_weight" and "input_norm_bias" [F],
        "output_norm_weight" and "output_norm_bias" [N H], or [N] with `group_norm`.
      x: [total, F], sequence after sequence. Rows outside all sequences must be finite, since the
        gradients of the weights are sums over all rows.
      cu_seqlens: [batch + 1] int32, offsets as in `ikbo_jax.gdpa`.
      num_heads: N.
      mask: which rows of its sequence a row sees, such as `ikbo_jax.masks.hstu(num_targets,
        contextual=..., window=...)`; None: itself and earlier rows.
      max_seqlen: bound of the lengths, with a `cache` of both parts together; known while tracing.
        Rows beyond it are ignored by other rows, and their own `a` is 0.
      activations: of u, v, q and k, as in `ikbo_jax.norm_linear`.
      scale: factor of the scores; None: 1 / √D.
      output_scale: factor of `a`, a number or [batch] float32; None: 1 / max_seqlen.
      approx: as in `ikbo_jax.gdpa`.
      concat: whether the output is projected from [u, a, u · norm(a)], not from u · norm(a) alone.
      group_norm: whether the columns of every head of `a` are normalised on their own.
      eps: number that both norms add to the variance.
      dropout_rate: share of the numbers that dropout sets to 0, if there is a key.
      dropout_key: key of `jax.random`; None: inference.
      recompute: what the gradient computes again: "projection", u, v, q and k, so that `x` and `a`
        alone are kept; "norm", the normalised input, which always is.
      cache: of earlier rows of the same sequences; `x` continues them (Meta's delta forward).
      return_cache: whether to return the cache of all rows, too (prefill).
      dtype: of computation and result; None promotes parameters and `x`.
      precision: of f32 products.

    Returns:
      out [total, F]; with `return_cache` (out, `HstuCache`). Rows outside all sequences have a = 0.

    Raises:
      ValueError: parameters, `x` or the cache disagree in a size; both `max_seqlen` and
        `output_scale` are None; what the three ops refuse.

    Source: Zhai et al., "Actions Speak Louder than Words", 2024; parameters, defaults and options
    are those of `STULayer` in Meta's generative-recommenders.
    """
    concat, group_norm, with_cache = (
        arguments.flag(name, value)
        for name, value in (
            ("concat", concat),
            ("group_norm", group_norm),
            ("return_cache", return_cache),
        )
    )
    hidden, width = _check(params, x, num_heads, concat, group_norm)
    arguments.check_offsets("cu_seqlens", "batch", cu_seqlens)
    if max_seqlen is None and output_scale is None:
        raise ValueError("HSTU needs max_seqlen or output_scale, but both are None")
    if max_seqlen is not None:
        max_seqlen = integer("max_seqlen", max_seqlen)
    if output_scale is None:
        output_scale = 1 / (max_seqlen or 1)
    names = check_recompute(recompute)
    params, (x,) = cast(parameters.HSTU_X.layer, params, dtype, x=x)
    if cache is not None:
        _check_cache(cache, cu_seqlens, (num_heads, max(hidden, width)), x.dtype)
    attention: dict[str, Any] = {
        "activation": "silu",
        "approx": approx,
        "scale": width**-0.5 if scale is None else scale,
        "output_scale": output_scale,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
        "mask": masks.causal() if mask is None else mask,
    }

    def layer(params: Parameters, x: jax.Array) -> tuple[jax.Array, HstuCache]:
        u, value, query, key = norm_linear(
            x,
            *_groups(params, num_heads, hidden, width),
            activations=activations,
            norm_scale=params.get("input_norm_weight"),
            norm_bias=params.get("input_norm_bias"),
            eps=eps,
        )
        seen = HstuCache(key, value, cu_seqlens)
        if cache is not None:
            (key, value), offsets = jagged_rows.append(
                cache[:2], cache.cu_seqlens, (key, value), cu_seqlens
            )
            seen = HstuCache(key, value, offsets)
        a = gdpa(query, seen.key, seen.value, cu_seqlens, seen.cu_seqlens, **attention)
        out = gated_linear(
            u,
            a[..., :hidden],
            params["output_weight"],
            x,
            concat=concat,
            by_head=group_norm,
            norm_scale=params.get("output_norm_weight"),
            norm_bias=params.get("output_norm_bias"),
            eps=eps,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
        )
        return out, seen

    if "projection" in names:
        policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)
        layer = jax.checkpoint(layer, policy=policy)
    with with_precision(precision):
        out, seen = layer(params, x)
    return (out, seen) if with_cache else out


def _check(
    params: Parameters, x: jax.Array, num_heads: int, concat: bool, group_norm: bool
) -> tuple[int, int]:
    """Returns the widths of a head: of values and u, and of queries and keys.

    Raises ValueError, naming both values, unless parameters and rows agree.
    """
    layer = parameters.HSTU_X.layer
    (heads,) = parameters.check_sizes(layer, num_heads=num_heads)
    parameters.check(layer, params, parameters.HSTU, parameters.HSTU_REQUIRED)
    parameters.HSTU_X.check(x, params["uvqk_weight"].shape[0])
    rows, columns = params["output_weight"].shape[0], params["uvqk_weight"].shape[1]
    parts = 3 if concat else 1
    hidden, width = rows // (parts * heads), columns // (2 * heads) - rows // (parts * heads)
    if rows % (parts * heads) or columns % (2 * heads) or min(hidden, width) < 1:
        raise ValueError(
            f"{layer}: output_weight has {rows} rows and uvqk_weight has {columns} columns, but "
            f"with num_heads={heads} and concat={concat} they need {parts * heads} · hidden_dim "
            f"and {2 * heads} · (hidden_dim + attention_dim)"
        )
    wanted = (heads if group_norm else heads * hidden,)
    for name in ("output_norm_weight", "output_norm_bias"):
        if name in params and params[name].shape != wanted:
            raise ValueError(
                f"{layer}: {name} has shape {params[name].shape} but group_norm={group_norm} and "
                f"num_heads={heads} need {wanted}"
            )
    return hidden, width


def _check_cache(cache: Any, cu_seqlens: jax.Array, head: tuple[int, int], dtype: Any) -> None:
    """Raises ValueError, naming both values, unless the cache has rows of the same sequences."""
    if not isinstance(cache, HstuCache):
        raise ValueError(f"HSTU: cache must be an HstuCache, but is {arguments.describe(cache)}")
    arguments.check_runnable("HSTU", (cache, cu_seqlens))
    key, value, offsets = cache
    arguments.check_offsets("cache.cu_seqlens", "batch", offsets)
    if offsets.shape != cu_seqlens.shape:
        raise ValueError(
            f"cache.cu_seqlens has batch={offsets.shape[0] - 1} but cu_seqlens has "
            f"batch={cu_seqlens.shape[0] - 1}"
        )
    for name, array in (("cache.key", key), ("cache.value", value)):
        arguments.check_array(name, array, "[total, N, H]")
        if array.shape[1:] != head or array.dtype != dtype:
            raise ValueError(
                f"{name} is {arguments.describe(array)} but the layer's rows are "
                f"{dtype}[total, {head[0]}, {head[1]}]"
            )
    arguments.check_sizes("cache.key", key, "cache.value", value, ("total", " ", " "))


def _groups(
    params: Parameters, heads: int, hidden: int, width: int
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Cuts weight and bias into groups of columns: u, values, queries and keys.

    Attention has one width of a head. Narrower ones are filled up with columns of zeros: they add
    nothing to a score, and what they add to `a` is cut off.
    """
    wide = max(hidden, width)
    widths = ((hidden, hidden), (hidden, wide), (width, wide), (width, wide))
    ends = [heads * hidden, 2 * heads * hidden, heads * (2 * hidden + width)]

    def groups(array: jax.Array) -> list[jax.Array]:
        found = []
        for part, (old, new) in zip(jnp.split(array, ends, axis=-1), widths, strict=True):
            part = part.reshape(*array.shape[:-1], heads, old)
            found.append(jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, new - old)]))
        return found

    beta = params.get("uvqk_beta")
    return groups(params["uvqk_weight"]), [None] * 4 if beta is None else [*groups(beta)]
