"""Results as tables: the same content for the terminal (rich) and for the README (markdown)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.contenders import TITLES
from benchmarks.record import Record, cases_of, machine_line, row_of

REACHED, MISSED = "reached", "NOT reached"


@dataclass(slots=True)
class Grid:
    """A titled table of strings; its first column is text, the others figures."""

    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def as_rich(self) -> Table:
        """The grid for the terminal, verdicts coloured."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.head):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*(_coloured(cell) for cell in row))
        return table

    def as_markdown(self) -> str:
        """The grid as a GitHub table."""
        rule = ["---" if number == 0 else "---:" for number in range(len(self.head))]
        lines = [self.head, rule, *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def grids(record: Record) -> list[Grid]:
    """Every table that the record has content for."""
    found = [_throughput(record), _known_slow(record), _memory(record), _shared(record)]
    found += [_resize_workers(record), _resize_bytes(record), _resume(record)]
    found.append(_waits(record))
    found.append(_trainer(record))
    return [grid for grid in found if grid.rows] + [_targets(record)]


def as_markdown(record: Record) -> str:
    """The whole record as a markdown page."""
    parts = [grid.as_markdown() for grid in grids(record)]
    head = f"Measured on: {machine_line(record)}. How: [benchmarks/README.md](../README.md).\n"
    return "\n".join([head, *parts])


def _throughput(record: Record) -> Grid:
    columns = ["workload", "torch, samples/s", "Stoker, samples/s", "Stoker / torch"]
    columns += [
        "SPDL / torch",
        "Stoker / torch, consumer copies",
        "Stoker / torch, first 12 batches",
    ]
    grid = Grid(
        "Throughput (a batch is read whole by the consumer; median [95 % interval])", columns
    )
    for case in cases_of(record, "throughput"):
        cells = [_value(row_of(case, who, "read")) for who in ("torch", "stoker")]
        cells += [_ratio(row_of(case, who, "read")) for who in ("stoker", "spdl")]
        cells += [_ratio(row_of(case, "stoker", variant)) for variant in ("copy", "beginning")]
        grid.rows.append([case["title"], *cells])
    return grid


def _known_slow(record: Record) -> Grid:
    grid = Grid("", ["loader", "time lost, first epoch", "time lost, second epoch"])
    for case in cases_of(record, "known_slow"):
        grid.title = case["title"]
        for who in ("torch", "torch_unordered", "stoker"):
            rows = [row_of(case, who, f"epoch {number}") for number in (1, 2)]
            if any(rows):
                grid.rows.append([TITLES[who], *map(_value, rows)])
    return grid


def _memory(record: Record) -> Grid:
    grid = Grid(
        "Memory (process tree, own cgroup)", ["loader", "base", "added", "of torch", "pace"]
    )
    for case in cases_of(record, "memory"):
        grid.title = f"{case['title']} (process tree in a cgroup of its own)"
        for row in case["rows"]:
            if row["variant"] == "added":
                base = row_of(case, row["contender"], "base")
                ratio = f"{row['ratio']['median']:.2f}" if row["ratio"] else "-"
                cells = [_value(base), _value(row), ratio, row["note"]]
                grid.rows.append([TITLES[row["contender"]], *cells])
    return grid


def _shared(record: Record) -> Grid:
    waits = ("first_1", "first_2", "first_4", "first_8")
    columns = ["loader", "shared memory, 16 workers", "of torch"]
    columns += [f"first batch, {name[6:]}" for name in waits]
    grid = Grid("Shared batches", columns)
    for case in cases_of(record, "shared"):
        grid.title = case["title"]
        for row in case["rows"]:
            if row["variant"] == "shmem":
                who = row["contender"]
                ratio = f"{row['ratio']['median']:.2f}" if row["ratio"] else "-"
                firsts = [_value(row_of(case, who, name)) for name in waits]
                grid.rows.append([TITLES[who], _value(row), ratio, *firsts])
    return grid


def _resize_workers(record: Record) -> Grid:
    columns = ["loader", "longest pause", "of torch", "90 % of the pace of 4 workers after"]
    grid = Grid("", columns)
    for case in cases_of(record, "resize_workers"):
        grid.title = case["title"]
        for who in ("torch", "stoker"):
            pause, pace = (row_of(case, who, variant) for variant in ("pause", "pace"))
            if pause is not None:
                grid.rows.append([TITLES[who], _value(pause), _ratio(pause), _value(pace)])
    return grid


def _resize_bytes(record: Record) -> Grid:
    columns = ["loader", "shared memory before", "after", "given back after", "longest wait"]
    grid = Grid("", columns)
    for case in cases_of(record, "resize_bytes"):
        grid.title = case["title"]
        for who in ("torch", "stoker"):
            variants = ("before", "after", "given_back", "wait")
            rows = [row_of(case, who, variant) for variant in variants]
            if any(rows):
                grid.rows.append([TITLES[who], *map(_value, rows)])
    return grid


def _resume(record: Record) -> Grid:
    columns = ["loader", "first batch after", "of torch", "a call of state_dict()", "what follows"]
    grid = Grid("", columns)
    for case in cases_of(record, "resume"):
        grid.title = case["title"]
        for who in ("torch", "torch_skipping", "torchdata", "stoker"):
            wait, cost = (row_of(case, who, variant) for variant in ("wait", "state_dict"))
            if wait is not None:
                cells = [_value(wait), _ratio(wait), _value(cost), wait["note"]]
                grid.rows.append([TITLES[who], *cells])
    return grid


def _waits(record: Record) -> Grid:
    grid = Grid(
        "Wait for the first batch", ["setting", "torch", "Stoker", "Stoker / torch", "SPDL"]
    )
    for case in cases_of(record, "first_batch"):
        torch, stoker, spdl = (row_of(case, who, "wait") for who in ("torch", "stoker", "spdl"))
        cells = [_value(torch), _value(stoker), _ratio(stoker), _value(spdl)]
        grid.rows.append([case["title"].removeprefix("First batch: "), *cells])
    return grid


def _trainer(record: Record) -> Grid:
    grid = Grid("Trainer", ["what", "torch", "Stoker", "Stoker / torch"])
    for case in cases_of(record, "trainer_cost"):
        torch, stoker = (row_of(case, who, "cpu") for who in ("torch", "stoker"))
        grid.title = "What a batch costs the training process"
        grid.rows.append([case["title"], _value(torch), _value(stoker), _ratio(stoker)])
    return grid


def _targets(record: Record) -> Grid:
    grid = Grid("Targets", ["case", "target", "measured", "verdict"])
    for name, case in record["cases"].items():
        if case["skipped"]:
            grid.rows.append([name, "-", case["skipped"], "skipped"])
        for target in case["targets"]:
            verdict = REACHED if target["reached"] else MISSED
            grid.rows.append([name, target["text"], target["got"], verdict])
    return grid


def _value(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    value, unit = row["value"]["median"], row["unit"]
    figure = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return figure if unit == "samples/s" else f"{figure} {unit}"


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None or row["ratio"] is None:
        return "-"
    ratio = row["ratio"]
    return f"{ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _coloured(cell: str) -> Text:
    styles = {REACHED: "green", MISSED: "bold red", "skipped": "yellow"}
    return Text(cell, style=styles.get(cell, ""))
