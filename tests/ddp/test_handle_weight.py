"""A registered module in a Join whose batches count other than its loop means: a warning, once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

# When the weight is set -> the words of the warnings of the rank with two sizes, and of the other.
CASES = {
    "before": ((), ()),
    "never": (("[2, 3] samples count the same",), ()),
    "after": (("after a backward pass",),) * 2,
}


def texts(when: str, over: Any, keyword: bool) -> list[str]:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    handle = fjoin.ddp.register(model, tx.mean("data", over=over))
    with warnings.catch_warnings(record=True) as seen, fjoin.Join([model]):
        warnings.simplefilter("always")
        for size in (3, 3) if dist.get_rank() else (3, 2, 2):
            x = torch.ones(size, 2)
            for moment in ("before", "after"):
                if when == moment:
                    handle.weight(size)
                if moment == "before":
                    (model(input=x) if keyword else model(x)).sum().backward()
    return [str(one.message) for one in seen if "handle.weight" in str(one.message)]


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("when", CASES)
def test_weights_that_are_not_given_in_time_are_warned_of(pool: Any, when: str, keyword: bool) -> None:
    for got, want in zip(pool.run(2, texts, when, "weight", keyword), CASES[when], strict=True):
        assert len(got) == len(want) and all(word in text for word, text in zip(want, got, strict=True)), got


def test_means_that_count_ranks_need_no_weight(pool: Any) -> None:
    assert pool.run(2, texts, "never", "live", False) == [[], []]
