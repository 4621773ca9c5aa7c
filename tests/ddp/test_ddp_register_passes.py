"""Passes of a registered module: accumulation, unused parameters, resuming, and the messages sent and counted."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, HOOKS, SMALL, Branches, check, samples
from tests.helpers import max_diff, same_bits
from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_batches, make_model, mean_loss
from tests.traffic import watched


def accumulate() -> Any:
    """Two micro-batches a step; the weights are those of both."""
    ddp = DistributedDataParallel(make_model(), **SMALL)
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05)))
    own = make_batches(1, [[3, 2, 4, 2], [5, 1, 2, 6]])[dist.get_rank()]
    for i in range(0, 4, 2):
        first, second = own[i], own[i + 1]
        total = samples(first) + samples(second)
        ddp.zero_grad()
        with ddp.no_sync():
            (mean_loss(ddp, first) * samples(first) / total).backward()
        handle.weight(total)
        (mean_loss(ddp, second) * samples(second) / total).backward()
    assert handle.step == 2
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}, handle.total


def test_accumulation_under_no_sync(pool: Any) -> None:
    batches = make_batches(1, [[3, 2, 4, 2], [5, 1, 2, 6]])
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for i in range(0, 4, 2):
        live = [own[j] for own in batches for j in (i, i + 1)]
        optimizer.zero_grad()
        sum(mean_loss(model, b) * (samples(b) / sum(map(samples, live))) for b in live).backward()
        optimizer.step()
    results = pool.run(2, accumulate)
    check(results, whole_batch.parameters(model))
    assert results[0][1] == 14.0


def unused(ours: bool) -> Any:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    if ours:
        fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.1)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.05, weight_decay=0.1, fused=True)
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp.zero_grad()
        ddp(
            torch.randn(5, 3, generator=g, dtype=torch.float64), [0, 3] if step == 2 else [0, 1 + dist.get_rank()]
        ).backward()
        if not ours:
            optimizer.step()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}


def test_parameters_unused_on_all_ranks_do_not_change(pool: Any) -> None:
    """Parameters without gradient get no decay and no step count, as in torch.optim."""
    ours, theirs = pool.run(2, unused, True), pool.run(2, unused, False)
    assert max_diff(ours[0], theirs[0]) < 1e-14 and same_bits(ours[0], ours[1])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Parameter(torch.zeros(64))
        self.other = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.each * x).sum() + ((self.other * x).sum() if both else 0)


def fed_back_now_and_then(fused: bool) -> float:
    """The part of the gradients that is neither in the parameter used in every second pass nor in its residual."""
    hook = tx.error_feedback(tx.compress(tx.top_k(0.1), tx.mean("data")))
    ddp = DistributedDataParallel(Two(), find_unused_parameters=True)
    handle = fjoin.ddp.register(ddp, tx.fuse(hook, tx.sgd(1.0)) if fused else hook)
    optimizer, true = torch.optim.SGD(ddp.parameters(), lr=1.0), torch.zeros(64)
    g = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        x = torch.randn(64, generator=g)
        true += x * (step % 2 == 0)
        optimizer.zero_grad()
        ddp(x, step % 2 == 0).backward()
        if not fused:
            optimizer.step()
    (residual,) = (v.clone() for name, v in handle.state_dict()["hook"].items() if name.endswith("error.other"))
    for x in (true, residual):
        dist.all_reduce(x)
    assert residual.abs().max() > 0.1
    return ((-ddp.module.other.detach() + residual) * dist.get_world_size() - true).abs().max().item()


@pytest.mark.parametrize("fused", [True, False])
def test_residual_of_an_unused_parameter_is_kept(pool: Any, fused: bool) -> None:
    assert max(pool.run(2, fed_back_now_and_then, fused)) < 1e-5


def resume(hook: str) -> Any:
    """The second epoch, with a new module that loads the saved state: DDP starts with other buckets."""

    def fresh() -> Any:
        ddp = DistributedDataParallel(make_model(), **SMALL)
        return ddp, fjoin.ddp.register(
            ddp, tx.fuse(tx.chain(HOOKS[hook](), tx.every(2, tx.clip_by_value(0.01))), tx.adamw(0.05))
        )

    def epoch(ddp: Any, handle: Any) -> None:
        for batch in make_batches(1, EVEN)[dist.get_rank()]:
            ddp.zero_grad()
            handle.weight(samples(batch))
            mean_loss(ddp, batch).backward()

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
    assert resumed.step == handle.step == 6
    return [{p: v.detach().clone() for p, v in m.module.named_parameters()} for m in (ddp, other)]


@pytest.mark.parametrize("hook", ["mean", "clip, mean", "by path"])
def test_training_resumes_from_a_saved_state(pool: Any, hook: str) -> None:
    for going_on, resumed in pool.run(2, resume, hook):
        assert same_bits(going_on, resumed)


def messages(hook: str, alone: bool, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(elements, dtype) of the messages given to torch.distributed in each pass, and of those announced before and after it."""
    ddp = DistributedDataParallel(make_model(), **options)
    made = tx.identity() if hook == "noop" else HOOKS[hook]()
    handle = fjoin.ddp.register(ddp, made if alone else tx.fuse(made, tx.adamw(0.05)))
    sent: list[list[Any]] = []

    def explained() -> list[Any]:
        return sorted(
            (m.payload_bytes // m.dtype.itemsize, str(m.dtype)) for row in handle.explain().rows for m in row.messages
        )

    announced = [explained()]
    for batch in make_batches(1, EVEN)[dist.get_rank()]:
        ddp.zero_grad()
        handle.weight(samples(batch))
        with watched() as seen:
            mean_loss(ddp, batch).backward()
        sent.append([(one.elements, one.dtype) for one in seen])
        announced.append(explained())
    return sent, announced


@pytest.mark.gloo
def test_one_message_besides_the_buckets(pool: Any) -> None:
    """The record of the step, with the first bucket; the module's first pass has one bucket, and the others two."""
    wide = "torch.float64"
    for sent, _ in pool.run(2, messages, "mean", False, SMALL):
        assert sent == [[(6, wide), (66, wide)], *[[(6, wide), (24, wide), (42, wide)]] * 2]


@pytest.mark.gloo
@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": None}], ids=str
)
@pytest.mark.parametrize("alone", [False, True], ids=["pipeline", "hook"])
@pytest.mark.parametrize("hook", [*HOOKS, "noop"])
def test_what_is_announced_is_sent(pool: Any, hook: str, alone: bool, options: dict[str, Any]) -> None:
    """Before the first pass for that one; then for the pass that was."""
    for sent, announced in pool.run(2, messages, hook, alone, {**SMALL, **options}):
        assert [sorted(messages) for messages in sent] == announced[1:] and announced[0] == announced[1]
        assert all(announced) or (hook == "noop" and alone)


def averaged(weight: float) -> Any:
    """The parameter after a pass whose gradients stay as they are on each rank."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.identity(), tx.sgd(1.0), after=tx.mean("data")))
    with torch.no_grad():
        ddp.module.weight.zero_()
    handle.weight(weight if dist.get_rank() else 1.0)
    ddp(torch.full((1, 1), 4.0 * dist.get_rank())).sum().backward()
    return ddp.module.weight.item()


def test_parameters_are_averaged_by_weight(pool: Any) -> None:
    assert pool.run(2, averaged, 3.0) == [-3.0, -3.0]


AFTER_BACKWARD = {
    "clip first": lambda: tx.chain(tx.clip_by_global_norm(1.0), tx.mean("data")),
    "skip": lambda: tx.skip_if_nonfinite(tx.compress(tx.int8(), tx.mean("data"))),
}


def passes_of(hook: str, weights: list[list[float]], bad: list[int]) -> Any:
    """In each pass the total and whether parameters have moved; the ranks that are found to be bad in the last one."""
    torch.manual_seed(0)
    ddp, rank, seen = DistributedDataParallel(nn.Linear(3, 2)), dist.get_rank(), []
    handle = fjoin.ddp.register(ddp, tx.fuse(AFTER_BACKWARD[hook](), tx.adamw(0.1, weight_decay=0.5)))
    for own in weights:
        before = ddp.module.weight.detach().clone()
        handle.weight(own[rank])
        with watched() as sent:
            ddp(torch.ones(1, 3)).sum().backward()
        announced = [m.payload_bytes for row in handle.explain().rows for m in row.messages]
        assert sorted(one.bytes for one in sent) == sorted(announced)
        seen.append((handle.total, not torch.equal(before, ddp.module.weight)))
    try:
        ddp(torch.full((1, 3), math.nan if rank in bad else 1.0)).sum().backward()
    except fjoin.NonFinite as error:
        return seen, error.ranks
    return seen, None


@pytest.mark.gloo
@pytest.mark.parametrize("hook", AFTER_BACKWARD)
def test_ranks_that_are_summed_after_backward_are_counted(pool: Any, hook: str) -> None:
    for seen, ranks in pool.run(3, passes_of, hook, [[1.0, 2.0, 0.0], [0.0] * 3], [0, 2]):
        assert seen == [(3.0, True), (0.0, False)]
        assert ranks == (None if hook == "skip" else ())
