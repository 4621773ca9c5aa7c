"""Programs in which torch's Join hangs or aborts, and ours does not: processes of their own, with a time-out of 3 s.

Each also runs on even inputs, where torch's Join works: so the Join fails, not the program. Where a test fails,
torch has fixed it.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.ranks import Ranks
from tests.reducer.one_weight import joined, scalar, weight, x
from tests.uneven.test_join_ddp import average

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


def zero_first(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    with joined(kind, [zero, ddp]):
        for _ in range(3 if even else [1, 3][rank]):
            zero.zero_grad()
            ddp(x(1.0)).backward()
            zero.step()
    return weight(ddp)


def passes(ddp: Any, kind: str, optimizer: Any, n: int, no_sync_at: int = -1, evaluates: bool = False) -> float:
    with joined(kind, [ddp, optimizer]):
        for i in range(n):
            with ddp.no_sync() if i == no_sync_at else contextlib.nullcontext():
                ddp(x(1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                with torch.no_grad():
                    ddp(x(1.0))
    return weight(ddp)


def mixed_windows(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    """Rank 0 has ended; of the others one is within a window while the other synchronises."""
    n = 2 if even else [0, 2, 2][rank]
    return passes(ddp, kind, torch.optim.SGD(ddp.parameters(), 1.0), n, 0 if rank == 1 and not even else -1)


def evaluate(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    """A rank with input runs the module once without gradients while another has ended."""
    n = 3 if even else [1, 3][rank]
    return passes(ddp, kind, torch.optim.SGD(ddp.parameters(), 1.0), n, evaluates=rank == 1 or even)


def local_sgd(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    """Each rank steps with its own gradients, and parameters are averaged after every step."""
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 0, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), 1.0), averager)
    return passes(ddp, kind, optimizer, 3 if even else [1, 3][rank])


def buffer_hook(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    """Buffers averaged by a hook after each forward pass."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double())
    ddp._register_buffer_comm_hook(ddp.process_group, average)
    with joined(kind, [ddp]):
        for _ in range(3 if even else [1, 3][rank]):
            ddp(torch.tensor([[1.0], [2.0]]).double()).sum().backward()
    return float(ddp.module[1].num_batches_tracked)


def in_forward(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    """A model that communicates in its forward pass: its inputs are divided by their mean over the ranks."""

    def normed(value: float) -> torch.Tensor:
        mean = x(value)
        dist.all_reduce(mean)
        return x(value) / (mean / 2)

    if kind == "fjoin":
        loop = fjoin.join(range(3 if even else [1, 3][rank]))
        for _ in loop:
            optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
            (ddp(normed(1.0)) * loop.scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight(ddp)
    with joined(kind, [ddp]):
        for _ in range(3 if even else [1, 3][rank]):
            ddp(normed(1.0)).backward()
    return weight(ddp)


def exception(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    with joined(kind, [ddp]):
        for i in range(3):
            if (rank, i) == (1, 1) and not even:
                raise ValueError("bad batch")
            ddp(x(1.0)).backward()
    return 0.0


def power_sgd(ddp: Any, rank: int, kind: str, even: bool) -> Any:
    """No Join: PowerSGD in several buckets. The order of its messages differs between ranks once it compresses."""
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(None, 1, 9 if even else 2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(6):
        ddp(torch.ones(2, 64)).sum().backward()
    return 0.0


PROGRAMS = {
    "zero first": zero_first, "no_sync": mixed_windows, "eval": evaluate, "local sgd": local_sgd,
    "buffer hook": buffer_hook, "in forward": in_forward, "exception": exception, "power sgd": power_sgd,
}  # fmt: skip


def _run(rank: int, report: Any, what: str, kind: str, even: bool) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    ddp = scalar()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)
    report("started")
    try:
        report(PROGRAMS[what](ddp, rank, kind, even))
    except Exception as error:
        report(f"{type(error).__name__}: {error}")


def outcomes(what: str, kind: str, ranks: int = 2, even: bool = False) -> list[Any]:
    """The last report of each rank; a process that hangs or aborts has only "started"."""
    with Ranks(ranks, _run, what, kind, even) as run:
        found: dict[int, Any] = {}
        with contextlib.suppress(AssertionError):
            for _ in range(2 * ranks):
                rank, _, value = run.next(60.0 if len(found) < ranks else 7.0 if kind == "torch" and not even else 30.0)
                found[rank] = value
        return [found[rank] for rank in range(ranks)]


# The reports of a rank that a hang or an abort has ended.
STUCK = re.compile(r"RuntimeError: .*(Timed out|Connection (closed|reset)|timeout)", re.DOTALL)


def check_torch(what: str, ranks: int = 2) -> list[Any]:
    """On even inputs torch's Join works, and on uneven ones at least one rank hangs until the time-out or aborts."""
    control = outcomes(what, "torch", ranks, even=True)
    assert all(isinstance(value, float) for value in control), control
    values = outcomes(what, "torch", ranks)
    assert all(
        isinstance(v, float) or v == "started" or "ValueError: bad batch" in v or STUCK.match(v) for v in values
    ), values
    assert not all(isinstance(value, float) for value in values), values
    return values


# What ours comes to: a rank without input does not move by itself, and is averaged; inputs are 1 after a division.
OURS = {
    "zero first": [-2.0] * 2, "eval": [-2.0] * 2, "local sgd": [-2.0] * 2, "buffer hook": [3.0] * 2,
    "in forward": [-3.0] * 2,
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", OURS)
def test_what_hangs_in_torchs_join(what: str) -> None:
    check_torch(what)
    assert outcomes(what, "fjoin") == OURS[what]


@pytest.mark.long
def test_torch_hangs_or_aborts_with_several_buckets_of_power_sgd() -> None:
    """Ours runs in several buckets in reducer/test_power_sgd.py."""
    check_torch("power sgd")


@pytest.mark.long
def test_ranks_that_disagree_on_no_sync() -> None:
    """torch times out; ours raises an error that names the cause."""
    check_torch("no_sync", 3)
    ours = outcomes("no_sync", "fjoin", 3)
    assert ours[1].startswith("JoinError") and "inside no_sync" in ours[1] and "rank 2" in ours[1]
    assert all(value.startswith("PeerLost: rank 1 failed") and "no_sync" in value for value in (ours[0], ours[2])), ours


def test_an_exception_on_one_rank() -> None:
    """Torch's other ranks get no report of the error; ours get it at once (test_failures.py)."""
    theirs, own = check_torch("exception")
    assert own == "ValueError: bad batch" and "bad batch" not in theirs
    reported, own = outcomes("exception", "fjoin")
    assert own == "ValueError: bad batch" and reported.startswith("PeerLost: rank 1 failed") and "bad batch" in reported
