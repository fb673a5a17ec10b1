"""What all ops refuse, or log, in the same words, and dtypes that they take in the same way."""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_arguments as of_attention
import test_gdpa_arguments as of_gdpa
import test_linear_compression_arguments as of_compression
from refusals import Refusal, ones

import ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig, GdpaConfig, LinearCompressionConfig


class Op(NamedTuple):
    """A call that takes options and other arrays, and what differs between the ops' refusals.

    Attributes:
      call: the op with arrays that it takes.
      refusals: arrays that it refuses.
      config: a configuration of its kernel.
      configs: the end of the list of configurations that it takes.
      wrong: one of the refusals, of arrays that do not fit the others.
    """

    call: functools.partial[Any]
    refusals: dict[str, Refusal]
    config: Any
    configs: str
    wrong: str


#: An op, its floating-point arrays, the integer arrays behind them, and the result's shape.
Empty = tuple[Callable[..., Any], list[jax.Array], list[np.ndarray], tuple[int, ...]]

ATTEND = functools.partial(ikbo.attention, **of_attention.ARRAYS)
GDPA = functools.partial(ikbo.gdpa, **of_gdpa.ARRAYS)
OPS = {
    "attention": Op(
        ATTEND, of_attention.BAD_ARRAYS, AttentionConfig(), "or a FewQueriesConfig", "query_width"
    ),
    "gdpa": Op(
        GDPA,
        of_gdpa.BAD_ARRAYS,
        GdpaConfig(),
        "config must be a GdpaConfig or a ShortGdpaConfig",
        "query_width",
    ),
    "linear_compression": Op(
        functools.partial(ikbo.linear_compression, **of_compression.ARRAYS),
        of_compression.BAD_ARRAYS,
        LinearCompressionConfig(),
        "or a ResidentCompressionConfig",
        "k_cand",
    ),
}
TERMS = [of_compression.TERM, of_compression.CHILD]
CALLS = {name: op.call for name, op in OPS.items()}
CALLS["multilevel_linear_compression"] = functools.partial(
    ikbo.multilevel_linear_compression, TERMS
)


@pytest.mark.parametrize("implementation", ["triton", "XLA", "", 3, np.ones((2, 2))])
@pytest.mark.parametrize("name", CALLS)
def test_unknown_implementation_lists_the_known(name: str, implementation: Any) -> None:
    message = f"unknown implementation {implementation!r}; known: None, 'mosaic_gpu', 'xla'"
    with pytest.raises(ValueError, match=re.escape(message)):
        CALLS[name](implementation=implementation)


@pytest.mark.parametrize("name", CALLS)
def test_mosaic_gpu_off_hopper(name: str, on_cpu) -> None:
    message = f"{name} with implementation='mosaic_gpu': .* need a Hopper GPU.* is a cpu"
    with pytest.raises(NotImplementedError, match=message):
        CALLS[name](implementation="mosaic_gpu")


@pytest.mark.parametrize("name", CALLS)
def test_fallback_is_logged(name: str, on_cpu, caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="ikbo_jax"):
        jax.eval_shape(CALLS[name])
        jax.eval_shape(functools.partial(CALLS[name], implementation="xla"))
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert f"{name} runs in XLA: the Mosaic GPU kernels need a Hopper" in record.getMessage()


@pytest.mark.parametrize("name", OPS)
def test_config_must_be_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{OPS[name].configs}, but is {{'block_kv': 64}}"):
        OPS[name].call(config={"block_kv": 64})


@pytest.mark.parametrize("name", OPS)
def test_xla_takes_no_config(name: str) -> None:
    config = OPS[name].config
    with pytest.raises(
        ValueError, match=re.escape(f"'xla' takes no config, but config is {config}")
    ):
        OPS[name].call(implementation="xla", config=config)


@pytest.mark.parametrize("name", OPS)
def test_wrong_arguments_win_over_what_the_kernel_cannot_do(name: str) -> None:
    changes, message = OPS[name].refusals[OPS[name].wrong]
    with pytest.raises(ValueError, match=message):
        OPS[name].call(**changes, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, x in OPS.items() for name in x.refusals]
)
def test_bad_array_raises_and_names_both_values(op: str, name: str) -> None:
    changes, message = OPS[op].refusals[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        OPS[op].call(**changes)
    # While tracing, too, where arrays are what is wrong; JAX then knows no float64.
    if name != "f64" and all(hasattr(x, "shape") for x in changes.values()):
        arrays = OPS[op].call.keywords | changes
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(lambda arrays: OPS[op].call(**arrays), arrays)


SCALES = {
    "attention": lambda scale: ATTEND(scale=scale),
    "gdpa": lambda scale: GDPA(scale=scale),
    "gdpa_output": lambda scale: GDPA(output_scale=scale),
}
NO_SCALES = {
    "nan": (float("nan"), "finite number, but is nan"),
    "inf": (float("inf"), "finite number, but is inf"),
    "minus_inf": (-float("inf"), "finite number, but is -inf"),
    "numpy_nan": (np.float32("nan"), "finite number, but is nan"),
    "bool": (True, "known while tracing, but is a bool, True"),
    "numpy_bool": (np.bool_(False), "known while tracing, but is bool[], "),
    "text": ("2", "known while tracing, but is a str, '2'"),
    "bytes": (b"2", "known while tracing, but is a bytes, b'2'"),
    "complex": (1j, "known while tracing, but is a complex"),
    "numpy_complex": (np.complex64(1j), "known while tracing, but is complex64[]"),
    "two_elements": (np.ones(2), "known while tracing, but is float64[2]"),
    "one_element": (np.ones(1, np.float32), "known while tracing, but is float32[1]"),
    "beyond_float32": (1e39, "finite number, but is 1e+39, beyond float32"),
    "just_beyond_float32": (-3.4028236e38, "beyond float32"),
    "float64": (np.float64(1e39), "finite number, but is 1e+39, beyond float32"),
    "beyond_float64": (-(10**400), "finite number, but is -inf"),
}


# The output may have an array of scales, see `test_gdpa_scales`.
@pytest.mark.parametrize(
    ("name", "op"),
    [(n, op) for op in SCALES for n in NO_SCALES if op != "gdpa_output" or "_element" not in n],
)
def test_scale_must_be_a_number_that_float32_holds(name: str, op: str) -> None:
    scale, words = NO_SCALES[name]
    argument = "output_scale" if op == "gdpa_output" else "scale"
    with pytest.raises(ValueError, match=f"^{argument} must be a .*{re.escape(words)}"):
        SCALES[op](scale)


@pytest.mark.parametrize("op", SCALES)
def test_scale_must_be_known_while_tracing(op: str) -> None:
    with pytest.raises(ValueError, match=r"scale .* known while tracing, but is float32\[\]"):
        jax.eval_shape(SCALES[op], jnp.float32(1))


@pytest.mark.parametrize("scale", [2, 0, -0.5, 3.4e38, np.float32(2), np.int32(3), np.ones(())])
def test_scale_may_be_any_other_number(scale: Any) -> None:
    def program(scale: Any) -> str:
        arrays = of_attention.ARRAYS
        return str(jax.make_jaxpr(lambda arrays: ikbo.attention(**arrays, scale=scale))(arrays))

    assert program(scale) == program(float(scale)) != program(7.0)


FLAGS = {
    "indices_are_sorted": lambda value: ATTEND(indices_are_sorted=value),
    "return_residuals": lambda value: ATTEND(return_residuals=value),
    "broadcast_q": lambda value: GDPA(cu_seqlens_q=None, broadcast_q=value),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("False", "a str, 'False'"),
        (2, "an int, 2"),
        (None, "None"),
        (np.ones(2, bool), "bool[2]"),
        ([True], "a list"),
    ],
)
def test_flags_are_bools(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} must be a bool known while tr")) as e:
        FLAGS[name](value)
    assert str(e.value).endswith(f"but is {words}")


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_known_while_tracing(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} must be a bool known while tracing")):
        jax.eval_shape(lambda value: jax.tree.leaves(FLAGS[name](value)), jnp.asarray(True))


@pytest.mark.parametrize("value", [True, np.bool_(True), np.asarray(True), jnp.asarray(True), 1])
def test_flags_may_be_of_any_library(value: Any) -> None:
    shape = jax.eval_shape(lambda: FLAGS["return_residuals"](value))
    assert isinstance(shape, tuple)


@pytest.mark.parametrize("name", OPS)
def test_numpy_arrays_are_welcome(name: str) -> None:
    call = OPS[name].call
    out = call.func(**jax.tree.map(np.asarray, call.keywords))
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(out, call())


INTEGERS = {
    "attention": {"key_value_seq_lengths": np.full(3, 5, np.int32)},
    "gdpa": {"q_to_kv": np.zeros(2, np.int32)},
}


@pytest.mark.parametrize("name", OPS)
def test_integers_have_the_gradient_that_integers_have(name: str) -> None:
    arrays = OPS[name].call.keywords | INTEGERS.get(name, {})

    def total(arrays: dict[str, Any]) -> jax.Array:
        return jnp.sum(OPS[name].call.func(**arrays))

    gradient = jax.eval_shape(jax.grad(total, allow_int=True), arrays)
    dtypes = {gradient[name].dtype for name, x in arrays.items() if x.dtype == jnp.int32}
    assert dtypes == {jax.dtypes.float0}


KEYLESS = ones(3, 0, 2, 8)
WITH_WEAK_TYPES = CALLS | {
    "residuals": functools.partial(ATTEND, return_residuals=True),
    "no_keys": functools.partial(ATTEND, key=KEYLESS, value=KEYLESS, return_residuals=True),
    "merge_attention": functools.partial(
        ikbo.merge_attention, *(of_attention.OUT, of_attention.LSE) * 2
    ),
}


def weak(x: Any) -> Any:
    """An array of a weak type, such as a broadcast Python number, for one of floats."""
    if not isinstance(x, jax.Array) or x.dtype == jnp.int32:
        return x
    array = jnp.broadcast_to(jnp.asarray(0.5), x.shape)
    assert array.weak_type
    return array


@pytest.mark.parametrize("name", WITH_WEAK_TYPES)
def test_results_have_no_weak_type(name: str) -> None:
    """A weak float32 added to a bfloat16 would be a bfloat16."""
    call = WITH_WEAK_TYPES[name]
    args, options = jax.tree.map(weak, (call.args, call.keywords))
    for result in jax.tree.leaves(jax.eval_shape(lambda: call.func(*args, **options))):
        assert result.dtype == jnp.float32
        assert not result.weak_type


def empty_attention(users: int, candidates: int, q_len: int, heads: int) -> Empty:
    query, keys = ones(candidates, q_len, heads, 8), ones(users, 5, 2, 8)
    op = functools.partial(ikbo.attention, return_residuals=True)
    return op, [query, keys, keys], [np.zeros(candidates, np.int32)], query.shape


def empty_gdpa(rows: int, kv_rows: int, heads: int, batch: int) -> Empty:
    query, keys = ones(rows, heads, 8), ones(kv_rows, 2, 8)
    op = functools.partial(ikbo.gdpa, activation="silu")
    return op, [query, keys, keys], [np.zeros(batch + 1, np.int32)] * 2, query.shape


def empty_compression(users: int, candidates: int, m: int, n: int) -> Empty:
    floats = [ones(m, 6), ones(m, 5), ones(candidates, 6, n), ones(users, 5, n)]
    index = np.zeros(candidates, np.int32)
    return ikbo.linear_compression, floats, [index], (candidates, m, n)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        *((empty_attention, x) for x in ((3, 0, 2, 4), (0, 0, 2, 4), (3, 5, 0, 4), (3, 5, 2, 0))),
        *((empty_gdpa, x) for x in ((0, 5, 2, 3), (4, 0, 2, 3), (4, 5, 0, 3), (4, 5, 2, 0))),
        *((empty_compression, x) for x in ((3, 0, 4, 8), (0, 0, 4, 8), (3, 5, 0, 8), (3, 5, 4, 0))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_empty_result(make: Callable[..., Empty], sizes: tuple[int, ...], implementation) -> None:
    """Where no row has candidates or keys, the result and all gradients are zero."""
    op, floats, integers, shape = make(*sizes)

    def run(*floats: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(op(*floats, *integers, implementation=implementation))

    out, *lse = run(*floats)
    assert (out.shape, out.dtype) == (shape, jnp.bfloat16)
    chex.assert_trees_all_equal(out, jnp.zeros(shape, jnp.bfloat16))
    assert [(x.shape, x.dtype) for x in lse] == [(shape[:-1], jnp.float32)] * len(lse)
    gradients = jax.grad(lambda *x: run(*x)[0].sum(), tuple(range(len(floats))))(*floats)
    chex.assert_trees_all_equal(gradients, tuple(map(jnp.zeros_like, floats)))
