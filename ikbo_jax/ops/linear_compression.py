"""Linear compression: padded weights, checks, choice of implementation, vmap rule, gradient."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from ikbo_jax.integers import integer
from ikbo_jax.ops import arguments, dispatch
from ikbo_jax.ops.linear_compression_backward import (
    GRADIENT,
    Arrays,
    CompressionCall,
    choose,
    decomposed_vjp,
    fold,
    problem_of,
)
from ikbo_jax.ops.op import Named, Op, Part, Pulled
from ikbo_jax.ops.partition import Division
from ikbo_jax.ops.sharded import run_kernel
from ikbo_jax.problems import (
    LinearCompressionConfig,
    LinearCompressionProblem,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.problems.packed_compression import WEIGHT_ALIGNMENT
from ikbo_jax.reference import linear_compression as reference

#: A configuration of one of the op's kernels.
AnyConfig = LinearCompressionConfig | PackedCompressionConfig | ResidentCompressionConfig


@dataclasses.dataclass(frozen=True)
class PaddedWeight:
    """A weight [M, K] whose rows are padded with zeros, as the kernel reads them; by `pad_weight`.

    A pytree with the one leaf `rows`. Its gradient is a `PaddedWeight`, too, whose padding is zero:
    an optimiser that leaves a parameter of 0 with a gradient of 0 as it is leaves the padding zero.
    The padding must stay finite, and only zeros are the same on every path.

    Attributes:
      rows: [M, columns], K or more columns.
      k: K.
    """

    rows: jax.Array
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.k

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def weight(self) -> jax.Array:
        """The weight [M, K], without padding."""
        return self.rows[:, : self.k]

    def astype(self, dtype: Any) -> PaddedWeight:
        """Converts the weight to another dtype."""
        if jnp.dtype(dtype) == self.dtype:
            return self
        return pad_weight(self.weight.astype(dtype))


# Unflattening checks nothing, since JAX puts other things than arrays in the leaf's place.
jax.tree_util.register_dataclass(PaddedWeight, data_fields=["rows"], meta_fields=["k"])
jax.export.register_pytree_node_serialization(
    PaddedWeight,
    serialized_name="ikbo_jax.PaddedWeight",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def pad_weight(weight: jax.Array | PaddedWeight) -> PaddedWeight:
    """Pads the rows of a weight of linear compression to multiples of 128 bytes.

    Tensor Memory Access reads no rows of, say, K = 866 bfloat16 values, so the kernel of
    `linear_compression` and `multilevel_linear_compression` copies such weights in every call. Both
    functions take a `PaddedWeight` in place of a weight and return the same bits:

        layer = {name: ikbo_jax.pad_weight(w) for name, w in layer.items()}  # once

    Args:
      weight: [M, K], bfloat16, float16 or float32; a `PaddedWeight` is returned as it is.

    Raises:
      ValueError: the weight has another rank or dtype, or no values.
    """
    if isinstance(weight, PaddedWeight):
        return weight
    arguments.check_runnable("pad_weight", weight)
    arguments.check_array("weight", weight, "[M, K]")
    k, multiple = weight.shape[1], WEIGHT_ALIGNMENT // weight.dtype.itemsize
    return PaddedWeight(pad_columns(weight, -(-k // multiple) * multiple), k)


def pad_columns(weight: jax.Array, columns: int) -> jax.Array:
    """Adds columns of zeros to a matrix."""
    missing = columns - weight.shape[1]
    return jnp.pad(weight, ((0, 0), (0, missing))) if missing else weight


class Term(NamedTuple):
    """One level of a multi-level linear compression.

    Attributes:
      weight: [M, K], bfloat16, float16 or float32; or such a weight from `pad_weight`.
      embedding: [B, K, N] in the same dtype: batch B of this level, K rows, embedding width N.
      parent: [B] int32, for each batch entry the index of its entry in the preceding, coarser term,
        in any order; None for the first, coarsest term.
    """

    weight: jax.Array | PaddedWeight
    embedding: jax.Array
    parent: jax.Array | None = None


jax.export.register_namedtuple_serialization(Term, serialized_name="ikbo_jax.Term")


def linear_compression(
    w_cand: jax.Array | PaddedWeight,
    w_user: jax.Array | PaddedWeight,
    e_cand: jax.Array,
    e_user: jax.Array,
    cand_to_user: jax.Array,
    *,
    implementation: str | None = None,
    config: AnyConfig | None = None,
) -> jax.Array:
    """Compresses the embeddings of every candidate and its user; never copies the user.

        out[b] = w_cand · e_cand[b] + w_user · e_user[cand_to_user[b]]

    Args:
      w_cand: [M, K_cand], bfloat16, float16 or float32; or such a weight from `pad_weight`, which
        saves the kernel's copy of it in every call.
      w_user: [M, K_user], same dtype; likewise.
      e_cand: [B, K_cand, N], same dtype; B candidates, B may be 0.
      e_user: [U, K_user, N], same dtype; U users, at least 1 if B > 0.
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order; a user
        may have no candidates. Values outside the range are clamped to it, so nothing is read
        outside `e_user`; `ikbo_jax.debug.check_index` finds them.
      implementation: None takes the fastest that can run these sizes on the default device, or,
        without a GPU, where the program is lowered for (`ikbo_jax.export_target`); "mosaic_gpu"
        (Hopper; bfloat16 and float16) or "xla" take that one or raise.
      config: configuration of the "mosaic_gpu" kernel; None takes it from the dispatch table. A
        `PackedCompressionConfig` selects the kernel whose tiles span candidates, and a
        `ResidentCompressionConfig` the kernel whose CTAs keep their weights.

    Returns:
      [B, M, N] in the inputs' dtype. Both products are accumulated and added in f32, and the sum is
      rounded once; f32 products on the "xla" path follow `jax.default_matmul_precision`.

      Differentiable in reverse mode with respect to the four floating-point arrays, at user and
      candidate batch size. With "mosaic_gpu", kernels compute the gradients, and round the sum over
      a user's candidates and the gradient; with "xla", each gradient is rounded once. XLA computes
      second derivatives. The gradient of a padded weight is one whose padding is zero.

    Raises:
      ValueError: a rank is wrong; sizes, dtypes or the index disagree; U = 0 with B > 0;
        `implementation` is unknown; `config` is of none of the kernels' classes, or
        `implementation` is "xla" and `config` not None.
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run on this device, or
        with these sizes, this dtype or this `config`; forward-mode differentiation. The message
        says why.

    Source: Meta IKBO, "linear compression embedding", published by Meta on the PyTorch blog.
    """
    terms = (Term(w_user, e_user), Term(w_cand, e_cand, cand_to_user))
    names = (
        _Names("w_user", "e_user", "the users' index", "K_user", "U"),
        _Names("w_cand", "e_cand", "cand_to_user", "K_cand"),
    )
    return _compress("linear_compression", terms, names, implementation, config)


def multilevel_linear_compression(
    terms: Sequence[Term], *, implementation: str | None = None, config: AnyConfig | None = None
) -> jax.Array:
    """Compresses embeddings of several levels (user, candidate, ...), each at its own batch.

        out[b] = Σ_l terms[l].weight · terms[l].embedding[a_l(b)]

    where a_l(b) is the ancestor of entry b in level l, found by following `parent` from fine to
    coarse.

    Args:
      terms: at least one `Term`, coarsest first: weights [M, K_l] (`pad_weight` saves their copy in
        every call), embeddings [B_l, K_l, N] of one dtype, and from the second term on `parent`
        [B_l] int32 with values in [0, B_{l-1}), clamped to that range. B_{l-1} = 0 requires
        B_l = 0.
      implementation: as in `linear_compression`.
      config: likewise.

    Returns:
      [B_last, M, N] in the inputs' dtype. All products are accumulated and added in f32, and the
      sum is rounded once. Differentiable in reverse mode with respect to every weight and
      embedding.

    Raises:
      ValueError: `terms` is empty; a rank, size, dtype or parent is wrong; the first term has a
        parent or a later term has none; a level is empty but a finer one is not; or of
        `implementation` and `config` as for `linear_compression`.
      NotImplementedError: as for `linear_compression`.

    Source: as of `linear_compression`; levels generalise that publication's user and candidate.
    """
    if isinstance(terms, Term) or not isinstance(terms, Iterable):
        raise ValueError(
            f"terms must be a sequence of Term, coarsest level first, but is "
            f"{'one Term' if isinstance(terms, Term) else arguments.describe(terms)}"
        )
    terms = tuple(terms)
    if not terms:
        raise ValueError("terms must hold at least 1 Term, but holds 0")
    for level, term in enumerate(terms):
        if not isinstance(term, Term):
            raise ValueError(
                f"terms[{level}] must be a Term, but is {arguments.describe(term)}: a level's "
                "weight [M, K], embedding [B, K, N], and parent [B] (int32; None in terms[0])"
            )
    names = tuple(
        _Names(*(f"terms[{level}].{field}" for field in Term._fields))
        for level in range(len(terms))
    )
    return _compress("multilevel_linear_compression", terms, names, implementation, config)


class _Names(NamedTuple):
    """Names of a `Term`'s arrays and axes in error messages."""

    weight: str
    embedding: str
    parent: str
    k: str = "K"
    batch: str = "B"


def _compress(
    op: str,
    terms: tuple[Term, ...],
    names: tuple[_Names, ...],
    implementation: str | None,
    config: AnyConfig | None,
) -> jax.Array:
    kinds = (LinearCompressionConfig, PackedCompressionConfig, ResidentCompressionConfig)
    request = arguments.request(op, implementation, config, terms, *kinds)
    _check(terms, names)
    weights, embeddings, parents = zip(*terms, strict=True)
    rows = tuple(w.rows if isinstance(w, PaddedWeight) else w for w in weights)
    arrays, call = Arrays(rows, embeddings, parents), CompressionCall(request)
    shape = (embeddings[-1].shape[0], weights[-1].shape[0], embeddings[-1].shape[2])
    return _OP.planned(call, arrays, shape, embeddings[-1].dtype)


def _check(terms: tuple[Term, ...], names: tuple[_Names, ...]) -> None:
    """Raises ValueError, quoting both conflicting values, unless the terms agree."""
    (first, *_), (first_name, *_) = terms, names
    like = first_name.weight, first.weight
    for term, name in zip(terms, names, strict=True):
        weight = term.weight
        matrix = weight.rows if isinstance(weight, PaddedWeight) else weight
        arguments.check_array(name.weight, matrix, f"[M, {name.k}]", like)
        if isinstance(weight, PaddedWeight):
            k = integer(f"k of {name.weight}", weight.k)
            if matrix.shape[1] < k:
                raise ValueError(f"{name.weight} has K={k} but rows of shape {matrix.shape}")
        arguments.check_array(name.embedding, term.embedding, f"[{name.batch}, {name.k}, N]", like)
    for term, name in zip(terms, names, strict=True):
        (m, k), (_, k_embedding, n) = term.weight.shape, term.embedding.shape
        for size, a_name, a, b_name, b in (
            ("K", name.weight, k, name.embedding, k_embedding),
            ("M", first_name.weight, first.weight.shape[0], name.weight, m),
            ("N", first_name.embedding, first.embedding.shape[2], name.embedding, n),
        ):
            if a != b:
                raise ValueError(f"{a_name} has {size}={a} but {b_name} has {size}={b}")
    if first.parent is not None:
        raise ValueError(
            f"{first_name.parent} must be None, but is {arguments.describe(first.parent)}"
        )
    for coarser, term, coarser_name, name in zip(
        terms[:-1], terms[1:], names[:-1], names[1:], strict=True
    ):
        rows, coarser_rows = term.embedding.shape[0], coarser.embedding.shape[0]
        arguments.check_index(name.parent, term.parent, name.embedding, "B", rows)
        if rows and not coarser_rows:
            raise ValueError(
                f"{coarser_name.embedding} has no rows, shape {coarser.embedding.shape}, "
                f"but {name.embedding} has B={rows}"
            )


_Part = Part[CompressionCall, Arrays, jax.Array]


class _LinearCompression(Op[CompressionCall, Arrays, jax.Array]):
    name = "_linear_compression"
    by_kernels = "mosaic_gpu, at user and candidate batch size"
    choose_gradient = staticmethod(choose)

    def problem(self, call: CompressionCall, arrays: Arrays) -> LinearCompressionProblem:
        del call
        return problem_of(arrays)

    def run(self, call: CompressionCall, plan: dispatch.Plan, arrays: Arrays) -> jax.Array:
        if plan.implementation == "xla":
            return dispatch.record(reference.decomposed(*_without_padding(arrays)), plan)
        # Imported here because Mosaic GPU takes 0.3 s to import.
        from ikbo_jax.pallas.linear_compression import kernel

        launch = functools.partial(
            kernel.linear_compression_kernel, config=plan.config, num_sms=call.request.num_sms
        )
        out = run_kernel(launch, *arrays)
        return dispatch.record(out, plan)

    def fold(
        self, call: CompressionCall, size: int, batched: Arrays, arrays: Arrays
    ) -> tuple[CompressionCall, Arrays] | None:
        """Concatenates the batches of problems with the same weights.

        Returns None if weights are batched, or if that would copy embeddings that are shared.
        """
        # A level needs separate batch entries for every problem if its arrays are batched, or if
        # the level that its parents point into needs them.
        folded: list[bool] = []
        for level_batched in zip(batched.embeddings, batched.parents, strict=True):
            folded.append(any(level_batched) or (bool(folded) and folded[-1]))
        if any(batched.weights) or folded != list(batched.embeddings):
            return None
        return call, fold(size, folded, arrays)

    def named(self, call: CompressionCall, arrays: Arrays) -> Named:
        # Level by level, coarsest first: its rows of K and its batch; "b" is the last one's batch.
        levels = range(len(arrays.weights))
        batches = [f"u{level}" for level in levels[:-1]] + ["b"]
        # A padded weight has other columns than its embedding has rows.
        weights = tuple(
            f"m k{level}" if weight.shape[1] == embedding.shape[1] else f"m padded{level}"
            for level, (weight, embedding) in enumerate(
                zip(arrays.weights, arrays.embeddings, strict=True)
            )
        )
        embeddings = tuple(f"{batches[level]} k{level} n" for level in levels)
        names = Arrays._make((weights, embeddings, (None, *batches[1:])))
        return Named(names, "b m n", {"b": "candidates", "m": "M"})

    def part(self, call: CompressionCall, arrays: Arrays, division: Division) -> _Part:
        return Part(dataclasses.replace(call, is_m_divided=bool(division.axes_of("m"))), arrays)

    def vjp(
        self, call: CompressionCall, plan: dispatch.Plan, of: Pulled[Arrays, jax.Array]
    ) -> Arrays:
        arrays = _without_padding(of.arrays)
        if plan.backward_config is not None:
            of_gradient = self.of_gradient(call, plan, of)
            weights, embeddings = GRADIENT.differentiable(of_gradient, (arrays, of.cotangents))
        else:
            weights, embeddings = decomposed_vjp(call.request, arrays, of.cotangents, of.dtype)
        pairs = zip(weights, of.arrays.weights, strict=True)
        padded = tuple(pad_columns(w, like.shape[1]) for w, like in pairs)
        return Arrays(padded, embeddings, (None,) * len(arrays.parents))


def _without_padding(arrays: Arrays) -> Arrays:
    """Replaces padded weights by weights [M, K]."""
    pairs = zip(arrays.weights, arrays.embeddings, strict=True)
    return arrays._replace(
        weights=tuple(
            w if w.shape[1] == e.shape[1] else jax.lax.slice_in_dim(w, 0, e.shape[1], axis=1)
            for w, e in pairs
        )
    )


_OP = _LinearCompression()
