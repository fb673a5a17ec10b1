"""The kernel of `norm_linear`, interpreted on a CPU under a race detector."""

import functools
import math
from typing import Any

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.linear.norm_linear import norm_linear_kernel
from ikbo_jax.problems.norm_linear import NormLinearConfig, NormLinearProblem
from ikbo_jax.reference import norm_linear as reference

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Rows, F, shapes of the groups, norm, dtype, whether there are factors and biases, configuration.
CASES = {
    # The second tile of rows begins while slots of the first one are read; tiles end in a group.
    "layer": (140, 72, ((2, 64), (136,)), "layer", "bfloat16", True, NormLinearConfig(3, 2)),
    "early": (270, 72, ((8,), (24,)), "layer", "bfloat16", True, NormLinearConfig(3, 2, 1, True)),
    "rms_in_parts": (65, 40, ((2, 8), (24,)), "rms", "float16", False, NormLinearConfig(1, 2, 2)),
}


def check(case: Any) -> None:
    """Runs a case, interpreted or emulated, and compares it with the reference."""
    rows, features, shapes, kind, dtype, has_vectors, config = case
    columns = tuple(map(math.prod, shapes))
    problem = NormLinearProblem(rows, features, columns, kind, dtype, "")
    assert config.illegal_reason(problem) is None
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    arrays = reference.NormLinear(
        draw(rows, features) + 3 * draw(rows, 1),
        draw(features) if has_vectors else None,
        draw(features) if has_vectors else None,
        tuple(draw(features, *shape) for shape in shapes),
        tuple(draw(*shape) if has_vectors else None for shape in shapes),
    )
    options = {"norm": reference.Norm(kind, 1e-3), "activations": ("silu", "identity")}
    kernel = functools.partial(
        norm_linear_kernel, **options, has_projection=has_vectors, config=config, num_sms=1
    )
    found = jax.block_until_ready((jax.jit(kernel) if mosaic.is_interpreted() else kernel)(*arrays))
    expected = reference.norm_linear(*options.values(), has_vectors, arrays)
    assert jax.tree.structure(reference.Projected(*found)) == jax.tree.structure(expected)
    jax.tree.map(problems.assert_within_units, reference.Projected(*found), expected)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_norm_linear(name: str, launches: interpreter.Launches) -> None:
    check(CASES[name])
    launches.assert_no_races(1)
