"""What a handle tells, and what it changes in its optimizer between passes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fjoin
from fjoin import transforms as tx
from tests import traffic

LOSSES = (5.0, 4.0, 4.0, 4.0, 3.9, 4.0, 4.0, 4.0)
ADAMW = tx.inject_hyperparameters(tx.adamw(0.1))


def made(pipeline: Any = None) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    return model, pipeline and fjoin.ddp.register(model, pipeline)


def plateau(optimizer: str) -> tuple[list[float], list[torch.Tensor]]:
    """The rates after each epoch, and the parameters; a run of "resumed" goes on in another module after half of them."""
    model, handle = made(None if optimizer == "torch" else tx.fuse(tx.mean("data"), ADAMW))
    stepped = torch.optim.AdamW(model.parameters(), 0.1) if handle is None else torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler, rates = ReduceLROnPlateau(stepped, factor=0.5, patience=1), list[float]()
    for epoch, loss in enumerate(LOSSES):
        if optimizer == "resumed" and epoch == len(LOSSES) // 2:
            saved = model.module.state_dict(), handle.state_dict()
            model, handle = made(tx.fuse(tx.mean("data"), ADAMW))
            model.module.load_state_dict(saved[0])
            handle.load_state_dict(saved[1])
        model.zero_grad()
        model(torch.full((2, 3), epoch + dist.get_rank() + 1.0)).square().mean().backward()
        if handle is None:
            stepped.step()
        scheduler.step(loss)
        rates.append(stepped.param_groups[0]["lr"])
        if handle is not None:
            handle.with_hyperparameters(lr=rates[-1])
    return rates, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", ["ours", "resumed"])
def test_a_rate_that_follows_a_result_is_that_of_torch(pool: Any, optimizer: str) -> None:
    for (rates, params), (expected, of_torch) in zip(
        pool.run(2, plateau, optimizer), pool.run(2, plateau, "torch"), strict=True
    ):
        assert rates == expected and rates[-1] == 0.025
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(params, of_torch, strict=True))


def falling(step: Any) -> Any:
    return 0.1 / (step + 1)


def messages(over: Any, rate: Any) -> list[tuple[str, int]]:
    """Those of the third pass."""
    model, handle = made(tx.fuse(tx.mean("data", over=over), tx.adamw(rate)))
    for _ in range(3):
        with traffic.watched() as sent:
            model(torch.ones(1, 3)).sum().backward()
    announced = [message.payload_bytes for row in handle.explain().rows for message in row.messages]
    assert sorted(one.bytes for one in sent) == sorted(announced)
    return [(one.name, one.elements) for one in sent]


def test_a_mean_over_the_world_sends_the_gradients_alone(pool: Any) -> None:
    for rate, more in ((0.1, 0), (tx.cosine(0.1, 9), 0), (falling, 1)):
        for sent in pool.run(2, messages, "world", rate):
            assert len(sent) == 1 + more and max(elements for _, elements in sent) == 8
    for sent in pool.run(2, messages, "weight", 0.1):
        assert len(sent) == 2


def without_the_wrapper() -> list[str]:
    model, handle = made(tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    x = torch.ones(1, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.module(x).sum().backward()  # before it has trained, such as a test of the model
        for _ in range(2):
            model(x).sum().backward()
            model.module(x)  # to look at its result
        assert not seen and handle.step == 2
        for _ in range(2):
            model.module(x).sum().backward()
    return [str(one.message) for one in seen]


def test_a_module_that_is_called_without_its_wrapper_is_warned_of(pool: Any) -> None:
    for texts in pool.run(2, without_the_wrapper):
        (text,) = set(texts)
        assert "takes no step" in text and "call ddp(x) to train" in text


# -- a registered module in a Join whose batches count other than its loop means: a warning, once --


# When the weight is set -> the words of the warnings of the rank with two sizes, and of the other.
CASES = {
    "before": ((), ()),
    "never": (("[2, 3] samples count the same",), ()),
    "after": (("after a backward pass",),) * 2,
}


def texts(when: str, over: Any, keyword: bool) -> list[str]:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    handle = fjoin.ddp.register(model, tx.mean("data", over=over))
    with warnings.catch_warnings(record=True) as seen, fjoin.Join([model]):
        warnings.simplefilter("always")
        for size in (3, 3) if dist.get_rank() else (3, 2, 2):
            x = torch.ones(size, 2)
            for moment in ("before", "after"):
                if when == moment:
                    handle.weight(size)
                if moment == "before":
                    (model(input=x) if keyword else model(x)).sum().backward()
    return [str(one.message) for one in seen if "handle.weight" in str(one.message)]


@pytest.mark.parametrize(("when", "keyword"), [("before", False), ("never", False), ("never", True), ("after", False)])
def test_weights_that_are_not_given_in_time_are_warned_of(pool: Any, when: str, keyword: bool) -> None:
    for got, want in zip(pool.run(2, texts, when, "weight", keyword), CASES[when], strict=True):
        assert len(got) == len(want) and all(word in text for word, text in zip(want, got, strict=True)), got


def test_means_that_count_ranks_need_no_weight(pool: Any) -> None:
    assert pool.run(2, texts, "never", "live", False) == [[], []]
