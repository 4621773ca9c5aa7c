"""A registered pipeline whose state is loaded, flushed, or left by a Join."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.algorithms.join as torch_join

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.scalars import Batch, Module, registered


def load_another_step() -> Any:
    _, handle, train = registered(tx.fuse(tx.mean("data"), tx.sgd(0.5, momentum=0.9)))
    handle.load_state_dict({**handle.state_dict(), "step": 4 if torch.distributed.get_rank() == 1 else 3})
    return bool(
        raises_text(fjoin.DesyncError, lambda: train(1.0), "rank 1 differs from rank 0 in its step: 4 there, 3")
    )


def test_ranks_that_load_different_steps_raise(pool: Any) -> None:
    assert pool.run(3, load_another_step) == [True] * 3


def resumed(wrapped_first: bool) -> Any:
    """The weight after six steps, the last two of them after a resume in the middle of a window."""
    rank, saved = torch.distributed.get_rank(), None
    pipeline, inner = tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 3), Module()
    for steps in (4, 2):
        inner, weights = Module(), copy.deepcopy(inner.state_dict())
        if not wrapped_first:
            inner.load_state_dict(weights)
        model = torch.nn.parallel.DistributedDataParallel(inner)
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
    assert pool.run(2, resumed, True) == [-6 * 1.5] * 2
    assert all(pool.run(2, resumed, False))


def flushed() -> Any:
    module, handle, train = registered(tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 2))
    for _ in range(3):
        train(Batch(1.0 + torch.distributed.get_rank(), 1.0))
    handle.flush()
    raises_text(TypeError, registered(tx.identity())[1].flush, "pipeline")
    return {path: p.detach().clone() for path, p in module.named_parameters()}


def test_a_registered_pipeline_can_be_flushed(pool: Any) -> None:
    first, second = pool.run(2, flushed)
    assert max_diff(first, second) == 0 and first["w"].tolist() == [-3 * 1.5] * 2


JOINS: dict[str, Any] = {"torch": lambda: torch_join.Join, "ours": lambda: fjoin.Join}


def in_a_join(which: str) -> Any:
    """The weight before and after the flush, and the buffer: rank 0 has five batches, rank 1 four."""
    rank = torch.distributed.get_rank()
    inner = torch.nn.Sequential(torch.nn.BatchNorm1d(1, affine=False), torch.nn.Linear(1, 1, bias=False)).eval()
    torch.nn.init.zeros_(inner[1].weight)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    handle = fjoin.ddp.register(model, tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 10))
    with JOINS[which]()([model]):
        for _ in range(5 - rank):
            model.zero_grad()
            (model(torch.ones(1, 1)) * (1.0 + 2 * rank)).sum().backward()
        inner[0].running_mean.fill_(1.0 + rank)
    before = inner[1].weight.item()
    handle.flush()
    return before, inner[1].weight.item(), inner[0].running_mean.item()


@pytest.mark.parametrize("which", JOINS)
def test_join_end_does_not_overwrite_local_training(pool: Any, which: str) -> None:
    """torch's Join sends the last rank's parameters to all; of buffers that stays so."""
    first, second = pool.run(2, in_a_join, which)
    scale = (1 + 1e-5) ** -0.5  # of the normalisation
    assert [before for before, *_ in (first, second)] == pytest.approx([-5 * scale, -12 * scale], abs=1e-4)
    assert first[1] == second[1] == pytest.approx((5 * -5 + 4 * -12) / 9 * scale, abs=1e-4)
    assert first[2] == second[2] == 1.0
