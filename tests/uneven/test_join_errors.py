"""torch's own joinables in our Join where something is wrong: errors on all ranks, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.ddp.ddp_problem import batches_of, loss, make_model
from tests.helpers import raises_text


def shadow_a_static_graph() -> tuple[str, str, float]:
    start = time.monotonic()
    ddp = DistributedDataParallel(make_model(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    try:
        with fjoin.Join([ddp, optimizer]):
            for batch in batches_of([2, 0])[dist.get_rank()]:
                loss(ddp, batch).backward()
                optimizer.step()
    except fjoin.FjoinError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


def test_a_static_graph_that_a_rank_has_never_run(pool: Any) -> None:
    """torch's own Join aborts the process here. The other rank, which waits in the module's messages, is released."""
    (kind, text, seconds), (kind_1, text_1, _) = pool.run(2, shadow_a_static_graph)
    assert (kind, kind_1) == ("PeerLost", "JoinError") and "static_graph" in text and "at least one batch" in text_1
    assert seconds < 20.0


def failed_join() -> tuple[int, bool]:
    ddp = DistributedDataParallel(make_model())
    module = ddp.module
    with contextlib.suppress(KeyError), fjoin.Join([ddp], divide_by_initial_world_size=False):
        raise KeyError
    module(torch.ones(2, 4).double()).sum().backward()
    return len(ddp._forward_hooks), "_sync_buffers" in vars(ddp)


def test_a_failed_join_leaves_the_module_as_it_was(pool: Any) -> None:
    assert pool.run(1, failed_join) == [(0, False)]


def unknown_optimizer() -> list[str]:
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(ddp.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with fjoin.Join([ddp]):
            for _ in range(2):
                loss(ddp, torch.ones(2, 4, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in seen if "fall behind" in str(w.message)]


def test_an_optimizer_that_the_join_does_not_know(pool: Any) -> None:
    for texts in pool.run(2, unknown_optimizer):
        assert len(texts) == 1 and "Adam" in texts[0] and "Join([ddp, optimizer])" in texts[0]


def test_raises_on_objects_that_cannot_be_joined() -> None:
    model = nn.Linear(2, 2)
    raises_text(ValueError, lambda: fjoin.Join([torch.optim.SGD(model.parameters(), 0.1)]), "communicates")
    with pytest.raises(ValueError, match="got .'Linear'.; wrap a module in DistributedDataParallel"):
        fjoin.Join([model])
    joinable = fjoin.as_joinable(fjoin.transforms.JoinHook())
    raises_text(TypeError, lambda: fjoin.Join([joinable, copy.copy(model)]), "Linear")
