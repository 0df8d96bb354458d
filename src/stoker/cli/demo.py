"""`stoker demo`: Stoker and stock torch on the same made-up dataset, measured on this machine, now.

The dataset: eight LiDAR scans a sample, each a tenth of a real one's size, read from files and
scaled. Each contender trains in a process of its own (this file, run as a module), one after the
other. Not a benchmark: one round each; `make bench` has rounds, intervals and peers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import IO, TYPE_CHECKING, Any

from stoker.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

CONTENDERS = {"torch": "torch DataLoader", "stoker": "stoker.DataLoader"}
SCANS, SEQUENCES, BATCH = 8, 4, 4
STEP_SECONDS = 0.010
"""The pretended training step: the time a GPU would compute, in which the CPU is free."""
WARM_UP_SHARE = 0.2
"""The share of the time that is not measured: workers start, memory is touched, queues fill."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one contender did."""

    samples_per_second: float
    wait_share: float
    wait_seconds_per_step: float
    fluctuation: float | None
    first_batch_seconds: float
    peak_bytes: int
    memory_from: str


@dataclass(frozen=True, slots=True)
class Task:
    """What each contender is asked to do."""

    folder: Path
    points: int
    workers: int
    seconds: float

    @property
    def batch_bytes(self) -> int:
        """The size of one batch."""
        return BATCH * SCANS * self.points * 16

    def arguments(self) -> list[str]:
        """The task as the command line of the subprocess."""
        return [str(self.folder), str(self.points), str(self.workers), str(self.seconds)]


class DemoFailed(Exception):
    """A contender's process ended without a result; the message has the end of its stderr."""


def run(seconds: float, as_json: bool) -> int:
    """Measure both contenders for `seconds` each and print the comparison; the exit status."""
    from rich.console import Console

    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="stoker-demo-") as folder:
        task = _scaled_to_this_machine(Path(folder), seconds)
        if not as_json:
            console.print(_what_happens(task))
        _write_scans(task)
        try:
            with _bars(console, live=console.is_terminal and not as_json) as progress:
                results = {name: _measure(name, task, progress) for name in CONTENDERS}
        except DemoFailed as failure:
            console.print(f"The demo failed. {failure}", style="red", markup=False)
            return 1
    if as_json:
        print(json.dumps(_as_json(task, results), indent=2))
        return 0
    console.print(_table(results))
    console.print(_verdict(results), style="bold")
    console.print(f"Memory: {results['stoker'].memory_from}.", style="dim")
    return 0


# The task: small enough for any machine, large enough to hurt torch's loader.


def _scaled_to_this_machine(folder: Path, seconds: float) -> Task:
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    roomy = psutil.virtual_memory().available > 4_000_000_000
    points = 93_750 if roomy else 18_750
    return Task(folder, points, workers=max(2, min(4, cores or 2)), seconds=seconds)


def _what_happens(task: Task) -> str:
    return (
        f"Eight LiDAR scans of {format_bytes(task.points * 16)} a sample, batch {BATCH} "
        f"({format_bytes(task.batch_bytes)}), {task.workers} workers, prefetch 2, "
        f"{task.seconds:g} s for each.\nA training step copies the batch once, as the transfer to "
        f"a GPU does, and then waits {STEP_SECONDS * 1000:g} ms in place of the GPU."
    )


def _write_scans(task: Task) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    for name in (name for paths in _paths(task.folder) for name in paths):
        rng.random((task.points, 4), dtype=np.float32).tofile(name)


def _paths(folder: Path) -> list[list[str]]:
    return [[str(folder / f"{n}_{scan}.bin") for scan in range(SCANS)] for n in range(SEQUENCES)]


class Scans:
    """A map-style dataset of LiDAR sequences, as a user would write it; four, visited in turn."""

    def __init__(self, folder: Path, points: int) -> None:
        self._paths, self._points = _paths(folder), points

    def __len__(self) -> int:
        return 10_000_000  # more than the demo consumes

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        scale = np.array([0.01, 0.01, 0.02, 1.0], dtype=np.float32)
        scans = np.empty((SCANS, self._points, 4), dtype=np.float32)
        for scan, path in zip(scans, self._paths[index % SEQUENCES], strict=True):
            np.multiply(np.fromfile(path, dtype=np.float32).reshape(-1, 4), scale, out=scan)
        return {"scans": scans, "frame": index}


# In the subprocess: train, and say how it goes, a line of JSON at a time.


def _train(contender: str, task: Task) -> None:
    import numpy as np

    from stoker.loader.dataloader import DataLoader

    # Stock torch's loader is the class that Stoker's derives from; both sides import the same.
    loader_class: Any = DataLoader if contender == "stoker" else DataLoader.__mro__[1]
    dataset = Scans(task.folder, task.points)
    on_device = np.ones((BATCH, SCANS, task.points, 4), dtype=np.float32)
    begun = time.perf_counter()
    batches = iter(loader_class(dataset, batch_size=BATCH, num_workers=task.workers))
    batch = next(batches)
    first = time.perf_counter() - begun
    steps: list[tuple[float, float]] = []  # (when it ended, how long it waited for its batch)
    started = spoken = time.perf_counter()
    while (now := time.perf_counter()) - started < task.seconds:
        np.copyto(on_device, batch["scans"].numpy())
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
        batch = next(batches)
        ended = time.perf_counter()
        steps.append((ended - started, ended - asked))
        if now - spoken > 0.2:
            spoken = now
            _say(at=ended - started, **_rates(steps[-200:]))
    measured = [step for step in steps if step[0] > WARM_UP_SHARE * task.seconds]
    _say(result={**_rates(measured), "first_batch_seconds": first} | _steadiness(measured))


def _rates(steps: list[tuple[float, float]]) -> dict[str, float]:
    """Rate and waits over the given steps, from the end of the first to the end of the last."""
    if len(steps) < 2:
        return {"samples_per_second": 0.0, "wait_share": 0.0, "wait_seconds_per_step": 0.0}
    elapsed, count = steps[-1][0] - steps[0][0], len(steps) - 1
    waited = sum(wait for _, wait in steps[1:])
    return {
        "samples_per_second": count * BATCH / elapsed,
        "wait_share": waited / elapsed,
        "wait_seconds_per_step": waited / count,
    }


def _steadiness(steps: list[tuple[float, float]]) -> dict[str, float | None]:
    """Fluctuation: 1 - p5 / median of step rates over windows of 1 s or 5 steps, the longer."""
    rates, window = [], steps[:1]
    for step in steps[1:]:
        window.append(step)
        length = window[-1][0] - window[0][0]
        if length >= 1.0 and len(window) > 5:
            rates.append((len(window) - 1) / length)
            window = [step]
    if len(rates) < 5:
        return {"fluctuation": None}
    return {"fluctuation": 1 - quantiles(rates, n=20, method="inclusive")[0] / median(rates)}


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


# In the parent: start it, listen, and look at its memory.


def _measure(contender: str, task: Task, progress: Progress) -> Result:
    bar = progress.add_task(CONTENDERS[contender], total=task.seconds, speed="", memory="")
    command = [sys.executable, "-m", "stoker.cli.demo", contender, *task.arguments()]
    with contextlib.ExitStack() as stack:
        group = _own_memory_group()
        meter = _TreeMeter() if group is None else stack.enter_context(_GroupMeter(group))
        complaints = stack.enter_context(tempfile.TemporaryFile("w+"))
        limit = 4 * task.seconds + 60
        process = stack.enter_context(_process(meter.inside(command), complaints, limit))
        stack.enter_context(meter.polling(process.pid))
        for line in process.stdout or ():
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "result" in message:
                progress.update(bar, completed=task.seconds)
                return Result(
                    **message["result"],
                    peak_bytes=meter.peak_bytes,
                    memory_from=meter.memory_from,
                )
            rate, share = message["samples_per_second"], message["wait_share"]
            progress.update(
                bar,
                completed=min(message["at"], task.seconds),
                speed=f"{rate:.0f} samples/s, waiting {share:.0%}",
                memory=format_bytes(meter.now_bytes),
            )
        complaints.seek(0)
        last = complaints.read().strip().splitlines()[-3:]
        raise DemoFailed(f"{CONTENDERS[contender]}: {' | '.join(last) or 'it was killed'}")


@contextlib.contextmanager
def _process(
    command: list[str], stderr: IO[str], most_seconds: float
) -> Iterator[subprocess.Popen[str]]:
    """A subprocess in a session of its own; whatever is left of it at the end is killed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    overdue = threading.Timer(most_seconds, kill)
    overdue.start()
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:
        overdue.cancel()
        kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _own_memory_group() -> Path | None:
    """The memory cgroup of this process, if it lets us make a group inside it."""
    from stoker.machine.cgroup import hierarchies

    for hierarchy in hierarchies("memory"):
        trial = hierarchy.levels[0] / f"stoker-demo-{os.getpid()}-trial"
        try:
            trial.mkdir()
        except OSError:
            continue
        counts = (trial / "memory.stat").exists()
        trial.rmdir()
        if counts:
            return hierarchy.levels[0]
    return None


class _TreeMeter:
    """What a process tree holds, where no cgroup can be made: PSS, and what /dev/shm grew by."""

    period_seconds = 0.5
    memory_from = (
        "PSS of each process tree plus growth of /dev/shm, read twice a second (no memory cgroup "
        "could be made here; torch's mapped batches count twice)"
    )

    def __init__(self) -> None:
        self._shm_before = _shm_bytes()
        self.now_bytes = self.peak_bytes = 0

    def inside(self, command: list[str]) -> list[str]:
        """The command, so that this meter sees it."""
        return command

    @contextlib.contextmanager
    def polling(self, pid: int) -> Iterator[None]:
        """Read again and again, on a thread of its own, while the block runs."""
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(self.period_seconds):
                self.now_bytes = self._read(pid)
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _read(self, pid: int) -> int:
        import psutil

        total = max(0, _shm_bytes() - self._shm_before)
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(pid)
            for process in [leader, *leader.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    full = process.memory_full_info()
                    total += getattr(full, "pss", full.uss)
        return total


class _GroupMeter(_TreeMeter):
    """The kernel's own account of a process tree in its own cgroup, queued batches included."""

    period_seconds = 0.02
    memory_from = "anonymous and shared memory of each process tree, from a cgroup of its own"

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self._path = parent / f"stoker-demo-{os.getpid()}"

    def __enter__(self) -> _GroupMeter:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(100):
            for pid in (self._path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.05)

    def inside(self, command: list[str]) -> list[str]:
        """The command, in the group from its first instruction on."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self._path / "cgroup.procs"), *command]

    def _read(self, _pid: int) -> int:
        lines = (self._path / "memory.stat").read_text().splitlines()
        stat = {key: int(value) for key, value in (line.split(" ", 1) for line in lines)}
        if "total_rss" in stat:  # cgroup v1
            return stat["total_rss"] + stat["total_shmem"]
        return stat["anon"] + stat["shmem"]


def _shm_bytes() -> int:
    try:
        stat = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return 0
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


# What a person reads.


@contextlib.contextmanager
def _bars(console: Console, live: bool) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = ("{task.description}", BarColumn(), "{task.fields[speed]}", "{task.fields[memory]}")
    cells = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    with Progress(*cells, console=console, disable=not live) as progress:
        yield progress


def _table(results: dict[str, Result]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("")
    for name in results:
        table.add_column(CONTENDERS[name], justify="right")
    lines: dict[str, Callable[[Result], str]] = {
        "samples per second": lambda got: f"{got.samples_per_second:.1f}",
        "time spent waiting for data": lambda got: f"{got.wait_share:.0%}",
        "wait for each step": lambda got: f"{got.wait_seconds_per_step * 1000:.1f} ms",
        "fluctuation of the step rate": lambda got: (
            "-" if got.fluctuation is None else f"{got.fluctuation:.0%}"
        ),
        "first batch after": lambda got: f"{got.first_batch_seconds:.2f} s",
        "peak memory of the process tree": lambda got: format_bytes(got.peak_bytes),
    }
    for label, cell in lines.items():
        table.add_row(label, *(cell(got) for got in results.values()))
    return table


def _verdict(results: dict[str, Result]) -> str:
    torch, stoker = results["torch"], results["stoker"]
    speedup = stoker.samples_per_second / torch.samples_per_second
    peaks = f"{format_bytes(stoker.peak_bytes)} against {format_bytes(torch.peak_bytes)}"
    if speedup >= 1.05:
        speed = f"Stoker fed the training loop {speedup:.1f} times as fast"
    elif speedup > 0.95:
        speed = "No difference in speed here"
    else:
        speed = f"Stoker was slower here ({speedup:.2f} of torch's speed)"
    return f"{speed}, with a peak memory of {peaks}."


def _as_json(task: Task, results: dict[str, Result]) -> dict[str, Any]:
    torch, stoker = results["torch"], results["stoker"]
    return {
        "task": {
            "batch_size": BATCH,
            "batch_bytes": task.batch_bytes,
            "workers": task.workers,
            "step_seconds": STEP_SECONDS,
            "seconds": task.seconds,
        },
        "results": {name: asdict(got) for name, got in results.items()},
        "speedup": stoker.samples_per_second / torch.samples_per_second,
        "memory_ratio": stoker.peak_bytes / torch.peak_bytes,
    }


if __name__ == "__main__":
    who, where, points_text, workers_text, seconds_text = sys.argv[1:]
    _train(who, Task(Path(where), int(points_text), int(workers_text), float(seconds_text)))
