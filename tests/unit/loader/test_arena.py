"""A lease ends exactly when nobody can read the extent any more, in no process."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from stoker.loader import arena as arena_module
from stoker.loader.arena import Arena, Lease, map_memory, memory_file
from stoker.loader.extents import PAGE_BYTES, Extent
from stoker.loader.room import tensor_over

PAGE = PAGE_BYTES
FIRST = Extent(0, PAGE)
SECOND = Extent(PAGE, PAGE)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 * PAGE)
    yield arena
    arena.close()


def leased_tensor(arena: Arena, extent: Extent, value: int = 7) -> torch.Tensor:
    """A batch as the loader makes one: a tensor over a lease."""
    arena.view(extent, extent.size)[:] = value
    return tensor_over(arena.lease(extent, extent.size), 0, torch.uint8, (extent.size,))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def pages_of(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // PAGE


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("stoker-arena")


def eventually(condition: Callable[[], Any]) -> Any:
    """The kernel needs a moment to close what a process had; only a failure waits long."""
    deadline = time.monotonic() + 20
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


@contextmanager
def child(body: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """A fork that waits until it is let go, then runs `body`; the result says if that was true."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(write)
            os.read(read, 1)
            code = 0 if body() else 2
        finally:
            os._exit(code)
    os.close(read)
    ended: list[int] = []

    def finish() -> bool:
        if not ended:
            os.close(write)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return ended == [0]

    try:
        yield finish
    finally:
        finish()


# ---- when a lease ends


@pytest.mark.parametrize(
    "alias",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:9],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.int32)[1:].numpy()[::2],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    ],
    ids=["tensor", "slice", "numpy", "slices", "storage", "memoryview", "parameter"],
)
def test_a_lease_ends_with_the_last_thing_that_can_read_it(
    arena: Arena, alias: Callable[[torch.Tensor], Any]
) -> None:
    last = alias(leased_tensor(arena, FIRST))
    gc.collect()
    assert arena.ended() == []
    del last
    assert arena.ended() == [0]
    assert arena.ended() == []


def test_each_lease_ends_for_itself(arena: Arena) -> None:
    first, second = leased_tensor(arena, FIRST, 1), leased_tensor(arena, SECOND, 2)
    del first
    assert arena.ended() == [FIRST.start]
    assert int(second[0]) == 2
    del second
    assert arena.ended() == [SECOND.start]


def test_an_extent_can_be_leased_again_and_again(arena: Arena) -> None:
    for value in range(50):
        tensor = leased_tensor(arena, FIRST, value)
        assert tensor.sum() == value * PAGE
        del tensor
        assert arena.ended() == [0]


def test_a_lease_in_a_reference_cycle_ends_with_the_cycle(arena: Arena) -> None:
    cycle: list[Any] = [leased_tensor(arena, FIRST)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert arena.ended() == [0]


def test_a_lease_may_end_on_any_thread(arena: Arena) -> None:
    held = [leased_tensor(arena, Extent(n * PAGE, PAGE)) for n in range(8)]
    threads = [threading.Thread(target=held.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(arena.ended()) == [n * PAGE for n in range(8)]


def test_a_private_copy_takes_nothing_of_the_arena(arena: Arena) -> None:
    arena.view(FIRST, PAGE)[:] = 1
    copy = arena.private_copy(FIRST, 10)
    arena.view(FIRST, PAGE)[:] = 2
    assert copy.tolist() == [1] * 10
    del copy
    assert arena.ended() == []


# ---- memory that a worker brought itself


def test_adopted_memory_is_counted_while_it_is_held(arena: Arena) -> None:
    fd = memory_file("test", 2 * PAGE)
    os.write(fd, b"\x05" * PAGE)
    before = descriptors()
    lease = arena.adopt(fd, 100)
    assert descriptors() == before - 1, "the descriptor was closed"
    assert lease.tolist() == [5] * 100
    own = arena.adopt_memory(np.zeros(PAGE, np.uint8), 10)
    assert arena.overdraft_bytes == 3 * PAGE
    del lease
    assert arena.ended() == []
    assert arena.overdraft_bytes == PAGE
    del own
    arena.ended()
    assert arena.overdraft_bytes == 0


def test_a_thousand_adopted_batches_take_no_descriptor(arena: Arena) -> None:
    before = descriptors()
    held = [arena.adopt(memory_file("test", PAGE), 10) for _ in range(1000)]
    assert descriptors() == before
    del held


def test_memory_that_can_not_be_mapped_leaves_no_descriptor(arena: Arena) -> None:
    before = descriptors()
    with pytest.raises(OSError, match="could not map"):
        arena.adopt(memory_file("test", 0), 0)
    assert descriptors() == before


def test_a_mapping_shares_its_bytes_and_outlives_its_descriptor() -> None:
    fd = memory_file("test", PAGE)
    _, one = map_memory(fd, PAGE)
    _, other = map_memory(fd, PAGE)
    os.close(fd)
    one[5] = 9
    assert other[5] == 9


# ---- forks


def test_a_lease_that_ends_in_a_forked_child_goes_on_here(arena: Arena) -> None:
    held = [leased_tensor(arena, FIRST)]

    def let_go() -> bool:
        held.clear()
        gc.collect()
        return not arena.ended()

    with child(let_go) as finish:
        assert finish()
    assert arena.ended() == []
    held.clear()
    assert arena.ended() == [0]


def test_what_was_leased_at_a_fork_is_not_recycled_while_the_child_lives(arena: Arena) -> None:
    old = [leased_tensor(arena, FIRST, 3)]
    with child(lambda: bool((old[0] == 3).all())) as finish:
        new = leased_tensor(arena, SECOND)
        del new
        assert arena.ended() == [SECOND.start], "leased after the fork: the child can't know it"
        old.clear()
        assert arena.ended() == []
        assert arena.ended() == []
        assert finish(), "the child read what it held"
    assert eventually(arena.ended) == [FIRST.start]


def test_a_grandchild_keeps_the_fence_up(arena: Arena) -> None:
    held = leased_tensor(arena, FIRST, 3)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        if not os.fork():
            os.read(read, 1)
        os._exit(0)
    os.close(read)
    os.waitpid(pid, 0)
    del held
    assert arena.ended() == [], "the child is gone, its child is not"
    os.close(write)
    assert eventually(arena.ended) == [FIRST.start]


def test_a_child_that_became_another_program_holds_nothing(arena: Arena) -> None:
    held = leased_tensor(arena, FIRST)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(read, 0)
        os.close(write)
        os.execv(sys.executable, [sys.executable, "-c", "input()"])
    os.close(read)
    try:
        del held
        assert eventually(arena.ended) == [FIRST.start]
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it still runs"
    finally:
        os.write(write, b"\n")
        os.close(write)
        os.waitpid(pid, 0)


def test_forks_without_a_leased_batch_take_no_descriptor(arena: Arena) -> None:
    before = descriptors()
    with child(lambda: True):
        assert descriptors() == before + 1, "this test's own pipe"


def test_children_that_are_gone_take_no_descriptor(arena: Arena) -> None:
    held = leased_tensor(arena, FIRST)
    before = descriptors()
    for _ in range(10):
        with child(lambda: True):
            pass
    assert descriptors() <= before + 1, "one at most, of the last child"
    del held
    assert eventually(arena.ended) == [0]
    assert descriptors() == before


def test_two_threads_that_fork_at_once_close_their_own_fences_only(arena: Arena) -> None:
    """The fork of one thread may come between the hooks of the other's."""
    held = leased_tensor(arena, FIRST)
    arena_module._before_fork()

    def fork_fails() -> None:
        arena_module._before_fork()
        arena_module._after_fork_in_parent()

    other = threading.Thread(target=fork_fails)
    other.start()
    other.join()
    del held
    assert arena.ended() == [], "this thread's child may still be forked"
    arena_module._after_fork_in_parent()
    assert arena.ended() == [FIRST.start]


def test_without_a_descriptor_for_a_fence_the_extent_is_never_recycled(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = leased_tensor(arena, FIRST)

    def exhausted() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", exhausted)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    del held
    assert arena.ended() == []
    assert arena.ended() == []


# ---- the end of the arena


def test_close_gives_back_every_page_that_is_not_leased() -> None:
    arena = Arena(8 * PAGE)
    fd = os.dup(arena.fd)
    arena.all_bytes()[:] = 1
    held = leased_tensor(arena, SECOND, 5)
    assert pages_of(fd) == 8
    arena.close()
    assert pages_of(fd) == 1
    assert (held == 5).all()
    del held
    assert pages_of(fd) == 0
    os.close(fd)


def test_close_gives_back_pages_that_others_have_mapped_too() -> None:
    arena = Arena(8 * PAGE)
    _, elsewhere = map_memory(arena.fd, 8 * PAGE)
    elsewhere[:] = 1
    fd = os.dup(arena.fd)
    arena.close()
    assert pages_of(fd) == 0
    os.close(fd)


def test_leases_that_ended_unnoticed_before_close_are_given_back() -> None:
    arena = Arena(8 * PAGE)
    fd = os.dup(arena.fd)
    held = leased_tensor(arena, FIRST)
    del held
    arena.close()
    assert pages_of(fd) == 0
    os.close(fd)


def test_a_lease_that_ends_after_close_on_another_thread_is_given_back() -> None:
    arena = Arena(8 * PAGE)
    fd = os.dup(arena.fd)
    held = [leased_tensor(arena, FIRST), leased_tensor(arena, SECOND)]
    arena.close()
    del arena
    thread = threading.Thread(target=held.pop)
    thread.start()
    thread.join()
    assert pages_of(fd) == 1
    assert (held[0] == 7).all()
    held.clear()
    assert pages_of(fd) == 0
    os.close(fd)


def test_a_child_reads_what_it_held_after_the_parent_closed_the_arena() -> None:
    arena = Arena(8 * PAGE)
    held = [leased_tensor(arena, FIRST, 3), leased_tensor(arena, SECOND, 4)]
    with child(lambda: bool((held[0] == 3).all() and (held[1] == 4).all())) as finish:
        arena.close()
        del held[0]
        gc.collect()
        held_here = held.pop()
        held[:] = []
        assert finish()
    assert (held_here == 4).all()


def test_the_region_is_unmapped_with_the_last_batch() -> None:
    before = mappings()
    arena = Arena(8 * PAGE)
    held = leased_tensor(arena, FIRST)
    arena.close()
    del arena
    assert mappings() == before + 1
    del held
    assert mappings() == before


def test_closing_twice_and_in_a_child_changes_nothing() -> None:
    arena = Arena(8 * PAGE)
    held = leased_tensor(arena, FIRST, 6)

    def close_here() -> bool:
        arena.close()
        return True

    with child(close_here) as finish:
        assert finish()
    assert os.fstat(arena.fd).st_size == 8 * PAGE
    arena.close()
    arena.close()
    assert (held == 6).all()


def test_many_epochs_with_a_kept_batch_each_take_no_descriptor() -> None:
    before = descriptors()
    kept = []
    for value in range(20):
        arena = Arena(8 * PAGE)
        kept.append(leased_tensor(arena, FIRST, value))
        with child(lambda: True):
            pass
        arena.close()
        del arena
    assert [int(tensor[-1]) for tensor in kept] == list(range(20))
    kept = kept[-1:]
    with child(lambda: True):
        pass
    assert descriptors() <= before + 1
    kept.clear()
    assert descriptors() == before


def test_pages_of_free_extents_can_be_given_back_beside_leased_ones(arena: Arena) -> None:
    arena.all_bytes()[:] = 1
    held = leased_tensor(arena, SECOND, 5)
    arena.give_back([FIRST, Extent(2 * PAGE, 6 * PAGE)])
    assert pages_of(arena.fd) == 1
    assert (held == 5).all()
    assert not arena.view(FIRST, PAGE).any()


def test_an_arena_has_whole_pages_and_one_descriptor() -> None:
    before = descriptors()
    arena = Arena(PAGE + 1)
    assert arena.nbytes == 2 * PAGE
    assert descriptors() == before + 1
    assert not os.get_inheritable(arena.fd)
    arena.close()
    assert descriptors() == before


def test_addresses_for_later_cost_nothing_until_they_are_used() -> None:
    before = descriptors()
    arena = Arena(8 * PAGE, 1 << 40)
    assert (arena.nbytes, arena.region_bytes) == (8 * PAGE, 1 << 40)
    assert descriptors() == before + 1
    assert pages_of(arena.fd) == 0
    assert arena.resize(100 * PAGE + 5) == arena.nbytes == 100 * PAGE
    assert arena.resize(1 << 50) == 1 << 40
    far = leased_tensor(arena, Extent((1 << 40) - PAGE, PAGE), 3)
    fd = os.dup(arena.fd)
    assert pages_of(fd) == 1
    arena.close()
    assert (far == 3).all()
    del far
    assert pages_of(fd) == 0
    os.close(fd)


def test_what_can_not_be_mapped_for_later_is_done_without() -> None:
    before = descriptors()
    arena = Arena(8 * PAGE, 1 << 60)
    assert arena.nbytes == arena.region_bytes == 8 * PAGE
    assert arena.resize(9 * PAGE) == 8 * PAGE
    assert descriptors() == before + 1
    arena.close()


def test_no_python_runs_when_a_lease_ends(arena: Arena) -> None:
    """A Ctrl-C could land in it, be swallowed, and leave the extent taken for good."""
    held = [leased_tensor(arena, FIRST)]
    ran: list[str] = []

    def trace(frame: Any, event: str, _: object) -> None:
        if event == "call" and "arena" in frame.f_code.co_filename:
            ran.append(frame.f_code.co_name)

    sys.setprofile(trace)
    try:
        held.clear()
    finally:
        sys.setprofile(None)
    assert ran == []
    assert arena.ended() == [FIRST.start]


def test_watches_are_forgotten_with_their_leases() -> None:
    before = len(arena_module._watches)
    arena = Arena(8 * PAGE)
    for _ in range(5):
        leased_tensor(arena, FIRST)
        assert arena.ended() == [0]
    held = [leased_tensor(arena, FIRST), leased_tensor(arena, SECOND)]
    assert len(arena_module._watches) == before + 2
    arena.close()
    assert len(arena_module._watches) == before + 2
    held.clear()
    assert len(arena_module._watches) == before


def test_a_lease_is_of_a_type_of_its_own(arena: Arena) -> None:
    """numpy collapses the base of a plain view: tensors would hold the region, not the lease."""
    lease = arena.lease(FIRST, 10)
    assert type(lease) is Lease
    assert lease.shape == (10,)
    assert np.ndarray((5,), np.uint8, lease, 2).base is not None
