"""Clocks: of calls in this process, of compilations, and of commands as a user runs them."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Time and CPU time [s], and the peak memory of all processes together [B]."""

    wall: float
    cpu: float
    memory: float = 0.0


def best(runs: Sequence[Spent]) -> Spent:
    """Returns the least of each over repeats: what is left of a shared machine's noise."""
    return Spent(*map(min, zip(*runs, strict=True)))


class Clock:
    """Wall and CPU time since it was made, of all threads of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def spent(self) -> Spent:
        """Returns what has passed."""
        return Spent(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def timed(call: Callable[[], Any]) -> Spent:
    """Returns what one call takes."""
    clock = Clock()
    call()
    return clock.spent()


def repeated(run: Callable[[], Spent], most: int, enough: float = 12.0) -> Spent:
    """Returns the best of `most` runs, of fewer where they have taken `enough` seconds."""
    runs = [run()]
    while len(runs) < most and sum(spent.wall for spent in runs) < enough:
        runs.append(run())
    return best(runs)


# ---- Compilations ----

TRACE, LOWER, COMPILE = (
    f"/jax/core/compile/{what}_duration"
    for what in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)


@contextlib.contextmanager
def compilations() -> Iterator[dict[str, list[tuple[float, float, str]]]]:
    """Yields start, end and program of every trace, lowering and compilation within."""
    import jax.monitoring

    seen: dict[str, list[tuple[float, float, str]]] = {TRACE: [], LOWER: [], COMPILE: []}
    active = True

    def listen(event: str, seconds: float, **details: Any) -> None:
        if active and event in seen:
            now = time.perf_counter()
            seen[event].append((now - seconds, now, str(details.get("fun_name", ""))))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        active = False


def covered(spans: Sequence[tuple[float, float, str]]) -> float:
    """Returns the time that spans cover; those inside others count once.

    >>> covered([(0.0, 2.0, "outer"), (0.5, 1.0, "inner"), (3.0, 4.0, "later")])
    3.0
    """
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# ---- Commands ----


def command(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Spent:
    """Returns what `python …` takes in a process of its own, its children included.

    Memory is the largest sum of resident pages seen over the process and its children, where the
    system tells (Linux; pages that they share count twice), else that of the largest process.
    """
    settings = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=settings | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    peak = 0.0
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            break
        peak = max(peak, _resident(process.pid))
        time.sleep(0.01)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    with process:
        said = process.stderr.read().decode(errors="replace") if process.stderr else ""
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed: {said.strip()[-500:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    # The system's own figure starts at the size of this process, which was forked: second choice.
    return Spent(wall, usage.ru_utime + usage.ru_stime, peak or usage.ru_maxrss * unit)


def _resident(pid: int) -> float:
    """Returns the resident memory of a process and its descendants [B]."""
    total = 0.0
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            total += int(file.read().split()[1]) * resource.getpagesize()
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                total += sum(_resident(int(child)) for child in file.read().split())
    except (OSError, IndexError, ValueError):
        # It has just ended, or this system has no /proc.
        pass
    return total
