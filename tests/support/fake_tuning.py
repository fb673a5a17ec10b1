"""Rows of the dispatch table, and a device that is played, for tests of the table and the tuner."""

from typing import Any

import jax

from ikbo_jax.autotuner.bench import Contender, Task
from ikbo_jax.problems import AttentionProblem, GdpaProblem, LinearCompressionProblem
from ikbo_jax.tuning import table_rows

LINEAR = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
ATTENTION = AttentionProblem(2048, 32, 64, 4096, 2, 2, 128, "bfloat16")
GDPA = GdpaProblem(*(8, 8, 512, 640, 4, 2, 64, "bfloat16"), ("relu",), None, False, 100, None)
#: The card at hand, as the ops see it.
HERE = jax.devices()[0].device_kind
#: Milliseconds of the reference matmul's windows.
MATMUL_MS = [1.6, 1.7, 1.8]
#: Options of a task on the machine of the tests.
QUICK = {"window_s": 0.002, "windows": 2, "matmul_size": 64}


def row(
    problem: Any = LINEAR, config: Any = "default", *, ms: float = 0.35, device: str = "NVIDIA H200"
) -> table_rows.Row:
    """A row of the table; by default with the problem's default configuration."""
    config = problem.default_config() if config == "default" else config
    return table_rows.Row(problem, config, device, "2026-01-02", "0.11.2", ms, 0.8, 1.0)


def other(problem: Any = LINEAR, place: int = 1) -> Any:
    """A legal configuration that is not the default one."""
    return list(problem.configs())[place]


class Bench:
    """Plays the device: windows of every candidate in milliseconds, or a text for a failure.

    None is XLA. `rest` is what the others take; a number stands for equal windows.
    """

    def __init__(
        self,
        times: dict[Contender, Any],
        rest: Any = 0.5,
        *,
        device: str = "NVIDIA H200",
        capability: str = "9.0",
    ) -> None:
        self.times, self.rest = times, rest
        self.device, self.capability = device, capability
        self.tasks: list[Task] = []

    def windows(self, candidate: Contender, task: Task) -> list[float] | str:
        value = self.times.get(candidate, self.rest)
        if isinstance(value, int | float):
            return [float(value)] * task.windows
        return value if isinstance(value, str) else list(value)

    def __call__(self, task: Task) -> dict[str, Any]:
        assert Task.from_json(task.to_json()) == task
        self.tasks.append(task)
        found = [self.windows(candidate, task) for candidate in task.contenders]
        return {
            "device": self.device,
            "compute_capability": self.capability,
            "jax": "0.11.2",
            "matmul_ms": MATMUL_MS,
            "results": [{"failure": x} if isinstance(x, str) else {"ms": x} for x in found],
        }
