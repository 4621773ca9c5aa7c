"""Hooks, modules and inputs for pipelines inside DistributedDataParallel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_model

SIZES = [[3, 2, 4, 1], [5, 1], []]
EVEN = [[3, 2, 4], [5, 1, 2]]
SMALL = {"bucket_cap_mb": 1e-4}  # two buckets, from the second pass on


def by_hand() -> tx.Transform:
    """A hook without a spec, which sends two messages, one after the other."""

    def update(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        w = torch.as_tensor(1.0 if weight is None else weight, dtype=torch.float64)
        total = tx.psum(w, "data")
        sums = tx.psum({k: g * w for k, g in grads.items()}, "data")
        return {k: s / total for k, s in sums.items()}, state

    return tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES)


def times(k: float, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {path: g * k for path, g in grads.items()}, state


HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"),
    "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "clip, mean": lambda: tx.chain(tx.clip_by_value(0.5), tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "by path": lambda: tx.partition({"*.weight": tx.mean("data"), "*": tx.chain(tx.mean("data"), tx.clip_by_value(0.01))}),
    "by hand": by_hand,
    "a partial": lambda: tx.chain(tx.mean("data"), tx.Transform(lambda p: (), functools.partial(times, 0.5), needs=tx.Needs.LEAVES)),
    "mean of mean": lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")),
    "power_sgd": lambda: fjoin.ddp.powerSGD_hook(start_powerSGD_iter=0, min_compression_rate=1.0),
    "int8": lambda: fjoin.ddp.quantization_pertensor_hook(),
}  # fmt: skip


def samples(batch: Any) -> int:
    return len(batch[1])


class Branches(nn.Module):
    """Rank r uses branch r in its first step; the last branch is used by no rank in the first two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        for i in which:
            x = torch.tanh(self.branches[i](x))
        return x.square().mean()


def check(results: list[Any], want: dict[str, Tensor]) -> None:
    start = whole_batch.parameters(make_model())
    assert max_diff(want, start) > 1e-2
    for params, _ in results:
        assert max_diff(params, want) < 1e-12 and same_bits(params, results[0][0])
