"""Models that communicate in their forward pass, and again where a backward pass computes parts of it once more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fjoin
from fjoin import transforms as tx
from fjoin.training._passes import GradOutput
from fjoin.transforms.axes import _environment as _axis_env
from fjoin.transforms.sync import BatchNormState
from tests.devices.engine_thread import in_engine_thread
from tests.helpers import stepped

HOW: dict[str, Callable[..., Any]] = {
    "plain": lambda fn, *args: fn(*args),
    "checkpoint": lambda fn, *args: checkpoint(fn, *args, use_reentrant=False),
    "remat": lambda fn, *args: tx.remat(fn)(*args),
}


def _summed(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ p["a"])
    return hidden * (1.0 + tx.psum(hidden.mean(), "data").tanh())


def _normed(p: Any, x: Tensor) -> Tensor:
    start = BatchNormState(torch.zeros(4), torch.ones(4))
    return torch.tanh(tx.sync_batch_norm(x @ p["a"], start, axis="data")[0])


BODIES = {"psum": _summed, "sync_batch_norm": _normed}


@contextlib.contextmanager
def elsewhere() -> Any:
    """Backward passes of steps run in a thread of autograd's."""
    backward = GradOutput.backward
    with mock.patch.object(GradOutput, "backward", lambda *given: in_engine_thread(lambda: backward(*given))):
        yield


def trained(mesh: fjoin.Mesh, body: str, how: str, threaded: bool, fault: bool = False) -> list[float]:
    """This rank's parameters after a loop in which rank 1 has fewer batches; its last ones are replayed with weight 0."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return HOW[how](BODIES[body], p, x).square().mean()

    torch.manual_seed(7)
    params = {"a": torch.randn(3, 4)}
    batches = [torch.randn(5, 3) for _ in range(8)][mesh.rank :: 2][: 4 - 2 * mesh.rank]
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh, weight=len)
    state = step.init(params)
    with contextlib.ExitStack() as stack:
        stack.enter_context(elsewhere() if threaded else contextlib.nullcontext())
        if fault:
            stack.enter_context(mock.patch.object(_axis_env, "bindings_of_caller", _axis_env._Bindings))
        state = stepped(step, state, step.join(batches, when_exhausted="replay"))
    out: list[float] = state.params["a"].flatten().tolist()
    return out


def by_hand(mesh: fjoin.Mesh, how: str, threaded: bool) -> list[float]:
    """The gradient of a loop of one's own, in a `bind`."""
    with fjoin.bind(mesh):
        torch.manual_seed(7)
        p = {"a": torch.randn(3, 4, requires_grad=True)}
        loss = HOW[how](_summed, p, torch.randn(5, 3) + mesh.rank).square().mean()
        in_engine_thread(loss.backward) if threaded else loss.backward()
    out: list[float] = p["a"].grad.flatten().tolist()  # type: ignore[union-attr]
    return out


def all_of(fault: bool = False) -> dict[str, list[float]]:
    """Each model by its name, in each way."""
    mesh = fjoin.mesh({"data": -1})
    if fault:
        return {"": trained(mesh, "psum", "checkpoint", True, True)}
    found = {f"{b} {h} {t}": trained(mesh, b, h, t) for b in BODIES for h in HOW for t in (False, True)}
    return found | {f"by hand {h} {t}": by_hand(mesh, h, t) for h in HOW for t in (False, True)}
