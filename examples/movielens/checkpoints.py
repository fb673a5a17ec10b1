"""Checkpoints of a run, by orbax."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

#: Checkpoints that are kept.
KEPT = 2


class Checkpoints:
    """The checkpoints of a run in a folder; without a folder it saves and finds none.

    Args:
      folder: the folder, which is created; None saves none.
      identity: what describes the run, as JSON. A folder with another run's checkpoints is refused.
    """

    def __init__(self, folder: pathlib.Path | None, identity: dict[str, Any]):
        self._identity, self._folder = identity, folder
        self._manager = None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
            self._manager = ocp.CheckpointManager(pathlib.Path(folder).resolve(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._manager.close()

    def save(self, state: Any, log: dict[str, Any]) -> None:
        """Saves the state of a run, whose field `step` numbers the checkpoint, and its log."""
        if self._manager is None:
            return
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                log=ocp.args.JsonSave({"identity": self._identity, **log}),
            ),
        )
        # The next step writes into the buffers of `state`.
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return [] if self._manager is None else sorted(self._manager.all_steps())

    def restore(self, state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """A checkpoint's state and log; `state` and an empty log if there is none.

        Args:
          state: a state with the shapes, dtypes and devices of the result.
          step: the checkpoint's step; None: the newest one.

        Raises:
          ValueError: the checkpoint is of another run.
          FileNotFoundError: there is no checkpoint of this step.
        """
        steps = self.steps()
        if self._manager is None or not steps:
            return state, {}
        if step is None:
            step = steps[-1]
        elif step not in steps:
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self._folder}, which has the steps {steps}"
            )
        log = self._log(step)
        if (found := log.pop("identity")) != self._identity:
            name = next(name for name in found if found[name] != self._identity.get(name))
            raise ValueError(
                f"the checkpoint has {name}={found[name]}, but the run has "
                f"{name}={self._identity.get(name)}"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=args).state, log

    def newest_identity(self) -> dict[str, Any]:
        """What describes the run of the newest checkpoint; raises FileNotFoundError without one."""
        if self._manager is None or (step := self._manager.latest_step()) is None:
            raise FileNotFoundError(f"no checkpoint in {self._folder}")
        found: dict[str, Any] = self._log(step)["identity"]
        return found

    def _log(self, step: int) -> dict[str, Any]:
        assert self._manager is not None
        found = self._manager.restore(step, args=ocp.args.Composite(log=ocp.args.JsonRestore()))
        log: dict[str, Any] = found.log
        return log
