"""The layers as functions of a mapping from names to parameters; needs no Flax.

Every function casts its floating-point arrays to `dtype`, the dtype of computation and result; with
None, to the dtype that they promote to. `precision` applies to f32 products: a name, a
`jax.lax.Precision`, or None for JAX's default. All raise ValueError if ranks or sizes disagree or
an activation is unknown. Letters: N heads of width H.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ikbo_jax.layers import parameters
from ikbo_jax.masks import Mask
from ikbo_jax.ops import arguments
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.dot_product_attention import dot_product_attention
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.gdpa_arguments import bound
from ikbo_jax.ops.linear_compression import linear_compression
from ikbo_jax.ops.look_up import look_up as look_up_rows

#: Only `compress` takes a `PaddedWeight`.
Parameters = Mapping[str, Any]
#: Dtypes that the layers cast, besides integers.
_PROMOTED = (*arguments.DTYPES, "float64", "bool")


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies [..., features] by [features, N, H]; returns [..., N, H]."""
    return jnp.einsum("...f,fnh->...nh", x, weight)


def projected(
    params: Parameters, x: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects [..., F] to queries, and [..., F_memory] to keys and values: [..., N, H] each."""
    return (
        project(x, params["w_query"]),
        project(memory, params["w_key"]),
        project(memory, params["w_value"]),
    )


def merge_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies [..., N, H] by [N, H, features]; returns [..., features]."""
    return jnp.einsum("...nh,nhf->...f", x, weight, out_sharding=_merged_sharding(x, weight))


def _merged_sharding(x: jax.Array, weight: jax.Array) -> NamedSharding | None:
    """Chooses the layout of `merge_heads` where Explicit axes divide heads, which JAX does not.

    Rows keep their layout, and all devices have the sum over heads.
    """
    of_x, of_weight = (jax.typeof(array).sharding for array in (x, weight))
    if not any(of_x.spec[-2:]) and not any(of_weight.spec[:2]):
        return None
    mesh = of_weight.mesh if of_x.mesh.empty else of_x.mesh
    return NamedSharding(mesh, PartitionSpec(*of_x.spec[:-2], None))


def compress(
    params: Parameters,
    e_user: jax.Array,
    e_cand: jax.Array,
    cand_to_user: jax.Array,
    *,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Applies `linear_compression` to the embeddings of users and candidates.

    Args:
      params: "w_user" [M, K_user], "w_cand" [M, K_cand]; or such weights from
        `ikbo_jax.pad_weight`.
      e_user: [U, K_user, N].
      e_cand: [B, K_cand, N].
      cand_to_user: [B] int32, the user of every candidate, in [0, U), in any order.

    Returns:
      [B, M, N].
    """
    parameters.check(parameters.E_USER.layer, params, parameters.COMPRESSION)
    parameters.E_USER.check(e_user, params["w_user"].shape[1])
    parameters.E_CAND.check(e_cand, params["w_cand"].shape[1])
    params, (e_user, e_cand) = cast(
        parameters.E_USER.layer, params, dtype, e_user=e_user, e_cand=e_cand
    )
    with with_precision(precision):
        return linear_compression(params["w_cand"], params["w_user"], e_cand, e_user, cand_to_user)


def look_up(
    params: Parameters, index: jax.Array, *, indices_are_sorted: bool = False, dtype: Any = None
) -> jax.Array:
    """Looks up rows of a table, whose gradient is summed in f32 and rounded once.

    Args:
      params: "table" [rows, features].
      index: int32 of any shape, values in [0, rows), in any order; others are clamped.
      indices_are_sorted: whether the flattened `index` never decreases.

    Returns:
      [*index.shape, features].

    Raises:
      ValueError: the table is no matrix; the index is not int32.
    """
    parameters.check("LookUp", params, {"table": "rows features"})
    arguments.check_int32("index", index)
    arguments.check_runnable("LookUp", index)
    params, _ = cast("LookUp", params, dtype)
    rows = look_up_rows(params["table"], index.reshape(-1), indices_are_sorted=indices_are_sorted)
    return rows.reshape(*index.shape, rows.shape[1])


def attend(
    params: Parameters,
    x_cand: jax.Array,
    x_user: jax.Array,
    cand_to_user: jax.Array,
    *,
    key_value_seq_lengths: jax.Array | None = None,
    key_value_ranges: jax.Array | None = None,
    indices_are_sorted: bool = False,
    logit_cap: float | None = None,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Attends from every candidate's rows to the rows of its user.

    Args:
      params: "w_query" [F_cand, N, H], "w_key" and "w_value" [F_user, N, H], "w_out"
        [N, H, F_out].
      x_cand: [B, T, F_cand].
      x_user: [U, S, F_user].
      cand_to_user: [B] int32, the user of every candidate, in [0, U), in any order.
      key_value_seq_lengths: [U] int32, the number of valid rows of every user; None means S.
      key_value_ranges: [B, 2] int32, the rows of its user that a candidate sees, begin and end;
        None means all.
      indices_are_sorted: whether `cand_to_user` is sorted, as in `ikbo_jax.attention`.
      logit_cap: bound of the scores, as in `ikbo_jax.attention`.

    Returns:
      [B, T, F_out].
    """
    parameters.check(parameters.X_CAND.layer, params, parameters.ATTENTION)
    parameters.X_CAND.check(x_cand, params["w_query"].shape[0])
    parameters.X_USER.check(x_user, params["w_key"].shape[0])
    arguments.check_index("cand_to_user", cand_to_user, "x_cand", "B", x_cand.shape[0])
    if (lengths := key_value_seq_lengths) is not None:
        arguments.check_index("key_value_seq_lengths", lengths, "x_user", "U", x_user.shape[0])
    params, (x_cand, x_user) = cast(
        parameters.X_CAND.layer, params, dtype, x_cand=x_cand, x_user=x_user
    )
    with with_precision(precision):
        query, key, value = projected(params, x_cand, x_user)
        out = attention(
            *(query, key, value, cand_to_user),
            key_value_seq_lengths=lengths,
            key_value_ranges=key_value_ranges,
            indices_are_sorted=indices_are_sorted,
            logit_cap=logit_cap,
        )
        return merge_heads(out, params["w_out"])


def pma(
    params: Parameters,
    x: jax.Array,
    cu_seqlens: jax.Array,
    *,
    activation: str | tuple[str, ...] = "softmax",
    output_scale: float | jax.Array = 1.0,
    logit_cap: float | None = None,
    max_seqlen: int | None = None,
    mask: Mask | None = None,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Pools jagged sequences: learned seeds attend to the rows of each sequence.

    Args:
      params: "seeds" [num_seeds, F_out], "w_query" [F_out, N, H], "w_key" and "w_value" [F, N, H],
        "w_out" [N, H, F_out].
      x: [total, F], sequence after sequence.
      cu_seqlens: [batch + 1] int32, offsets as in `ikbo_jax.gdpa`.
      activation: as in `ikbo_jax.gdpa`.
      output_scale: as in `ikbo_jax.gdpa`.
      logit_cap: as in `ikbo_jax.gdpa`.
      max_seqlen: bound of the lengths, known while tracing; rows beyond it have no effect.
      mask: the rows of its sequence that a seed sees, as in `ikbo_jax.gdpa`: the seeds have the
        positions of the last rows. `ikbo_jax.masks.intervals` has num_seeds rows a sequence.

    Returns:
      [batch, num_seeds, F_out].
    """
    parameters.check(parameters.PMA_X.layer, params, parameters.PMA)
    parameters.PMA_X.check(x, params["w_key"].shape[0])
    arguments.check_offsets("cu_seqlens", "batch", cu_seqlens)
    params, (x,) = cast(parameters.PMA_X.layer, params, dtype, x=x)
    seeds = params["seeds"]
    with with_precision(precision):
        out = gdpa(
            *projected(params, seeds, x),
            None,
            cu_seqlens,
            activation=activation,
            scale=params["w_query"].shape[2] ** -0.5,
            output_scale=output_scale,
            logit_cap=logit_cap,
            broadcast_q=True,
            max_seqlen_kv=bound("max_seqlen", max_seqlen, x.shape[0]),
            mask=mask,
        )
        return merge_heads(out.reshape(-1, seeds.shape[0], *out.shape[1:]), params["w_out"])


def pffn(
    params: Parameters,
    x: jax.Array,
    memory: jax.Array,
    cu_seqlens: jax.Array,
    cu_seqlens_memory: jax.Array,
    x_to_memory: jax.Array | None = None,
    *,
    activation: str | tuple[str, ...] = "gelu",
    output_scale: float = 1.0,
    max_seqlen: int | None = None,
    max_seqlen_memory: int | None = None,
    dtype: Any = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Applies to every row a two-layer net whose weights are projected from a memory.

    Args:
      params: "w_query" [F, N, H], "w_key" and "w_value" [F_memory, N, H], "w_out" [N, H, F].
      x: [total, F], sequence after sequence.
      memory: [total_memory, F_memory], sequence after sequence.
      cu_seqlens: [batch + 1] int32, offsets of `x` as in `ikbo_jax.gdpa`.
      cu_seqlens_memory: [batch_memory + 1] int32, offsets of `memory`.
      x_to_memory: [batch] int32, the memory sequence of every sequence (the user of a candidate);
        None pairs sequence b with memory sequence b.
      activation: as in `ikbo_jax.gdpa`.
      output_scale: as in `ikbo_jax.gdpa`.
      max_seqlen: bound of the lengths of `x`, known while tracing.
      max_seqlen_memory: bound of the lengths of `memory`, known while tracing.

    Returns:
      [total, F]; 0 in rows outside all sequences.
    """
    parameters.check(parameters.PFFN_X.layer, params, parameters.ATTENTION)
    parameters.PFFN_X.check(x, params["w_query"].shape[0])
    parameters.PFFN_MEMORY.check(memory, params["w_key"].shape[0])
    arguments.check_offsets("cu_seqlens", "batch", cu_seqlens)
    arguments.check_offsets("cu_seqlens_memory", "batch_memory", cu_seqlens_memory)
    batch, batch_memory = cu_seqlens.shape[0] - 1, cu_seqlens_memory.shape[0] - 1
    if x_to_memory is not None:
        arguments.check_index("x_to_memory", x_to_memory, "cu_seqlens", "batch", batch)
    elif cu_seqlens.shape != cu_seqlens_memory.shape:
        raise ValueError(
            f"cu_seqlens has batch={batch} sequences but cu_seqlens_memory has "
            f"batch_memory={batch_memory}; pass x_to_memory, the memory sequence of every sequence"
        )
    params, (x, memory) = cast(parameters.PFFN_X.layer, params, dtype, x=x, memory=memory)
    with with_precision(precision):
        out = gdpa(
            *projected(params, x, memory),
            cu_seqlens,
            cu_seqlens_memory,
            activation=activation,
            scale=params["w_query"].shape[2] ** -0.5,
            output_scale=output_scale,
            q_to_kv=x_to_memory,
            max_seqlen_q=bound("max_seqlen", max_seqlen, x.shape[0]),
            max_seqlen_kv=bound("max_seqlen_memory", max_seqlen_memory, memory.shape[0]),
        )
        return merge_heads(out, params["w_out"])


def cast(
    layer: str, params: Parameters, dtype: Any, **arrays: jax.Array
) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Casts parameters and arrays to `dtype`; None: to the dtype that they promote to.

    Raises ValueError, naming the layer, for shapes without values, arrays on other devices, and
    dtypes in which the ops do not compute.
    """
    named = dict(params) | arrays
    arguments.check_runnable(layer, named)
    refusal = f"{layer} computes in bfloat16, float16 or float32, but"
    for name, x in named.items():
        if not hasattr(x, "dtype"):
            raise ValueError(f"{layer}: {name} must be an array, but is {arguments.describe(x)}")
        if not jnp.issubdtype(x.dtype, jnp.integer) and str(x.dtype) not in _PROMOTED:
            raise ValueError(f"{refusal} {name} is {x.dtype}")
    chosen = "dtype is"
    if dtype is None:
        chosen, dtype = "its arrays promote to", jnp.result_type(*jax.tree.leaves(named))
    try:
        common = str(jax.dtypes.canonicalize_dtype(dtype))
    except (TypeError, ValueError):
        common = f"{dtype!r:.80}"
    if common not in arguments.DTYPES:
        raise ValueError(f"{refusal} {chosen} {common}")
    cast = {name: param.astype(dtype) for name, param in params.items()}
    return cast, [x.astype(dtype) for x in arrays.values()]


def with_precision(
    precision: str | jax.lax.Precision | None,
) -> contextlib.AbstractContextManager[Any]:
    """Sets the precision of f32 products; None: leaves JAX's setting."""
    if precision is None:
        return contextlib.nullcontext()
    try:
        name = jax.lax.Precision(precision).name.lower()
    except (TypeError, ValueError):
        raise ValueError(
            "precision must be None, a jax.lax.Precision or its name, such as 'highest', but is "
            f"{precision!r:.80}"
        ) from None
    return jax.default_matmul_precision(name)


def attention_fn(cand_to_user: jax.Array) -> Callable[..., jax.Array]:
    """Makes an `attention_fn` for `flax.nnx.MultiHeadAttention` and Linen's.

    The layer then takes queries of candidates, [B, T, features], beside keys and values of users,
    [U, S, features], and computes what it would on `keys[cand_to_user]`.

    Args:
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order.

    Returns:
      A function of query, key, value, bias and mask as `ikbo_jax.dot_product_attention` takes them,
      with the options of Flax's; a mask may also hold numbers, 0 for hidden, as Flax's own do. It
      raises NotImplementedError for dropout, for `sow_weights`, and where `dot_product_attention`
      raises it.
    """

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng
        rate = arguments.finite_number("dropout_rate", dropout_rate)
        if rate and not arguments.flag("deterministic", deterministic):
            raise NotImplementedError(
                f"attention_fn has no dropout of attention weights, but dropout_rate={dropout_rate}"
            )
        if module is not None:
            raise NotImplementedError(
                "attention_fn keeps no attention weights for sow_weights=True"
            )
        if mask is not None and jnp.issubdtype(getattr(mask, "dtype", bool), jnp.number):
            # The masks that Flax makes, also while decoding, hold 0 and 1 in float32.
            mask = mask != 0
        _, (query, key, value) = cast("attention_fn", {}, dtype, query=query, key=key, value=value)
        with with_precision(precision):
            out: jax.Array = dot_product_attention(
                *(query, key, value, bias, mask), cand_to_user=cand_to_user, is_causal=is_causal
            )
        return out

    return attend
