"""Ranks that call a collective with other arguments raise, on all ranks and in words; so does the simulator."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx

LARGE = 40_000
Call = Callable[[int, int], Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# What differs on rank 1 -> the call of rank r, in tensors of n elements.
CALLS: dict[str, Call] = {
    "the root": lambda r, n: tx.pbroadcast(ones(n), "data", int(r == 1)),
    "pairs": lambda r, n: tx.ppermute(ones(n), "data", [(0, 1)] if r != 1 else [(1, 0)]),
    "more pairs": lambda r, n: tx.ppermute(ones(n), "data", [(0, 1), (1, 0)][: 2 - (r == 1)]),
    "a size": lambda r, n: tx.psum(ones(n + (r == 1)), "data"),
    "the dtype": lambda r, n: tx.psum(ones(n, dtype=torch.int32 if r == 1 else torch.float32), "data"),
    "the shape of rows": lambda r, n: tx.all_to_all_single(ones(6, 2 + (r == 1), n), "data"),
    "the number of rows": lambda r, n: tx.all_to_all_single(ones(6 + 6 * (r == 1), n), "data"),
    "the reduction": lambda r, n: (tx.pmax if r == 1 else tx.pmin)(ones(n), "data"),
    "the collective": lambda r, n: tx.all_gather(ones(n), "data") if r == 1 else tx.pbroadcast(ones(n), "data", 0),
}  # fmt: skip


def ends(what: str, n: int, transport: str) -> tuple[str, str]:
    mesh = fjoin.mesh({"data": -1}, transport=transport)
    try:
        with fjoin.bind(mesh):
            CALLS[what](mesh.rank, n)
            tx.psum(torch.ones(3), "data")  # where one rank alone has noticed, the others do here
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "fine", ""


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [3, LARGE])
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_arguments_that_differ(pool: Any, ranks: int, what: str, n: int) -> None:
    for kind, text in pool.run(ranks, ends, what, n, "shared"):
        assert kind == "DesyncError", (kind, text)


@pytest.mark.parametrize("what", CALLS)
def test_simulator_raises_on_mismatched_arguments(what: str) -> None:
    with pytest.raises(tx.CollectiveMismatch):
        tx.simulate(lambda r: CALLS[what](r, 3), {"data": 2}, [0, 1])


def scattered(group: Any, r: int, n: int, root: int) -> Any:
    parts = [ones(n) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    return dist.scatter(ones(n), parts, group=group, group_src=root)


def gathered(group: Any, r: int, n: int, root: int) -> Any:
    outs = [ones(n) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    return dist.gather(ones(n), outs, group=group, group_dst=root)


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
# The same for the backend: the call of rank r over a group.
BACKEND: dict[str, Callable[[Any, int, int], Any]] = {
    "root of broadcast": lambda g, r, n: dist.broadcast(ones(n), group=g, group_src=int(r == 1)),
    "root of reduce": lambda g, r, n: dist.reduce(ones(n), group=g, group_dst=int(r == 1)),
    "root of scatter": lambda g, r, n: scattered(g, r, n, int(r == 1)),
    "root of gather": lambda g, r, n: gathered(g, r, n, int(r == 1)),
    "op of all_reduce": lambda g, r, n: dist.all_reduce(ones(n), MAX if r == 1 else SUM, group=g),
    "op of reduce": lambda g, r, n: dist.reduce(ones(n), group=g, group_dst=0, op=MAX if r == 1 else SUM),
    "op of reduce_scatter": lambda g, r, n: dist.reduce_scatter(ones(n), [ones(n)] * 2, MAX if r == 1 else SUM, group=g),
    "size of all_reduce": lambda g, r, n: dist.all_reduce(ones(n + (r == 1)), group=g),
    "size of broadcast": lambda g, r, n: dist.broadcast(ones(n + (r == 1)), group=g, group_src=0),
    "dtype of all_reduce": lambda g, r, n: dist.all_reduce(ones(n, dtype=torch.int32 if r else torch.float32), group=g),
    "sizes of reduce_scatter": lambda g, r, n: dist.reduce_scatter(
        ones(n), [ones(n), ones(n + 1)] if r == 0 else [ones(n + 1), ones(n)], group=g
    ),
}  # fmt: skip


def backend_ends(n: int) -> list[tuple[str, str, str]]:
    found = []
    for what, call in BACKEND.items():
        group = dist.new_group(backend="fjoin", timeout=datetime.timedelta(seconds=20))
        try:
            call(group, dist.get_rank(), n)
            found.append((what, "fine", ""))
        except RuntimeError as error:
            found.append((what, type(error).__name__, str(error)))
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("n", [3, LARGE])
def test_arguments_of_the_backend_that_differ(pool: Any, n: int) -> None:
    for found in pool.run(2, backend_ends, n):
        assert [what for what, kind, _ in found if kind != "DesyncError"] == []


def bad_roots() -> list[str]:
    group, texts = dist.new_group(backend="fjoin"), []
    x, outs = ones(3), [ones(3), ones(3)]
    for root in (2, 5, -1):
        calls: list[Callable[[], Any]] = [
            lambda root=root: dist.broadcast(x, group=group, group_src=root),  # type: ignore[misc]
            lambda root=root: dist.reduce(x, group=group, group_dst=root),  # type: ignore[misc]
            lambda root=root: dist.gather(x, None, group=group, group_dst=root),  # type: ignore[misc]
            lambda root=root: dist.scatter(x, None, group=group, group_src=root),  # type: ignore[misc]
            lambda root=root: group.broadcast(x, root=root),  # type: ignore[misc]
            lambda root=root: group.scatter(x, outs, root),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"invalid root rank: {root}") as error:
                call()
            texts.append(str(error.value))
    dist.all_reduce(x, group=group)  # the group can be used on
    assert (x == 2).all()
    dist.destroy_process_group(group)
    return texts


def test_roots_that_do_not_exist(pool: Any) -> None:
    for texts in pool.run(2, bad_roots):
        assert len(texts) == 18 and all("the ranks of this group are 0 to 1" in text for text in texts)
