"""A module with a hook of ours can be saved and copied, as with torch's; the copy has none and can be given one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {"saved": _saved, "copied": copy.deepcopy}
WHAT = {
    "mean": lambda: tx.mean("data"),
    "feedback": lambda: tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
    "pipeline": lambda: tx.fuse(tx.mean("data"), tx.sgd(0.5)),
    "scaled": lambda: tx.dynamic_loss_scale(tx.fuse(tx.mean("data"), tx.sgd(0.5)), init_scale=4.0),
}


def _pass(model: Any, handle: Any, what: str) -> Any:
    model.zero_grad()
    loss = model(torch.full((2, 3), 1.0 + torch.distributed.get_rank())).square().mean()
    (handle.scale(loss) if what == "scaled" else loss).backward()
    return [p.detach().clone() if what in ("pipeline", "scaled") else p.grad.clone() for p in model.parameters()]


def copies(what: str, how: str) -> None:
    torch.manual_seed(0)
    settings = {"find_unused_parameters": True} if what == "pipeline" else {}
    model = DistributedDataParallel(torch.nn.Linear(3, 2), **settings)
    handle = fjoin.ddp.register(model, WHAT[what]())
    _pass(model, handle, what)
    other = COPIES[how](model)
    assert other._comm_hooks == [] and len(model._comm_hooks) == 1
    assert other.join_hook.__func__ is DistributedDataParallel.join_hook and other.join_hook.__self__ is other
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    again = fjoin.ddp.register(other, WHAT[what]())
    again.load_state_dict(handle.state_dict())
    for _ in range(2):  # the first pass of a module has buckets of its own
        assert all(
            torch.allclose(a, b, atol=0.02 if what == "feedback" else 0.0)
            for a, b in zip(_pass(model, handle, what), _pass(other, again, what), strict=True)
        )
    assert handle.step == again.step == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", WHAT)
def test_a_registered_module_is_saved_and_copied(pool: Any, what: str, how: str) -> None:
    pool.run(2, copies, what, how)
