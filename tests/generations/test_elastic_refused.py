"""What `fjoin.elastic` refuses, and what it does with one rank."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx

PARAMS = {"w": torch.ones(3), "m": torch.ones(32, 32)}
SGD = tx.sgd(0.1, momentum=0.9)
MEAN = tx.mean("data")


@pytest.fixture
def address() -> Iterator[str]:
    limit = datetime.timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    yield f"127.0.0.1:{store.port}"
    del store


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return (params["w"] * batch.mean()).sum() + params["m"].square().sum()


def trained(address: str, pipeline: Any, change: Callable[[Any, Any], Any] = lambda members, step: step) -> Any:
    """One epoch on one rank."""

    def train(members: Any) -> Any:
        step = fjoin.train_step(loss_fn, pipeline, mesh=members.mesh, weight=len)
        step = change(members, step)
        state = members.resume(step, PARAMS)
        sampler = fjoin.Shuffled(7, 2, mesh=members.mesh)
        batches = torch.utils.data.DataLoader(torch.ones(7), batch_sampler=sampler)  # type: ignore[arg-type]
        for batch in members.join(step, batches):
            state, _ = step(state, batch)
        return state

    return fjoin.elastic(train, ranks=1, store=address, transport="gloo", timeout_s=20)


@pytest.mark.parametrize(
    ("pipeline", "name"),
    [
        (tx.zero(MEAN, SGD, "data"), "pipeline.optimizer"),
        (tx.local_sgd(SGD, MEAN, every=2), "params"),
        (tx.diloco(SGD, MEAN, every=2, outer=tx.sgd(0.7)), "params"),
        (tx.fuse(tx.error_feedback(tx.compress(tx.int8(), MEAN)), SGD), "error"),
        (tx.fuse(tx.error_feedback(tx.power_sgd("data")), SGD), "error"),
    ],
    ids=["zero", "local SGD", "DiLoCo", "error feedback", "PowerSGD"],
)
def test_values_of_each_rank_are_refused_by_name(address: str, pipeline: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"each rank has its own .*{name}.*fjoin.Checkpoints"):
        trained(address, pipeline)


@pytest.mark.parametrize(
    "pipeline",
    [
        tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(1.0)), tx.adamw(0.1), after=tx.ema(0.9)),
        tx.skip_if_nonfinite(tx.fuse(MEAN, SGD)),
        tx.fuse(tx.power_sgd("data"), SGD),
        tx.fuse(tx.compress(tx.int8(), MEAN), tx.partition({"w": SGD, "m": tx.muon(0.1)})),
    ],
    ids=["clipping and ema", "skips", "PowerSGD without feedback", "encoded, two optimizers"],
)
def test_values_that_all_ranks_have_alike_train(address: str, pipeline: Any) -> None:
    assert trained(address, pipeline).step == 4
    assert not dist.is_initialized()


def test_buffers_that_nobody_averages_are_refused(address: str) -> None:
    def train(members: Any) -> Any:
        step = fjoin.train_step(lambda p, b, x: (loss_fn(p, x), None, b), tx.fuse(MEAN, SGD), mesh=members.mesh)
        return members.resume(step, PARAMS, {"mean": torch.zeros(2)})

    with pytest.raises(ValueError, match="each rank has its own buffers, .*on_buffers=tx.average_buffers"):
        fjoin.elastic(train, ranks=1, store=address)


def test_a_step_of_another_mesh_and_a_loader_without_positions_are_refused(address: str) -> None:
    def other_mesh(members: Any, step: Any) -> Any:
        return fjoin.train_step(loss_fn, tx.fuse(MEAN, SGD))

    with pytest.raises(ValueError, match="mesh=members.mesh"):
        trained(address, tx.fuse(MEAN, SGD), other_mesh)
    with pytest.raises(ValueError, match="begin_at needs a loader .* got a list"):
        fjoin.train_step(loss_fn, tx.fuse(MEAN, SGD)).join([1]).begin_at(3)


def test_members_cannot_be_used_after_their_generation(address: str) -> None:
    kept = []

    def keep(members: Any, step: Any) -> Any:
        kept.append(members)
        return step

    trained(address, tx.fuse(MEAN, SGD), keep)
    with pytest.raises(fjoin.JoinError, match="this generation has ended"):
        kept[0].resume(None, PARAMS)
