"""The trainer is killed without a chance to clean up; nobody outlives it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.process.scripts import gone, running

TRAIN = """
if __name__ == "__main__":
    loader = DataLoader(
        {dataset}, batch_size=2, num_workers=3, multiprocessing_context={context!r},
        persistent_workers={persistent}
    )
    iterator = iter(loader)
    worker_pids(iterator)
    if not {busy}:
        next(iterator)
    print("training", flush=True)
    time.sleep(60)
"""


def train(context: str, *, busy: bool = False, persistent: bool = False) -> str:
    dataset = "Sleepy(1000, set(range(1000)), 60.0)" if busy else "Numbers(1000)"
    return TRAIN.format(dataset=dataset, context=context, busy=busy, persistent=persistent)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_busy_workers_and_their_host_end_with_the_trainer(context: str) -> None:
    with running(train(context, busy=True)) as script:
        script.wait_for("training")
        left = script.descendants()
        assert len(left) >= 4, "three workers and a host"
        theirs = {f"torch_{process.pid}_" for process in left} | {f"torch_{script.pid}_"}
        script.process.kill()
        assert gone(left, seconds=2.0) == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(theirs))]


def test_idle_persistent_workers_end_with_the_trainer() -> None:
    with running(train("fork", persistent=True)) as script:
        script.wait_for("training")
        left = script.descendants()
        script.process.kill()
        assert gone(left, seconds=2.0) == []


def test_a_stopped_host_ends_with_the_trainer_once_it_goes_on() -> None:
    with running(train("fork")) as script:
        script.wait_for("training")
        left = script.descendants()
        host = next(p for p in left if p.ppid() == script.pid)
        host.send_signal(signal.SIGSTOP)
        script.process.kill()
        script.process.wait(5)
        host.send_signal(signal.SIGCONT)
        assert gone(left, seconds=2.0) == []


FROM_A_THREAD = """
import threading

def start():
    global iterator
    iterator = iter(DataLoader(Numbers(1000), batch_size=2, num_workers=2))
    worker_pids(iterator)

thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.2)
assert all(w.is_alive() for w in iterator._workers), "workers died with the thread that asked"
print("training", flush=True)
time.sleep(60)
"""


def test_workers_outlive_the_thread_that_started_them_and_not_the_trainer() -> None:
    with running(FROM_A_THREAD) as script:
        script.wait_for("training")
        left = script.descendants()
        assert len(left) >= 3
        script.process.kill()
        assert gone(left, seconds=2.0) == []


TERMINATED = """
loader = DataLoader(Numbers(1000), batch_size=2, num_workers=2)
iterator = iter(loader)
next(iterator)
print("training", flush=True)
time.sleep(60)
"""


def test_a_trainer_that_is_terminated_leaves_nothing_either() -> None:
    with running(TERMINATED) as script:
        script.wait_for("training")
        left = script.descendants()
        os.kill(script.pid, signal.SIGTERM)
        assert gone(left, seconds=2.0) == []
        assert script.end(5) == -signal.SIGTERM
