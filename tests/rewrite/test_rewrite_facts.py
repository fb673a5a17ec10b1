"""Curves, the proof of activations, and facts about values, each on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from lookalikes import with_slope

from ikbo_jax.reference.activations import ACTIVATIONS, SOFTMAX
from ikbo_jax.rewrite.facts import activations, curves, masks, proofs
from ikbo_jax.rewrite.facts.known import known
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.report.recorder import Recorder


def told(fact, fn, *args, more=()):
    """Returns `fact(context, result, *more)` of the result of `fn`.

    Nothing is known of `args`, which are structs; arrays that `fn` closes over are known.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(fn)(*args)
    found = []

    def run(*args):
        context = Context(Recorder())
        (value,) = context.run(program, program.consts, args)
        found.append(fact(context, value, *more))
        return 0

    jax.make_jaxpr(run)(*args)
    return found[0]


def curve_of(fn, dtype="float32"):
    # Inner functions stand in place then.
    with jax.numpy_dtype_promotion("standard"), jax.disable_jit():
        program = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((), dtype)).jaxpr
    env = {program.invars[0]: curves.logits(jnp.dtype(dtype))}
    for eqn in program.eqns:
        operands = [x.val if isinstance(x, core.Literal) else env[x] for x in eqn.invars]
        if any(isinstance(x, curves.Curve) for x in operands):
            operands = [x if isinstance(x, curves.Curve) else float(x) for x in operands]
            found = curves.then(eqn, operands)
            assert found is not None, eqn
        else:
            found = eqn.primitive.bind(*operands, **eqn.params)
        env[eqn.outvars[0]] = found
    return env[program.outvars[0]]


def match(fn, dtype="float32"):
    return activations.match(curve_of(fn, dtype))


def leaky(slope):
    return lambda x: jnp.where(x >= 0, x, slope * x)


FUNCTIONS = {
    "abs": jnp.abs,
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "div": lambda x: 1 / (1 + x * x),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "integer_pow": lambda x: x**3,
    "log": lambda x: jnp.log(x * x + 1),
    "log1p": lambda x: jnp.log1p(x * x),
    "logistic": jax.nn.sigmoid,
    "max": lambda x: jnp.maximum(x, 0.5),
    "min": lambda x: jnp.minimum(x, 0.5),
    "own": with_slope(jnp.exp, 2.0),
    "select": lambda x: jnp.where(x > 0.5, x * x, -x),
    "sign": lambda x: jnp.sign(x) * x,
    "sqrt": lambda x: jnp.sqrt(x * x + 1),
    "square": jnp.square,
    "stop": lambda x: x * lax.stop_gradient(x),
    "sub": lambda x: 2 - x * x,
    "tanh": jnp.tanh,
    "truth values": lambda x: jnp.where((x > 0.3) & ~(x >= 1) | (x != x), x, 2 * x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_of_a_curve_are_those_of_jax(name: str) -> None:
    fn = FUNCTIONS[name]
    points = np.array([-3.25, -1.0, -0.4, 0.25, 0.5, 0.75, 1.0, 2.5], np.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        values, slopes = jax.jvp(jax.vmap(fn), (points,), (np.ones_like(points),))
    found = curve_of(fn)(points.astype(np.float64))
    np.testing.assert_allclose(found.value, values, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(found.slope, slopes, rtol=2e-6, atol=1e-6)


def test_activations_with_their_scales() -> None:
    assert match(jax.nn.relu) == ("relu", 1.0, 1.0, True)
    assert match(lambda x: jax.nn.relu(-x)) == ("relu", -1.0, 1.0, True)
    assert match(lambda x: -jax.nn.relu(x)) == ("relu", 1.0, -1.0, True)
    assert match(lambda x: jax.nn.relu(2 * x) ** 2 / 4) == ("relu_squared", 1.0, 1.0, True)
    assert match(lambda x: jax.nn.silu(x / -4) * 3) == ("silu", -0.25, 3.0, True)
    assert match(jax.nn.hard_swish) == ("hardswish", 1.0, 1.0, True)
    assert match(lambda x: x * lax.clamp(0.0, x + 3, 6.0) / 6) == ("hardswish", 1.0, 1.0, True)


OTHERS = {
    "a slope that is off by 3e-6": leaky(0.01000003),
    "a cap": lambda x: jnp.minimum(jax.nn.relu(x), 20.0),
    "a threshold": lambda x: jnp.where(x < -40, -1, jax.nn.relu(x)),
    "far below 0": lambda x: jnp.where(
        (x < 0) & (x * x > 1600.0) & (x * x < 1700.0), -1.0, jax.nn.relu(x)
    ),
    "a large threshold": lambda x: jnp.where(x > 1e30, 0, jax.nn.relu(x)),
    "a small threshold": lambda x: jnp.where((x > 0) & (x < 1e-30), 0.0, jax.nn.relu(x)),
    "one point": lambda x: jnp.where(x == 1.2345678, 2.0, jax.nn.relu(x)),
    "one point below 0": lambda x: jnp.where(x == -1.2345678, 2.0, jax.nn.relu(x)),
    "between two numbers": lambda x: jnp.where((x > 1.2345678) & (x < 1.234568), 2, jax.nn.relu(x)),
    "infinity": lambda x: jnp.where(x == jnp.inf, 0, jax.nn.relu(x)),
    "NaN": lambda x: jnp.where(x != x, 0, jax.nn.relu(x)),
    "0": lambda x: jnp.where(x == 0, 1, jax.nn.relu(x)),
    "the end of the dtype": lambda x: jnp.minimum(jax.nn.relu(x), 1e38),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_activation(name: str) -> None:
    assert match(OTHERS[name]) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_activation_in_16_bits(dtype: str) -> None:
    others = [
        lambda x: jnp.where(x < -40, -1, jax.nn.relu(x)),
        lambda x: jnp.where(x < -20, 0.001, jax.nn.relu(x)),
        lambda x: jnp.where(x == 1.5, 1, jax.nn.relu(x)),
        lambda x: jnp.where(x == -1.5, 1, jax.nn.relu(x)),
        leaky(0.011),
    ]
    assert match(jax.nn.relu, dtype) == ("relu", 1.0, 1.0, True)
    for fn in others:
        assert match(lambda x, fn=fn: fn(x).astype(dtype), dtype) is None


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.relu(lax.stop_gradient(x)),
        with_slope(jax.nn.relu, 2.0),
        lambda x: x * lax.stop_gradient(jax.nn.sigmoid(x)),
    ],
)
def test_activations_of_another_slope(fn) -> None:
    found = match(fn)
    assert found is not None
    assert not found.same_slope


def test_every_activation_is_known_to_the_rewrite() -> None:
    assert {*activations.KNOWN, SOFTMAX, "identity"} == set(ACTIVATIONS)


def ints(*shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype)


X = ints(5)
BOUNDS = {
    "clip": (lambda x: jnp.clip(x, 0, 7), (0, 7)),
    "wide cast": (lambda x: jnp.clip(x, 0, 300).astype(jnp.int16), (0, 300)),
    "narrow cast": (lambda x: jnp.clip(x, 0, 300).astype(jnp.int8), None),
    "unsigned cast": (lambda x: jnp.clip(x, -1, 3).astype(jnp.uint8), None),
    "sum": (lambda x: jnp.clip(x, 0, 7) + jnp.clip(x, 1, 2), (1, 9)),
    "sum that wraps around": (lambda x: jnp.clip(x, 0, 2**31 - 2) + jnp.clip(x, 1, 2), None),
    "difference": (lambda x: jnp.clip(x, 0, 7) - jnp.clip(x, 1, 2), (-2, 6)),
    "remainder": (lambda x: lax.rem(jnp.clip(x, 0, 7), jnp.int32(4)), (0, 3)),
    "quotient": (lambda x: lax.div(jnp.clip(x, 0, 7), jnp.int32(2)), (0, 3)),
    "remainder of a negative number": (lambda x: lax.rem(x, jnp.int32(4)), None),
    "choice": (lambda x: jnp.where(x > 2, 5, -3), (-3, 5)),
    "negative index": (
        lambda x: (lambda y: jnp.where(y < 0, y + 8, y))(jnp.clip(x, -8, 7)),
        (0, 7),
    ),
    "too negative": (lambda x: (lambda y: jnp.where(y < 0, y + 8, y))(jnp.clip(x, -9, 7)), (-1, 7)),
    "parts": (lambda x: jnp.concatenate([jnp.clip(x, 0, 2), jnp.clip(x, -4, 1)]), (-4, 2)),
    "positions": (lambda x: jnp.clip(x, 0, 0) + lax.iota(jnp.int32, 5), (0, 4)),
    "positions that wrap around": (lambda x: lax.iota(jnp.int8, 129), None),
    "one side": (lambda x: jnp.maximum(x, 3), (3, 2**63)),
    "running sum": (lambda x: lax.cumsum(jnp.clip(x, 0, 2)), (0, 10)),
    "clamp": (lambda x: lax.clamp(1, x, 7), (1, 7)),
    "clamp to less than the lower bound": (
        lambda x: lax.clamp(np.zeros(5, "int32"), x, jnp.clip(x, 0, 3) - 1),
        (-1, 2),
    ),
    "unknown": (lambda x: x * 2, None),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str) -> None:
    fn, expected = BOUNDS[name]
    assert told(proofs.interval, fn, X) == expected


def test_numbers_are_rounded_as_the_program_rounds_them() -> None:
    seven = jnp.float32(7)
    root = told(proofs.constant, lambda: 1 / jnp.sqrt(seven))
    assert root == np.float32(1) / np.sqrt(np.float32(7))
    third = told(proofs.constant, lambda: (seven / 3).astype(jnp.bfloat16))
    assert third == float(jnp.bfloat16(7 / 3))
    assert told(proofs.constant, lambda: jnp.sin(seven)) is None
    assert told(proofs.constant, lambda y: y + 1, ints()) is None


#: Numbers that the program fixes, and whether they are the same however XLA computes them.
NUMBERS = {
    "integers": (lambda: jnp.arange(6) * 7 - 3, True),
    "integers in float32": (lambda: jnp.arange(6.0) * 3.0 - 1.0, True),
    "halves": (lambda: jnp.arange(6.0) / 2.0 + 0.25, True),
    "multiples of a mask's number": (lambda: (1.0 - jnp.arange(6.0)) * -1e9, True),
    "zero or a mask's number": (lambda: (jnp.arange(6) > 2).astype("float32") * -1e9, True),
    "thirds": (lambda: jnp.arange(6.0) / 3.0, False),
    "tenths": (lambda: jnp.arange(6.0) * 0.1, False),
    "a sum that is rounded": (lambda: jnp.arange(6.0) + 1e8, False),
    "a cast that rounds": (lambda: jnp.arange(300).astype("bfloat16"), False),
    "a cast to 16 bits": (lambda: jnp.arange(200.0).astype("bfloat16"), True),
    "a cast to integers": (lambda: (jnp.arange(6.0) / 2.0).astype("int32"), True),
    "a cast of negative numbers": (lambda: (jnp.arange(6.0) - 3.0).astype("uint8"), False),
    "a cast of large numbers": (lambda: (jnp.arange(6.0) * 1e9).astype("int32"), False),
    "a running sum": (lambda: jnp.cumsum(jnp.arange(6.0)), True),
    "a running sum of halves": (lambda: jnp.cumsum(jnp.arange(6.0) / 2.0), False),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_known_if_nothing_is_rounded(name: str) -> None:
    make, expected = NUMBERS[name]
    found = told(known, make)
    assert (found is not None) == expected
    if expected:
        np.testing.assert_array_equal(np.broadcast_to(found, make().shape), make())


def test_possible_values() -> None:
    kept = ints(2, 3, dtype="bool")
    fills = told(proofs.possible_values, lambda m: jnp.where(m, 0.0, -1e9), kept)
    assert fills == {0.0, float(np.float32(-1e9))}
    bias = told(proofs.possible_values, lambda m: (1 - m.astype("float32")) * -1e4, kept)
    assert bias == {0.0, -1e4}
    assert told(proofs.possible_values, lambda x: x * 2.0, ints(3)) is None


def test_positions_count_up_only_if_they_are_0_1_2() -> None:
    def counts_up(value, dim=0):
        return told(lambda ctx, _: proofs.counts_along(ctx, value, dim), lambda: jnp.ones(()))

    def counted(fn, dim=0):
        return told(proofs.counts_along, fn, more=(dim,))

    assert counts_up(np.arange(5))
    assert counts_up(np.arange(5)[None, :, None], 1)
    assert counts_up(np.broadcast_to(np.arange(5), (3, 5)), 1)
    for other in (np.arange(5)[::-1], 1 + np.arange(5), np.zeros(5), 2 * np.arange(5)):
        assert not counts_up(other)
    assert not counts_up(np.arange(15).reshape(3, 5), 1)
    assert counted(lambda: lax.iota("int32", 5)[None], 1)
    # A reshape after a transpose shuffles them.
    assert not counted(lambda: lax.iota("int32", 6).reshape(2, 3).T.reshape(6))
    for dtype, size, expected in (
        *(("int8", 128, True), ("int8", 129, False), ("uint8", 256, True), ("uint8", 257, False)),
        *(("bfloat16", 257, True), ("bfloat16", 258, False), ("float16", 2049, True)),
    ):
        cast = counted(lambda n=size, d=dtype: lax.iota("int32", n).astype(d))
        assert cast == expected == counted(lambda n=size, d=dtype: lax.iota(d, n))
    assert not counted(lambda: lax.broadcasted_iota("int32", (2, 3), 1).reshape(6))


@pytest.mark.parametrize(
    ("fn", "is_length"),
    [
        (lambda at, n: at < n, True),
        (lambda at, n: n > at, True),
        (lambda at, n: at <= n, True),
        (lambda at, n: n >= at, True),
        (lambda at, n: at > n, False),
        (lambda at, n: n < at, False),
        (lambda at, n: at == n, False),
        (lambda at, n: (at < n) & np.ones((3, 5), bool), True),
        (lambda at, n: (at < n) & np.eye(3, 5, dtype=bool), False),
        (lambda at, n: (at < n) & (at < 2 * n), True),
        (lambda at, n: (at < n) | np.eye(3, 5, dtype=bool), False),
        (lambda at, n: at[:, ::-1] < n, False),
    ],
)
def test_lengths(fn, is_length: bool) -> None:
    at = np.arange(5)[None]
    assert told(masks.keeps_first, lambda n: fn(at, n), ints(3, 1), more=(True, 1)) == is_length
    found = told(masks.keeps_first, lambda n: ~fn(at, n), ints(3, 1), more=(False, 1))
    assert found == is_length


@pytest.mark.parametrize(
    ("fn", "dim", "is_length"),
    [
        (lambda n: np.arange(4)[None] < n[:, None], 1, True),
        (lambda n: np.arange(4)[None] < n[:, None], 0, False),
        (lambda n: np.arange(4)[:, None] < n[None], 1, False),
        (lambda n: (np.arange(4)[:, None] < n[None]).T, 1, True),
        (lambda n: (np.arange(4) < n[:, None]).T, 1, False),
        (lambda n: (np.arange(4) < n[:, None])[:, None], 2, True),
        (lambda n: (np.arange(4) < n[:, None])[:, None], 0, False),
        (lambda n: (np.arange(4) < n[:, None]).reshape(1, 4, 4), 2, True),
        (lambda n: (np.arange(4) < n[:, None]).reshape(1, 4, 4), 1, False),
        (lambda n: np.arange(4)[None] < n[None], 1, False),
    ],
)
def test_lengths_of_as_many_users_as_keys(fn, dim: int, is_length: bool) -> None:
    assert told(masks.keeps_first, fn, ints(4), more=(True, dim)) == is_length
