"""The rounding rule itself: which programs it takes for others."""

import pytest
from lookalikes import attention, lookup
from rounding_rule import compared

#: Logits of some hundreds: their rounding in float32 is that of 1e-5 of a weight, and in bfloat16
#: that of a half.
LARGE = "x = L(8 * q)\nx = jnp.where(~(at < 3), jnp.finfo(x.dtype).min, x) * 30\n"
HALF = "x = L(30 * q)\n"
MIXED = "out = mix(softmax(x))"


@pytest.mark.parametrize(
    ("original", "other", "dtype"),
    [
        *(
            (LARGE + MIXED, other, "float32")
            for other in (
                LARGE.replace("* 30", "* (30 + 2**-10)") + MIXED,
                LARGE.replace("8 * q", "(8 * q).astype(bf16).astype(f32)") + MIXED,
                LARGE + "out = mix(softmax(x).astype(bf16).astype(f32))",
                LARGE + "out = mix(softmax(x).astype(f16).astype(f32))",
                LARGE + "out = mix(softmax(x) * (1 + 2**-15))",
                LARGE + "out = mix(softmax(x + lax.stop_gradient(x) * 2**-18))",
            )
        ),
        *(
            (HALF + MIXED, other, "bfloat16")
            for other in (
                HALF.replace("30", "29") + MIXED,
                HALF + "out = mix(softmax(x * 0.98))",
                HALF + "out = mix(softmax(x.astype(jnp.float8_e4m3fn).astype(bf16)))",
                HALF + "out = mix(softmax(x) * 1.1)",
                HALF + "out = mix(by_hand_stopped(x - stop(x) * 0.02))",
            )
        ),
    ],
)
def test_a_coarser_program_is_another_one(original: str, other: str, dtype: str) -> None:
    first, second = attention(original, dtype), attention(other, dtype)
    assert compared(first, first.fn) is None
    assert compared(first, second.fn) is not None


def test_nan_may_only_get_lost_where_a_one_hot_product_spreads_it() -> None:
    nan, none = (f" + jnp.where(jnp.arange(4) == 0, {x}, 0.0)" for x in ("jnp.nan", "1.0"))
    by_one_hot, by_index = "nn.one_hot(i, U, dtype=u.dtype) @ u", "u[i]"
    first, other = lookup(by_one_hot + nan), lookup(by_one_hot + none)
    assert compared(first, other.fn) is None
    assert compared(first, lookup(f"({by_one_hot}) * 1.01{nan}").fn) is not None
    # Not the other way round, and not without such a product.
    assert compared(other, first.fn) is not None
    assert compared(lookup(by_index + nan), lookup(by_index + none).fn) is not None
