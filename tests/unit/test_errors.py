"""Errors begin with torch's words, name the culprit, carry fields, pickle, and end in an action."""

from __future__ import annotations

import copy
import pickle

import pytest

from stoker import errors

EXAMPLES = [
    errors.StokerError("plain"),
    errors.ConfigError(name="memory", given=lambda: 0, accepted="a number of bytes"),
    errors.StateError("it does not fit", differences={"samples": (1, 2)}),
    errors.WorkerDied(
        worker=3,
        pid=123,
        signal_name="SIGKILL",
        indices=[4, 5],
        attempts=3,
        private_bytes=4_100_000_000,
    ),
    errors.WorkerDied(worker=0, pid=9, exit_code=3),
    errors.WorkerTimeout(timeout=5.0, worker=1, pid=77, indices=range(3)),
    errors.WorkerTimeout(timeout=0.5),
    errors.WorkerStartError(cause="cannot pickle '_io.TextIOWrapper' object"),
    errors.WorkerLost(pid=12, cause="killed by SIGKILL"),
]
WORKER_ERRORS = [error for error in EXAMPLES if isinstance(error, errors.WorkerError)]


def of_class(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", EXAMPLES, ids=of_class)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(error: errors.StokerError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert vars(copy.copy(error)) == vars(error)


def test_what_a_caller_added_survives_too() -> None:
    error = errors.WorkerLost(pid=1, cause="x")
    error.seen_on = "node 7"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(error)).seen_on == "node 7"


@pytest.mark.parametrize(
    ("signal_name", "words"),
    [
        ("SIGSEGV", "Segmentation fault"),
        ("SIGKILL", "Killed"),
        ("SIGBUS", "Bus error"),
        ("SIGRTMIN+3", "SIGRTMIN+3"),
    ],
)
def test_death_by_a_signal_begins_with_torchs_words(signal_name: str, words: str) -> None:
    error = errors.WorkerDied(worker=0, pid=123, signal_name=signal_name)
    assert str(error).startswith(f"DataLoader worker (pid 123) is killed by signal: {words}.")


def test_an_unexpected_exit_begins_with_torchs_words() -> None:
    error = errors.WorkerDied(worker=0, pid=123, exit_code=3)
    assert str(error).startswith(
        "DataLoader worker (pid(s) 123) exited unexpectedly with exit code 3"
    )


@pytest.mark.parametrize(("timeout", "words"), [(5.0, "5"), (0.5, "0.5"), (120, "120")])
def test_a_timeout_begins_with_torchs_words(timeout: float, words: str) -> None:
    error = errors.WorkerTimeout(timeout=timeout)
    assert str(error).startswith(f"DataLoader timed out after {words} seconds")


def test_a_death_says_what_was_loaded_how_often_it_killed_and_what_was_held() -> None:
    text = str(
        errors.WorkerDied(
            worker=3, pid=1, signal_name="SIGKILL", indices=[4, 5], attempts=3, private_bytes=10**9
        )
    )
    for fact in ("Worker 3", "indices [4, 5]", "killed 3 workers", "holding 1 GB"):
        assert fact in text


def test_many_indices_are_all_in_the_field_and_shortened_in_the_text() -> None:
    error = errors.WorkerDied(worker=0, pid=1, exit_code=1, indices=range(1000))
    assert error.indices == tuple(range(1000))
    assert "and 984 more" in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize("error", WORKER_ERRORS, ids=of_class)
def test_a_worker_error_ends_in_what_to_do(error: errors.WorkerDied) -> None:
    assert error.hint
    assert str(error).endswith(error.hint)


def test_a_hint_of_the_callers_replaces_the_general_one() -> None:
    error = errors.WorkerDied(worker=0, pid=1, exit_code=1, hint="Try: stoker plan --tier safe")
    assert str(error).endswith("Try: stoker plan --tier safe")


def test_they_are_also_what_torch_code_catches() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.StateError, ValueError)
    assert issubclass(errors.WorkerError, RuntimeError)
    for kind in (errors.WorkerDied, errors.WorkerTimeout, errors.WorkerLost):
        assert issubclass(kind, errors.WorkerError)
    assert issubclass(errors.WorkerStartError, errors.WorkerError)


def test_a_huge_argument_does_not_make_a_huge_message() -> None:
    assert len(str(errors.ConfigError(name="x", given="y" * 10_000, accepted="less"))) < 300
