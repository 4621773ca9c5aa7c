"""Ranks that call a collective with other arguments raise, on all ranks and in words; so does the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

LARGE = 40_000
Call = Callable[[int, int], Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# What differs on rank 1 -> the call of rank r, in tensors of n elements.
CALLS: dict[str, Call] = {
    "the root": lambda r, n: tx.pbroadcast(ones(n), "data", int(r == 1)),
    "pairs": lambda r, n: tx.ppermute(ones(n), "data", [(0, 1)] if r != 1 else [(1, 0)]),
    "more pairs": lambda r, n: tx.ppermute(ones(n), "data", [(0, 1), (1, 0)][: 2 - (r == 1)]),
    "a size": lambda r, n: tx.psum(ones(n + (r == 1)), "data"),
    "the dtype": lambda r, n: tx.psum(ones(n, dtype=torch.int32 if r == 1 else torch.float32), "data"),
    "the shape of rows": lambda r, n: tx.all_to_all_single(ones(6, 2 + (r == 1), n), "data"),
    "the number of rows": lambda r, n: tx.all_to_all_single(ones(6 + 6 * (r == 1), n), "data"),
    "the reduction": lambda r, n: (tx.pmax if r == 1 else tx.pmin)(ones(n), "data"),
    "the collective": lambda r, n: tx.all_gather(ones(n), "data") if r == 1 else tx.pbroadcast(ones(n), "data", 0),
}  # fmt: skip


def ends(what: str, n: int, transport: str) -> tuple[str, str]:
    mesh = fjoin.mesh({"data": -1}, transport=transport)
    try:
        with fjoin.bind(mesh):
            CALLS[what](mesh.rank, n)
            tx.psum(torch.ones(3), "data")  # where one rank alone has noticed, the others do here
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "fine", ""


@pytest.mark.sample(5)
@pytest.mark.parametrize("n", [3, LARGE])
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_arguments_that_differ(pool: Any, ranks: int, what: str, n: int) -> None:
    for kind, text in pool.run(ranks, ends, what, n, "shared"):
        assert kind == "DesyncError", (kind, text)


@pytest.mark.parametrize("what", CALLS)
def test_simulator_raises_on_mismatched_arguments(what: str) -> None:
    raises_text(tx.CollectiveMismatch, lambda: tx.simulate(lambda r: CALLS[what](r, 3), {"data": 2}, [0, 1]))
