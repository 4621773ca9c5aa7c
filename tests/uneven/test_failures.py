"""One rank fails in a Join or a loop, and stays alive: the others get an error that says so, at once. tests/faults has more."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.uneven import _loop
from tests.ranks import Ranks
from tests.reducer.in_backward import in_backward

Fail = Callable[..., Any]  # reports the failure, and raises the error


def mesh() -> fjoin.Mesh:
    return fjoin.mesh({"data": -1}, timeout_s=300)


def group() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))


def module(where: str, counts: tuple[int, ...] = (2, 4, 4)) -> Any:
    """Before or within a backward pass, while others wait in messages of the module."""

    def program(rank: int, fail: Fail) -> None:
        group()
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with fjoin.Join([ddp, optimizer]):
            for i in range(counts[rank]):
                out = ddp(torch.ones(2, 4))
                if (rank, i) == (1, 2):
                    out = fail() if where == "forward" else in_backward(out, fail)
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    return program


def hooks(where: str) -> Any:
    """In the loop, in a main hook or in a post hook."""

    def program(rank: int, fail: Fail) -> None:
        def main(state: Any) -> Any:
            return fail() if (where, rank) == ("main", 1) else tx.psum(state, "data")

        def post(state: Any, is_last_joiner: bool) -> Any:
            return fail() if (where, rank) == ("post", 1) else tx.psum(state, "data")

        with fjoin.bind(one := mesh()):
            joinable = fjoin.as_joinable(tx.JoinHook(main, post), torch.zeros(3), mesh=one)
            with fjoin.Join([joinable]):
                for i in range(2 if rank == 1 else 4):
                    fjoin.Join.notify_join_context(joinable)
                    if (where, rank, i) == ("loop", 1, 1):
                        fail()
                    joinable.state = tx.psum(joinable.state, "data")

    return program


def around_a_module(rank: int, fail: Fail) -> None:
    """The group that the loop takes down is also released by the module; what waits in it gets gloo's own error."""
    _loop._TOGETHER_S = 2.0  # the others wait in the module's messages, and see nothing
    group()
    ddp = DistributedDataParallel(nn.Linear(5, 2).double())
    for i in fjoin.join(range(4)):
        if (rank, i) == (1, 1):
            fail()
        ddp(torch.ones(2, 5, dtype=torch.float64)).sum().backward()


# Ranks, the program, the errors of the other ranks, words of these, and the seconds until they have them.
ROWS: dict[str, tuple[int, Any, tuple[str, ...], str, float]] = {
    "module, backward": (3, module("backward"), ("PeerLost",), "ValueError: bad batch", 10),
    # Two ranks shadow, and all keep their errors: four processes, on as few cores as there are.
    "kept errors": (4, module("forward", (1, 4, 4, 1)), ("PeerLost",), "ValueError: bad batch", 5),
    **{f"pure hooks, {where}": (3, hooks(where), ("PeerLost",), "ValueError: bad batch", 10)
       for where in ("loop", "main", "post")},
    "around a module": (3, around_a_module, ("PeerLost", "RuntimeError"), "", 10),
}  # fmt: skip
kept: list[Exception] = []  # with their frames, as a debugger or a retry keeps them


def run(rank: int, report: Any, name: str) -> None:
    def fail() -> None:
        report("failing")
        raise ValueError("bad batch")

    try:
        ROWS[name][1](rank, fail)
    except Exception as error:
        kept.append(error)
        report((type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "step", None)))
    else:
        report(("", "", None, None))


@pytest.mark.parametrize("name", ROWS)
def test_one_rank_fails(name: str) -> None:
    ranks, _, others, words, limit_s = ROWS[name]
    with Ranks(ranks, run, name) as running:
        found = running.after("failing", ranks)
    for rank, seconds, (kind, text, failed, step) in found:
        if rank == 1:
            assert (kind, text) == ("ValueError", "bad batch")
        else:
            assert kind in others and words in text and seconds < limit_s, (rank, kind, text, seconds)
            assert not name.startswith(("pure", "module")) or failed == 1
            assert not name.startswith("module") or step == 3
