"""`python -m benchmarks`: measures every case, or those named, and writes the results."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from benchmarks.case import Case, Context, Measurement, Summary
from benchmarks.cases import NAMES, find_case
from benchmarks.contenders import missing
from benchmarks.harness import MeasurementFailed, Unit, measure, pause, schedule
from benchmarks.memory_group import NoMemoryGroup
from benchmarks.plot import draw
from benchmarks.record import Record, add_case, open_record
from benchmarks.tables import as_markdown, grids

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    """Measure, write, print; the exit status says whether every measurement was taken."""
    options = _parse()
    out: Path = options.out or (RESULTS / "quick" if options.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    if not console.is_terminal:
        console.width = 150
    record = open_record(out / "results.json", options.quick)
    failures: list[str] = []
    if not options.render:
        _warn_if_busy(console)
        cases = [find_case(name) for name in _chosen(options.case)]
        rounds = options.rounds or (2 if options.quick else 7)
        with _progress(console) as progress:
            failures = _run(cases, rounds, options, record, progress)
    _write(record, out)
    for grid in grids(record):
        console.print(grid.as_rich())
    console.print(f"Written to {out}: results.json, results.md, results.png")
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return 1 if failures else 0


def _run(
    cases: list[Case],
    rounds: int,
    options: argparse.Namespace,
    record: Record,
    progress: Progress,
) -> list[str]:
    """Measure case after case into the record; what failed is returned, not raised."""
    failures: list[str] = []
    failures += [f"{who}: {missing(who)}" for who in options.contender or [] if missing(who)]
    plan = {case.name: list(schedule(case, _able(case, options), rounds)) for case in cases}
    total = sum(_seconds(unit, options.quick) for units in plan.values() for unit in units)
    task = progress.add_task("", total=total)
    for case in cases:
        results: dict[int, dict[str, Measurement]] = defaultdict(dict)
        summary: Summary | None = None
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
            context = Context(Path(folder), options.quick)
            case.prepare(context)
            for unit in plan[case.name]:
                what = f"{case.name}: {unit.contender}, round {unit.round + 1}"
                progress.update(task, description=what)
                try:
                    results[unit.round][unit.contender] = measure(unit, context)
                except NoMemoryGroup as reason:
                    summary = Summary(skipped=str(reason))
                    break
                except MeasurementFailed as failure:
                    failures.append(f"{what} failed: {failure}")
                finally:
                    progress.advance(task, _seconds(unit, options.quick))
                pause()
        taken = [results[number] for number in sorted(results) if results[number]]
        if summary is None:
            nothing = Summary(skipped="every measurement failed")
            summary = case.summarise(taken) if taken else nothing
        add_case(record, case, list(taken), summary)
        if not progress.console.is_terminal:
            progress.console.print(f"{case.name}: done")
    return failures


def _able(case: Case, options: argparse.Namespace) -> list[str]:
    wanted = options.contender or case.contenders
    return [who for who in case.contenders if who in wanted and not missing(who)]


def _seconds(unit: Unit, quick: bool) -> float:
    return unit.case.estimated_seconds(unit.contender, quick)


def _write(record: Record, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "results.md").write_text(as_markdown(record))
    draw(record, out / "results.png")


def _chosen(patterns: list[str] | None) -> list[str]:
    if not patterns:
        return list(NAMES)
    # A whole name means that case alone: first_batch_fork is not also first_batch_forkserver.
    globs = [pattern if pattern in NAMES else f"{pattern}*" for pattern in patterns]
    chosen = [name for name in NAMES if any(fnmatch.fnmatch(name, glob) for glob in globs)]
    if not chosen:
        raise SystemExit(f"no case matches {' '.join(patterns)}: choose from {', '.join(NAMES)}")
    return chosen


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), _Remaining())
    text = TextColumn("{task.description}")
    with Progress(text, *columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


class _Remaining(ProgressColumn):
    """Time left: what is estimated for the rest, corrected by how the estimates did so far."""

    def render(self, task: Task) -> Text:
        left = (task.total or 0.0) - task.completed
        pace = (task.elapsed or 0.0) / task.completed if task.completed else 1.0
        minutes, seconds = divmod(int(left * pace), 60)
        return Text(f"about {minutes}:{seconds:02d} left", style="cyan")


def _warn_if_busy(console: Console) -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        text = f"The machine is not quiet (load {load:.1f}): ratios will be rough, rates too low."
        console.print(text, style="yellow")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--case", nargs="+", metavar="NAME", help="names or their beginnings")
    parser.add_argument("--contender", nargs="+", metavar="NAME", help="only these contenders")
    parser.add_argument("--rounds", type=int, help="rounds for each case (7; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a result")
    parser.add_argument("--out", type=Path, help="where to write (benchmarks/results)")
    parser.add_argument("--render", action="store_true", help="only draw what results.json holds")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
