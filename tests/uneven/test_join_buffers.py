"""Buffers of a DistributedDataParallel in our Join, and forward passes that change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.ddp.ddp_problem import loss, state_of
from tests.helpers import same_bits


def with_buffers(counts: list[int]) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    g = torch.Generator().manual_seed(dist.get_rank())
    with fjoin.Join([ddp, optimizer]) as join:
        for _ in range(counts[dist.get_rank()]):
            loss(ddp, torch.randn(5, 4, generator=g)).backward()
            optimizer.step()
            optimizer.zero_grad()
    states = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    return states, state_of(optimizer, list(ddp.module.parameters())), join.last_joiner


@pytest.mark.parametrize("counts", [[1, 4], [3, 0, 2]], ids=str)
def test_buffers_come_from_a_rank_that_has_input(pool: Any, counts: list[int]) -> None:
    """Statistics of BatchNorm are counted on as long as any rank trains, and end equal on all."""
    results = pool.run(len(counts), with_buffers, counts)
    for states, optimizer, last in results:
        assert same_bits((states, optimizer), results[0][:2])
        assert states["1.num_batches_tracked"] == max(counts) and last == counts.index(max(counts))


def with_a_buffer_hook(counts: list[int]) -> Any:
    """Buffers averaged by a hook after each forward pass, which torch's Join does not shadow."""

    def average(group: Any, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=group)
                buffer /= group.size()

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    ddp._register_buffer_comm_hook(ddp.process_group, average)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    g = torch.Generator().manual_seed(dist.get_rank())
    with fjoin.Join([ddp, optimizer]):
        for _ in range(counts[dist.get_rank()]):
            loss(ddp, torch.randn(5, 4, generator=g)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {k: v.clone() for k, v in ddp.module.state_dict().items()}


def test_a_buffer_hook_is_shadowed(pool: Any) -> None:
    a, b = pool.run(2, with_a_buffer_hook, [1, 3])
    assert same_bits(a, b) and a["1.running_mean"].abs().max() > 0


def evaluate_inside() -> Any:
    """Forward passes without gradients, in eval mode and not, on one rank only."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    rank = dist.get_rank()
    with fjoin.Join([ddp, optimizer]) as join:
        for _ in range([2, 4][rank]):
            loss(ddp, torch.ones(5, 4) * rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                with torch.no_grad():
                    ddp.eval()
                    ddp(torch.ones(2, 4))
                    ddp.train()
    return join.iterations, [p.detach().clone() for p in ddp.parameters()]


def test_an_evaluation_inside_is_harmless(pool: Any) -> None:
    (n, a), (m, b) = pool.run(2, evaluate_inside)
    assert n == m == 4 and same_bits(a, b)
