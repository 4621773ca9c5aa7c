"""Accumulation windows of fjoin.join: exact over all samples of a window, on all ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.oracle.whole_batch import make_batches, mean_loss
from tests.traffic import watched
from tests.uneven.loop_problem import SIZES, make_model, samples

EMPTY = (torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
OF_ONE = [[4, 1, 3, 2, 5]]


def reference(sizes: list[list[int]], window: int) -> dict[str, Tensor]:
    """One process, plain torch: a step for the mean over all samples of all ranks in a window."""
    model, batches = make_model(), make_batches(1, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for start in range(0, max(map(len, sizes)), window):
        parts = [batch for own in batches for batch in own[start : start + window]]
        count = sum(len(batch[1]) for batch in parts)
        optimizer.zero_grad()
        sum((len(batch[1]) / count * mean_loss(model, batch) for batch in parts), torch.zeros(())).backward()
        optimizer.step()
    return {path: p.detach() for path, p in model.named_parameters()}


def accumulated(batches: list[Any], window: int, divides: bool = False) -> tuple[dict[str, Tensor], list[Any]]:
    """DistributedDataParallel, which sends where a window ends; `divides` as one would without fjoin."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer, seen = torch.optim.AdamW(model.parameters(), 0.05), list[Any]()
    loop = fjoin.join(batches, weight=samples, accumulate=window, empty=EMPTY)
    for batch in loop:
        with contextlib.nullcontext() if loop.sync_gradients else ddp.no_sync():
            (mean_loss(ddp, batch) * (1 / window if divides else loop.scale)).backward()
        if loop.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((loop.number, loop.live, loop.total, loop.sync_gradients))
    return {path: p.detach() for path, p in model.named_parameters()}, seen


def on_processes(sizes: list[list[int]], window: int, divides: bool) -> Any:
    return accumulated(make_batches(1, sizes)[dist.get_rank()], window, divides)


@pytest.mark.sample(2)
@pytest.mark.parametrize("window", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [SIZES, [[], [2, 3]], [[2], [3, 1], [4, 4, 4, 1, 2]], OF_ONE], ids=str)
def test_windows_equal_one_process(pool: Any, sizes: list[list[int]], window: int) -> None:
    want, most = reference(sizes, window), max(map(len, sizes))
    whole = -(-most // window) * window
    for params, seen in pool.run(len(sizes), on_processes, sizes, window, False):
        assert max_diff(params, want) < 1e-12 and len(seen) == whole
        for number, live, total, ends in seen:
            start = number - number % window
            assert total == sum(sum(own[start : start + window]) for own in sizes) and ends == (
                number % window == window - 1
            )
            assert not live or number < most


def test_the_mean_of_means_is_another_training(pool: Any) -> None:
    """What the loop is for: the division by the window's length does not count every sample once."""
    want = reference(SIZES, 2)
    assert all(max_diff(params, want) > 1e-3 for params, _ in pool.run(2, on_processes, SIZES, 2, True))


def messages(n: int, window: int) -> int:
    with watched() as sent:
        for _ in fjoin.join([0] * n, accumulate=window):
            pass
    return len(sent)


def test_one_message_in_each_window(pool: Any) -> None:
    assert pool.run(2, messages, 5, 2) == [4, 4]  # 3 windows, and one at the start


@pytest.mark.parametrize(("asked", "iterations"), [(4, 6), (5, 6), (6, 9)])
def test_a_request_to_stop_ends_a_window(asked: int, iterations: int) -> None:
    """It travels with the message of the window's last iteration, or else with that of the next window."""

    def one_rank(rank: int) -> tuple[int, bool]:
        loop, count = fjoin.join([0] * 20, accumulate=3), 0
        for _ in loop:
            count += 1
            if rank == 1 and count == asked:
                loop.stop()
        return count, loop.stopped

    assert tx.simulate(one_rank, {"data": 2}, [0, 1]) == [(iterations, True)] * 2


def positions(count: int, window: int, cut: int | None) -> tuple[list[float], Any]:
    """What a loop yields, with draws of the loader and of the body, and its position after `cut` iterations."""
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(torch.arange(count), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    loop, seen, position = fjoin.join(loader, accumulate=window), list[float](), None
    for batch in loop:
        seen.append(float(batch) + float(torch.rand(())))
        if len(seen) == cut:
            position = loop.state_dict()
    return seen, position


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.filterwarnings("ignore:to resume, the loop loads")
def test_a_loop_goes_on_at_the_end_of_a_window(count: int, window: int) -> None:
    seen, _ = positions(count, window, None)
    for cut in range(window, len(seen) + 1, window):
        _, position = positions(count, window, cut)
        loader = torch.utils.data.DataLoader(torch.arange(count), batch_size=1, shuffle=True)  # type: ignore[arg-type]
        loop = fjoin.join(loader, accumulate=window)
        loop.load_state_dict(position)
        torch.manual_seed(99)
        assert [float(batch) + float(torch.rand(())) for batch in loop] == seen[cut:], cut


def test_a_position_within_a_window_is_refused() -> None:
    loop = fjoin.join([1, 2, 3, 4], accumulate=2)
    for batch in loop:
        if batch % 2:
            raises_text(fjoin.JoinError, loop.state_dict, "within an accumulation window", "sync_gradients")
        else:
            assert loop.state_dict()["batches"] == batch


def test_a_loader_that_reuses_any_batch_of_a_window_is_found() -> None:
    def reusing() -> Any:
        buffers = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
        for i in range(12):
            yield buffers[i % 3].fill_(float(i))

    list(batch.clone() for batch in fjoin.join(reusing(), accumulate=1))
    raises_text(fjoin.JoinError, lambda: list(fjoin.join(reusing(), accumulate=3)), "memory of the current one", "clone()")  # fmt: skip


def loop_alone(window: int) -> str:
    try:
        for _ in fjoin.join([0] * 6, accumulate=window + dist.get_rank()):
            pass
    except fjoin.FjoinError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_other_windows_are_an_error_on_all(pool: Any) -> None:
    first, second = pool.run(2, loop_alone, 2)
    assert "accumulate=2" in first and "accumulate=3" in second and "2.5 on average" in first
    assert all(text.startswith(("DesyncError", "PeerLost")) for text in (first, second))


@pytest.mark.parametrize("k", [0, -1, 1.5, "2", True])
def test_bad_windows(k: Any) -> None:
    raises_text((TypeError, ValueError), lambda: fjoin.join([], accumulate=k), "accumulate")  # type: ignore[arg-type]
    step = fjoin.train_step(lambda p, b: p["w"].sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    raises_text(TypeError, lambda: fjoin.join([], steps=[step], accumulate=2), "accumulate")  # type: ignore[call-overload]
