"""What the command answers before any verb has run."""

from __future__ import annotations

import subprocess
import sys

import stoker

LOADED = (
    "import atexit, sys; atexit.register(lambda: print('torch loaded:', 'torch' in sys.modules))"
)


def stoker_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"{LOADED}; from stoker.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_version_is_the_packages() -> None:
    done = stoker_command("--version")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"stoker {stoker.__version__}"


def test_help_names_the_verbs_and_does_not_load_torch() -> None:
    done = stoker_command("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "torch loaded: False" in done.stdout


def test_a_verb_says_its_options_without_loading_torch() -> None:
    done = stoker_command("demo", "--help")
    assert done.returncode == 0
    assert "--seconds" in done.stdout
    assert "--json" in done.stdout
    assert "torch loaded: False" in done.stdout


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = stoker_command("stoke")
    assert done.returncode == 2
    assert "stoke" in done.stderr
