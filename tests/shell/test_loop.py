"""fjoin.join: uneven inputs in a loop of one's own, for whatever communicates in it."""

from __future__ import annotations

import datetime
import os
import signal
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
    state = step.init(params)
    for batch in step.join(batches):
        state, _ = step(state, batch)
    return {p: v.clone() for p, v in state.params.items()}


def two_steps_on_processes(sizes: list[list[int]], accumulate: int) -> Any:
    return two_steps(make_batches(1, sizes)[dist.get_rank()], accumulate)


@pytest.mark.parametrize("sizes", [SIZES, [[2], [3, 1, 4]]], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_steps_over_one_loader(pool: Any, sizes: list[list[int]], accumulate: int) -> None:
    """Each ends as it would alone, a last window that is not complete included."""
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
        for batch in fjoin.join([torch.ones(2)], steps=[a, b]):
            state, _ = a(state, batch)

    raises_text(fjoin.JoinError, loop, "did not call step 1 of steps")
    raises_text(TypeError, lambda: fjoin.join([], steps=[]), "steps", "at least one")
    raises_text(TypeError, lambda: fjoin.join([], steps=[loss_fn]), "train_step")  # type: ignore[call-overload]
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, a]), "different")
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, slow]), "same mesh, axes and accumulate")
    raises_text(TypeError, lambda: fjoin.join([], steps=[a], weight=len), "no weight")  # type: ignore[call-overload]
    raises_text(TypeError, lambda: fjoin.join([], when_exhausted="replay"), "steps")  # type: ignore[call-overload]


# -- ends ---------------------------------------------------------------------------------------------------------


def test_weights_and_ends() -> None:
    def one_rank(weights: list[float]) -> Any:
        loop = fjoin.join(weights, weight=lambda w: w)
        return [(batch if loop.live else None, loop.total, loop.scale) for batch in loop]

    assert tx.simulate(one_rank, {"data": 2}, [[], []]) == [[], []]
    # Where no rank has weight the body does not run; a batch of weight 0 is not seen where another one can be.
    assert tx.simulate(one_rank, {"data": 2}, [[0.0, 3.0, 0.0, 1.0], [0.0, 2.0, 5.0]]) == [
        [(3.0, 5.0, 1.2), (3.0, 5.0, 0.0), (1.0, 1.0, 2.0)],
        [(2.0, 5.0, 0.8), (5.0, 5.0, 2.0), (None, 1.0, 0.0)],
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


def test_leaving_alone_takes_nothing_down(pool: Any) -> None:
    assert pool.run(1, leave_alone) == [True]


def leave_alone() -> bool:
    for _ in fjoin.join([1, 2]):
        break
    return dist.is_initialized()


def leave(rank: int, report: Any, how: str) -> None:
    """Rank 1 leaves its loop in iteration 1, and stays alive but where it is killed; the time-out is 300 s."""
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
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
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
        ("kill", "", ""),
    ],
)
def test_leaving_the_loop_is_told_to_all(how: str, own: str, told: str) -> None:
    with Ranks(3, leave, how) as run:
        for rank, seconds, (kind, text) in run.after("leaving", 2 if how == "kill" else 3):
            if rank == 1:
                assert kind == own
            elif how == "kill":
                assert kind == "PeerLost" and "left the loop" not in text, text
            else:
                assert kind == "PeerLost" and told in text, (kind, text)
                assert seconds < 2.0


def fail_around_a_module(rank: int, report: Any) -> None:
    """Rank 1 fails while a DistributedDataParallel of its own has messages under way, and stays alive; the time-out is 300 s."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    ddp = DistributedDataParallel(make_model())
    try:
        for i in fjoin.join(range(4)):
            if (rank, i) == (1, 1):
                report("leaving")
                raise ValueError("bad batch")
            ddp(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    except Exception as error:
        report((type(error).__name__, str(error)))


def test_a_module_does_not_hold_the_others_up() -> None:
    """The group that the loop takes down is let go of by the module too. What waits in it gets gloo's own error."""
    with Ranks(3, fail_around_a_module) as run:
        for rank, seconds, (kind, text) in run.after("leaving", 3):
            assert kind == "ValueError" if rank == 1 else kind in ("PeerLost", "RuntimeError"), (kind, text)
            assert seconds < 2.0


def test_a_batch_to_stand_in_for_one_without_weight() -> None:
    """Where `empty` is given it comes in the place of a first batch of weight 0, so that no NaN does."""

    def one_rank(first: float) -> list[float]:
        return [batch for batch in fjoin.join([first, 3.0], weight=lambda w: w, empty=7.0)]

    assert tx.simulate(one_rank, {"data": 2}, [0.0, 2.0]) == [[7.0, 3.0], [2.0, 3.0]]
