"""Passes of a registered module: accumulation, unused parameters, messages, slips, and what waits for a device."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.records import DeviceReads, _record
from tests.ddp.register_problem import EVEN, HOOKS, SMALL, Branches, samples
from tests.helpers import max_diff, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss
from tests.traffic import watched


def unused(ours: bool) -> Any:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    if ours:
        fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.1)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.05, weight_decay=0.1, fused=True)
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp.zero_grad()
        which = [0, 3] if step == 2 else [0, 1 + dist.get_rank()]
        ddp(torch.randn(5, 3, generator=g, dtype=torch.float64), which).backward()
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


# -- slips around a module that steps in its backward pass --------------------------------------------

X = torch.ones(4, 3)


def stepped_twice(kind: Any) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    if kind == "a part":  # the optimizer steps only what the pipeline leaves alone
        pipeline = tx.fuse(tx.mean("data"), tx.partition({"weight": tx.sgd(0.1), "*": tx.frozen()}))
        optimizer = torch.optim.SGD([ddp.module.bias], lr=0.1)  # type: ignore[list-item]
    else:
        pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))
        other = nn.Linear(3, 1)
        optimizer = torch.optim.SGD((other if kind == "another model" else ddp).parameters(), lr=0.1)
    fjoin.ddp.register(ddp, tx.mean("data") if kind == "only a hook" else pipeline)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            ddp(X).square().mean().backward()
            optimizer.step()
    return [str(one.message) for one in seen if "steps" in str(one.message)]


def all_kinds() -> list[list[str]]:
    return [stepped_twice(kind) for kind in ("the same", "only a hook", "another model", "a part")]


def test_warns_once_about_an_optimizer_beside_a_registered_pipeline(pool: Any) -> None:
    for (text,), *others in pool.run(2, all_kinds):
        assert "remove optimizer.step()" in text and others == [[]] * 3


def without_zero_grad(zero_grad: Any, view: Any, window: Any) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1), gradient_as_bucket_view=view)
    fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9)))
    for i in range(6):
        if zero_grad and i % window == 0:
            ddp.zero_grad()
        if (i + 1) % window:
            with ddp.no_sync():
                ddp(X + i).square().mean().backward()
        else:
            ddp(X + i).square().mean().backward()
            assert ddp.module.weight.grad is not None, "it can be read after the pass"  # type: ignore[union-attr]
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize(("view", "window"), [(False, 2), (True, 1)])
def test_a_loop_without_zero_grad_steps_as_one_with_it(pool: Any, view: bool, window: int) -> None:
    (with_it,), (without,) = (pool.run(1, without_zero_grad, zero, view, window) for zero in (True, False))
    assert max_diff(with_it, without) == 0


# -- a registered hook alone does not wait for a device in a pass; with a pipeline the host decides on the step -----------

MADE = {
    "mean": tx.mean("data"),
    "bfloat16": tx.compress(torch.bfloat16, tx.mean("data")),
    "clipped": tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "pipeline": tx.fuse(tx.mean("data"), tx.sgd(0.1)),
}


def waited(name: str, on_device: bool) -> tuple[int, list[float], Any]:
    """The number of waits in the passes, the totals, and the gradients."""
    ddp = DistributedDataParallel(make_model(), **SMALL)
    handle = fjoin.ddp.register(ddp, MADE[name])
    grads = handle.run.records.check.grads
    grads.on_device = on_device
    waits, totals, now = [0], [], DeviceReads.now

    def counted(*args: Any) -> Any:
        waits[0] += 1
        return now(*args)

    def read_now(mesh: Any, x: torch.Tensor) -> Any:
        waits[0] += 1
        return x.tolist()

    for batch in make_batches(1, [[3, 2, 4, 2], [5, 1, 2, 6]])[dist.get_rank()]:
        ddp.zero_grad()
        handle.weight(samples(batch))
        with mock.patch.object(DeviceReads, "now", counted), mock.patch.object(_record, "read_now", read_now):
            mean_loss(ddp, batch).backward()
        totals.append(handle.total)
    reads = handle.run.records.check.reads
    assert len(reads.under_way) == (on_device and name != "pipeline"), "the host may run ahead by one pass"
    return waits[0], totals, [p.grad for p in ddp.parameters()]


@pytest.mark.parametrize("name", MADE)
def test_a_hook_alone_does_not_wait(name: str, pool: Any) -> None:
    there, here = (pool.run(2, waited, name, on_device) for on_device in (True, False))
    for (waits, totals, grads), (_, want, others) in zip(there, here, strict=True):
        assert (waits == 0) == (name != "pipeline")
        assert totals == want == [8.0, 3.0, 6.0, 8.0]
        assert max_diff(grads, others) < 1e-6
