"""fjoin.join: uneven inputs in a custom loop, for all code that communicates in it, in windows, and over several steps.

test_left_loops.py has loops that are left, and tests/groups/test_lost_ranks.py ranks that fail.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits, stepped
from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_batches, mean_loss
from tests.traffic import watched

SIZES = [[3, 5], [4, 2, 6, 1]]
EMPTY = (torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


def samples(batch: Any) -> int:
    return len(batch[1])


def make_model() -> torch.nn.Sequential:
    """With sizes that tensor parallelism can divide by two."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def reference(sizes: list[list[int]], window: int = 1) -> dict[str, Tensor]:
    """One process, plain torch: a step for the mean over all samples of all ranks in a window."""
    model = make_model()
    whole_batch.train(model, torch.optim.AdamW(model.parameters(), 0.05), make_batches(1, sizes), window=window)
    return whole_batch.parameters(model)


def told(batches: list[Any]) -> list[tuple[Any, ...]]:
    loop = fjoin.join(batches, weight=samples, empty=EMPTY)
    return [(loop.live, loop.weight, loop.total, loop.number, loop.batches) for _ in loop]


@pytest.mark.parametrize("sizes", [[[], [2, 3]], [[2], [3, 1], [4, 4, 4]]], ids=["one empty", "three"])
def test_a_loop_tells_where_it_is(sizes: list[list[int]]) -> None:
    """tests/test_places.py trains in such loops."""
    for own, seen in zip(sizes, tx.simulate(told, {"data": len(sizes)}, make_batches(1, sizes)), strict=True):
        assert len(seen) == max(map(len, sizes))
        for i, (live, weight, total, number, batches) in enumerate(seen):
            assert live == (i < len(own)) and weight == (own[i] if live else 0) and number == i
            assert total == sum(rank[i] for rank in sizes if i < len(rank)) and batches == min(i + 1, len(own))


# -- models that communicate by themselves -----------------------------------------------------------------


def torch_loop(kind: str, sizes: list[list[int]], window: int, divides: bool) -> Any:
    """A model that torch distributes, which sends where a window ends; `divides` as one would without fjoin."""
    model, rank, ranks = make_model(), dist.get_rank(), dist.get_world_size()
    shard, run = rank, model
    if kind == "ddp":
        run = DistributedDataParallel(model)  # type: ignore[assignment]
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
    optimizer, seen = torch.optim.AdamW(model.parameters(), 0.05), []
    loop = fjoin.join(make_batches(1, sizes)[shard], weight=samples, accumulate=window, empty=EMPTY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of views that FSDP2 returns over tensor-parallel layers
        for batch in loop:
            with contextlib.nullcontext() if loop.sync_gradients else run.no_sync():  # type: ignore[operator]
                (mean_loss(run, batch) * (1 / window if divides else loop.scale)).backward()
            if loop.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
            seen.append((loop.number, loop.live, loop.total, loop.sync_gradients))
    params = {path: p.detach() for path, p in model.named_parameters()}
    return {path: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for path, p in params.items()}, seen


MODELS = [
    ("fully_shard", 2, SIZES, 1), ("fully_shard", 2, [[], [2, 3]], 1), ("fully_shard", 4, [[1], [2, 2, 2], [], [3, 1]], 1),
    ("tensor", 2, [[2, 4, 1]], 1), ("tensor and fully_shard", 4, SIZES, 1),
    *(("ddp", len(sizes), sizes, window) for window in (1, 2, 7) for sizes in (
        [[], [2, 3]], [[2], [3, 1], [4, 4, 4, 1, 2]])),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "ranks", "sizes", "window"), MODELS, ids=str)
def test_models_equal_one_process(pool: Any, kind: str, ranks: int, sizes: list[list[int]], window: int) -> None:
    """Every rank runs forward, backward and step equally often; repeated batches count nothing; a window counts all its samples."""
    want, most = reference(sizes, window), max(map(len, sizes))
    for params, seen in pool.run(ranks, torch_loop, kind, sizes, window, False):
        assert max_diff(params, want) < 1e-12 and len(seen) == -(-most // window) * window
        for number, live, total, ends in seen:
            start = number - number % window
            assert total == sum(sum(own[start : start + window]) for own in sizes) * (ranks // len(sizes))
            assert ends == (number % window == window - 1) and (not live or number < most)


def messages(n: int, window: int) -> int:
    """The messages given to torch.distributed in a loop whose body sends nothing."""
    with watched() as sent:
        for _ in fjoin.join([0] * (n - dist.get_rank()), accumulate=window):
            pass
    return len(sent)


@pytest.mark.parametrize(("window", "count"), [(1, 6), (2, 4)])
def test_one_message_in_each_window(pool: Any, window: int, count: int) -> None:
    assert pool.run(2, messages, 5, window) == [count] * 2  # and one at the start


# -- several steps -----------------------------------------------------------------------------------------


def several(batches: list[Any], accumulate: int, only: int | None = None) -> Any:
    """A generator and a discriminator, so to speak; or one of the two by itself."""
    apply, params, _ = fjoin.functional(make_model())

    def loss_fn(params: Any, batch: Any) -> Any:
        return cross_entropy(apply(params, {}, batch[0]), batch[1])

    mesh, n = fjoin.mesh({"data": -1}, ordered=True), 0
    steps = [
        fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), opt), mesh=mesh, weight=samples, accumulate=accumulate)
        for i, opt in enumerate((tx.adamw(0.05), tx.sgd(0.1))) if only in (None, i)
    ]  # fmt: skip
    states = [step.init(params) for step in steps]
    for batch in fjoin.join(batches, steps=steps) if only is None else steps[0].join(batches):
        states = [step(state, batch)[0] for step, state in zip(steps, states, strict=True)]
        n += 1
    out = [{p: v.clone() for p, v in state.params.items()} for state in states]
    counts = states[0].batches, states[-1].step, n
    for step in steps:
        step.close()
    return out, counts


@pytest.mark.parametrize(("sizes", "accumulate"), [(SIZES, 1), ([[2], [3, 1, 4]], 2)], ids=str)
def test_several_steps_over_one_loader(pool: Any, sizes: list[list[int]], accumulate: int) -> None:
    """Each step ends as it would alone, including an incomplete last window."""
    batches = make_batches(1, sizes)
    want = [tx.simulate(lambda b, i=i: several(b, accumulate, i)[0][0], {"data": 2}, batches)[0] for i in (0, 1)]
    real = pool.each(several, batches, accumulate)
    simulated = tx.simulate(lambda b: several(b, accumulate), {"data": 2}, batches)
    steps = -(-max(map(len, sizes)) // accumulate)
    for rank, (params, counts) in enumerate(real):
        assert max_diff(params, want) < 1e-13 and counts == (len(sizes[rank]), steps, steps * accumulate)
        assert same_bits((params, counts), simulated[rank])
    if accumulate == 1:
        assert max_diff(real[0][0][0], reference(sizes)) < 1e-12


# -- how a loop ends, and what is refused ------------------------------------------------------------------


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

    def with_empty(first: float) -> list[float]:
        return list(fjoin.join([first, 3.0], weight=lambda w: w, empty=7.0))

    # `empty` takes the place of a first batch of weight 0, so no NaN enters.
    assert tx.simulate(with_empty, {"data": 2}, [0.0, 2.0]) == [[7.0, 3.0], [2.0, 3.0]]


def test_throwing_on_early_termination() -> None:
    def one_rank(n: int) -> tuple[int, str]:
        seen = list[int]()
        loop = fjoin.join(range(n), throw_on_early_termination=True)
        return len(seen), raises_text(fjoin.EarlyTermination, lambda: seen.extend(loop), "1 of 3 ranks", "iteration 2")

    assert len(tx.simulate(one_rank, {"data": 3}, [2, 3, 3])) == 3


def positions(count: int, window: int, cut: int | None, position: Any = None) -> tuple[list[float], Any]:
    """What a loop yields, with draws of the loader and of the body, and its position after `cut` iterations."""
    torch.manual_seed(3 if position is None else 99)
    loader = torch.utils.data.DataLoader(torch.arange(count), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    loop, seen, found = fjoin.join(loader, accumulate=window), list[float](), None
    if position is not None:
        loop.load_state_dict(position)
    for batch in loop:
        seen.append(float(batch) + float(torch.rand(())))
        if len(seen) == cut:
            found = loop.state_dict()
    return seen, found


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.filterwarnings("ignore:to resume, the loop loads")
def test_a_loop_goes_on_at_the_end_of_a_window(count: int, window: int) -> None:
    seen, _ = positions(count, window, None)
    for cut in range(window, len(seen) + 1, window):
        _, position = positions(count, window, cut)
        assert positions(count, window, None, position)[0] == seen[cut:], cut


def within(loop: Any) -> None:
    for _ in loop:
        loop.state_dict()


def reusing() -> Any:
    buffers = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    for i in range(12):
        yield buffers[i % 3].fill_(float(i))


def step(accumulate: int = 1) -> fjoin.TrainStep:
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))
    return fjoin.train_step(lambda p, b: (p["w"] * b).sum(), pipeline, accumulate=accumulate)


def one_of_two() -> None:
    """The body calls one of two steps."""
    one = step()
    stepped(one, one.init({"w": torch.ones(2)}), fjoin.join([torch.ones(2)], steps=[one, step()]))


Join: Any = fjoin.join
T, V, J = TypeError, ValueError, fjoin.JoinError
REFUSED: list[tuple[Any, ...]] = [
    (lambda: list(Join([-1.0], weight=lambda w: w)), V, "weight(batch)", "-1.0"),
    (lambda: tx.simulate(lambda b: [len(x) for x in Join(b)], {"data": 2}, [[[1]], []]), fjoin.NoBatch, "empty="),
    (lambda: within(Join([1, 2, 3, 4], accumulate=2)), J, "within an accumulation window", "sync_gradients"),
    # Any batch of a window that a loader uses again is found.
    (lambda: list(Join(reusing(), accumulate=3)), J, "memory of the current one", "clone()"),
    *((lambda k=k: Join([], accumulate=k), (T, V), "accumulate") for k in (0, -1, 1.5, "2", True)),
    (one_of_two, J, "did not call step 1 of steps"),
    (lambda: Join([], steps=[]), T, "steps", "at least one"), (lambda: Join([], steps=[len]), T, "train_step"),
    (lambda: Join([], steps=[step()] * 2), V, "different"),
    (lambda: Join([], steps=[step(), step(2)]), V, "same mesh, axes and accumulate"),
    (lambda: Join([], steps=[step()], weight=len), T, "no weight"), (lambda: Join([], when_exhausted="replay"), T, "steps"),
    (lambda: Join([], steps=[step()], accumulate=2), T, "accumulate"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=[f"{i} {row[2]}" for i, row in enumerate(REFUSED)])
def test_it_is_refused(row: tuple[Any, ...]) -> None:
    call, kind, *words = row
    raises_text(kind, call, *words)


def test_one_loop_at_a_time_and_again() -> None:
    loop = fjoin.join([1, 2])
    running = iter(loop)
    next(running)
    raises_text(fjoin.JoinError, lambda: next(iter(loop)), "still running")
    del running
    assert list(loop) == [1, 2] and loop.batches == 2, "a second epoch"
    list(batch.clone() for batch in fjoin.join(reusing(), accumulate=1))


def other_windows() -> str:
    return raises_text(fjoin.FjoinError, lambda: list(fjoin.join([0] * 6, accumulate=2 + dist.get_rank())))


def test_ranks_with_other_windows_are_an_error_on_all(pool: Any) -> None:
    first, second = pool.run(2, other_windows)
    assert "accumulate=2" in first and "accumulate=3" in second


# -- evaluation over uneven shards equals one process on all samples --


SHARDS = [[[3, 1, 4], []], [[5], [2, 2], [1]], [[], [7, 3], []]]


def shards_of(shards: list[list[int]]) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [[torch.randn(n, 3, generator=g, dtype=torch.float64) for n in own] for own in shards]


def metrics(batch: torch.Tensor) -> dict[str, Any]:
    right = (batch.sum(1) > 0).double()
    return {"accuracy": right.mean(), "by column": batch.mean(0), "sum": {"right": right.sum(), "n": len(batch)}}


def evaluated(mine: list[torch.Tensor]) -> Any:
    out, again = (fjoin.evaluate(metrics, mine, weight=len) for _ in range(2))  # which meet anew
    assert same_bits(out, again)
    return out.means["accuracy"], out.means["by column"].tolist(), out.sums, out.weight, out.batches


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_every_sample_counts_once(pool: Any, shards: list[list[int]]) -> None:
    all_samples = torch.cat([batch for own in shards_of(shards) for batch in own])
    right = (all_samples.sum(1) > 0).double()
    results = tx.simulate(evaluated, {"data": len(shards)}, shards_of(shards))
    assert results == pool.each(evaluated, shards_of(shards)), "simulated and real"
    for accuracy, columns, sums, weight, batches in results:
        assert (accuracy, columns, sums, weight) == results[0][:4]
        assert abs(accuracy - right.mean().item()) < 1e-12
        assert torch.allclose(torch.tensor(columns, dtype=torch.float64), all_samples.mean(0), rtol=0, atol=1e-12)
        assert sums == {"right": right.sum().item(), "n": len(all_samples)} and weight == len(all_samples)
        assert batches == sum(map(len, shards))


def test_no_batch_at_all_and_weight_zero() -> None:
    assert fjoin.evaluate(metrics, []) == ({}, {}, 0.0, 0)
    out = fjoin.evaluate(lambda x: {"m": x}, [1.0, float("nan")], weight=lambda x: float(x == x))
    assert out.means == {"m": 1.0} and out.weight == 1
    exact = fjoin.evaluate(lambda x: {"m": 0.1, "sum": {"n": 2**53 - 1}, "none": torch.ones(0, 3)}, [1])
    assert exact.means["m"] == 0.1 and exact.sums["n"] == 2**53 - 1 and exact.means["none"].shape == (0, 3)
