"""What shared memory holds, and for how long."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fjoin
from fjoin.shared_memory._exchange import Exchange
from fjoin.shared_memory._memory import HostMemory


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [name.split(":")[0].split(" ")[0] for name in found if "memfd" in name or name.startswith("socket")]


def opened() -> Any:
    counts = []
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
    with open("/proc/self/maps") as maps:
        return counts, sum("memfd:fjoin" in line for line in maps)


def test_a_closed_mesh_leaves_nothing_open(pool: Any) -> None:
    for counts, mapped in pool.run(2, opened):
        assert counts[1:] == counts[1:2] * 3 and mapped == 0


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


def left_without_a_collection() -> int:
    mesh = fjoin.mesh({"data": -1}, transport="shared")
    axis = mesh.axes["data"]
    gc.collect()
    gc.disable()
    try:
        for size in (10, 60_000):
            for op in ("psum", "all_gather", "pmax"):
                axis.run(op, torch.ones(size), None)
        return sum(type(one) is Exchange for one in gc.get_objects())
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
