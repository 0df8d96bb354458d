"""Ctrl-C reaches every process of the terminal; the trainer alone handles it."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.process.scripts import Script, gone, running

ENDS_WITHIN_SECONDS = 5.0


def interrupted(script: Script) -> None:
    left = script.descendants()
    assert left
    script.interrupt()
    code = script.end(ENDS_WITHIN_SECONDS)
    assert code == -signal.SIGINT
    assert script.errors.count("Traceback") == 1, script.errors
    assert script.errors.rstrip().endswith("KeyboardInterrupt")
    assert "replaced" not in script.errors
    assert "started again" not in script.errors
    assert gone(left, seconds=2.0) == []


MID_EPOCH = """
import logging
logging.basicConfig()

def main():
    loader = DataLoader(
        Augmented(100_000, seconds=0.001), batch_size=4, num_workers=3,
        multiprocessing_context={context!r}, persistent_workers={persistent},
    )
    for step, batch in enumerate(loader):
        if step == 5:
            print("training", flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("context", "persistent"), [("fork", False), ("spawn", True), ("forkserver", False)]
)
def test_ctrl_c_in_mid_epoch_ends_everything_with_one_traceback(
    context: str, persistent: bool
) -> None:
    with running(MID_EPOCH.format(context=context, persistent=persistent)) as script:
        script.wait_for("training")
        time.sleep(random.random() / 10)
        interrupted(script)


SLOW_BATCH = """
loader = DataLoader(Sleepy(100, {20}, 60.0), batch_size=4, num_workers=2)
for step, batch in enumerate(loader):
    print("training" if step == 4 else "", flush=True)
"""


def test_ctrl_c_while_waiting_for_a_slow_batch_ends_everything_with_one_traceback() -> None:
    with running(SLOW_BATCH) as script:
        script.wait_for("training")
        time.sleep(0.2)
        interrupted(script)


AT_START = """
print("training", flush=True)
for _ in range(1000):
    for batch in DataLoader(Numbers(8), batch_size=4, num_workers=2):
        pass
"""


@pytest.mark.parametrize("_time", range(2))
def test_ctrl_c_while_workers_start_or_end_leaves_nothing(_time: int) -> None:
    with running(AT_START) as script:
        script.wait_for("training")
        time.sleep(0.2 + random.random() / 5)
        left = script.descendants()
        script.interrupt()
        assert script.end(ENDS_WITHIN_SECONDS) == -signal.SIGINT
        assert script.errors.count("Traceback") == 1, script.errors
        assert gone(left, seconds=2.0) == []


GOES_ON = """
import random, threading
moments = random.Random({seed})

def epoch(disturbed):
    torch.manual_seed(3)
    loader = DataLoader(
        Augmented(1200, width=2000), batch_size=4, shuffle=True, num_workers=2, {more}
    )
    loader._counters.costs.note([], [(index, 60.0) for index in {known}])
    iterator = iter(loader)
    found = []
    sent = []
    armed = threading.Event()
    over = threading.Event()

    def disturb():
        while not over.wait(0.002 + moments.random() / 16):
            if armed.is_set():
                armed.clear()
                sent.append(True)
                os.kill(os.getpid(), signal.SIGINT)

    def record(batch):  # once, also if it is interrupted and called again
        if not found or found[-1][0] is not batch["index"]:
            found.append((batch["index"], batch["torch"].sum().item()))

    disturber = threading.Thread(target=disturb)
    if disturbed:
        disturber.start()
    batch = None
    while True:
        try:
            armed.set()
            for batch in iterator:
                record(batch)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
        except KeyboardInterrupt:
            if batch is not None:
                record(batch)
    over.set()
    if disturbed:
        disturber.join()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert bool(loader.stats().early_batches) == bool({known})
    return [(index.tolist(), total) for index, total in found], len(sent)

expected, _ = epoch(False)
found, sent = epoch(True)
assert sent, "too fast"
missing = [batch for batch in expected if batch not in found]
assert len(found) == len(expected), (len(found), missing, sent)
assert found == expected, missing
print("right", sent)
"""


@pytest.mark.parametrize("known", ["range(0)", "range(0, 1200, 31)"], ids=["in turn", "early"])
@pytest.mark.parametrize("seed", range(2))
def test_after_ctrl_c_the_same_iterator_goes_on_with_the_right_batches(
    seed: int, known: str
) -> None:
    more = "memory='1MB'" if seed % 2 else ""
    with running(GOES_ON.format(seed=seed, more=more, known=known)) as script:
        script.wait_for("right")
        assert script.end(10) == 0, script.errors


CATCHES_AND_LEAVES = """
try:
    for step, batch in enumerate(DataLoader(Numbers(100_000), batch_size=4, num_workers=2)):
        if step == 5:
            print("training", flush=True)
except KeyboardInterrupt:
    pass
left = torch.multiprocessing.active_children()
print("done", flush=True)
"""


def test_a_script_that_catches_ctrl_c_ends_cleanly() -> None:
    with running(CATCHES_AND_LEAVES) as script:
        script.wait_for("training")
        left = script.descendants()
        script.interrupt()
        assert script.end(ENDS_WITHIN_SECONDS) == 0
        assert script.errors == ""
        assert gone(left, seconds=2.0) == []
