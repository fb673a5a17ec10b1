"""A check of kernels while they are lowered: integers that they select stay signed."""

from typing import Any

import pytest
from jax.experimental.mosaic.gpu import FragmentedArray


@pytest.fixture(autouse=True)
def selected_integers_keep_their_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a kernel's `jnp.where` would make integers unsigned; see `per_thread.select`."""
    select = FragmentedArray.select

    def checked(self: Any, on_true: Any, on_false: Any) -> Any:
        found = select(self, on_true, on_false)
        assert found.is_signed == on_true.is_signed, "jnp.where makes integers unsigned here"
        return found

    monkeypatch.setattr(FragmentedArray, "select", checked)
