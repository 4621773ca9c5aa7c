"""What a sharded module sends beside torch's own messages; the order of its units; ranks that are killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fjoin
from fjoin import transforms as tx
from tests.fsdp.gpt import full, loss_of, make_batches, make_model, shard, tokens
from tests.helpers import max_diff
from tests.ranks import Ranks, end_of
from tests.traffic import watched

SGD = tx.sgd(0.1)
PIPELINES = {
    "mean": (lambda: tx.fuse(tx.mean("data"), tx.adamw(0.01)), 16),
    "a rate of the user": (lambda: tx.fuse(tx.mean("data"), tx.adamw(lambda step: 0.01 / (step + 1))), 24),
    "clip": (lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), SGD), 24),
    "owners": (lambda: tx.fuse(tx.mean("data"), tx.partition({"blocks.*.up.weight": tx.muon(0.02), "*": SGD})), None),
}  # fmt: skip


def one_mesh(axis: str = "data") -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def sent_by_torch(steps: int) -> list[Any]:
    model = shard(make_model(), one_mesh())
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in make_batches(dist.get_rank(), False)[:steps]:
        with watched() as sent:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(sorted(sent))
    return seen


def sent_by_us(name: str, steps: int) -> Any:
    model = shard(make_model(), one_mesh())
    handle, seen, expected = fjoin.fsdp.register(model, PIPELINES[name][0]()), [], []
    for i, batch in enumerate(make_batches(dist.get_rank(), False)[:steps]):
        expected.append([m.payload_bytes for row in handle.explain(at_step=i).rows for m in row.messages])
        with watched() as sent:
            handle.backward(loss_of(model, batch), tokens(batch))
            handle.step()
        seen.append(sorted(sent))
    return seen, expected


@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_sends_16_bytes_beside_torchs_own_messages(pool: Any, name: str) -> None:
    theirs = pool.run(3, sent_by_torch, 4)
    for seen, (ours, expected) in zip(theirs, pool.run(3, sent_by_us, name, 4), strict=True):
        for step in range(1, 4):  # in the first one, ranks also compare their pipelines
            more = list(ours[step])
            for one in seen[step]:
                more.remove(one)
            if name == "owners":
                assert [one.name for one in more].count("all_to_all_single") == 2 and len(more) == 3
            else:
                assert sum(one.bytes for one in more) == PIPELINES[name][1]
            assert sorted(one.bytes for one in more) == sorted(expected[step])


class Two(torch.nn.Module):
    """Two equal layers, in an order that a rank chooses."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=bias) for _ in range(2))
        self.order = [0, 1]

    def forward(self, x: Any) -> Any:
        for i in self.order:
            x = self.layers[i](x).tanh()
        return x.square().sum() * 1.0


def in_another_order(check_order: bool, at: int) -> Any:
    """From a step on rank 1 runs the layers in another order: the losses, or the error."""
    model, x = Two(), torch.ones(4, 8)
    for layer in model.layers:
        fully_shard(layer, mesh=one_mesh())
    fully_shard(model, mesh=one_mesh())
    handle = fjoin.fsdp.register(model, tx.fuse(tx.mean("data"), SGD), check_order=check_order)
    losses = []

    def train() -> None:
        for step in range(4):
            if step == at and dist.get_rank():
                model.order.reverse()
            loss = model(x)
            losses.append(loss.item())
            handle.backward(loss)
            handle.step()

    end = end_of(train)
    return end.kind, end.text, losses


@pytest.mark.parametrize(("check_order", "at", "found"), [(False, 0, True), (True, 3, True), (False, 3, False)])
def test_units_in_another_order(pool: Any, check_order: bool, at: int, found: bool) -> None:
    """Without a check both ranks compute with each other's parameters, which is what torch does."""
    for kind, text, losses in pool.run(2, in_another_order, check_order, at):
        assert (kind == "DesyncError") == found and len(losses) == (at if found else 4)
        if found:
            assert "it gathers 'layers.1', 36 elements there, it gathers 'layers.0', 36 elements on rank 0" in text


def killed(rank: int, report: Any, where: str) -> None:
    fjoin.mesh({"data": -1}, timeout_s=30.0)
    model, batches = shard(make_model(), one_mesh()), make_batches(rank, False)
    handle = fjoin.fsdp.register(model, tx.fuse(tx.mean("data"), SGD))

    def train() -> None:
        for i, batch in enumerate(batches):
            die = rank == 1 and i == 2
            if die and where == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(model, batch)
            if die and where == "backward":
                os.kill(os.getpid(), signal.SIGKILL)
            handle.backward(loss, tokens(batch))
            if die and where == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            handle.step()

    end = end_of(train)
    report((end.kind, end.text, handle.steps))


@pytest.mark.parametrize(
    "where", ["backward", *(pytest.param(one, marks=pytest.mark.long) for one in ("forward", "step"))]
)
def test_a_rank_that_is_killed_is_a_lost_peer(where: str) -> None:
    with Ranks(2, killed, where) as ranks:
        rank, _, (kind, text, steps) = ranks.next()
        assert rank == 0 and kind == "PeerLost" and "rank 1" in text and steps == 2


def closed() -> Any:
    model, (a, *_) = shard(make_model(), one_mesh()), make_batches(dist.get_rank(), False)
    fjoin.fsdp.register(model, tx.fuse(tx.mean("data"), SGD)).close()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, a).backward()
    optimizer.step()
    return full(model)


def as_torch() -> Any:
    model, (a, *_) = shard(make_model(), one_mesh()), make_batches(dist.get_rank(), False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, a).backward()
    optimizer.step()
    return full(model)


def test_a_closed_handle_leaves_the_module_as_torch_made_it(pool: Any) -> None:
    assert max_diff(pool.run(2, closed)[0], pool.run(2, as_torch)[0]) < 1e-15
