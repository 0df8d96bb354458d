"""Real frameworks train with our loader: same batches as with torch's, by our engine.

What is checked is in with_*.py, one file a framework.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest

from tests.frameworks import checks

LIBRARIES = {
    "with_accelerate": "accelerate",
    "with_ignite": "ignite",
    "with_lightning": "lightning",
    "with_mmengine": "mmengine",
    "with_transformers": "transformers",
}
run = functools.cache(checks.run)


@pytest.mark.timeout(85)
@pytest.mark.parametrize(
    ("module", "name"), [(m, name) for m in LIBRARIES for name in checks.names(m)]
)
def test_training(module: str, name: str) -> None:
    library = LIBRARIES[module]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'stoker[frameworks]'")
    outcome = run(module)[name]
    if outcome.startswith(checks.SKIPPED):
        pytest.skip(outcome.removeprefix(checks.SKIPPED))
    if outcome:
        pytest.fail(outcome, pytrace=False)
