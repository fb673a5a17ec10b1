"""The layers as functions of a mapping from names to parameters; needs no Flax.

Every function casts its floating-point arrays to `dtype`, the dtype of computation and result; with
None, to the dtype that they promote to. `precision` applies to f32 products: a name, a
`jax.lax.Precision`, or None for JAX's default. Letters: N heads of width H.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ikbo_jax.layers import parameters
from ikbo_jax.ops import arguments
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.linear_compression import linear_compression

#: Only `compress` takes a `PaddedWeight`.
Parameters = Mapping[str, Any]
#: A size, which is checked: None is refused like 0.
Size = int | None


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


#: `Spec.axes` of `w_user` and `w_cand`, which are transposed parts of one matrix.
TRANSPOSED = (1, 0)


class Input(NamedTuple):
    """An input of a layer, with the names that the layer's documentation uses.

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
        """The size of axis `size`; raises ValueError if `array` has another rank than `axes`."""
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
            expected_text, actual_text = (
                (f" ({self.letter}={expected})", f", {self.letter}={size}")
                if self.letter
                else ("", "")
            )
            raise ValueError(
                f"{self.layer} expects {self.size}={expected}{expected_text}, "
                f"but {self.name} has shape {array.shape}{actual_text}"
            )


E_USER = Input("LinearCompression", "e_user", "[U, user_rows, N]", "user_rows", "K")
E_CAND = Input("LinearCompression", "e_cand", "[B, cand_rows, N]", "cand_rows", "K")
X_CAND = Input("CandidateAttention", "x_cand", "[B, T, cand_features]", "cand_features")
X_USER = Input("CandidateAttention", "x_user", "[U, S, user_features]", "user_features")
PMA_X = Input("PMA", "x", "[total, in_features]", "in_features")
PFFN_X = Input("PFFN", "x", "[total, features]", "features")
PFFN_MEMORY = Input("PFFN", "memory", "[total_memory, memory_features]", "memory_features")


def check_sizes(layer: str, **sizes: int | None) -> tuple[int, ...]:
    """Returns the sizes; raises ValueError, naming size and value, unless all are integers > 0."""
    checked = []
    for name, size in sizes.items():
        is_integer = hasattr(size, "__index__") and not isinstance(size, bool)
        if size is None or not is_integer or operator.index(size) < 1:
            raise ValueError(f"{layer} needs {name} of at least 1, but {name} is {size!r}")
        checked.append(operator.index(size))
    return tuple(checked)


def _check_offsets(name: str, axis: str, array: jax.Array) -> None:
    """Raises ValueError unless `array` is [axis + 1] int32."""
    if getattr(array, "dtype", None) != "int32":
        raise ValueError(f"{name} must be an int32 array, but is {arguments.describe(array)}")
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} must have shape [{axis} + 1], but has shape {array.shape}")


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


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies [..., features] by [features, N, H]; returns [..., N, H]."""
    return jnp.einsum("...f,fnh->...nh", x, weight)


def projected(
    params: Parameters, x: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The queries of [..., F] and the keys and values of [..., F_memory]: [..., N, H] each."""
    return (
        project(x, params["w_query"]),
        project(memory, params["w_key"]),
        project(memory, params["w_value"]),
    )


def merge_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies [..., N, H] by [N, H, features]; returns [..., features]."""
    return jnp.einsum("...nh,nhf->...f", x, weight, out_sharding=_merged_sharding(x, weight))


def _merged_sharding(x: jax.Array, weight: jax.Array) -> NamedSharding | None:
    """The layout of `merge_heads` where Explicit axes divide heads, which JAX does not choose.

    Rows stay as they are, and the sum over heads is the same on all devices.
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

    Raises:
      ValueError: ranks or sizes disagree.
    """
    parameters.check(E_USER.layer, params, parameters.COMPRESSION)
    E_USER.check(e_user, params["w_user"].shape[1])
    E_CAND.check(e_cand, params["w_cand"].shape[1])
    params, (e_user, e_cand) = _cast(params, (e_user, e_cand), dtype)
    with _precision(precision):
        return linear_compression(params["w_cand"], params["w_user"], e_cand, e_user, cand_to_user)


def attend(
    params: Parameters,
    x_cand: jax.Array,
    x_user: jax.Array,
    cand_to_user: jax.Array,
    *,
    key_value_seq_lengths: jax.Array | None = None,
    indices_are_sorted: bool = False,
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
      indices_are_sorted: whether `cand_to_user` is sorted, as in `ikbo_jax.attention`.

    Returns:
      [B, T, F_out].

    Raises:
      ValueError: ranks or sizes disagree.
    """
    parameters.check(X_CAND.layer, params, parameters.ATTENTION)
    X_CAND.check(x_cand, params["w_query"].shape[0])
    X_USER.check(x_user, params["w_key"].shape[0])
    arguments.check_index("cand_to_user", cand_to_user, "x_cand", "B", x_cand.shape[0])
    if (lengths := key_value_seq_lengths) is not None:
        arguments.check_index("key_value_seq_lengths", lengths, "x_user", "U", x_user.shape[0])
    params, (x_cand, x_user) = _cast(params, (x_cand, x_user), dtype)
    with _precision(precision):
        query, key, value = projected(params, x_cand, x_user)
        out = attention(
            *(query, key, value, cand_to_user),
            key_value_seq_lengths=lengths,
            indices_are_sorted=indices_are_sorted,
        )
        assert isinstance(out, jax.Array)
        return merge_heads(out, params["w_out"])


def pma(
    params: Parameters,
    x: jax.Array,
    cu_seqlens: jax.Array,
    *,
    activation: str | tuple[str, ...] = "softmax",
    output_scale: float = 1.0,
    max_seqlen: int | None = None,
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
      max_seqlen: bound of the lengths, known while tracing; rows beyond it have no effect.

    Returns:
      [batch, num_seeds, F_out].

    Raises:
      ValueError: ranks or sizes disagree, or the activation is unknown.
    """
    parameters.check(PMA_X.layer, params, parameters.PMA)
    PMA_X.check(x, params["w_key"].shape[0])
    _check_offsets("cu_seqlens", "batch", cu_seqlens)
    params, (x,) = _cast(params, (x,), dtype)
    seeds = params["seeds"]
    with _precision(precision):
        out = gdpa(
            *projected(params, seeds, x),
            None,
            cu_seqlens,
            activation=activation,
            scale=params["w_query"].shape[2] ** -0.5,
            output_scale=output_scale,
            broadcast_q=True,
            max_seqlen_kv=max_seqlen,
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

    Raises:
      ValueError: ranks or sizes disagree, or the activation is unknown.
    """
    parameters.check(PFFN_X.layer, params, parameters.ATTENTION)
    PFFN_X.check(x, params["w_query"].shape[0])
    PFFN_MEMORY.check(memory, params["w_key"].shape[0])
    _check_offsets("cu_seqlens", "batch", cu_seqlens)
    _check_offsets("cu_seqlens_memory", "batch_memory", cu_seqlens_memory)
    if x_to_memory is not None:
        batch = cu_seqlens.shape[0] - 1
        arguments.check_index("x_to_memory", x_to_memory, "cu_seqlens", "batch", batch)
    params, (x, memory) = _cast(params, (x, memory), dtype)
    with _precision(precision):
        out = gdpa(
            *projected(params, x, memory),
            cu_seqlens,
            cu_seqlens_memory,
            activation=activation,
            scale=params["w_query"].shape[2] ** -0.5,
            output_scale=output_scale,
            q_to_kv=x_to_memory,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen_memory,
        )
        return merge_heads(out, params["w_out"])


def _cast(
    params: Parameters, arrays: tuple[jax.Array, ...], dtype: Any
) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
    if dtype is None:
        dtype = jnp.result_type(*jax.tree.leaves(list(params.values())), *arrays)
    cast = {name: param.astype(dtype) for name, param in params.items()}
    return cast, tuple(x.astype(dtype) for x in arrays)


def _precision(
    precision: str | jax.lax.Precision | None,
) -> contextlib.AbstractContextManager[Any]:
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(jax.lax.Precision(precision).name.lower())
