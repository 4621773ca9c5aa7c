"""fjoin.join: uneven inputs in a custom loop, for all code that communicates in it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.oracle.whole_batch import make_batches, mean_loss
from tests.traffic import watched
from tests.uneven.loop_problem import SIZES, make_model, reference, samples

EMPTY = (torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


# -- a pure custom loop ---------------------------------------------------------------------------------


def custom_loop(batches: list[Any]) -> Any:
    """Gradients by torch.func, a pure pipeline; the weights travel with the gradients."""
    model = make_model()
    params = {path: p.detach() for path, p in model.named_parameters()}
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    state = pipeline.init(params)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, params, batch[0]), batch[1])

    mesh = fjoin.mesh({"data": -1}, ordered=True)
    loop = fjoin.join(batches, mesh=mesh, weight=samples, empty=EMPTY)
    seen = []
    with fjoin.bind(mesh):
        for batch in loop:
            grads = torch.func.grad(loss_fn)(params, batch)
            params, state = pipeline.step(params, grads, state, weight=loop.weight)
            seen.append((loop.live, loop.weight, loop.total, loop.number, loop.batches))
    return params, seen


def on_processes(sizes: list[list[int]]) -> Any:
    return custom_loop(make_batches(1, sizes)[dist.get_rank()])


@pytest.mark.parametrize("sizes", [SIZES, [[], [2, 3]], [[2], [3, 1], [4, 4, 4]]], ids=["uneven", "one empty", "three"])
def test_a_custom_loop_equals_one_process(pool: Any, sizes: list[list[int]]) -> None:
    want = reference(sizes)
    simulated = tx.simulate(custom_loop, {"data": len(sizes)}, make_batches(1, sizes))
    real = pool.run(len(sizes), on_processes, sizes)
    most = max(map(len, sizes))
    for own, (params, seen), (sim_params, sim_seen) in zip(sizes, real, simulated, strict=True):
        assert max_diff(params, want) < 1e-12
        assert same_bits(params, sim_params) and seen == sim_seen and len(seen) == most
        for i, (live, weight, total, number, batches) in enumerate(seen):
            assert live == (i < len(own)) and weight == (own[i] if live else 0) and number == i
            assert total == sum(rank[i] for rank in sizes if i < len(rank)) and batches == min(i + 1, len(own))


# -- models that communicate by themselves ------------------------------------------------------------------


def torch_loop(kind: str, sizes: list[list[int]]) -> Any:
    """A model that torch distributes, whose gradients it averages over the ranks of `data`."""
    model, rank, ranks = make_model(), dist.get_rank(), dist.get_world_size()
    shard = rank
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fully_shard":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    else:  # tensor-parallel in pairs, sharded across them
        grid = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind == "tensor and fully_shard":
            fully_shard(model, mesh=grid["data"])
        shard = rank // 2
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    loop = fjoin.join(make_batches(1, sizes)[shard], weight=samples, empty=EMPTY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of views that FSDP2 returns over tensor-parallel layers
        for batch in loop:
            (mean_loss(model, batch) * loop.scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    names = [(path.removeprefix("module."), p.detach()) for path, p in model.named_parameters()]
    return {path: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for path, p in names}, loop.number


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes"),
    [
        ("ddp", 2, SIZES), ("fully_shard", 2, SIZES), ("fully_shard", 2, [[], [2, 3]]),
        ("fully_shard", 4, [[1], [2, 2, 2], [], [3, 1]]), ("tensor", 2, [[2, 4, 1]]),
        ("tensor and fully_shard", 4, SIZES),
    ],
    ids=str,
)  # fmt: skip
def test_models_that_communicate_equal_one_process(pool: Any, kind: str, ranks: int, sizes: list[list[int]]) -> None:
    """Every rank runs forward, backward and step equally often, and repeated batches count nothing."""
    want = reference(sizes)
    for params, iterations in pool.run(ranks, torch_loop, kind, sizes):
        assert max_diff(params, want) < 1e-12 and iterations == max(map(len, sizes))


def messages(n: int) -> int:
    """The messages given to torch.distributed in a loop of n iterations whose body sends nothing."""
    with watched() as sent:
        for _ in fjoin.join([0] * (n - dist.get_rank())):
            pass
    return len(sent)


def test_one_message_in_each_iteration(pool: Any) -> None:
    assert pool.run(2, messages, 5) == [6, 6]  # and one at the start
