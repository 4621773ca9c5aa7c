"""Correct programs in which ranks are late, end early, fork or continue after an error: no rank is reported as lost."""

from __future__ import annotations

import datetime
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.groups.ends import LONG_S, End, a_step, ends, params

LATE_S = 3.2  # two looks at failures in a message, and more


def late() -> None:
    threading.Event().wait(LATE_S)


def rows(rank: int) -> None:
    """The ranks of the second row end while the first row continues."""
    mesh = fjoin.mesh({"row": 2, "data": 2}, timeout_s=LONG_S)
    with fjoin.bind(mesh):
        tx.psum(torch.ones(1), "data")
        if rank < 2:
            if rank == 1:
                late()
            tx.psum(torch.ones(1), "data")
    mesh.close()


def broadcast(rank: int, closes: bool) -> None:
    """Rank 2 has its part of a broadcast at once, and closes the mesh or ends, while the others wait for rank 1."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    with fjoin.bind(mesh):
        if rank == 1:
            late()
        tx.pbroadcast(torch.ones(1), "data", 0)
    if closes:
        mesh.close()
    elif rank == 2:
        del mesh
        os._exit(0)


def again(rank: int) -> None:
    """All ranks catch an error of the first meshes and make new ones."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    with fjoin.bind(mesh):
        tx.psum(torch.ones(1), "data")  # all have made it
    try:
        if rank == 0:
            with mesh:
                raise ValueError("bad checkpoint")
        a_step(mesh).init(params())
    except (ValueError, fjoin.PeerLost):
        pass
    if rank == 1:
        late()
    step = a_step(fjoin.mesh({"data": -1}, timeout_s=LONG_S))
    step(step.init(params()), torch.ones(2))


def two_modules(rank: int) -> None:
    """The hook of a module raises on all ranks alike; another module over the same group works."""

    def refuse(grads: Any) -> None:
        if rank == 0:
            threading.Event().wait(0.5)  # rank 1 would be the first to report
        raise ValueError("the norm is too large")

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    for hook in (tx.chain(tx.mean("data"), tx.tap(refuse)), tx.mean("data")):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        fjoin.ddp.register(ddp, hook)
        for i in range(3):
            if rank == 1 and i == 2:
                late()
            try:
                ddp(torch.ones(1, 2)).sum().backward()
            except ValueError:
                break


def fork(rank: int) -> None:
    """A forked process frees its copy of the mesh."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    step = a_step(mesh)
    state = step.init(params())
    if (child := os.fork()) == 0:
        mesh.report_failure(ValueError("in the child"), None)
        mesh.close()
        del mesh, step, state
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    step(state, torch.ones(2))


def without_descriptors(rank: int) -> None:
    step = a_step(fjoin.mesh({"data": -1}, timeout_s=LONG_S))
    state = step.init(params())
    state, _ = step(state, torch.ones(2))
    if rank == 0:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    else:
        late()
    step(state, torch.ones(2))


def device_meshes(rank: int) -> None:
    """Meshes over a DeviceMesh are made and dropped, by one rank later than by the others."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    kept = []
    for i in range(3):
        mesh = fjoin.mesh(device_mesh, timeout_s=LONG_S)
        with fjoin.bind(mesh):
            assert tx.psum(torch.ones(1), ("node", "local")) == 4
        if rank == 0 and i == 0:
            kept.append(mesh)


# A program, its ranks, and how many of them are there at its end.
PROGRAMS: dict[str, tuple[Callable[[int], None], int, int]] = {
    "rows": (rows, 4, 4), "broadcast": (partial(broadcast, closes=True), 4, 4),
    "without close": (partial(broadcast, closes=False), 4, 3), "again": (again, 2, 2),
    "two modules": (two_modules, 2, 2), "fork": (fork, 2, 2), "without descriptors": (without_descriptors, 2, 2),
    "device meshes": (device_meshes, 4, 4),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_rank_is_taken_for_lost(name: str) -> None:
    program, ranks, left = PROGRAMS[name]
    assert ends(ranks, program, reports=left) == [End()] * left
