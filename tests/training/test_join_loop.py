"""The loop over step.join: its body, its end, its loaders; it looks one batch ahead, so that a loader that writes the next batch
over the current one is refused."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.records import Requests
from fjoin.training import OnSignal
from fjoin.transforms.base.record_words import numbers_of, words_of
from tests.helpers import raises_text, stepped
from tests.training.small import MEAN_SGD, step_of

X = torch.ones(2)


def test_the_body_must_call_the_step_once_and_run_alone() -> None:
    def loop(calls: int) -> None:
        step, state = step_of()
        for batch in step.join([X, X]):
            state = stepped(step, state, [batch] * calls)

    raises_text(fjoin.JoinError, lambda: loop(0), "did not call the step in iteration 0", "weight 0")
    raises_text(fjoin.JoinError, lambda: loop(2), "twice in iteration 0", "accumulate=k")
    step, state = step_of()
    first = iter(step.join([X, X]))
    next(first)
    raises_text(fjoin.JoinError, lambda: next(iter(step.join([X]))), "still running")
    first.close()  # type: ignore[attr-defined]
    stepped(step, state, step.join([X]))


def sums(batches: list[Tensor], empty: Any = fjoin.NO_BATCH) -> list[float]:
    """Of the batches that the body sees."""
    step, state = step_of()
    seen = []
    for batch in step.join(batches, empty=empty):
        seen.append(float(batch.sum()))
        state, _ = step(state, batch)
    return seen


def test_a_rank_without_input_sees_its_last_batch_or_the_empty_one() -> None:
    for use in (
        lambda b: b.shape, lambda b: b[0], lambda b: len(b), lambda b: list(b), lambda b: b + 1, lambda b: bool(b),
    ):  # fmt: skip
        raises_text(fjoin.NoBatch, lambda: use(fjoin.NO_BATCH), "empty=")  # noqa: B023
    assert repr(fjoin.NO_BATCH) == "fjoin.NO_BATCH"
    assert tx.simulate(sums, {"data": 2}, [[X, X], []], [X * 0] * 2) == [[2.0, 2.0], [0.0, 0.0]]
    raises_text(fjoin.NoBatch, lambda: tx.simulate(sums, {"data": 2}, [[X, X], []]), "empty=")
    assert tx.simulate(sums, {"data": 2}, [[X, X, X], [X * 2]]) == [[2.0] * 3, [4.0] * 3]


def test_throwing_early_on_all_ranks_in_the_same_step() -> None:
    def one_rank(n: int) -> Any:
        step, state = step_of()
        calls = 0
        try:
            for batch in step.join([X] * n, throw_on_early_termination=True):
                state, _ = step(state, batch)
                calls += 1
        except fjoin.EarlyTermination as error:
            stepped(step, state, step.join([X]))  # the step can be used on
            return calls, str(error)
        return calls, ""

    for calls, text in tx.simulate(one_rank, {"data": 3}, [4, 2, 3]):
        assert calls == 2 and "1 of 3 ranks are out of input in iteration 2" in text
    assert tx.simulate(one_rank, {"data": 2}, [2, 2]) == [(2, "")] * 2
    for calls, text in tx.simulate(one_rank, {"data": 2}, [1, 0]):
        assert calls == 0 and "1 of 2 ranks" in text and "in iteration 0" in text


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 2), (3, 0)])
def test_a_loop_ends_where_its_last_step_is_not_finite(accumulate: int, steps: int) -> None:
    def one_rank(batches: list[Tensor]) -> Any:
        step, state = step_of(accumulate=accumulate)
        calls = 0
        for batch in step.join(batches):
            calls += 1
            with contextlib.suppress(fjoin.NonFinite):
                state, _ = step(state, batch)
        return calls, state.step

    assert tx.simulate(one_rank, {"data": 2}, [[X, X, X * math.nan], [X, X]]) == [(3, steps)] * 2


# -- memory of batches ---------------------------------------------------------------------------------


def made() -> Any:
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(1.0))
    return step_of(lambda p, b: (p["w"] * _number(b)).sum(), pipeline, {"w": torch.zeros(1)})


def _number(batch: Any) -> Any:
    return batch["x"][0] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch


def by_step(loader: Any) -> float:
    step, state = made()
    return float(stepped(step, state, step.join(loader)).params["w"])


def by_steps(loader: Any) -> float:
    (a, first), (b, second) = made(), made()
    for batch in fjoin.join(loader, steps=[a, b]):
        (first, _), (second, _) = a(first, batch), b(second, batch)
    assert torch.equal(first.params["w"], second.params["w"])
    return float(first.params["w"])


def by_loop(loader: Any) -> float:
    return -sum(float(_number(batch)) for batch in fjoin.join(loader))


LOOPS = pytest.mark.parametrize("loop", [by_step, by_steps, by_loop])


def filled() -> Iterator[Any]:
    buffer = torch.zeros(1)
    for i in range(4):
        yield buffer.fill_(i)


def viewed() -> Iterator[Any]:
    buffer = torch.zeros(8)
    for i in range(4):
        buffer[:4] = i
        yield {"x": (buffer[:4].view(2, 2).mean(), buffer[:4]), "name": "text"}


def labelled() -> Iterator[Any]:
    """Only the labels lie in a buffer that is used again."""
    labels = torch.zeros(1, dtype=torch.long)
    for i in range(4):
        labels.copy_(torch.tensor([i]))
        yield torch.tensor(float(i)), labels


def from_numpy() -> Iterator[Any]:
    """Noticed once the same memory has been given twice."""
    buffer = np.zeros(1, dtype=np.float32)
    for i in range(4):
        buffer[:] = i
        yield torch.from_numpy(buffer)


def of_one_numpy() -> Iterator[Any]:
    buffer = np.full(2, np.nan)
    tensor = torch.from_numpy(buffer)
    for i in range(4):
        buffer[0] = i
        yield tensor[0]


@pytest.mark.sample(2)
@LOOPS
@pytest.mark.parametrize("loader", [filled, viewed, labelled, from_numpy, of_one_numpy])
def test_a_buffer_that_is_used_again_is_refused(loop: Any, loader: Any) -> None:
    raises_text(fjoin.JoinError, lambda: loop(loader()), "memory of the current one", "copy the batch in the loader")
    raises_text(
        fjoin.JoinError,
        lambda: tx.simulate(lambda r: loop(loader() if r else []), {"data": 2}, [1, 0]),
        "copy the batch",
    )


def alternating() -> Iterator[Any]:
    buffers = torch.zeros(1), torch.zeros(1)
    for i in range(4):
        yield buffers[i % 2].fill_(i)


def slices_of_a_growing_store() -> Iterator[Any]:
    store = torch.zeros(4)
    for i in range(4):
        store[i] = i
        yield store[i]


FINE: list[Any] = [
    alternating, slices_of_a_growing_store, lambda: (batch.clone() for batch in filled()),
    lambda: (torch.from_numpy(np.full(1, i, dtype=np.float32)) for i in range(4)),
]  # fmt: skip


@LOOPS
@pytest.mark.parametrize("loader", FINE)
def test_other_loaders_are_not(loop: Any, loader: Any) -> None:
    assert loop(loader()) == -6.0


@LOOPS
def test_the_same_batch_again_is_fine(loop: Any) -> None:
    batch = torch.tensor(2.0)
    assert loop([batch] * 3) == -6.0
    assert loop([{"x": (batch,)}] * 3) == -6.0
    constant = np.full(1, 2.0, dtype=np.float32)
    assert loop(torch.from_numpy(constant) for _ in range(3)) == -6.0
    assert loop([{"x": (batch, torch.from_numpy(np.full(3, np.nan)))}] * 3) == -6.0


def test_a_body_may_write_into_its_batch() -> None:
    batch, seen = torch.tensor(1.0), []
    for one in fjoin.join([batch] * 3):
        seen.append(one.mul_(2).item())
    assert seen == [2.0, 4.0, 8.0]


def test_tensors_without_a_version_pass() -> None:
    with torch.inference_mode():
        batches = [torch.tensor(2.0), torch.tensor(4.0)]
    assert by_loop(batches) == -6.0
    sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse()]
    assert len(list(fjoin.join(sparse))) == 2


# -- requests to save and to stop, in the record of a step --


@pytest.mark.parametrize("ranks", [1, 3, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_counts_in_one_scalar(ranks: int, dtype: torch.dtype) -> None:
    """Exact for every number of ranks, in the words of the message's dtype, also where all ranks ask."""
    for next_, save, stop in ((0, 0, 0), (ranks, 0, 0), (ranks, ranks, 0), (0, 1, 1), (ranks, ranks, ranks), (1, 0, 1)):
        words = None
        for rank in range(ranks):
            if rank > 2 and rank < ranks - 1:
                continue  # the ranks between are as rank 1
            one = Requests(ranks)
            if rank < save:
                one.ask_save()
            if rank < stop:
                one.ask_stop()
            mine = words_of(["has_next"], [one.write(rank < next_)], dtype, ranks, torch.device("cpu"))
            times = 1 if ranks < 4 or rank != 1 else ranks - 3
            times = 1 if rank == 2 and ranks > 3 else times
            words = mine * times if words is None else words + mine * times
        assert words is not None
        reader, total = Requests(ranks), numbers_of(words, ranks, True)[0]
        reader.note(total)
        assert (reader.saves_due, reader.stop_due) == (save > 0, stop > 0)
        if next_ in (0, ranks) or ranks < 4:
            assert reader.with_next(total) == next_


def plain(rank: int, n: int, pipeline: Any, accumulate: int) -> list[tuple[int, bool, bool]]:
    """A loop without join: the requests travel in the steps, and are read after them."""
    step, state = step_of(pipeline=pipeline, accumulate=accumulate)
    run, seen, saves = step.run, [], 0
    for i in range(n):
        if rank == 1 and i == 2:
            run.records.requests.ask_save()
        if rank == 0 and i == 4:
            run.records.requests.ask_stop()
        state, metrics = step(state, X)
        requests = run.records.requests
        if metrics.stepped and requests.saves_due > saves:
            saves = requests.saves_due
            seen.append((i, True, requests.stop_due))
    step.flush(state)
    seen.append((n, run.records.requests.saves_due > saves, run.records.requests.stop_due))
    return seen


@pytest.mark.parametrize(
    "pipeline, accumulate, at", [("mean", 1, 2), ("mean", 3, 2), ("mean", 2, 3), ("local", 1, 3), ("local", 3, 5)]
)
def test_a_loop_without_join(pipeline: str, accumulate: int, at: int) -> None:
    made = MEAN_SGD if pipeline == "mean" else tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 100)
    want = [(at, True, False), (12, False, True)]
    for got in tx.simulate(lambda r: plain(r, 12, made, accumulate), {"data": 3}, [0, 1, 2]):
        assert got == want


@pytest.fixture
def usr1() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_sets_a_flag_and_calls_the_handler_before(usr1: None) -> None:
    calls = list[int]()
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    kept, requests = signal.getsignal(signal.SIGUSR1), Requests(2)
    one = OnSignal(requests.ask_save, requests.ask_stop, on=signal.SIGUSR1)
    one.install()
    assert one.installed
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == [signal.SIGUSR1] and requests.write(True) == 1 + 3 + 9
    one.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is kept and not one.installed
    os.kill(os.getpid(), signal.SIGUSR1)
    assert len(calls) == 2 and requests.write(True) == 1.0
