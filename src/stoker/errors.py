"""Every error Stoker raises on purpose.

    StokerError
    ├── ConfigError            (also a ValueError)    an argument is not acceptable
    ├── StateError             (also a ValueError)    a saved state can't be used, or not be saved
    └── WorkerError            (also a RuntimeError)  loading could not go on
        ├── WorkerDied         a batch has killed its workers
        ├── WorkerTimeout      no batch came within the user's `timeout`
        ├── WorkerStartError   a worker process could not be started
        └── WorkerLost         the process that starts workers is gone for good

Each carries its facts as fields, survives pickling, and ends in what to do next. Messages that
torch has too begin with torch's own words, because scripts and schedulers search logs for them. An
exception that a dataset raises is none of these: it reaches the caller with its own type, as in
torch. Each can also be made from a finished message alone, as code that carries exceptions between
processes does.
"""

from __future__ import annotations

import signal as _signal
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

_E = TypeVar("_E", bound="StokerError")

# More indices than this say nothing to a reader; the field holds all of them.
_SHOWN_INDICES = 16


def _rebuild(cls: type[_E], args: tuple[Any, ...], fields: dict[str, Any]) -> _E:
    # Not through __init__: that wants the facts, and here the message is already written.
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    return error


class StokerError(Exception):
    """The base of all of them: `except stoker.StokerError` catches what Stoker itself reports."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class ConfigError(StokerError, ValueError):
    """An argument is not acceptable: which one, what was given, and what would be accepted."""

    def __init__(self, *, name: str, given: object, accepted: str) -> None:
        self.name = name
        # Its words, not the thing itself: that may be large, or not picklable.
        self.given = _shortened(repr(given))
        self.accepted = accepted
        super().__init__(f"{name}={self.given} is not acceptable; give {accepted}.")


class StateError(StokerError, ValueError):
    """A loader's state can't be loaded here, or can't be saved; `differences` says what differs."""

    def __init__(
        self, message: str = "", *, differences: dict[str, tuple[Any, Any]] | None = None
    ) -> None:
        self.differences = differences or {}
        super().__init__(message)


class WorkerError(StokerError, RuntimeError):
    """Loading could not go on because of the processes that load, not because of the data."""


class WorkerDied(WorkerError):
    """The same batch has killed worker after worker, so trying it once more is pointless."""

    def __init__(
        self,
        message: str = "",
        *,
        worker: int = -1,
        pid: int = 0,
        signal_name: str | None = None,
        exit_code: int | None = None,
        indices: Sequence[Any] | None = None,
        attempts: int = 1,
        private_bytes: int | None = None,
        hint: str = "",
    ) -> None:
        self.worker = worker
        self.pid = pid
        self.signal_name = signal_name
        self.exit_code = exit_code
        self.indices = None if indices is None else tuple(indices)
        self.attempts = attempts
        self.private_bytes = private_bytes
        self.hint = hint or _what_to_do(signal_name, self.indices)
        super().__init__(message or " ".join(self._sentences()))

    def _sentences(self) -> list[str]:
        held = self.private_bytes
        return [
            _how_it_died(self.pid, self.signal_name, self.exit_code),
            f"Worker {self.worker}"
            + ("" if held is None else f", holding {format_bytes(held)} of its own,")
            + f" was {_doing(self.indices)}.",
            *([f"That has killed {self.attempts} workers."] if self.attempts > 1 else []),
            self.hint,
        ]


class WorkerTimeout(WorkerError):
    """No batch came within the `timeout` that the user set."""

    def __init__(
        self,
        message: str = "",
        *,
        timeout: float = 0.0,
        worker: int | None = None,
        pid: int | None = None,
        indices: Sequence[Any] | None = None,
        hint: str = "",
    ) -> None:
        self.timeout = timeout
        self.worker = worker
        self.pid = pid
        self.indices = None if indices is None else tuple(indices)
        self.hint = hint or (
            "Look at the stack of the worker above for where it waits;"
            " if the data is only slow, give a larger timeout=, or 0 to wait without limit."
        )
        who = "No worker had taken the next batch"
        if worker is not None:
            who = f"Worker {worker}" + ("" if pid is None else f" (pid {pid})")
            who += f" was {_doing(self.indices)}"
        super().__init__(
            message or f"DataLoader timed out after {timeout:g} seconds. {who}. {self.hint}"
        )


class WorkerStartError(WorkerError):
    """A worker process could not be started; `cause` keeps the words of what went wrong."""

    def __init__(self, message: str = "", *, cause: str = "", hint: str = "") -> None:
        self.cause = cause
        self.hint = hint or (
            "Check that the dataset, collate_fn and worker_init_fn can be pickled"
            " and that the limits on processes and memory leave room; num_workers=0 needs neither."
        )
        super().__init__(
            message or f"a worker process could not be started: {_clause(cause)}. {self.hint}"
        )


class WorkerLost(WorkerError):
    """The process that starts and watches the workers is gone and can't be started again."""

    def __init__(self, message: str = "", *, pid: int = 0, cause: str = "", hint: str = "") -> None:
        self.pid = pid
        self.cause = cause
        self.hint = hint or (
            "If it ended by itself, its own error stands above (where processes are spawned, a"
            ' script needs if __name__ == "__main__":). If it was killed, look in the system\'s log'
            " for an out-of-memory kill and use fewer workers; iter(loader) starts a new iteration."
        )
        super().__init__(
            message
            or f"the process that starts workers{f' (pid {pid})' if pid else ''} is gone: "
            f"{_clause(cause)}. {self.hint}"
        )


def _clause(text: str) -> str:
    return text.rstrip(". ")


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def _how_it_died(pid: int, signal_name: str | None, exit_code: int | None) -> str:
    """torch's own sentence, word for word."""
    if signal_name is not None:
        return f"DataLoader worker (pid {pid}) is killed by signal: {_describe(signal_name)}."
    if exit_code is None:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly."
    return f"DataLoader worker (pid(s) {pid}) exited unexpectedly with exit code {exit_code}."


def _describe(signal_name: str) -> str:
    """ "SIGSEGV" -> "Segmentation fault", as torch (through strsignal) says it."""
    try:
        number = _signal.Signals[signal_name]
    except KeyError:  # a real-time signal has a number and no name of its own
        return signal_name
    return _signal.strsignal(number) or signal_name


def _doing(indices: tuple[Any, ...] | None) -> str:
    if indices is None:
        return "not working on a batch"
    shown = ", ".join(map(repr, indices[:_SHOWN_INDICES]))
    more = len(indices) - _SHOWN_INDICES
    return f"loading indices [{shown}" + (f", and {more} more]" if more > 0 else "]")


def _what_to_do(signal_name: str | None, indices: tuple[Any, ...] | None) -> str:
    if signal_name == "SIGKILL":
        return (
            "SIGKILL is most often the kernel freeing memory: use fewer workers or a smaller"
            " memory=, or look in the system's log for who sent it."
        )
    if signal_name == "SIGBUS":
        return (
            "A bus error means that mapped memory or a mapped file went away:"
            " check that no data file was truncated and that memory is left."
        )
    if indices:
        return (
            f"Load it in the main process to see the failure itself: dataset[{indices[0]!r}],"
            " or num_workers=0 with python -X faulthandler."
        )
    return "Run once with num_workers=0 and python -X faulthandler to see the failure itself."
