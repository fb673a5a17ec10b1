"""The kernel of `gated_linear`, interpreted on a CPU under a race detector."""

import functools
from typing import Any

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.linear.gated_linear import gated_linear_kernel
from ikbo_jax.problems.gated_linear import NO_NORM, GatedLinearConfig, GatedLinearProblem
from ikbo_jax.problems.hopper import WGMMA_M
from ikbo_jax.reference import norm_linear as reference

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Rows, shape of a row of `a`, F, norm, dtype, whether [u, a, u · norm(a)] are multiplied or None
#: without u, whether there are factors and a residual, configuration.
CASES = {
    # A CTA's second tile begins while the first one's last slots are read.
    "by_head": (140, (2, 64), 72, "layer", "bfloat16", True, True, GatedLinearConfig(1, 3, 2)),
    "product": (65, (1, 136), 24, "rms", "float16", False, False, GatedLinearConfig(1, 4, 2)),
    "wide": (2, (1, 200), 136, "layer", "bfloat16", True, False, GatedLinearConfig(3, 5, 3)),
    # Weights that stay in some of the slots, and a shared residual; weights that do not.
    "plain": (192, (1, 136), 72, None, "bfloat16", None, True, GatedLinearConfig(2, 3, 4)),
    "plain_rms": (130, (1, 72), 136, "rms", "float16", None, False, GatedLinearConfig(2, 3, 2)),
}


def check(case: Any) -> None:
    """Runs a case, interpreted or, with False, emulated, and compares it with the reference."""
    rows, row, features, kind, dtype, concat, has_rest, config = case
    (groups, width), columns = row, row[0] * row[1]
    is_plain, shared_rows = concat is None, WGMMA_M if concat is None and has_rest else 0
    sizes = rows, features, (columns,), kind or NO_NORM, dtype, "", groups, concat, False
    problem = GatedLinearProblem(*sizes, is_plain, False, shared_rows)
    assert config.illegal_reason(problem) is None
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    has_factors = has_rest and not is_plain
    vectors = [draw(groups if groups > 1 else columns) if has_factors else None for _ in range(2)]
    arrays = reference.GatedLinear(
        None if is_plain else draw(rows, groups, width),
        draw(rows, groups, width) + 3 * draw(rows, 1, 1),
        *vectors,
        draw((3 if concat else 1) * columns, features) * columns**-0.5,
        draw(rows, features) if has_rest else None,
        None,
        draw(rows // shared_rows, features) if shared_rows else None,
    )
    gate = reference.Gate(reference.Norm(kind, 1e-3), groups, bool(concat))
    kernel = functools.partial(gated_linear_kernel, gate=gate, config=config, num_sms=1)
    found = jax.block_until_ready((jax.jit(kernel) if mosaic.is_interpreted() else kernel)(arrays))
    wanted = reference.gated_linear(gate, arrays)
    problems.assert_within_units(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_gated_linear(name: str, launches: interpreter.Launches) -> None:
    check(CASES[name])
    launches.assert_no_races(1)
