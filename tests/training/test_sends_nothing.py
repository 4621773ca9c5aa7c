"""A pipeline that reduces nothing, on several ranks: they drift apart, so that it must be `identity` where that is meant."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx


def warned(pipeline: tx.Pipeline, ranks: int) -> list[str]:
    """The warnings of all ranks in `init`."""

    def one_rank() -> None:
        step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), pipeline)
        step.init({"w": torch.zeros(2), "b": torch.zeros(1)})

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tx.simulate(one_rank, {"data": ranks})
    assert all(warning.filename == __file__ for warning in seen)
    return [str(warning.message) for warning in seen]


SGD = tx.sgd(0.1)
SILENT = {
    "clip": tx.fuse(tx.chain(tx.clip_by_value(1.0), tx.clip_by_global_norm(1.0)), SGD),
    "by path": tx.fuse(tx.partition({"*": tx.clip_by_value(1.0)}), SGD),
    "clip alone": tx.fuse(tx.chain(tx.clip_by_value(1.0), tx.identity()), SGD),  # a chain leaves identity out
    "identity in some steps": tx.fuse(tx.every(2, tx.identity()), SGD),
    "identity for some leaves": tx.fuse(tx.partition({"w": tx.identity(), "b": tx.clip_by_value(1.0)}), SGD),
    "identity at the end": tx.fuse(tx.clip_by_value(1.0), SGD, after=tx.switch_after(10, tx.identity(), tx.ema(0.9))),
    "some steps": tx.skip_if_nonfinite(tx.fuse(tx.every(2, tx.clip_by_value(1.0)), SGD)),
}
TALKS = {
    "mean": tx.fuse(tx.mean("data"), SGD),
    "some": tx.fuse(tx.masked(tx.mean("data"), "*"), SGD),
    "identity": tx.fuse(tx.identity(), SGD),
    "after": tx.fuse(tx.identity(), SGD, after=tx.every(2, tx.mean("data"))),
    "by hand": tx.fuse(tx.Transform(lambda p: (), lambda p, s, params=None, **extra: (tx.pmean(p, "data"), s)), SGD),
    "a function": tx.fuse(tx.stateless(lambda g: -g), SGD),  # which may communicate
}


@pytest.mark.parametrize("name", SILENT)
def test_one_rank_warns(name: str) -> None:
    (text,) = warned(SILENT[name], 3)
    assert all(part in text for part in ("reduces", "3 ranks", "tx.mean('data')", "tx.identity()"))
    assert warned(SILENT[name], 1) == []


@pytest.mark.parametrize("name", TALKS)
def test_others_do_not(name: str) -> None:
    assert warned(TALKS[name], 2) == []


def registered(name: str) -> list[str]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    what: Any = {"mean": tx.mean("data"), "identity": tx.identity(), "clip": tx.clip_by_value(1.0), **SILENT}[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fjoin.ddp.register(model, what)
    assert all(warning.filename == __file__ for warning in seen)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("name", ["clip", "identity", "mean"])
def test_a_registered_hook_warns_too(pool: Any, name: str) -> None:
    first, second = pool.run(2, registered, name)
    assert second == [] and len(first) == (name == "clip")
    assert all("2 ranks" in text and "tx.mean('data')" in text for text in first)
