"""One measurement in a process of its own: `benchmarks.child CASE CONTENDER FOLDER [quick]`.

Speaks to the parent in lines on stdout: BASE before the loader exists (and waits for a line back,
so that the parent can look at memory), RESULT with JSON at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Measure, and print the result."""
    from benchmarks.case import Context
    from benchmarks.cases import find_case

    name, contender, folder, *rest = arguments
    context = Context(Path(folder), quick="quick" in rest)
    result = find_case(name).measure(contender, context, _wait_at_baseline)
    print("\nRESULT", json.dumps(result), flush=True)


def _wait_at_baseline() -> None:
    print("\nBASE", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1:])
