"""A region beside a large table of numbers or texts makes the calls that it makes without."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from fjoin import transforms as tx

TABLE: dict[int, Any] = {i: float(i) for i in range(10_000)}


class Model(nn.Module):
    def __init__(self, entries: int) -> None:
        super().__init__()
        self.layer, self.vocabulary = nn.Linear(3, 3), {i: str(i) for i in range(entries)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() * TABLE[1]


def calls_of(model: Model) -> int:
    count, x, region = 0, torch.ones(2, 3, requires_grad=True), tx.remat(model)
    region(x).backward()

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        region(x).backward()
    finally:
        sys.setprofile(None)
    return count


def test_a_table_costs_nothing() -> None:
    assert calls_of(Model(10_000)) <= calls_of(Model(0)) + 10
