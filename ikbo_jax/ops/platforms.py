"""One computation in two forms: one for programs that are lowered for CUDA, one for all others.

Which one runs is decided while JAX lowers the program, since only then the platform is known:
`jax.export` traces a function once for several platforms. The form for CUDA is also traced then,
so that a program that is never lowered for CUDA does not trace kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ikbo_jax.ops.settings import as_now

# A computation: the jaxpr `elsewhere`, and the function `on_cuda` of the same arrays, with results
# of the same shapes and dtypes. If `refusal` is not empty, lowering `elsewhere` raises.
by_platform_p = Primitive("ikbo_by_platform")
by_platform_p.multiple_results = True
# JAX 0.12 would ask for a rule where `elsewhere` has what it lowers in two steps. `mlir.lower_fun`
# traces the form again, and takes both.
by_platform_p.is_high = lambda *_, **__: False  # type: ignore[method-assign]


def by_platform(
    elsewhere: Callable[[Any], Any], on_cuda: Callable[[Any], Any], operands: Any, refusal: str = ""
) -> Any:
    """Runs `on_cuda(operands)` in a program for CUDA, `elsewhere(operands)` in others.

    Derivatives are those of `elsewhere`, on every platform. Both functions have `vmap`, and trees
    of like results; `elsewhere` is traced at once, `on_cuda` when it is lowered. Lowering for
    another platform raises NotImplementedError if there is a `refusal`, which says why.
    """
    leaves, treedef = jax.tree.flatten(operands)

    def tree(*leaves: Any) -> Any:
        return elsewhere(jax.tree.unflatten(treedef, leaves))

    @as_now
    def kernels(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(on_cuda(jax.tree.unflatten(treedef, leaves)))

    traced, shape = jax.make_jaxpr(tree, return_shape=True)(*leaves)
    results = by_platform_p.bind(*leaves, elsewhere=traced, on_cuda=kernels, refusal=refusal)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def differentiate(primitive: Primitive, form: Callable[..., Any]) -> None:
    """Gives a primitive the derivatives of the jaxpr `form(**params)`.

    In place of a `custom_jvp` around the primitive: JAX's rule of `vmap` batches the derivative of
    a `custom_jvp`, and cannot if the derivative has a `custom_vjp`.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        moving = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*values: Any) -> list[Any]:
            operands = list(primals)
            for n, value in zip(moving, values, strict=True):
                operands[n] = value
            return jaxpr_as_fun(form(**params))(*operands)

        _, found = jax.jvp(of_moving, [primals[n] for n in moving], [tangents[n] for n in moving])
        return primitive.bind(*primals, **params), found

    ad.primitive_jvps[primitive] = jvp


differentiate(by_platform_p, lambda elsewhere, **_: elsewhere)


@by_platform_p.def_impl
def _run_elsewhere(*operands: Any, elsewhere: Any, on_cuda: Any, refusal: str) -> list[Any]:
    # Besides lowering, only `jax.disable_jit` comes here: ops are jitted.
    del on_cuda
    if refusal:
        raise NotImplementedError(refusal)
    return jaxpr_as_fun(elsewhere)(*operands)


by_platform_p.def_abstract_eval(lambda *_, elsewhere, **__: elsewhere.out_avals)


def _run_on_cuda(*operands: Any, elsewhere: Any, on_cuda: Any, refusal: str) -> list[Any]:
    del refusal
    results: list[Any] = on_cuda(*operands)
    found, expected = ([(x.shape, str(x.dtype)) for x in y] for y in (results, elsewhere.out_avals))
    assert found == expected, f"on CUDA {found}, elsewhere {expected}"
    return results


mlir.register_lowering(by_platform_p, mlir.lower_fun(_run_elsewhere))
mlir.register_lowering(by_platform_p, mlir.lower_fun(_run_on_cuda), platform="cuda")


def _batch(
    operands: Any, axes: Any, *, elsewhere: Any, on_cuda: Any, refusal: str
) -> tuple[Any, Any]:
    def batched(fn: Callable[..., Any]) -> Callable[..., Any]:
        axes_of_operands = tuple(axis if isinstance(axis, int) else None for axis in axes)
        return jax.vmap(fn, axes_of_operands)

    traced = jax.make_jaxpr(batched(jaxpr_as_fun(elsewhere)))(*operands)
    results = by_platform_p.bind(
        *operands, elsewhere=traced, on_cuda=batched(on_cuda), refusal=refusal
    )
    return results, [0] * len(results)


batching.primitive_batchers[by_platform_p] = _batch
