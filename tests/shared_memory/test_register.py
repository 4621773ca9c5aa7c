"""A registered pipeline of ranks of one host: its messages are in shared memory, though the module's group is gloo's."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.traffic import watched

PIPELINES = {
    "adamw": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.01)),
    "clip": lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)), tx.adamw(0.01)),
    "int8": lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.sgd(0.01)),
    "zero": lambda: tx.zero(tx.mean("data"), tx.adamw(0.01), "data"),
}


def trained(transport: str, name: str) -> Any:
    """The parameters after five passes, and the names and sizes of torch's messages in the last three."""
    before, os.environ["FJOIN_TRANSPORT"] = os.environ["FJOIN_TRANSPORT"], transport
    try:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 8)), bucket_cap_mb=1)
        fjoin.ddp.register(ddp, PIPELINES[name]())
    finally:
        os.environ["FJOIN_TRANSPORT"] = before
    torch.manual_seed(1 + dist.get_rank())
    for i in range(5):
        with watched() as sent:
            ddp(torch.randn(16, 64)).square().mean().backward()
        large = [one for one in sent if one.bytes > 10_000] if i > 1 else []
    return [p.detach().clone() for p in ddp.parameters()], large


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("n", [2, 3])
def test_training_matches_gloo(pool: Any, n: int, name: str) -> None:
    want, got = pool.run(n, trained, "gloo", name), pool.run(n, trained, "auto", name)
    # Three ranks of gloo do not add in the order of ranks; the codec rounds what differs to other codes.
    tolerance = {"rtol": 0, "atol": 0} if n == 2 or name == "zero" else {"rtol": 1e-5, "atol": 1e-4}
    for (params, sent), (other, also) in zip(got, want, strict=True):
        torch.testing.assert_close(params, other, **tolerance)
        torch.testing.assert_close(params, got[0][0], rtol=0, atol=0)
        assert also and not sent


def elsewhere() -> str:
    os.environ["FJOIN_TRANSPORT"], before = "auto", os.environ["FJOIN_TRANSPORT"]
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    try:
        fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.sgd(0.1 + dist.get_rank())))
    except fjoin.DesyncError as error:
        return str(error)
    finally:
        os.environ["FJOIN_TRANSPORT"] = before
    return ""


def one_rank_prefers_gloo() -> Any:
    os.environ["FJOIN_TRANSPORT"], before = ("gloo", "auto")[dist.get_rank() % 2], os.environ["FJOIN_TRANSPORT"]
    try:
        fjoin.ddp.register(DistributedDataParallel(nn.Linear(2, 2)), tx.mean("data"))
    except fjoin.DesyncError as error:
        return str(error)
    finally:
        os.environ["FJOIN_TRANSPORT"] = before


def test_ranks_that_differ(pool: Any) -> None:
    for text in pool.run(2, elsewhere):
        assert "rank 1 differs from rank 0 in its hook" in text
    for text in pool.run(2, one_rank_prefers_gloo):
        assert "rank 1 makes" in text and "transport='auto', but rank 0" in text
