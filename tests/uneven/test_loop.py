"""fjoin.join: uneven inputs in a custom loop, for all code that communicates in it, and over several steps."""

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
from tests.helpers import max_diff, raises_text, same_bits, stepped
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


def two_steps(batches: list[Any], accumulate: int) -> Any:
    """A generator and a discriminator, so to speak."""
    model = make_model()
    apply, params, _ = fjoin.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    mesh = fjoin.mesh({"data": -1}, ordered=True)
    a, b = (
        fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), opt), mesh=mesh, weight=samples, accumulate=accumulate)
        for opt in (tx.adamw(0.05), tx.sgd(0.1))
    )
    first, second = a.init(params), b.init(params)
    n = 0
    for batch in fjoin.join(batches, steps=[a, b]):
        first, _ = a(first, batch)
        second, _ = b(second, batch)
        n += 1
    out = [{p: v.clone() for p, v in state.params.items()} for state in (first, second)], first.batches, second.step, n
    a.close()
    b.close()
    return out


def alone(batches: list[Any], accumulate: int, which: int) -> Any:
    """One of the two by itself."""
    model = make_model()
    apply, params, _ = fjoin.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    pipeline = tx.fuse(tx.mean("data"), [tx.adamw(0.05), tx.sgd(0.1)][which])
    step = fjoin.train_step(loss_fn, pipeline, weight=samples, accumulate=accumulate)
    state = stepped(step, step.init(params), step.join(batches))
    return {p: v.clone() for p, v in state.params.items()}


def two_steps_on_processes(sizes: list[list[int]], accumulate: int) -> Any:
    return two_steps(make_batches(1, sizes)[dist.get_rank()], accumulate)


@pytest.mark.parametrize("sizes", [SIZES, [[2], [3, 1, 4]]], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_steps_over_one_loader(pool: Any, sizes: list[list[int]], accumulate: int) -> None:
    """Each step ends as it would alone, including an incomplete last window."""
    batches = make_batches(1, sizes)
    want = [tx.simulate(lambda b, i=i: alone(b, accumulate, i), {"data": 2}, batches)[0] for i in (0, 1)]
    real = pool.run(2, two_steps_on_processes, sizes, accumulate)
    simulated = tx.simulate(lambda b: two_steps(b, accumulate), {"data": 2}, batches)
    steps = -(-max(map(len, sizes)) // accumulate)
    for rank, (params, consumed, seconds, n) in enumerate(real):
        assert max_diff(params, want) < 1e-13
        assert (consumed, seconds, n) == (len(sizes[rank]), steps, steps * accumulate)
        assert same_bits((params, consumed), simulated[rank][:2])
    if accumulate == 1:
        assert max_diff(real[0][0][0], reference(sizes)) < 1e-12


def test_each_of_several_steps_must_be_called() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return (params["w"] * batch).sum()

    a, b = (fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1))) for _ in range(2))
    slow = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
    state = a.init({"w": torch.ones(2)})

    def loop() -> None:
        nonlocal state
        state = stepped(a, state, fjoin.join([torch.ones(2)], steps=[a, b]))

    raises_text(fjoin.JoinError, loop, "did not call step 1 of steps")
    raises_text(TypeError, lambda: fjoin.join([], steps=[]), "steps", "at least one")
    raises_text(TypeError, lambda: fjoin.join([], steps=[loss_fn]), "train_step")  # type: ignore[call-overload]
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, a]), "different")
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, slow]), "same mesh, axes and accumulate")
    raises_text(TypeError, lambda: fjoin.join([], steps=[a], weight=len), "no weight")  # type: ignore[call-overload]
    raises_text(TypeError, lambda: fjoin.join([], when_exhausted="replay"), "steps")  # type: ignore[call-overload]
