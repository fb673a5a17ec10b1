"""Linear compression in PyTorch (cuBLAS), if PyTorch and a GPU are available."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.linear_compression import ALIGNED_K


class _Pending:
    """A result that `jax.block_until_ready` can wait for."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        self._torch, self.tensor = torch, tensor

    def block_until_ready(self) -> _Pending:
        self._torch.cuda.synchronize()
        return self


def _launch(torch: Any, fn: Callable[[], Any]) -> _Pending:
    return _Pending(torch, fn())


def contenders(
    inputs: Any, rows: Sequence[int], exact: np.ndarray, bound: float
) -> list[tuple[dict[str, Any], Callable[[], Any]]]:
    """Returns a record and a thunk for every formulation; checks `rows` against `exact`.

    Without PyTorch or a GPU, returns one record with the reason in "skipped".

    Args:
      inputs: the arguments of the op: w_cand, w_user, e_cand, e_user, cand_to_user.
      rows: candidates to check.
      exact: expected results of the candidates.
      bound: the largest allowed error of a result that is rounded once.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return [({"name": "torch", "stage": "PyTorch", "skipped": "no PyTorch"}, lambda: None)]
    if not torch.cuda.is_available():
        return [({"name": "torch", "stage": "PyTorch", "skipped": "no GPU"}, lambda: None)]
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
        found.append((record, functools.partial(_launch, torch, fn)))
    return found
