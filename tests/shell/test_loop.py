"""fjoin.join: uneven inputs in a loop of one's own, for whatever communicates in it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import max_diff, raises_text, same_bits
from oracle import whole_batch
from oracle.whole_batch import make_batches, mean_loss
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

SIZES = [[3, 5], [4, 2, 6, 1]]
EMPTY = (torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


def samples(batch: Any) -> int:
    return len(batch[1])


def make_model() -> torch.nn.Module:
    """With sizes that tensor parallelism can divide by two."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def reference(sizes: list[list[int]]) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    whole_batch.train(model, optimizer, make_batches(1, sizes))
    return whole_batch.parameters(model)


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
        ("ddp", 2, SIZES),
        ("fully_shard", 2, SIZES),
        ("fully_shard", 2, [[], [2, 3]]),
        ("fully_shard", 4, [[1], [2, 2, 2], [], [3, 1]]),
        ("tensor", 2, [[2, 4, 1]]),
        ("tensor and fully_shard", 4, SIZES),
    ],
    ids=str,
)
def test_models_that_communicate_equal_one_process(pool: Any, kind: str, ranks: int, sizes: list[list[int]]) -> None:
    """Every rank runs forward, backward and step equally often, and what it has seen before counts nothing."""
    want = reference(sizes)
    for params, iterations in pool.run(ranks, torch_loop, kind, sizes):
        assert max_diff(params, want) < 1e-12 and iterations == max(map(len, sizes))


def messages(n: int) -> int:
    """What is given to torch.distributed in a loop of n iterations whose body sends nothing."""
    sent = 0
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += 1
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counted(name))
    try:
        for _ in fjoin.join([0] * (n - dist.get_rank())):
            pass
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return sent


def test_one_message_in_each_iteration(pool: Any) -> None:
    assert pool.run(2, messages, 5) == [6, 6]  # and one at the start


# -- several steps over one loader -----------------------------------------------------------------------------


def two_steps(batches: list[Any], rank: int) -> Any:
    """A generator and a discriminator, so to speak, of which the second accumulates."""
    model = make_model()
    apply, params, _ = fjoin.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    mesh = fjoin.mesh({"data": -1}, ordered=True)
    a = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.05)), mesh=mesh, weight=samples)
    b = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh, weight=samples, accumulate=2)
    first, second = a.init(params), b.init(params)
    n = 0
    for batch in fjoin.join(batches, steps=[a, b]):
        first, _ = a(first, batch)
        second, _ = b(second, batch)
        n += 1
    out = {p: v.clone() for p, v in first.params.items()}, first.batches, second.step, n
    a.close()
    b.close()
    return out


def two_steps_on_processes(sizes: list[list[int]]) -> Any:
    return two_steps(make_batches(1, sizes)[dist.get_rank()], dist.get_rank())


def test_several_steps_over_one_loader(pool: Any) -> None:
    want = reference(SIZES)
    real = pool.run(2, two_steps_on_processes, SIZES)
    simulated = tx.simulate(two_steps, {"data": 2}, make_batches(1, SIZES), [0, 1])
    for rank, (params, batches, seconds, n) in enumerate(real):
        assert max_diff(params, want) < 1e-12
        assert (batches, seconds, n) == (len(SIZES[rank]), 2, 4)
        assert same_bits((params, batches), simulated[rank][:2])


def test_each_of_several_steps_must_be_called() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return (params["w"] * batch).sum()

    a, b = (fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1))) for _ in range(2))
    state = a.init({"w": torch.ones(2)})

    def loop() -> None:
        nonlocal state
        for batch in fjoin.join([torch.ones(2)], steps=[a, b]):
            state, _ = a(state, batch)

    raises_text(fjoin.JoinError, loop, "did not call step 1 of steps")
    raises_text(TypeError, lambda: fjoin.join([], steps=[]), "steps", "at least one")
    raises_text(TypeError, lambda: fjoin.join([], steps=[loss_fn]), "train_step")  # type: ignore[call-overload]
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, a]), "different")
    raises_text(TypeError, lambda: fjoin.join([], steps=[a], weight=len), "no weight")  # type: ignore[call-overload]
    raises_text(TypeError, lambda: fjoin.join([], when_exhausted="replay"), "steps")  # type: ignore[call-overload]


# -- ends ---------------------------------------------------------------------------------------------------------


def test_weights_and_ends() -> None:
    def one_rank(weights: list[float]) -> Any:
        loop = fjoin.join(weights, weight=lambda w: w)
        return [(batch if loop.live else None, loop.total, loop.scale) for batch in loop]

    assert tx.simulate(one_rank, {"data": 2}, [[], []]) == [[], []]
    assert tx.simulate(one_rank, {"data": 2}, [[0.0, 3.0], [0.0]]) == [
        [(0.0, 0.0, 0.0), (3.0, 3.0, 2.0)],
        [(0.0, 0.0, 0.0), (None, 3.0, 0.0)],
    ]
    raises_text(ValueError, lambda: one_rank([-1.0]), "weight(batch)", "-1.0")
    raises_text(
        fjoin.NoBatch,
        lambda: tx.simulate(lambda b: [len(x) for x in fjoin.join(b)], {"data": 2}, [[[1]], []]),
        "empty=",
    )


def test_throwing_on_early_termination() -> None:
    def one_rank(n: int) -> tuple[int, str]:
        seen = 0
        try:
            for _ in fjoin.join(range(n), throw_on_early_termination=True):
                seen += 1
        except fjoin.EarlyTermination as error:
            return seen, str(error)
        return seen, ""

    for seen, text in tx.simulate(one_rank, {"data": 3}, [2, 3, 3]):
        assert seen == 2 and "1 of 3 ranks" in text and "iteration 2" in text


def test_one_loop_at_a_time_and_again() -> None:
    loop = fjoin.join([1, 2])
    running = iter(loop)
    next(running)
    raises_text(fjoin.JoinError, lambda: next(iter(loop)), "still running")
    del running
    assert list(loop) == [1, 2] and loop.batches == 2, "a second epoch"


def leave(rank: int, report: Any, how: str) -> None:
    """Rank 1 leaves its loop in iteration 1, and stays alive; the time-out is 300 s."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=300)

    def loader() -> Any:
        for i in range(4):
            if how == "loader" and rank == 1 and i == 2:
                report("leaving")
                raise ValueError("bad file")
            yield i

    loop = fjoin.join(loader(), mesh=mesh)
    try:
        with fjoin.bind(mesh):
            for i in loop:
                if rank == 1 and i == 1 and how != "loader":
                    report("leaving")
                    if how == "break":
                        break
                    raise ValueError("bad batch")
                tx.psum(torch.ones(2), "data")
    except Exception as error:
        report((type(error).__name__, str(error)))
    else:
        report(("fine", ""))


@pytest.mark.parametrize(
    ("how", "own", "told"),
    [
        ("break", "fine", "rank 1 left the loop over fjoin.join in iteration 1"),
        ("raise", "ValueError", "rank 1 left the loop over fjoin.join in iteration 1"),
        ("loader", "ValueError", "ValueError: bad file"),
    ],
)
def test_leaving_the_loop_is_told_to_all(how: str, own: str, told: str) -> None:
    with Ranks(3, leave, how) as run:
        for rank, seconds, (kind, text) in run.after("leaving", 3):
            if rank == 1:
                assert kind == own
            else:
                assert kind == "PeerLost" and told in text, (kind, text)
                assert seconds < 2.0
