"""Ops by other libraries; NotImplementedError or "skipped" says why one cannot run here."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.linear_compression import ALIGNED_K
from ikbo_jax.models.strategies import move

#: Moves rows: all arrays of rows [rows, N, H] to sequences [batch, longest, N, H], or back.
Move = Callable[[jax.Array], jax.Array]
#: Returns a library's softmax attention, or raises NotImplementedError.
Library = Callable[[], Callable[..., jax.Array]]


def padding(offsets: jax.Array, total: int, longest: int) -> tuple[Move, Move]:
    """Functions that pad the sequences at `offsets` [batch + 1] of `total` rows, and the reverse.

    Both are gathers, and so are their derivatives.
    """
    batch = offsets.size - 1
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
    """`jax.nn.dot_product_attention` by cuDNN."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"cuDNN needs a GPU, but this is a {jax.default_backend()}")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def tokamax() -> Callable[..., jax.Array]:
    """tokamax's attention for Hopper GPUs."""
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"its kernel needs a GPU, not a {jax.default_backend()}")
    tokamax = importlib.import_module("tokamax")

    return functools.partial(tokamax.dot_product_attention, implementation="mosaic")


class _Pending:
    """A result that `jax.block_until_ready` can wait for."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        self._torch, self.tensor = torch, tensor

    def block_until_ready(self) -> _Pending:
        self._torch.cuda.synchronize()
        return self


def torch_linear_compression(
    inputs: Any, rows: Sequence[int], exact: np.ndarray, bound: float
) -> list[tuple[dict[str, Any], Callable[[], Any]]]:
    """Returns a record and a thunk for every formulation of PyTorch (cuBLAS), and checks `rows`.

    Without PyTorch or a GPU, returns one record with the reason in "skipped".

    Args:
      inputs: the arguments of the op: w_cand, w_user, e_cand, e_user, cand_to_user.
      rows: candidates to check.
      exact: expected results of the candidates.
      bound: the largest allowed error of a result that is rounded once.
    """
    missing = {"name": "torch", "stage": "PyTorch"}
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return [(missing | {"skipped": "no PyTorch"}, lambda: None)]
    if not torch.cuda.is_available():
        return [(missing | {"skipped": "no GPU"}, lambda: None)]
    jax.block_until_ready(inputs)
    w_cand, w_user, e_cand, e_user, index = (torch.from_dlpack(array) for array in inputs)
    index = index.long()

    def pad(tensor: Any) -> Any:
        # torch lists padding from the last dimension to the first; K is dimension 1.
        rows_missing = -tensor.shape[1] % ALIGNED_K
        return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, rows_missing))

    padded = [pad(tensor) for tensor in (w_cand, w_user, e_cand, e_user)]

    def materialised() -> Any:
        weight = torch.cat((w_user, w_cand), dim=1)
        return torch.matmul(weight, torch.cat((e_user[index], e_cand), dim=1))

    def decomposed(w_cand: Any, w_user: Any, e_cand: Any, e_user: Any) -> Any:
        return torch.matmul(w_cand, e_cand).add_(torch.matmul(w_user, e_user)[index])

    formulations: dict[str, tuple[str, Callable[[], Any]]] = {
        "torch-materialised": ("1 PyTorch materialised, with its copies", materialised),
        "torch-decomposed": (
            "2 PyTorch decomposed, rounds partial results",
            lambda: decomposed(w_cand, w_user, e_cand, e_user),
        ),
        "torch-decomposed-padded-before": (
            "2 PyTorch decomposed, rounds partial results, all K padded before",
            lambda: decomposed(*padded),
        ),
    }
    found: list[tuple[dict[str, Any], Callable[[], Any]]] = []
    for name, (stage, fn) in formulations.items():
        record: dict[str, Any] = {"name": name, "stage": stage}
        try:
            out = fn()[list(rows)].double().cpu().numpy()
        except RuntimeError as error:
            found.append((record | {"skipped": str(error).splitlines()[0]}, lambda: None))
            continue
        # PyTorch rounds every partial result, so twice the bound is allowed.
        check = Check(float(np.abs(out - exact).max()), 2 * bound)
        record |= {**check._asdict(), "ok": check.ok}
        found.append((record, functools.partial(lambda fn: _Pending(torch, fn()), fn)))
    return found
