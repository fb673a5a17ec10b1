"""The kernels of `norm_linear` and `gated_linear`, interpreted on a CPU under a race detector."""

import functools
import math
from collections.abc import Callable
from typing import Any

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.linear.gated_linear import gated_linear_kernel
from ikbo_jax.pallas.linear.norm_linear import norm_linear_kernel
from ikbo_jax.problems.hopper import WGMMA_M
from ikbo_jax.problems.norm_linear import (
    NO_NORM,
    GatedLinearConfig,
    GatedLinearProblem,
    NormLinearConfig,
    NormLinearProblem,
)
from ikbo_jax.reference import norm_linear as reference

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Rows, F, shapes of the groups, norm, dtype, whether there are factors and biases, configuration.
CASES = {
    # The second tile of rows begins while slots of the first one are read; tiles end in a group.
    "layer": (140, 72, ((2, 64), (136,)), "layer", "bfloat16", True, NormLinearConfig(3, 2)),
    "early": (270, 72, ((8,), (24,)), "layer", "bfloat16", True, NormLinearConfig(3, 2, 1, True)),
    "rms_in_parts": (65, 40, ((2, 8), (24,)), "rms", "float16", False, NormLinearConfig(1, 2, 2)),
}
#: Rows, shape of a row of `a`, F, norm, dtype, whether [u, a, u · norm(a)] are multiplied or None
#: without u, whether there are factors and a residual, configuration.
GATED = {
    # A CTA's second tile begins while the first one's last slots are read.
    "by_head": (140, (2, 64), 72, "layer", "bfloat16", True, True, GatedLinearConfig(1, 3, 2)),
    "product": (65, (1, 136), 24, "rms", "float16", False, False, GatedLinearConfig(1, 4, 2)),
    "wide": (2, (1, 200), 136, "layer", "bfloat16", True, False, GatedLinearConfig(3, 5, 3)),
    # Weights that stay in some of the slots, and a shared residual; weights that do not.
    "plain": (192, (1, 136), 72, None, "bfloat16", None, True, GatedLinearConfig(2, 3, 4)),
    "plain_rms": (130, (1, 72), 136, "rms", "float16", None, False, GatedLinearConfig(2, 3, 2)),
}


def norm_linear(case: Any, make: Callable[..., Any]) -> tuple[NormLinearProblem, Any, Any]:
    """The problem, the kernel's options, and arrays that `make` makes of dtypes and shapes."""
    rows, features, shapes, kind, dtype, has_vectors = case
    columns = tuple(map(math.prod, shapes))
    problem = NormLinearProblem(rows, features, columns, kind, dtype, "")
    of = functools.partial(make, dtype)
    arrays = reference.NormLinear(
        of(rows, features),
        *(of(features) if has_vectors else None for _ in range(2)),
        tuple(of(features, *shape) for shape in shapes),
        tuple(of(*shape) if has_vectors else None for shape in shapes),
    )
    activations = ("silu", *("identity",) * (len(shapes) - 1))
    return problem, {"activations": activations, "has_projection": has_vectors}, arrays


def gated_linear(case: Any, make: Callable[..., Any]) -> tuple[GatedLinearProblem, Any, Any]:
    """The problem, the gate but for its norm, and arrays."""
    rows, row, features, kind, dtype, concat, has_rest = case
    (groups, width), columns = row, row[0] * row[1]
    is_plain, shared_rows = concat is None, WGMMA_M if concat is None and has_rest else 0
    sizes = rows, features, (columns,), kind or NO_NORM, dtype, "", groups, concat, False
    of, has_factors = functools.partial(make, dtype), has_rest and not is_plain
    arrays = reference.GatedLinear(
        None if is_plain else of(rows, groups, width),
        of(rows, groups, width),
        *(of(groups if groups > 1 else columns) if has_factors else None for _ in range(2)),
        of((3 if concat else 1) * columns, features),
        of(rows, features) if has_rest else None,
        None,
        of(rows // shared_rows, features) if shared_rows else None,
    )
    problem = GatedLinearProblem(*sizes, is_plain, False, shared_rows)
    return problem, {"groups": groups, "concat": bool(concat)}, arrays


def check(case: Any) -> None:
    """Runs a case, interpreted or emulated, and compares it with the reference."""
    *sizes, config = case
    is_gated = isinstance(config, GatedLinearConfig)
    rng = np.random.default_rng(0)

    def draw(dtype: str, *shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    problem, options, arrays = (gated_linear if is_gated else norm_linear)(sizes, draw)
    assert config.illegal_reason(problem) is None
    norm, sms = reference.Norm(sizes[3], 1e-3), {"config": config, "num_sms": 1}
    if is_gated:
        arrays = arrays._replace(
            a=arrays.a + 3 * draw(sizes[4], len(arrays.a), 1, 1),
            weight=arrays.weight * math.prod(sizes[1]) ** -0.5,
        )
        gate = reference.Gate(norm, **options)
        kernel = functools.partial(gated_linear_kernel, gate=gate, **sms)
        operands, expected = (arrays,), reference.gated_linear(gate, arrays)
    else:
        arrays = arrays._replace(x=arrays.x + 3 * draw(sizes[4], len(arrays.x), 1))
        kernel = functools.partial(norm_linear_kernel, norm=norm, **options, **sms)
        operands = arrays
        expected = tuple(reference.norm_linear(norm, *options.values(), arrays))
    found = jax.block_until_ready(
        (jax.jit(kernel) if mosaic.is_interpreted() else kernel)(*operands)
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(problems.assert_within_units, found, expected)


@pytest.mark.parametrize("case", [*CASES.values(), *GATED.values()], ids=[*CASES, *GATED])
def test_interpreted_norm_linear(case: Any, launches: interpreter.Launches) -> None:
    check(case)
    launches.assert_no_races(1)
