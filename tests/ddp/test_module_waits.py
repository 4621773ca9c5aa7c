"""A registered hook alone does not wait for a device in a pass; with a pipeline the host decides on the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.agreement import DeviceReads, _record
from tests.ddp.register_problem import SMALL, samples
from tests.helpers import max_diff
from tests.oracle.whole_batch import make_batches, make_model, mean_loss

PASSES = 4
MADE: dict[str, Callable[[], Any]] = {
    "mean": lambda: tx.mean("data"),
    "bfloat16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "clipped": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "pipeline": lambda: tx.fuse(tx.mean("data"), tx.sgd(0.1)),
}


def train(name: str, on_device: bool) -> tuple[int, list[float], Any]:
    """The number of waits in the passes, the totals, and the gradients."""
    ddp = DistributedDataParallel(make_model(), **SMALL)
    handle = fjoin.ddp.register(ddp, MADE[name]())
    grads = handle.run.agreements.check.grads
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
    reads = handle.run.agreements.check.reads
    assert len(reads._under_way) == (on_device and name != "pipeline"), "the host may run ahead by one pass"
    return waits[0], totals, [p.grad for p in ddp.parameters()]


@pytest.mark.parametrize("name", MADE)
def test_a_hook_alone_does_not_wait(name: str, pool: Any) -> None:
    there, here = (pool.run(2, train, name, on_device) for on_device in (True, False))
    for (waits, totals, grads), (_, want, others) in zip(there, here, strict=True):
        assert (waits == 0) == (name != "pipeline")
        assert totals == want == [8.0, 3.0, 6.0, 8.0]
        assert max_diff(grads, others) < 1e-6
