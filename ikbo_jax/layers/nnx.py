"""Layers for Flax NNX: they hold parameters and call `functional`, as in `calls`.

Keyword arguments of every layer:
  dtype: dtype of computation and result; None promotes parameters and inputs.
  precision: precision of f32 products: a name, a `jax.lax.Precision`, or None for JAX's default.
  param_dtype: dtype of the parameters.
  kernel_init: initialises every parameter as a matrix, with the heads side by side; None means
    `default_kernel_init`. If it names axes (`nnx.with_partitioning`), it names the matrix's two
    axes. The parameter's axis N gets the name of the axis with the heads.
  rngs: its stream "params" supplies the keys.

Layers that attend have `num_heads` heads of width `head_dim` and divide scores by √H; `activation`
and `output_scale` are those of `ikbo_jax.gdpa`.

Every layer raises ValueError if a size is not an integer of at least 1. Its parameters are its
attributes, with the names and shapes of the parameters in `functional`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ikbo_jax.layers import calls, parameters

Initializer = Callable[..., Any]
#: Default initialiser. It gets the shape of a matrix, so that the result has the variance of a
#: dense layer.
default_kernel_init = nnx.initializers.lecun_normal()


@dataclasses.dataclass(eq=False, repr=False)
class _Layer(nnx.Module):
    """Holds the keyword arguments of all layers; compares and prints as NNX's modules do."""

    _: dataclasses.KW_ONLY
    dtype: Any = None
    precision: str | jax.lax.Precision | None = None
    param_dtype: dataclasses.InitVar[Any] = jnp.float32
    kernel_init: dataclasses.InitVar[Any] = None
    rngs: dataclasses.InitVar[nnx.Rngs]

    def __post_init__(
        self, param_dtype: Any, kernel_init: Initializer | None, rngs: nnx.Rngs
    ) -> None:
        init = default_kernel_init if kernel_init is None else kernel_init
        values = self._initialised(lambda shape: init(rngs.params(), shape, param_dtype))
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))
        self.names = tuple(values)

    def _initialised(self: Any, init: Callable[..., Any]) -> dict[str, Any]:
        """Makes the parameters by name; `init` makes a matrix of a shape with the next key."""
        made = {}
        sizes = (getattr(self, width.attribute) for width in self.widths)
        for name, spec in self._specs(*sizes).items():
            unboxed = _Unboxed(init)
            made[name] = unboxed.boxed(spec.make(unboxed), spec.axes)
        return made

    def _parameters(self, *inputs: jax.Array) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in self.names}


class _Unboxed(parameters.Unboxed):
    box_type = nnx.VariableMetadata
    value_of = operator.attrgetter("raw_value")

    def boxed(self, value: jax.Array, axes: tuple[int | None, ...]) -> Any:
        if self._box is None:
            return value
        metadata = dict(self._box.metadata)
        for key in ("out_sharding", "sharding_names", "sharding"):
            if metadata.get(key) is not None:
                metadata[key] = parameters.names_of_axes(axes, metadata[key])
        return dataclasses.replace(self._box, raw_value=value, metadata=metadata)


@dataclasses.dataclass(eq=False, repr=False)
class LinearCompression(calls.LinearCompression, _Layer):
    """Compresses the embeddings of every candidate and its user; never copies the user.

        out[b] = w_cand · e_cand[b] + w_user · e_user[cand_to_user[b]]

    Args:
      user_rows: K_user, embedding rows of a user.
      cand_rows: K_cand, embedding rows of a candidate.
      features: M, compressed rows.
      kernel_init: initialises one weight [user_rows + cand_rows, features]; its first `user_rows`
        rows, transposed, are `w_user`, the others `w_cand`.
    """

    user_rows: int
    cand_rows: int
    features: int

    def _initialised(self: Any, init: Callable[..., Any]) -> dict[str, Any]:
        return super()._initialised(functools.cache(init))


@dataclasses.dataclass(eq=False, repr=False)
class LookUp(calls.LookUp, _Layer):
    """Holds a table of rows, of items or of users, and looks rows up by `ikbo_jax.look_up`.

    Args:
      num_rows: rows of the table.
      features: width of a row.
      kernel_init: initialises the transposed table, [features, num_rows].
    """

    num_rows: int
    features: int


@dataclasses.dataclass(eq=False, repr=False)
class CandidateAttention(calls.CandidateAttention, _Layer):
    """Attends from every candidate to its user's rows; projects keys and values once per user.

        out[b] = Attention(x_cand[b] · w_query, x_user[u] · w_key, x_user[u] · w_value) · w_out,
        u = cand_to_user[b]

    Args:
      cand_features: width of the candidates' rows.
      user_features: width of the users' rows.
      out_features: width of the result; None means `cand_features`.
      logit_cap: bound of the scores, as in `ikbo_jax.attention`; None: there is none.
    """

    cand_features: int
    user_features: int
    num_heads: int
    head_dim: int
    out_features: int | None = None


@dataclasses.dataclass(eq=False, repr=False)
class PMA(calls.PMA, _Layer):
    """Pools jagged sequences: a few learned seeds attend to each one, through `ikbo_jax.gdpa`.

    Args:
      in_features: width of the sequences.
      num_seeds: rows that a sequence is pooled to.
      out_features: width of seeds and result; None means `in_features`.
      output_scale: without softmax, results grow with the number of keys; a smaller scale
        compensates.
      logit_cap: bound of the scores, as in `ikbo_jax.gdpa`; None: there is none.

    Source: Lee et al., "Set Transformer", 2019 (pooling by multi-head attention).
    """

    in_features: int
    num_seeds: int
    num_heads: int
    head_dim: int
    out_features: int | None = None


@dataclasses.dataclass(eq=False, repr=False)
class PFFN(calls.PFFN, _Layer):
    """Applies a two-layer net whose weights are projected from a memory, by `ikbo_jax.gdpa`.

        out[i] = output_scale · act(x[i] · w_query · keyᵀ / √H) · value · w_out

    with key = memory · w_key and value = memory · w_value over the memory of row i's sequence.

    Args:
      features: width of the rows and of the result.
      memory_features: width of the memory.
      output_scale: without softmax, results grow with the number of memory rows; a smaller scale
        compensates.
    """

    features: int
    memory_features: int
    num_heads: int
    head_dim: int


@dataclasses.dataclass(eq=False, repr=False)
class HSTU(calls.HSTU, _Layer):
    """Applies a layer of HSTU to jagged sequences, by `ikbo_jax.layers.hstu_layer`.

    Args:
      features: width of the rows and of the result.
      attention_dim: width of a head's queries and keys.
      hidden_dim: width of a head's values, and of u; None means `attention_dim`.
      concat: whether the output is projected from [u, a, u · norm(a)], not from u · norm(a) alone.
      group_norm: whether every head is normalised on its own.

    The other arguments are those of `hstu_layer`. Biases begin as 0, scales of norms as 1.
    """

    features: int
    num_heads: int
    attention_dim: int
    hidden_dim: int | None = None
