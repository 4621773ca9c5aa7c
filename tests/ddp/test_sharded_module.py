"""Sharded pipelines in a DistributedDataParallel: equal to the unsharded ones, from the first step on."""

from __future__ import annotations

import copy
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
RESUMED = {
    "adam": ZERO, "muon": tx.zero(tx.mean("data"), MUON, "data"),
    "clip": tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)), ADAM, "data"),
    "gather": tx.fuse(tx.scatter_mean("data"), ADAM, gather_codec=tx.int8()),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.layers(x).view(-1, 3, 3, 3)).mean()


def resume(name: str, steps: int) -> tuple[list[dict[str, Tensor]], list[int]]:
    """The parameters of a run, and of one that goes on from the state of its first half in another module."""
    ends = []
    torch.manual_seed(0)
    model, saved = Model(), {}
    for resumed in (False, True):
        gen = torch.Generator().manual_seed(dist.get_rank())
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        handle = fjoin.ddp.register(ddp, RESUMED[name])
        if resumed:
            handle.load_state_dict(saved)
        for i in range(steps):
            x = torch.randn(9 * 2, 20, generator=gen)
            if not resumed or i >= steps // 2:
                ddp(x).backward()
                assert all(p.grad is None for p in model.parameters()), "gradients of pieces must not stay"
            if not resumed and i + 1 == steps // 2:
                saved, half = copy.deepcopy(handle.state_dict()), copy.deepcopy(model)
        ends.append({path: p.detach().clone() for path, p in model.named_parameters()})
        model = half
    return ends, [handle.step, handle.skipped]


@pytest.mark.parametrize("name", RESUMED)
def test_a_sharded_pipeline_resumes_from_its_state_dict(pool: Any, name: str) -> None:
    found = pool.run(2, resume, name, 4)
    for (whole, resumed), counts in found:
        assert counts == [4, 0]
        for path, value in found[0][0][0].items():
            torch.testing.assert_close(resumed[path], value, rtol=1e-5, atol=1e-6, msg=path)
            assert torch.equal(resumed[path], found[0][0][1][path]) and torch.equal(whole[path], value)


EXPLAINED = {
    **RESUMED,
    "cast": tx.fuse(tx.compress(torch.bfloat16, tx.scatter_mean("data")), ADAM, tx.ema(0.9)),
    "int8": tx.fuse(tx.chain(tx.compress(tx.int8(), tx.scatter_mean("data")), tx.clip_by_global_norm(1.0)), ADAM),
}


def explained(name: str) -> Any:
    """(bytes, messages) that rank 0 sends in each pass, counted, and as explained; and the state's bytes, explained."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
    handle, seen = fjoin.ddp.register(ddp, EXPLAINED[name]), []
    for _ in range(3):
        with sent_to_others() as sent:
            ddp(torch.randn(9 * 2, 20)).backward()
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
