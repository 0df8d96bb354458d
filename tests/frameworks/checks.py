"""Runs the checks of one framework in a process of its own, and says how each ended.

    python -m tests.frameworks.checks tests.frameworks.with_lightning

Frameworks leave threads, hooks and state behind, and import a thousand modules: none of that
should be in the process in which all other tests run.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import unittest
import warnings
from pathlib import Path

HERE = Path(__file__).parent
SKIPPED = "skipped: "


def names(module: str) -> list[str]:
    """The checks of a module, in order, without importing it."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


def run(module: str) -> dict[str, str]:
    """By check, an empty text or what went wrong (``SKIPPED``: why it was not done)."""
    with tempfile.TemporaryDirectory(prefix="stoker-frameworks-") as home:
        done = subprocess.run(
            [sys.executable, "-m", "tests.frameworks.checks", module],
            cwd=HERE.parents[1],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "HOME": home,
                "TMPDIR": home,
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=80,
        )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        whole = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return dict.fromkeys(names(module), whole)
    found: dict[str, str] = json.loads(last)
    return found


def main(module: str) -> None:
    warnings.simplefilter("ignore")  # of the frameworks about each other
    checks = importlib.import_module(f"tests.frameworks.{module}")
    found = {}
    for name in names(module):
        with tempfile.TemporaryDirectory() as directory:
            try:
                getattr(checks, name)(Path(directory))
                found[name] = ""
            except unittest.SkipTest as reason:
                found[name] = f"{SKIPPED}{reason}"
            except BaseException:  # noqa: BLE001 - the one who asked judges
                found[name] = traceback.format_exc()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
