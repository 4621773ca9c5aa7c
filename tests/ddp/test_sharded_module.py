"""Sharded pipelines in a DistributedDataParallel: their messages, and steps that fail. tests/test_places.py compares them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.pool import JobFailed
from tests.traffic import sent_to_others

ADAM = tx.adamw(0.01)
MUON = tx.partition({("layers.0.weight", "layers.2.weight"): tx.muon(0.1), "*": ADAM})
ZERO = tx.zero(tx.mean("data"), ADAM, "data")
EXPLAINED = {
    "adam": ZERO, "muon": tx.zero(tx.mean("data"), MUON, "data"),
    "clip": tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)), ADAM, "data"),
    "gather": tx.fuse(tx.scatter_mean("data"), ADAM, gather_codec=tx.int8()),
    "cast": tx.fuse(tx.compress(torch.bfloat16, tx.scatter_mean("data")), ADAM, tx.ema(0.9)),
    "int8": tx.fuse(tx.chain(tx.compress(tx.int8(), tx.scatter_mean("data")), tx.clip_by_global_norm(1.0)), ADAM),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.layers(x).view(-1, 3, 3, 3)).mean()


def explained(name: str) -> Any:
    """(bytes, messages) that rank 0 sends in each pass, counted, and as explained; and the state's bytes, explained."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
    handle, seen = fjoin.ddp.register(ddp, EXPLAINED[name]), []
    for _ in range(3):
        with sent_to_others() as sent:
            ddp(torch.randn(9 * 2, 20)).backward()
        assert all(p.grad is None for p in ddp.parameters()), "gradients of pieces must not stay"
        what = handle.explain()
        seen.append(((sum(sent), len(sent)), (what.sent_bytes, what.messages)))
    return seen, what.state_bytes


@pytest.mark.gloo
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXPLAINED)
def test_the_messages_of_a_module_are_those_explained(pool: Any, name: str) -> None:
    found = pool.run(2, explained, name)
    assert all(counted == announced for counted, announced in found[0][0])
    if name == "adam":
        assert found[0][1] < 1.05 * 8 * sum(p.numel() for p in Model().parameters()) / 2


def fail(how: str) -> Any:
    """A pass with an infinite gradient on rank 1, and a hook without an optimizer."""
    torch.manual_seed(0)
    model = Model()
    ddp = DistributedDataParallel(model)
    if how == "no optimizer":
        fjoin.ddp.register(ddp, tx.chain(tx.scatter_mean("data"), tx.clip_by_value(1.0)))
    fjoin.ddp.register(ddp, ZERO)
    if dist.get_rank() == 1:
        model.layers[0].weight.register_hook(lambda grad: grad * math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    raises_text(fjoin.NonFinite, lambda: ddp(torch.ones(9 * 2, 20)).backward())
    same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    return same, all(p.grad is None for p in model.parameters())


def test_a_step_that_fails_leaves_no_gradients_of_shards_and_a_hook_needs_an_optimizer(pool: Any) -> None:
    assert pool.run(2, fail, "not finite") == [(True, True)] * 2
    words = "ValueError: chain(scatter_mean", "register fuse(", "rank 0", "rank 1"
    raises_text(JobFailed, lambda: pool.run(2, fail, "no optimizer"), *words)
