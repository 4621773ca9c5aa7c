"""A pipeline registered with a DistributedDataParallel is the pure one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.algorithms.join as torch_join
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.training.plan_problem import NAN, PIPELINES, UNEVEN, product, purely, start, weight_of

REGISTERED = (
    "mean, then an average", "local steps", "world", "first means, then local steps", "two stages", "one leaf",
    "by hand", "local SGD", "DiLoCo", "streaming", "moving average",
)  # fmt: skip


class Holder(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(p) for p in start(dtype).values())

    def forward(self, batch: float) -> Tensor:
        return product({"w": self.w, "v": self.v}, batch)


def in_module(name: str, batches: list[list[Any]], skips: bool, dtype: torch.dtype = torch.float64) -> Any:
    """The parameters after each backward pass; a batch of None counts nothing."""
    pipeline = tx.skip_if_nonfinite(PIPELINES[name]) if skips else PIPELINES[name]
    model = torch.nn.parallel.DistributedDataParallel(Holder(dtype))
    handle, seen = fjoin.ddp.register(model, pipeline), []
    for batch in batches[torch.distributed.get_rank()]:
        handle.weight(weight_of(batch))
        model.zero_grad()
        try:
            model(0.0 if batch is None else batch).backward()
        except fjoin.NonFinite as error:
            return seen, (error.step, error.ranks)
        seen.append({path: p.detach().clone() for path, p in model.module.named_parameters()})
    return seen, handle.step


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_pipeline_is_the_pure_one(pool: Any, name: str) -> None:
    for skips in (False, True):
        pipeline, batches = PIPELINES[name], [list(each) for each in UNEVEN["uneven"][:3]]
        if skips:
            pipeline, batches[0][1] = tx.skip_if_nonfinite(pipeline), NAN
        batches = [own + [None] * (4 - len(own)) for own in batches]
        if name == "by hand":  # which sums over four
            batches.append([None] * 4)
        want = tx.simulate(lambda own: purely(pipeline, own)[0], {"data": len(batches)}, batches)  # noqa: B023
        for (seen, steps), wanted in zip(pool.run(len(batches), in_module, name, batches, skips), want, strict=True):
            assert steps == 4 and max_diff(seen, wanted) < 1e-12


def test_modules_with_local_steps_raise_together(pool: Any) -> None:
    for rank, (seen, error) in enumerate(
        pool.run(2, in_module, "local steps", [[1.0] * 4, [1.0, NAN, 1.0, 1.0]], False)
    ):
        assert len(seen) == 3 and error == (1, (1,)), rank


def test_only_the_rank_with_bad_gradients_is_named(pool: Any) -> None:
    for seen, error in pool.run(2, in_module, "one leaf", [[1.0] * 4, [1.0, NAN, 1.0, 1.0]], False):
        assert len(seen) == 1 and error == (1, (1,))


def flushed_after_a_bad_pass() -> Any:
    model = torch.nn.parallel.DistributedDataParallel(Holder(torch.float64))
    handle = fjoin.ddp.register(model, tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 9))
    rank = torch.distributed.get_rank()
    for batch in (1.0, 1.0, NAN if rank else 1.0):
        model.zero_grad()
        model(batch).backward()
    text = raises_text(fjoin.NonFinite, handle.flush, "Rank 1 left step 2 out, which the others took")
    handle.flush()
    return bool(text), model.module.w[0].item()


def test_flush_raises_if_one_rank_skipped_the_last_pass(pool: Any) -> None:
    assert pool.run(2, flushed_after_a_bad_pass) == [(True, 1 - (3 * 3 + 2 * 2) / 5)] * 2


def load_another_step() -> Any:
    model = torch.nn.parallel.DistributedDataParallel(Holder(torch.float64))
    handle, rank = fjoin.ddp.register(model, PIPELINES["mean"]), torch.distributed.get_rank()
    saved = handle.state_dict()
    handle.load_state_dict({**saved, "step": 4 if rank == 1 else 3})
    text = raises_text(
        fjoin.DesyncError, lambda: model(1.0).backward(), "rank 1 differs from rank 0 in its step: 4 there, 3"
    )
    return bool(text)


def test_ranks_that_load_different_steps_raise(pool: Any) -> None:
    assert pool.run(3, load_another_step) == [True] * 3


def resumed(wrapped_first: bool) -> Any:
    """The weight after six steps, the last two of them after a resume in the middle of a window."""
    rank, saved = torch.distributed.get_rank(), None
    pipeline, inner = tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 3), Holder(torch.float64)
    for steps in (4, 2):
        inner, weights = Holder(torch.float64), copy.deepcopy(inner.state_dict())
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
                return raises_text(fjoin.DesyncError, lambda: model(1.0).backward(), "rank 1 goes on", "after Dist")  # noqa: B023
            model(1.0 + rank).backward()
        saved = copy.deepcopy(handle.state_dict())
    return inner.w[0].item()


def test_weights_are_loaded_after_the_module_is_made(pool: Any) -> None:
    """Its constructor sends those of rank 0 to all ranks, which is noticed."""
    assert pool.run(2, resumed, True) == [1 - 6 * 1.5] * 2
    assert all(pool.run(2, resumed, False))


def flushed() -> Any:
    model = torch.nn.parallel.DistributedDataParallel(Holder(torch.float64))
    handle = fjoin.ddp.register(model, tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 2))
    for _ in range(3):
        model.zero_grad()
        model(1.0 + torch.distributed.get_rank()).backward()
    handle.flush()
    only_a_hook = torch.nn.parallel.DistributedDataParallel(Holder(torch.float64))
    raises_text(TypeError, fjoin.ddp.register(only_a_hook, tx.identity()).flush, "pipeline")
    return {path: p.detach().clone() for path, p in model.module.named_parameters()}


def test_a_registered_pipeline_can_be_flushed(pool: Any) -> None:
    first, second = pool.run(2, flushed)
    assert max_diff(first, second) == 0 and first["w"].tolist() == [1 - 3 * 1.5] * 2


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
