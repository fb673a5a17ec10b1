"""The autotuner's worker process: what it compiles and measures, and what its death costs."""

import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import pytest
from fake_tuning import LINEAR as DEFAULT
from fake_tuning import QUICK
from processes import is_alive, until

from ikbo_jax._timing import device_time
from ikbo_jax.autotuner import bench, session, worker
from ikbo_jax.autotuner.bench import Contender, Task
from ikbo_jax.cases.linear_compression import Case
from ikbo_jax.problems import LinearCompressionProblem
from ikbo_jax.reference.linear_compression import decomposed

TINY = LinearCompressionProblem((2, 6), (7, 5), 9, 16, "float32")
A, B, _, C = list(DEFAULT.configs())[:4]


# What a worker does.


@pytest.fixture
def programs_of_the_cpu(monkeypatch) -> list[tuple[Contender, str]]:
    """Kernels are XLA's path here; returns which were lowered, and in which thread compiled."""
    seen: list[tuple[Contender, str]] = []
    xla = Case(TINY).runner(None)

    class Lowered:
        def __init__(self, config: Contender) -> None:
            self.config = config

        def call(self, *operands: Any) -> jax.Array:
            seen.append((self.config, threading.current_thread().name))
            if self.config == C:
                raise ValueError("too many registers\nand more")
            out = decomposed(*operands)
            return out + 1 if self.config == B else out

    def runner(case: Case, config: Contender, num_sms: int | None = None) -> Any:
        return xla if config is None else jax.jit(Lowered(config).call)

    monkeypatch.setattr(Case, "runner", runner)
    monkeypatch.setattr(bench, "lower", lambda problem, config, num_sms: Lowered(config))
    monkeypatch.setattr(bench, "_lowering_processes", concurrent.futures.ThreadPoolExecutor)
    return seen


def test_contenders_are_compiled_in_threads_checked_and_timed_by_turns(programs_of_the_cpu):
    events: list[dict[str, Any]] = []
    stand = bench.Bench(TINY, (None, A, B, C), events.append)
    stand.prepare()
    assert {config for config, _ in programs_of_the_cpu} == {A, B, C}
    assert all("MainThread" not in name for _, name in programs_of_the_cpu)
    # XLA times ways of multiplying while it compiles: nothing runs before that is over.
    told = [(event["event"], event["contender"]) for event in events]
    checks = [place for place, (kind, _) in enumerate(told) if kind == "checked"]
    assert told.index(("compiled", 0)) < checks[0]
    assert told[checks[0]] == ("checked", 0)
    assert {told[place][1] for place in checks} == {0, 1, 2}
    found = stand.measure(Task(TINY, (A, None, B, C), **QUICK))
    a, xla, b, c = found["results"]
    assert len(a["ms"]) == len(xla["ms"]) == len(found["matmul_ms"]) == 2
    assert a["error"] <= a["bound"]
    assert b["failure"].startswith("wrong result: error")
    assert c["failure"] == "ValueError: too many registers"
    assert (found["device"], found["jax"]) == (jax.devices()[0].device_kind, jax.__version__)
    samples = [event["contender"] for event in events if event["event"] == "sample"]
    assert samples == [1, 0, 1, 0]
    ends = {(event["event"], event["contender"]): event for event in events if "contender" in event}
    assert "failure" not in ends["compiled", 1]
    assert ends["compiled", 3]["failure"] == c["failure"]
    assert ends["checked", 2]["failure"] == b["failure"]
    # Programs and checks are kept for the next round.
    compiled = len(programs_of_the_cpu)
    stand.measure(Task(TINY, (A, None), **QUICK))
    assert len(programs_of_the_cpu) == compiled


@pytest.mark.parametrize(
    ("xla_ms", "kernel_ms", "on_device"),
    [(0.2, 0.1, (True, True)), (5.0, 0.1, (False, True)), (0.2, 0.4, (True, False))],
)
def test_short_kernels_are_timed_on_the_device(
    programs_of_the_cpu, monkeypatch, xla_ms, kernel_ms, on_device
):
    stand = bench.Bench(TINY, (None, A))
    stand.prepare()

    def measure(program: Any, *args: Any) -> device_time.DeviceTime:
        ms = xla_ms if program is stand._programs[None] else kernel_ms
        return device_time.DeviceTime([9.0, ms, ms], [])

    monkeypatch.setattr(device_time, "measure", measure)
    monkeypatch.setattr(bench._timing, "sustained_ms", lambda *args, **options: [7.0])
    for alone, ms, is_on_device in zip((None, A), (xla_ms, kernel_ms), on_device, strict=True):
        (found,) = stand.measure(Task(TINY, (alone,), **QUICK))["results"]
        assert found["ms"] == [ms if is_on_device else 7.0] * 2
    # Both in the same way, once a kernel was timed.
    for found in stand.measure(Task(TINY, (None, A), **QUICK))["results"]:
        assert (found["ms"] != [7.0] * 2) == on_device[1]


def test_no_profile_of_a_short_kernel_is_a_failure(programs_of_the_cpu, monkeypatch):
    found = iter([device_time.DeviceTime([0.1], []), None])
    monkeypatch.setattr(device_time, "measure", lambda program, *args: next(found))
    monkeypatch.setattr(bench._timing, "sustained_ms", lambda *args, **options: [7.0])
    stand = bench.Bench(TINY, (None, A))
    (result,) = stand.measure(Task(TINY, (A,), **QUICK))["results"]
    assert result == {"failure": "RuntimeError: the profiler recorded nothing"}


def test_suspects_are_compiled_one_by_one_at_the_end(programs_of_the_cpu):
    stand = bench.Bench(TINY, (None, A, B))
    stand.prepare(alone=[A])
    assert programs_of_the_cpu[-1] == (A, "MainThread")


def test_device_of_no_use_ends_the_worker_and_names_the_contender(programs_of_the_cpu, monkeypatch):
    def sustained_ms(program: Any, *operands: Any, **rest: Any) -> list[float]:
        if len(operands) == 3:  # Not the matmul.
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand more")
        return [1.0]

    events: list[dict[str, Any]] = []
    monkeypatch.setattr(bench._timing, "sustained_ms", sustained_ms)
    again = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS, again")
    monkeypatch.setattr(bench.jnp, "zeros", mock.Mock(side_effect=again))
    setup = json.dumps({"task": Task(TINY, (None, A)).to_json(), "alone": []})
    lines = [setup, Task(TINY, (A, None), **QUICK).to_json()]
    assert worker.serve(lines, events.append) == 1
    lost, end = events[-2:]
    assert lost["event"] == "lost"
    assert lost["contender"] == 1
    assert lost["failure"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert end["event"] == "end"


def test_kernels_are_lowered_for_cuda_without_a_device():
    exported = bench.lower(DEFAULT, A, 132)
    assert not isinstance(exported, str), exported
    assert exported.platforms == ("cuda",)
    assert exported.out_avals[0].shape == (1024, 433, 256)
    assert "mosaic_gpu" in exported.mlir_module()
    illegal = dataclasses.replace(A, block_m=8)
    assert "Error: " in bench.lower(DEFAULT, illegal, 132)


def test_lowering_processes_see_no_device(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with bench._lowering_processes(1) as processes:
        assert processes.submit(jax.default_backend).result() == "cpu"


@pytest.mark.slow
def test_session_measures_on_this_machine():
    lines: list[tuple[int, int, str]] = []
    with session.Session(TINY, (None,), lambda *line: lines.append(line)) as run:
        for _ in range(2):
            found = run(Task(TINY, (None,), **QUICK))
            assert len(found["results"][0]["ms"]) == len(found["matmul_ms"]) == 2
            assert found["results"][0]["error"] <= found["results"][0]["bound"]
    assert lines == [(1, 1, "compiled XLA"), (1, 1, "checked XLA")]


# What its death costs.

DIED = "worker ended with status 1: CUDA_ERROR_LAUNCH_FAILED"
#: Plays a worker: "behaviour" says what it does to a contender, by its `num_stages`.
FAKE = """
import json, os, sys, time
def say(**event):
    print("ikbo-autotune " + json.dumps(event), flush=True)
def do(kind, contender, position):
    say(event="start", contender=position)
    trouble = BEHAVIOUR.get(f"{kind} {contender.get('epilogue_rows')} {contender.get('cluster')}")
    if trouble == "die":
        sys.exit("CUDA_ERROR_LAUNCH_FAILED")
    if trouble == "die and leave a child":
        import subprocess
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        sys.exit("CUDA_ERROR_LAUNCH_FAILED")
    if trouble == "hang":
        time.sleep(60)
    if trouble == "lose":
        say(event="lost", contender=position, failure="illegal address")
        say(event="end", failure="illegal address")
        sys.exit(1)
    fields = {"ms": 1.0 + position} if kind == "sample" else {}
    say(event=kind, contender=position, **fields)
print("noise of a library")
setup = json.loads(sys.stdin.readline())
every = json.loads(setup["task"])["contenders"]
with open(LOG, "a") as log:
    print(json.dumps([len(every), len(setup["alone"])]), file=log)
together = [i for i in range(len(every)) if i not in setup["alone"]]
if len(together) > 1 and "together" in BEHAVIOUR:
    for i in together:
        say(event="start", contender=i)
    sys.exit("LLVM ERROR")
for i in [*together, *setup["alone"]]:
    do("compiled", every[i], i)
for line in sys.stdin:
    task = json.loads(line)
    for candidate in task["contenders"]:
        do("checked", candidate, every.index(candidate))
    ms = {i: [] for i in range(len(every))}
    for _ in range(task["windows"]):
        say(event="matmul", ms=1.5)
        for candidate in task["contenders"]:
            i = every.index(candidate)
            do("sample", candidate, i)
            ms[i].append(1.0 + i)
    results = [{"ms": ms[every.index(c)]} for c in task["contenders"]]
    say(event="answer", answer={"matmul_ms": [1.5], "results": results})
"""


def place(kind: str, config: Any) -> str:
    """Key of a behaviour: what a contender is doing."""
    return f"{kind} {config.epilogue_rows} {config.cluster}"


Starts = Callable[..., session.Session]


@pytest.fixture
def starts(monkeypatch, tmp_path) -> Starts:
    assert len({place("", config) for config in (A, B, C)}) == 3

    def start(
        behaviour: dict[str, str], progress: Any = lambda *line: None, **options: Any
    ) -> session.Session:
        code = f"BEHAVIOUR = {behaviour!r}\nLOG = {str(tmp_path / 'starts')!r}\n{FAKE}"
        monkeypatch.setattr(session, "COMMAND", (sys.executable, "-S", "-c", code))
        return session.Session(DEFAULT, (None, A, B, C), progress, **options)

    return start


@pytest.mark.parametrize(
    ("kind", "trouble", "reason"),
    [
        ("compiled", "die", DIED),
        ("checked", "die", DIED),
        ("checked", "die and leave a child", DIED),
        ("checked", "lose", "illegal address"),
        ("checked", "hang", "no answer after 1 s"),
        ("sample", "die", DIED),
    ],
)
def test_worker_that_dies_or_hangs_costs_the_contender_at_work(
    starts, tmp_path, kind, trouble, reason
):
    silence_s = 1.0 if trouble == "hang" else 30.0
    with starts({place(kind, B): trouble}, silence_s=silence_s) as run:
        found = run(Task(DEFAULT, (None, A, B, C)))["results"]
        assert found[2] == {"failure": reason}
        assert all(len(result["ms"]) == 3 for result in (found[0], found[1], found[3]))
        again = run(Task(DEFAULT, (B, C)))["results"]
        assert again[0] == {"failure": reason}
        assert run(Task(DEFAULT, (B,))) == {"failure": reason}
    # The second worker had one contender less, and was the last.
    assert (tmp_path / "starts").read_text().split("\n") == ["[4, 0]", "[3, 0]", ""]


def test_death_with_several_at_work_has_them_compiled_one_by_one(starts, tmp_path):
    with starts({"together": "die", place("compiled", A): "die"}) as run:
        found = run(Task(DEFAULT, (None, A, B, C)))["results"]
    assert found[1]["failure"].startswith("worker ended with status 1")
    assert [len(result.get("ms", [])) for result in found] == [3, 0, 3, 3]
    assert (tmp_path / "starts").read_text().split() == ["[4,", "0]", "[4,", "4]", "[3,", "3]"]


def test_worker_that_cannot_start_is_a_failure_of_the_task(monkeypatch):
    monkeypatch.setattr(session, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no')"))
    with session.Session(DEFAULT, (None, A), lambda *line: None) as run:
        assert run(Task(DEFAULT, (None,))) == {"failure": "worker ended with status 1: no"}


@pytest.mark.slow
def test_interruption_ends_the_worker_and_keeps_what_was_measured(starts):
    lines: list[str] = []
    calls = iter(range(100))

    def progress(done: int, total: int, text: str) -> None:
        lines.append(text)
        if text.startswith("checked") and next(calls) == 3:
            signal.setitimer(signal.ITIMER_REAL, 0.5)

    before = signal.signal(signal.SIGALRM, mock.Mock(side_effect=KeyboardInterrupt))
    try:
        with starts({place("sample", C): "hang"}, progress=progress) as run:
            with pytest.raises(session.Interrupted) as stopped:
                run(Task(DEFAULT, (None, A, B, C)))
            process = run._worker
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert process is None
    assert stopped.value.task.contenders == (None, A, B, C)
    results = stopped.value.answer["results"]
    assert [result["ms"] for result in results] == [[1.0], [2.0], [3.0], []]
    assert sum(line.startswith("compiled") for line in lines) == 4


@pytest.mark.slow
def test_worker_ends_with_its_parent_and_takes_its_processes_along(tmp_path):
    """Also in the middle of something: its input's end is enough."""
    child = tmp_path / "child"
    code = f"""
import subprocess, sys, time
from ikbo_jax.autotuner import worker
def serve(lines, say):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    open({str(child)!r}, "w").write(str(child.pid))
    say({{"event": "started"}})
    time.sleep(60)
worker.serve = serve
worker.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith(worker.MARK.encode())
        process.stdin.close()
        assert process.wait(timeout=20) == -signal.SIGKILL
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert until(lambda: not is_alive(int(child.read_text())), 20)


def test_events_are_marked_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(worker.os, "killpg", lambda group, number: None)

    def serve(lines: Any, say: Any) -> int:
        say({"event": "answer"})
        return 7

    monkeypatch.setattr(worker, "serve", serve)
    assert worker.main() == 7
    assert capsys.readouterr().out == 'ikbo-autotune {"event": "answer"}\n'


@pytest.mark.gpu
def test_kernels_that_another_process_lowered_run_on_the_device():
    problem = LinearCompressionProblem((3, 40), (130, 66), 65, 128, "bfloat16")
    kernels = list(problem.configs())[:4]
    lines: list[Any] = []
    with session.Session(problem, (None, *kernels), lambda *line: lines.append(line)) as run:
        found = run(Task(problem, (None, *kernels), 0.02, 2))
    assert found["compute_capability"] == "9.0"
    for result in found["results"]:
        assert "failure" not in result, (result, lines)
        assert result["error"] <= result["bound"]
        assert len(result["ms"]) == 2
