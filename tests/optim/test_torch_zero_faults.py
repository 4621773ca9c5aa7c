"""Faults of torch's ZeroRedundancyOptimizer, asserted on torch's own class, so that a mended torch is noticed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from tests.traffic import watched


def torchs(model: nn.Module, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **settings)


def faults() -> Any:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    zero = torchs(model)
    model(torch.ones(2, 4)).sum().backward()
    with watched() as sent:
        zero.step()
    broadcasts = sum(one.name == "broadcast" for one in sent)
    zero.consolidate_state_dict(to=0)
    changed = None
    if torch.distributed.get_rank() == 0:
        saved = zero.state_dict()
        before = copy.deepcopy(saved)
        zero.load_state_dict(saved)
        changed = sum(saved["state"][i] is None for i in before["state"])
    owned = sum(len(state) > 0 for state in zero.optim.state.values())
    return broadcasts, changed, owned


def test_a_broadcast_for_each_parameter_and_a_changed_state(pool: Any) -> None:
    (broadcasts, changed, owned), (_, _, other) = pool.run(2, faults)
    assert broadcasts == 8, "one for each of 8 parameters"
    assert changed == 4, "the entries of the other rank's parameters are None in the caller's dict"
    assert owned + other == 8, "whole parameters"


def overlaps() -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    zero = torchs(model, overlap_with_ddp=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    try:
        hook_with_zero_step(allreduce_hook, model, zero)
    except RuntimeError as error:
        return str(error)
    return ""


def test_overlap_is_refused_on_gloo(pool: Any) -> None:
    assert "may meet hangs" in pool.run(2, overlaps)[0]


def overlapped() -> list[float]:
    """How far the parameters move in each of five passes; the learning rate is 0 from the fourth on."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    zero, backend = torchs(model, overlap_with_ddp=True), dist.get_backend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    dist.get_backend = lambda group=None: "nccl"
    try:
        hook = hook_with_zero_step(allreduce_hook, model, zero)
    finally:
        dist.get_backend = backend
    model.register_comm_hook(None, hook)
    moves = []
    for i in range(5):
        if i == 3:
            zero.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in model.parameters()]
        zero.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        moves.append(sum((p - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True)))
    return moves


def test_overlap_loses_the_first_passes_and_ignores_the_learning_rate(pool: Any) -> None:
    for first, second, third, *later in pool.run(2, overlapped):
        assert first == second == 0.0, "two passes step nothing"
        assert third > 0 and min(later) > 0, "the learning rate of 0 has no effect"
