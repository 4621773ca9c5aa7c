"""Loops look one batch ahead: a loader that writes the next batch over the current one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped


def step_of() -> Any:
    step = fjoin.train_step(lambda p, b: (p["w"] * _number(b)).sum(), tx.fuse(tx.mean("data"), tx.sgd(1.0)))
    return step, step.init({"w": torch.zeros(1)})


def _number(batch: Any) -> Any:
    return batch["x"][0] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch


def by_step(loader: Any) -> float:
    step, state = step_of()
    state = stepped(step, state, step.join(loader))
    return float(state.params["w"])


def by_steps(loader: Any) -> float:
    (a, first), (b, second) = step_of(), step_of()
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


@LOOPS
@pytest.mark.parametrize("loader", [filled, viewed, labelled, from_numpy, of_one_numpy])
def test_a_buffer_that_is_used_again_is_refused(loop: Any, loader: Any) -> None:
    raises_text(fjoin.JoinError, lambda: loop(loader()), "memory of the current one", "copy the batch in the loader")
    raises_text(
        fjoin.JoinError,
        lambda: tx.simulate(lambda r: loop(loader() if r else []), {"data": 2}, [1, 0]),
        "copy the batch",
    )


def copied() -> Iterator[Any]:
    return (batch.clone() for batch in filled())


def alternating() -> Iterator[Any]:
    buffers = torch.zeros(1), torch.zeros(1)
    for i in range(4):
        yield buffers[i % 2].fill_(i)


def slices_of_a_growing_store() -> Iterator[Any]:
    store = torch.zeros(4)
    for i in range(4):
        store[i] = i
        yield store[i]


def new_arrays() -> Iterator[Any]:
    for i in range(4):
        yield torch.from_numpy(np.full(1, i, dtype=np.float32))


FINE = [new_arrays, copied, alternating, slices_of_a_growing_store]


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
