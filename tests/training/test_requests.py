"""Requests to save and to stop, in the record of a step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.records import Requests
from fjoin.training import OnSignal
from fjoin.transforms.base.record_words import numbers_of, words_of
from tests.helpers import raises_text
from tests.training.small import MEAN_SGD, step_of

X = torch.ones(2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 512, 4096])
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


def test_a_request_travels_once() -> None:
    one = Requests(3)
    one.ask_save()
    one.ask_end_of_loop()
    assert one.write(True) == 1 + 4 + 16 and one.write(True) == 1.0
    one.ask_end_of_loop()
    one.end()
    assert one.write(False) == 0.0, "withdrawn"
    one.ask_stop()
    one.end()
    assert one.write(False) == 16.0, "a signal's request waits for the next loop"
    raises_text(fjoin.JoinError, Requests(5000).ask_save, "4096 ranks", "5000")


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
    with OnSignal(requests.ask_save, requests.ask_stop, on=signal.SIGUSR1) as one:
        assert one.installed
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1] and requests.write(True) == 1 + 3 + 9
    assert signal.getsignal(signal.SIGUSR1) is kept and not one.installed
    os.kill(os.getpid(), signal.SIGUSR1)
    assert len(calls) == 2 and requests.write(True) == 1.0


def test_a_handler_that_was_installed_later_stays(usr1: None) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # which would end the process
    one = OnSignal(lambda: None, on=signal.SIGUSR1)
    one.install()
    later = lambda number, frame: one._handle(number, frame)  # noqa: E731
    signal.signal(signal.SIGUSR1, later)
    os.kill(os.getpid(), signal.SIGUSR1)
    one.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is later


def test_only_the_main_thread_installs_a_handler() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), list[bool]()

    def other() -> None:
        with OnSignal(lambda: None) as one:
            seen.append(one.installed)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [False] and signal.getsignal(signal.SIGTERM) is before
