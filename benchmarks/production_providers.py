"""What a user has besides this library, for every workload of `production_draws`.

A provider is a function of arrays on the device. What a data pipeline can do beforehand stands
before the timing: a layout in which a user's queries are contiguous, padded sequences, padded
widths. What depends on the model's parameters or on the request's copies is inside.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from benchmarks.production_draws import AttentionShape, CompressionShape, GdpaShape, Shape, normal
from benchmarks.ranking_by_hand import fold_by_user, move
from benchmarks.records import OUR_NAME
from ikbo_jax.cases import gdpa
from ikbo_jax.cases.attention import materialised_cudnn
from ikbo_jax.problems import GdpaProblem

#: Largest number of bytes of the copies for all candidates; larger ones are left out.
MAX_COPIES = 8 * 2**30
#: Largest error relative to the largest value: a few roundings of bfloat16.
TOLERANCE = 2.0**-6
#: The least and the largest tolerance of gradients that are added in bfloat16, one by one.
ADDED_TOLERANCES = 2.0**-3, 2.0**-2
#: Widths of embeddings are padded by hand to a multiple of this many elements: 16 bytes.
ALIGNMENT = 8
#: Results of a provider, each in the shape of this library's result.
Results = tuple[jax.Array, ...]


class Contender(NamedTuple):
    """One implementation; `stage` describes it.

    `fn` is a function of `args`, for which gradients are taken, and of `integers`: as constants,
    XLA would sort indices while it compiles. `finish` and `finish_gradients` convert results to the
    shapes of this library's. With `is_xla`, XLA chooses the GEMMs, which takes most of the time of
    compiling a point. `gradient_tolerance` is relative to a gradient's largest value. `other` names
    what another function computes, whose results are not compared.
    """

    name: str
    stage: str
    fn: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]
    integers: tuple[jax.Array | None, ...] = ()
    finish: Callable[[jax.Array], jax.Array] = lambda out: out
    finish_gradients: Callable[[Results], Results] = lambda gradients: gradients
    other: str = ""
    gradient_tolerance: float = TOLERANCE
    is_xla: bool = False


#: Moves rows: all arrays of rows [rows, N, H] to sequences [batch, longest, N, H], or back.
Move = Callable[[jax.Array], jax.Array]


def padding(offsets: jax.Array, total: int, longest: int) -> tuple[Move, Move]:
    """Makes functions that pad the sequences at `offsets` of `total` rows, and the reverse.

    Both are gathers, and so are their derivatives. As many rows as slots: nothing moves.
    """
    batch = offsets.size - 1
    if total == batch * longest:
        return (
            lambda x: x.reshape(batch, longest, *x.shape[1:]),
            lambda x: x.reshape(total, *x.shape[2:]),
        )
    column = jnp.arange(longest, dtype=jnp.int32)
    is_row = column[None] < (offsets[1:] - offsets[:-1])[:, None]
    # The row of every slot [batch · longest], and the slot of every row [total].
    number = jnp.arange(batch * longest, dtype=jnp.int32)
    rows = jnp.where(is_row, offsets[:-1, None] + column[None], 0).reshape(-1)
    # Slots without a row have different numbers, too: they are declared to be unique.
    rows = jnp.where(is_row.reshape(-1), rows, total + number)
    slots = jnp.full(total, batch * longest, jnp.int32)
    slots = slots.at[rows].set(number, unique_indices=True, mode="drop")

    def pad(x: jax.Array) -> jax.Array:
        return move(x, rows, slots, 0.0).reshape(batch, longest, *x.shape[1:])

    def unpad(x: jax.Array) -> jax.Array:
        return move(x.reshape(-1, *x.shape[2:]), slots, rows, 0.0)

    return pad, unpad


def cudnn() -> Callable[..., jax.Array]:
    """Returns `jax.nn.dot_product_attention` by cuDNN; raises NotImplementedError without it."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"cuDNN needs a GPU, but this is a {jax.default_backend()}")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def softmax() -> Callable[..., jax.Array]:
    """Returns cuDNN's softmax attention, of query, key and value and of both lengths or none."""
    by_cudnn = cudnn()

    def attend(query: Any, key: Any, value: Any, *lengths: Any) -> jax.Array:
        names = ("query_seq_lengths", "key_value_seq_lengths")[: len(lengths)]
        with jax.numpy_dtype_promotion("standard"):
            found: jax.Array = by_cudnn(query, key, value, **dict(zip(names, lengths, strict=True)))
        return found

    return attend


def padded(
    attend: Callable[..., jax.Array], longest_q: int, longest_kv: int
) -> Callable[..., jax.Array]:
    """Makes attention between jagged sequences of `attend`, of padded ones.

    It takes query, key and value [rows, N, H], and the offsets of queries, None if all sequences
    have the same queries, and of keys. `attend` also gets the lengths, unless all rows count.
    """

    def run(query: Any, key: Any, value: Any, cu_q: Any, cu_kv: Any, *_: Any) -> jax.Array:
        pad, unpad = padding(cu_kv, key.shape[0], longest_kv)
        arrays = pad(key), pad(value)
        lengths, batch = cu_kv[1:] - cu_kv[:-1], cu_kv.size - 1
        is_full = key.shape[0] == batch * longest_kv
        if cu_q is None:
            every = jnp.full_like(lengths, longest_q)
            query = jnp.broadcast_to(query, (batch, *query.shape))
            out = attend(query, *arrays, *(() if is_full else (every, lengths)))
            return out.reshape(-1, *out.shape[2:])
        is_full = is_full and query.shape[0] == batch * longest_q
        both = () if is_full else (cu_q[1:] - cu_q[:-1], lengths)
        pad, unpad = padding(cu_q, query.shape[0], longest_q)
        return unpad(attend(pad(query), *arrays, *both))

    return run


def _added_tolerance(cand_to_user: np.ndarray) -> float:
    """Computes the tolerance of gradients that are added in bfloat16, a rounding for a candidate.

    Independent errors of n roundings grow with the root of n.
    """
    least, largest = ADDED_TOLERANCES
    return min(max(TOLERANCE * float(np.bincount(cand_to_user).max()) ** 0.5, least), largest)


def _limit(size: int, words: str) -> None:
    if size > MAX_COPIES:
        raise NotImplementedError(f"{words} {size / 2**30:.1f} GiB")


def attend(
    query: Any, key: Any, value: Any, index: Any, lengths: Any = None, **options: Any
) -> jax.Array:
    """Calls `ikbo_jax.attention` with users' lengths, or None."""
    out = ikbo_jax.attention(query, key, value, index, key_value_seq_lengths=lengths, **options)
    assert isinstance(out, jax.Array)
    return out


def _grouped(
    name: str,
    stage: str,
    shape: AttentionShape,
    args: tuple[jax.Array, jax.Array, jax.Array],
    slots: int,
    keys: int,
    lengths: jax.Array | None,
) -> Contender:
    """Makes cuDNN's attention over queries that were grouped by user before.

    A user has room for the queries of `slots` candidates and for `keys` keys, of which the first
    `lengths` count; None: all.
    """
    query, key, value = args
    attend = cudnn()
    fold = fold_by_user(jnp.asarray(shape.cand_to_user), shape.users, slots)
    folded = jax.jit(fold.fold)(query)
    pad = ((0, 0), (0, keys - shape.kv_len), (0, 0), (0, 0))

    def run(query: Any, key: Any, value: Any, lengths: Any = None) -> jax.Array:
        return attend(query, key, value, key_value_seq_lengths=lengths)

    return Contender(
        name,
        stage,
        run,
        (folded, jnp.pad(key, pad), jnp.pad(value, pad)),
        () if lengths is None else (lengths,),
        fold.unfold,
        lambda found: (fold.unfold(found[0]), *(g[:, : shape.kv_len] for g in found[1:])),
    )


def _attention(shape: AttentionShape, is_drawn: bool) -> Iterator[Callable[[], Contender]]:
    s = shape
    query, key, value, index, seq_lengths = s.inputs()
    args = query, key, value
    lengths = jnp.asarray(s.lengths)
    integers = (index, lengths) if s.has_lengths else (index,)

    def op(implementation: str | None) -> Callable[..., jax.Array]:
        return functools.partial(
            attend, indices_are_sorted=s.is_sorted, implementation=implementation
        )

    most = int(np.bincount(s.cand_to_user, minlength=s.users).max())

    def grouped_cudnn() -> Contender:
        stage = "queries grouped by hand before, cuDNN"
        return _grouped("grouped-cudnn", stage, s, args, most, s.kv_len, seq_lengths)

    def grouped_cudnn_even() -> Contender:
        # cuDNN has no gradients for odd numbers of keys.
        if s.kv_len % 2 == 0:
            raise NotImplementedError("S is even, so this is the same program as grouped-cudnn")
        stage = "queries grouped and keys padded by hand before, to even numbers, cuDNN"
        even = most + most % 2, s.kv_len + 1
        return _grouped("grouped-cudnn-even", stage, s, args, *even, lengths)

    def copies_cudnn() -> Contender:
        cudnn()
        if is_drawn:
            _limit(2 * key[:1].nbytes * s.batch, "copies of")

        def run(*arrays: Any) -> jax.Array:
            return materialised_cudnn(*arrays, *((None,) if seq_lengths is None else ()))

        stage = "keys and values copied, then cuDNN"
        tolerance = _added_tolerance(s.cand_to_user)
        return Contender("copies-cudnn", stage, run, args, integers, gradient_tolerance=tolerance)

    def xla() -> Contender:
        return Contender("xla", "implementation='xla'", op("xla"), args, integers, is_xla=True)

    yield lambda: Contender(OUR_NAME, "ikbo_jax.attention", op(None), args, integers)
    yield xla
    yield grouped_cudnn
    yield grouped_cudnn_even
    yield copies_cudnn


def _linear_compression(shape: CompressionShape) -> Iterator[Callable[[], Contender]]:
    *arrays, index = shape.inputs().arguments
    args, integers, p = tuple(arrays), (index,), shape.problem

    def op(implementation: str | None) -> Callable[..., jax.Array]:
        return functools.partial(ikbo_jax.linear_compression, implementation=implementation)

    # XLA adds users' gradients of these programs in bfloat16.
    plain_xla = functools.partial(
        Contender, is_xla=True, gradient_tolerance=_added_tolerance(np.asarray(index))
    )

    def by_hand(*arrays: jax.Array) -> jax.Array:
        w_cand, w_user, e_cand, e_user, parents = arrays
        of_user = jnp.einsum("mk,ukn->umn", w_user, e_user)
        return jnp.einsum("mk,bkn->bmn", w_cand, e_cand) + of_user[parents]

    def xla_padded() -> Contender:
        def pad(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, -x.shape[1] % ALIGNMENT)) + ((0, 0),) * (x.ndim - 2))

        def cut(gradients: Results) -> Results:
            return tuple(g[:, : x.shape[1]] for g, x in zip(gradients, args, strict=True))

        if not any(k % ALIGNMENT for k in p.ks):
            raise NotImplementedError(
                f"K is a multiple of {ALIGNMENT}, so this is the same program as xla-by-hand"
            )
        stage = f"in XLA, K padded by hand before to a multiple of {ALIGNMENT}"
        padded_args = tuple(map(pad, args))
        return plain_xla("xla-padded", stage, by_hand, padded_args, integers, finish_gradients=cut)

    def copies() -> Contender:
        _limit(p.batches[-1] * sum(p.ks) * p.n * 2, "copies of")

        def run(*arrays: jax.Array) -> jax.Array:
            w_cand, w_user, e_cand, e_user, parents = arrays
            weight = jnp.concatenate((w_cand, w_user), axis=1)
            return jnp.matmul(weight, jnp.concatenate((e_cand, e_user[parents]), axis=1))

        return plain_xla("copies", "users copied, then one product", run, args, integers)

    def xla_by_hand() -> Contender:
        return plain_xla("xla-by-hand", "two products and a sum, in XLA", by_hand, args, integers)

    yield lambda: Contender(OUR_NAME, "ikbo_jax.linear_compression", op(None), args, integers)
    yield lambda: Contender("xla", "implementation='xla'", op("xla"), args, integers, is_xla=True)
    yield xla_padded
    yield xla_by_hand
    yield copies


def gdpa_of(case: gdpa.Case, implementation: str | None) -> Callable[..., jax.Array]:
    """Returns `ikbo_jax.gdpa` with the settings of a case; takes the fields of its inputs."""
    options = case.settings.options | {"implementation": implementation}
    return lambda *arrays: ikbo_jax.gdpa(*arrays[:5], q_to_kv=arrays[5], **options)


def _gdpa(shape: GdpaShape) -> Iterator[Callable[[], Contender]]:
    s = shape
    queries, keys = s.numbers
    cu_q, cu_kv = (
        jnp.asarray(np.concatenate([[0], np.cumsum(x)]), jnp.int32) for x in (queries, keys)
    )
    q_rows = s.longest if s.is_broadcast else int(queries.sum())
    rows = (q_rows, int(keys.sum()), int(keys.sum()))
    args = tuple(normal(i, (n, s.heads, s.head_dim), s.dtype) for i, n in enumerate(rows))
    integers = None if s.is_broadcast else cu_q, cu_kv, None
    problem = GdpaProblem(
        *(s.batch, s.batch, int(queries.sum()), int(keys.sum()), s.heads, s.heads, s.head_dim),
        *(s.dtype, (s.activation,), "tanh" if s.activation in ("gelu_tanh", "silu") else None),
        *(s.is_broadcast, int(queries.max()), int(keys.max())),
    )
    op = functools.partial(gdpa_of, gdpa.Case(problem))

    def cudnn_softmax() -> Contender:
        attend = cudnn()
        longest = int(queries.max()), int(keys.max())
        _limit(s.batch * sum(longest) * s.heads * s.head_dim * 4, "padded to")
        numbers = tuple(jnp.asarray(x, jnp.int32) for x in (queries, keys))
        (pad_q, unpad_q), (pad, unpad) = (
            padding(cu, int(x.sum()), most)
            for cu, x, most in zip((cu_q, cu_kv), (queries, keys), longest, strict=True)
        )
        query, key, value = args
        of_all = (s.batch, *query.shape)
        query = jnp.broadcast_to(query, of_all) if s.is_broadcast else pad_q(query)

        def run(query: Any, key: Any, value: Any, *numbers: Any) -> jax.Array:
            q, kv = numbers
            return attend(query, key, value, query_seq_lengths=q, key_value_seq_lengths=kv)

        def finish_gradients(gradients: Results) -> Results:
            of_query = gradients[0].sum(0) if s.is_broadcast else unpad_q(gradients[0])
            return (of_query, *map(unpad, gradients[1:]))

        return Contender(
            "cudnn-softmax",
            "softmax attention by cuDNN, sequences padded before",
            run,
            (query, pad(key), pad(value)),
            numbers,
            unpad_q,
            finish_gradients,
            other="" if s.activation == "softmax" else "softmax",
        )

    yield lambda: Contender(OUR_NAME, "ikbo_jax.gdpa", op(None), args, integers)
    yield lambda: Contender("xla", "implementation='xla'", op("xla"), args, integers, is_xla=True)
    yield cudnn_softmax


def contenders(shape: Shape, *, is_drawn: bool = True) -> list[Callable[[], Contender]]:
    """Returns makers of this library's contender, which is the first, and of the alternatives.

    The second is the XLA path, and the others follow in the order of how likely each is to be the
    fastest. A maker has the contender's name, with underscores, and raises NotImplementedError with
    the reason if its contender cannot run here.
    A sweep over sizes of attention, which are not drawn, also has large copies.
    """
    if isinstance(shape, AttentionShape):
        return list(_attention(shape, is_drawn))
    if isinstance(shape, CompressionShape):
        return list(_linear_compression(shape))
    return list(_gdpa(shape))
