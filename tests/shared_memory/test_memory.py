"""What shared memory holds, and for how long."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin.shared_memory import Exchange
from fjoin.shared_memory._memory import HostMemory


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [name.split(":")[0].split(" ")[0] for name in found if "memfd" in name or name.startswith("socket")]


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:fjoin" in line for line in maps)


def opened() -> Any:
    gc.collect()
    before, counts = mapped(), list[int]()  # earlier tests in this process may have left some
    for _ in range(4):
        mesh = fjoin.mesh({"data": -1}, transport="shared")
        x = mesh.zeros(100_000, torch.float32, None, ("data",))
        assert x is not None
        mesh.reduce_(x, ("data",)).wait()
        mesh.axes["data"].run("psum", torch.ones(100_000), None)
        del x
        mesh.close()
        del mesh
        gc.collect()
        counts.append(len(descriptors()))
    return counts, mapped() - before


def test_a_closed_mesh_leaves_nothing_open(pool: Any) -> None:
    for counts, more in pool.run(2, opened):
        assert counts[1:] == counts[1:2] * 3 and more <= 0


def overwritten_afterwards() -> int:
    """How many collectives gave a rank what another one wrote into its own tensor after the call had returned."""
    mesh = fjoin.mesh({"data": -1}, transport="shared")
    axis, n, wrong = mesh.axes["data"], 2 * 30_000, 0
    x = mesh.zeros(n, torch.float32, None, ("data",))  # other ranks read it where it lies
    assert x is not None
    calls: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: axis.run("all_gather", x, None).amax(),
        "pbroadcast": lambda: axis.run("pbroadcast", x, 1),
        "ppermute": lambda: axis.run("ppermute", x, ((0, 1), (1, 0))),
        "psum_scatter": lambda: axis.run("psum_scatter", x.view(2, -1), None) / 2,
        "all_to_all": lambda: axis.run("all_to_all", x.view(2, -1), None),
    }
    for call in calls.values():
        for _ in range(10):
            x.fill_(1.0)
            result = call()
            x.fill_(9.0)
            wrong += bool((result != 1.0).any())
    return wrong


def test_an_argument_may_be_overwritten_after_the_call(pool: Any) -> None:
    assert pool.run(2, overwritten_afterwards) == [0, 0]


def messages() -> int:
    return sum(type(one) is Exchange for one in gc.get_objects())


def left_without_a_collection() -> int:
    mesh = fjoin.mesh({"data": -1}, transport="shared")
    axis = mesh.axes["data"]
    gc.collect()
    before = messages()  # earlier tests in this process may have left some
    gc.disable()
    try:
        for size in (10, 60_000):
            for op in ("psum", "all_gather", "pmax"):
                axis.run(op, torch.ones(size), None)
        return messages() - before
    finally:
        gc.enable()


def test_messages_are_freed_without_a_collection(pool: Any) -> None:
    assert pool.run(2, left_without_a_collection) == [0, 0]


def test_free_memory_is_bounded() -> None:
    memory = HostMemory()
    for size in range(10_000, 400_000, 10_000):
        memory.give_back(memory.borrow(size))
    assert sum(one.size for one in memory._free) <= 4 * 450_000
    for _ in range(3):  # several sizes, one after the other, are kept
        made = memory._end
        for size in (300_000, 200_000, 100_000):
            memory.give_back(memory.borrow(size))
    assert memory._end == made


def test_lent_memory_is_used_again_once_nothing_views_it() -> None:
    memory = HostMemory()
    first = memory.lend(50_000, torch.float64)
    view, place = first[7:9], memory.find(first)
    assert place is not None and memory.find(view) == (*place[:2], 7 * 8)
    del first
    second = memory.lend(50_000, torch.float64)
    assert memory.find(second) != place
    del view
    assert memory.find(memory.lend(50_000, torch.float64)) == place
    kept = memory.lend(10, torch.float32).fill_(3.0)
    memory.close()
    assert (kept == 3.0).all()


def test_memory_may_be_given_back_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may end tensors while memory is made or borrowed, in this thread."""
    memory, allocate = HostMemory(), os.posix_fallocate
    lent = [memory.lend(size, torch.uint8) for size in (5_000, 50_000, 500_000)]

    def collects(*args: int) -> None:
        if lent:
            del lent[-1]
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", collects)
    for size in (60_000, 70_000, 80_000, 5_000, 50_000, 500_000):
        assert memory.borrow(size).size >= size
    assert not lent


def test_memory_is_lent_to_one_thread_at_a_time() -> None:
    memory, wrong = HostMemory(), []

    def borrow(number: int) -> None:
        chance = random.Random(number)
        for _ in range(200):
            x = memory.lend(chance.choice([100, 5_000, 20_000]), torch.int64).fill_(number)
            y = memory.zeros(10, torch.int64).fill_(number)
            if not (x.eq(number).all() and y.eq(number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=borrow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_frees_nothing() -> None:
    """A DataLoader worker, for example, drops the tensors that it has inherited."""
    memory = HostMemory()
    held = [memory.zeros(5_000, torch.float32).fill_(3.0), memory.lend(5_000, torch.float32).fill_(4.0)]
    if (child := os.fork()) == 0:
        held.clear()
        memory.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (held[0] == 3.0).all() and (held[1] == 4.0).all()


def test_freed_memory_returns_to_the_system() -> None:
    memory = HostMemory()
    for _ in range(20):
        memory.zeros(1_000_000, torch.float32).fill_(1.0)
    assert os.fstat(memory.fd).st_blocks * 512 < 1_000_000
