"""States of registered hooks and pipelines: saved and copied with the module, resumed, loaded wrongly, flushed, left by a Join."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, HOOKS, SMALL, samples
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss
from tests.scalars import Batch, Module, registered


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


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
    again.load_state_dict(handle.state_dict())
    for _ in range(2):  # the first pass of a module has buckets of its own
        assert max_diff(one(model, handle), one(other, again)) <= (0.02 if what is FED else 0)
    assert handle.step == again.step == 3


@pytest.mark.parametrize(("what", "how"), [("feedback", "saved"), ("scaled", "copied")])
def test_a_registered_module_is_saved_and_copied(pool: Any, what: str, how: str) -> None:
    pool.run(2, copies, what, how)


# -- resuming ------------------------------------------------------------------------------------------


def batched() -> tx.Transform:
    return fjoin.ddp.batched_powerSGD_hook(start_powerSGD_iter=0, min_compression_rate=1.0)


def resume(hook: str) -> Any:
    """The second epoch, with a new module that loads the saved state: DDP starts with other buckets. A pass is left out."""
    made = {**HOOKS, "batched": batched}[hook]()
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.chain(made, tx.every(2, tx.clip_by_value(0.01))), tx.adamw(0.05)))

    def fresh() -> Any:
        ddp = DistributedDataParallel(make_model(), **SMALL)
        return ddp, fjoin.ddp.register(ddp, pipeline)

    def epoch(ddp: Any, handle: Any) -> None:
        for i, (x, y) in enumerate(make_batches(1, EVEN)[dist.get_rank()]):
            ddp.zero_grad()
            handle.weight(samples((x, y)))
            mean_loss(ddp, (x * float("nan") if i == dist.get_rank() == 1 else x, y)).backward()

    ddp, handle = fresh()
    epoch(ddp, handle)
    file = io.BytesIO()
    torch.save((ddp.module.state_dict(), handle.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    other, resumed = fresh()
    other.module.load_state_dict(weights)
    resumed.load_state_dict(saved)
    epoch(ddp, handle)
    epoch(other, resumed)
    assert resumed.step == handle.step == 6 and resumed.skipped == handle.skipped == 2
    return [{p: v.detach().clone() for p, v in m.module.named_parameters()} for m in (ddp, other)]


@pytest.mark.parametrize("hook", ["clip, mean", "by path", "batched"])
def test_training_resumes_from_a_saved_state(pool: Any, hook: str) -> None:
    (going_on, resumed), (_, other) = pool.run(2, resume, hook)
    assert same_bits(resumed, other)
    if hook != "batched":  # whose matrix is of a bucket, which is another in the first pass
        assert same_bits(going_on, resumed)


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
