"""States of registered hooks and pipelines: saved and copied with the module, loaded wrongly, flushed, left by a Join."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fjoin
from fjoin import transforms as tx
from tests import traffic
from tests.helpers import max_diff, raises_text
from tests.scalars import Batch, Module, registered


def _saved(value: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


# -- a module with a hook of ours can be saved and copied, as with torch's; the copy has none ------------

COPIES: dict[str, Callable[[Any], Any]] = {"saved": _saved, "copied": copy.deepcopy}
FED = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
SCALED = tx.dynamic_loss_scale(tx.fuse(tx.mean("data"), tx.sgd(0.5)), init_scale=4.0)


def copies(what: Any, how: str) -> None:
    def one(model: Any, handle: Any) -> Any:
        model.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean()
        (handle.scale(loss) if what is SCALED else loss).backward()
        return [(p.detach() if isinstance(what, tx.Pipeline) else p.grad).clone() for p in model.parameters()]

    what = {"feedback": FED, "scaled": SCALED}[what]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2), find_unused_parameters=what is SCALED)
    handle = fjoin.ddp.register(model, what)
    one(model, handle)
    other = COPIES[how](model)
    assert other._comm_hooks == [] and len(model._comm_hooks) == 1
    assert other.join_hook.__func__ is DistributedDataParallel.join_hook and other.join_hook.__self__ is other
    assert max_diff([*model.parameters()], [*other.parameters()]) == 0
    again = fjoin.ddp.register(other, what)
    again.load_state_dict(_saved(handle.state_dict(), weights_only=True))
    for _ in range(2):  # the first pass of a module has buckets of its own
        assert max_diff(one(model, handle), one(other, again)) <= (0.02 if what is FED else 0)
    assert handle.step == again.step == 3


@pytest.mark.parametrize(("what", "how"), [("feedback", "saved"), ("scaled", "copied")])
def test_a_registered_module_is_saved_and_copied(pool: Any, what: str, how: str) -> None:
    pool.run(2, copies, what, how)


def load_another_step() -> None:
    _, handle, train = registered(tx.fuse(tx.mean("data"), tx.sgd(0.5, momentum=0.9)))
    handle.load_state_dict({**handle.state_dict(), "step": 4 if dist.get_rank() == 1 else 3})
    raises_text(fjoin.DesyncError, lambda: train(1.0), "rank 1 differs from rank 0 in its step: 4 there, 3")


def test_ranks_that_load_different_steps_raise(pool: Any) -> None:
    pool.run(3, load_another_step)


def in_a_window(wrapped_first: bool) -> Any:
    """The weight after six steps, the last two of them after a resume in the middle of a window."""
    rank, saved = dist.get_rank(), None
    pipeline, inner = tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 3), Module()
    for steps in (4, 2):
        inner, weights = Module(), copy.deepcopy(inner.state_dict())
        if not wrapped_first:
            inner.load_state_dict(weights)
        model = DistributedDataParallel(inner)
        inner.load_state_dict(weights if wrapped_first else inner.state_dict())
        handle = fjoin.ddp.register(model, pipeline)
        if saved is not None:
            handle.load_state_dict(saved)
        for _ in range(steps):
            model.zero_grad()
            if saved is not None and not wrapped_first:
                loss = model(Batch(1.0, 1.0))
                return raises_text(fjoin.DesyncError, loss.backward, "rank 1 goes on", "after Dist")
            model(Batch(1.0 + rank, 1.0)).backward()
        saved = copy.deepcopy(handle.state_dict())
    return inner.w[0].item()


def test_weights_are_loaded_after_the_module_is_made(pool: Any) -> None:
    """Its constructor sends those of rank 0 to all ranks, which is noticed."""
    assert pool.run(2, in_a_window, True) == [-6 * 1.5] * 2
    assert all(pool.run(2, in_a_window, False))


# -- the end -------------------------------------------------------------------------------------------

JOINS: dict[str, Any] = {"torch": lambda: torch_join.Join, "ours": lambda: fjoin.Join}


def in_a_join(which: str) -> Any:
    """The weight before and after the flush, and the buffer: rank 0 has five batches, rank 1 four."""
    rank = dist.get_rank()
    inner = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1, bias=False)).eval()
    nn.init.zeros_(inner[1].weight)
    model = DistributedDataParallel(inner)
    handle = fjoin.ddp.register(model, tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 10))
    with JOINS[which]()([model]):
        for _ in range(5 - rank):
            model.zero_grad()
            (model(torch.ones(1, 1)) * (1.0 + 2 * rank)).sum().backward()
        inner[0].running_mean.fill_(1.0 + rank)
    before = inner[1].weight.item()
    handle.flush()
    raises_text(TypeError, registered(tx.identity())[1].flush, "pipeline")
    return before, inner[1].weight.item(), inner[0].running_mean.item()


@pytest.mark.parametrize("which", JOINS)
def test_join_end_does_not_overwrite_local_training(pool: Any, which: str) -> None:
    """torch's Join sends the last rank's parameters to all; of buffers that stays so. A flush averages."""
    first, second = pool.run(2, in_a_join, which)
    scale = (1 + 1e-5) ** -0.5  # of the normalisation
    assert [before for before, *_ in (first, second)] == pytest.approx([-5 * scale, -12 * scale], abs=1e-4)
    assert first[1] == second[1] == pytest.approx((5 * -5 + 4 * -12) / 9 * scale, abs=1e-4)
    assert first[2] == second[2] == 1.0


# -- what a handle tells, and what it changes in its optimizer between passes --

LOSSES = (5.0, 4.0, 4.0, 4.0, 3.9, 4.0, 4.0, 4.0)
ADAMW = tx.inject_hyperparameters(tx.adamw(0.1))


def made(pipeline: Any = None) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    return model, pipeline and fjoin.ddp.register(model, pipeline)


def plateau(ours: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The rates after each epoch, and the parameters; ours goes on in another module after half of them."""
    model, handle = made(ours and tx.fuse(tx.mean("data"), ADAMW))
    stepped = torch.optim.AdamW(model.parameters(), 0.1) if not ours else torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler, rates = ReduceLROnPlateau(stepped, factor=0.5, patience=1), list[float]()
    for epoch, loss in enumerate(LOSSES):
        if ours and epoch == len(LOSSES) // 2:
            saved = model.module.state_dict(), handle.state_dict()
            model, handle = made(tx.fuse(tx.mean("data"), ADAMW))
            model.module.load_state_dict(saved[0])
            handle.load_state_dict(saved[1])
        model.zero_grad()
        model(torch.full((2, 3), epoch + dist.get_rank() + 1.0)).square().mean().backward()
        if not ours:
            stepped.step()
        scheduler.step(loss)
        rates.append(stepped.param_groups[0]["lr"])
        if ours:
            handle.with_hyperparameters(lr=rates[-1])
    return rates, [p.detach() for p in model.parameters()]


def test_a_rate_that_follows_a_result_is_that_of_torch(pool: Any) -> None:
    both = pool.run(2, plateau, True), pool.run(2, plateau, False)
    for (rates, params), (expected, of_torch) in zip(*both, strict=True):
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
