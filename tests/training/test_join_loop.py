"""The loop over step.join, and its errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped
from tests.training.small import step_of

X = torch.ones(2)


def test_the_body_must_call_the_step_once() -> None:
    step, state = step_of()

    def never() -> None:
        for _ in step.join([X, X]):
            pass

    raises_text(fjoin.JoinError, never, "did not call the step in iteration 0", "weight 0")
    step, state = step_of()

    def twice() -> None:
        nonlocal state
        for batch in step.join([X, X]):
            state, _ = step(state, batch)
            state, _ = step(state, batch)

    raises_text(fjoin.JoinError, twice, "twice in iteration 0", "accumulate=k")


def test_one_loop_at_a_time() -> None:
    step, state = step_of()
    loop = iter(step.join([X, X]))
    next(loop)
    raises_text(fjoin.JoinError, lambda: next(iter(step.join([X]))), "still running")
    loop.close()  # type: ignore[attr-defined]
    state = stepped(step, state, step.join([X]))


def test_no_batch_error_names_the_empty_argument() -> None:
    for use in (
        lambda b: b.shape, lambda b: b[0], lambda b: len(b), lambda b: list(b), lambda b: b + 1, lambda b: bool(b),
    ):  # fmt: skip
        raises_text(fjoin.NoBatch, lambda: use(fjoin.NO_BATCH), "empty=")  # noqa: B023
    assert repr(fjoin.NO_BATCH) == "fjoin.NO_BATCH"

    def one_rank(batches: list[Tensor], empty: Any) -> list[float]:
        step, state = step_of()
        seen = []
        for batch in step.join(batches, empty=empty):
            seen.append(float(batch.sum()))
            state, _ = step(state, batch)
        return seen

    assert tx.simulate(one_rank, {"data": 2}, [[X, X], []], [X * 0] * 2) == [[2.0, 2.0], [0.0, 0.0]]
    raises_text(fjoin.NoBatch, lambda: tx.simulate(one_rank, {"data": 2}, [[X, X], []], [fjoin.NO_BATCH] * 2), "empty=")


def test_an_exhausted_rank_sees_its_last_batch_again() -> None:
    def one_rank(batches: list[Tensor]) -> list[float]:
        step, state = step_of()
        seen = []
        for batch in step.join(batches):
            seen.append(float(batch.sum()))
            state, _ = step(state, batch)
        return seen

    assert tx.simulate(one_rank, {"data": 2}, [[X, X, X], [X * 2]]) == [[2.0] * 3, [4.0] * 3]


def test_throwing_early_on_all_ranks_in_the_same_step() -> None:
    def one_rank(batches: list[Tensor]) -> Any:
        step, state = step_of()
        calls = 0
        try:
            for batch in step.join(batches, throw_on_early_termination=True):
                state, _ = step(state, batch)
                calls += 1
        except fjoin.EarlyTermination as error:
            for batch in step.join([X]):  # the step can be used on
                state, _ = step(state, batch)
            return calls, str(error)
        return calls, ""

    for calls, text in tx.simulate(one_rank, {"data": 3}, [[X] * 4, [X] * 2, [X] * 3]):
        assert calls == 2 and "1 of 3 ranks are out of input in iteration 2" in text
    assert tx.simulate(one_rank, {"data": 2}, [[X] * 2, [X] * 2]) == [(2, "")] * 2
    for calls, text in tx.simulate(one_rank, {"data": 2}, [[X], []]):
        assert calls == 0 and "1 of 2 ranks" in text and "in iteration 0" in text


def test_a_loader_that_raises() -> None:
    def broken() -> Any:
        yield X
        raise OSError("disk gone")

    step, state = step_of()
    with pytest.raises(OSError, match="disk gone"):
        state = stepped(step, state, step.join(broken()))


class _Numbers(torch.utils.data.IterableDataset[Tensor]):
    """A dataset that does not know its length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return (torch.full((2,), float(i)) for i in range(self.n))


class _Rows(torch.utils.data.Dataset[Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((2,), float(i))


LOADERS: dict[str, Any] = {
    "list": lambda n: [torch.full((2,), float(i)) for i in range(n)],
    "generator": lambda n: (torch.full((2,), float(i)) for i in range(n)),
    # Not forked from here, where jax may have threads.
    "workers": lambda n: (
        torch.utils.data.DataLoader(_Rows(n), batch_size=None, num_workers=1, multiprocessing_context="spawn")
        if n
        else []
    ),
    "iterable": lambda n: torch.utils.data.DataLoader(_Numbers(n), batch_size=None),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", LOADERS)
def test_any_loader_and_the_position_in_it(kind: str) -> None:
    """The state counts the batches that this rank has consumed; the loader itself is one batch ahead."""

    def one_rank(n: int) -> Any:
        step, state = step_of(accumulate=2)
        seen = []
        for batch in step.join(LOADERS[kind](n)):
            state, _ = step(state, batch)
            seen.append(state.batches)
        return seen, state.batches, state.step

    out = tx.simulate(one_rank, {"data": 3}, [3, 0, 5])
    assert [(batches, step) for _, batches, step in out] == [(3, 3), (0, 3), (5, 3)]
    assert out[0][0] == [1, 2, 3, 3, 3, 3] and out[2][0] == [1, 2, 3, 4, 5, 5]


def test_resuming_in_the_middle_of_an_epoch() -> None:
    """Skipping the consumed batches, on each rank its own number, resumes as if nothing had happened."""

    def one_rank(n: int) -> Any:
        step, state = step_of()
        whole = LOADERS["list"](n)
        state = stepped(step, state, step.join(whole))
        again, part = step_of()
        part = stepped(again, part, again.join(itertools.islice(whole, 2)))
        part = stepped(again, part, again.join(whole[part.batches :]))
        return torch.equal(part.params["w"], state.params["w"]), part.batches == state.batches == n

    assert tx.simulate(one_rank, {"data": 3}, [4, 1, 3]) == [(True, True)] * 3
