"""The record of a run: results.json, read, merged and written. Draws nothing."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Round, Summary
from benchmarks.cases import NAMES
from benchmarks.machine import describe_machine

Record = dict[str, Any]


def open_record(path: Path, quick: bool) -> Record:
    """The stored record if it is of this machine and these versions, otherwise a new one."""
    machine = describe_machine()
    if path.exists():
        stored: Record = json.loads(path.read_text())
        if stored["machine"] == machine and stored["quick"] == quick:
            return stored
    return {"machine": machine, "quick": quick, "cases": {}}


def add_case(record: Record, case: Case, rounds: list[Round], summary: Summary) -> None:
    """Put a case's result in the place of an older one; cases that were not run stay."""
    record["cases"][case.name] = {
        "kind": case.kind,
        "title": case.title,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load_average_after": round(os.getloadavg()[0], 2),
        **summary.as_json(),
        "rounds": [
            {who: {k: v for k, v in got.items() if k != "checksums"} for who, got in round_.items()}
            for round_ in rounds
        ],
    }
    record["cases"] = {name: record["cases"][name] for name in NAMES if name in record["cases"]}


def cases_of(record: Record, kind: str) -> list[dict[str, Any]]:
    """The stored cases of one kind, in the order of benchmarks.cases."""
    return [case for case in record["cases"].values() if case["kind"] == kind]


def row_of(case: dict[str, Any], contender: str, variant: str) -> dict[str, Any] | None:
    """One row of a stored case, or None."""
    for row in case["rows"]:
        if row["contender"] == contender and row["variant"] == variant:
            found: dict[str, Any] = row
            return found
    return None


def machine_line(record: Record) -> str:
    """The machine in one line, for titles and captions."""
    machine = record["machine"]
    dates = sorted(case["date"] for case in record["cases"].values())
    warning = "QUICK: a smoke test, not a result. " if record["quick"] else ""
    return warning + (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:.0f} GB, "
        f"{machine['kernel']}, Python {machine['python']}, torch {machine['torch']}, "
        f"SPDL {machine['spdl']}, {dates[-1] if dates else 'no cases'}"
    )
