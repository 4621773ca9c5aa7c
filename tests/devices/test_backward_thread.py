"""On a device autograd runs backward in a thread of its own: steps give the same numbers there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fjoin
from fjoin import transforms as tx
from fjoin.training._passes import GradOutput
from fjoin.transforms.axes import _environment as _axis_env
from fjoin.transforms.base import devices
from fjoin.transforms.sync import BatchNormState
from tests.devices.fake_device import EchoMesh
from tests.devices.test_streams import PIPELINES, loss_fn, params
from tests.helpers import raises_text, stepped
from tests.pool import JobFailed

# Autograd runs a backward pass that is nested deeper than this in a thread of its own.
_DEPTH = 70


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, run: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.run = depth, run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            nested(ctx.run, ctx.depth - 1)
        return grad, None, None


def nested(run: Callable[[], None], depth: int = _DEPTH) -> None:
    """Call a function within so many backward passes."""
    if depth:
        _Nested.apply(torch.ones((), requires_grad=True), depth, run).backward()
    else:
        run()


def in_engine_thread(run: Callable[[], Any]) -> Any:
    """The result of a function that runs in a thread of autograd's."""
    out: list[Any] = []
    here = threading.get_ident()

    def inside() -> None:
        assert threading.get_ident() != here
        out.append(run())

    nested(inside)
    return out[0]


def elsewhere(threaded: bool = True) -> Any:
    """Backward passes of steps run in a thread of autograd's."""
    backward = GradOutput.backward
    moved = mock.patch.object(GradOutput, "backward", lambda *given: in_engine_thread(lambda: backward(*given)))
    return moved if threaded else contextlib.nullcontext()


def trained(name: str, threaded: bool) -> list[Tensor]:
    make, options = PIPELINES[name]
    own = params()
    with elsewhere(threaded):
        step = fjoin.train_step(loss_fn, make(), mesh=EchoMesh(), weight=len, bucket_bytes=40, **options)
        state = stepped(step, step.init(own), (torch.randn(2 + i % 3, 3) for i in range(4)))
    return [p.detach().clone() for p in state.params.values()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_runs_in_another_thread(name: str) -> None:
    assert all(map(torch.equal, trained(name, True), trained(name, False)))


# -- models that communicate, and again where a backward pass computes parts of them once more -------------------------

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


def looped(mesh: fjoin.Mesh, body: str, how: str, threaded: bool) -> Tensor:
    """This rank's parameters after a loop in which rank 1 has fewer batches, and then replays some with weight 0."""
    torch.manual_seed(7)
    start = {"a": torch.randn(3, 4)}
    batches = [torch.randn(5, 3) for _ in range(8)][mesh.rank :: 2][: 4 - 2 * mesh.rank]
    step = fjoin.train_step(
        lambda p, x: HOW[how](BODIES[body], p, x).square().mean(), tx.fuse(tx.mean("data"), tx.sgd(0.1)),
        mesh=mesh, weight=len,
    )  # fmt: skip
    state = step.init(start)
    with elsewhere(threaded):
        state = stepped(step, state, step.join(batches, when_exhausted="replay"))
    return state.params["a"]


def by_hand(mesh: fjoin.Mesh, body: str, how: str, threaded: bool) -> Tensor:
    """The gradient of a loop of one's own, in a `bind`."""
    with fjoin.bind(mesh):
        torch.manual_seed(7)
        p = {"a": torch.randn(3, 4, requires_grad=True)}
        loss = HOW[how](BODIES[body], p, torch.randn(5, 3) + mesh.rank).square().mean()
        in_engine_thread(loss.backward) if threaded else loss.backward()
    assert p["a"].grad is not None
    return p["a"].grad


def threaded_models() -> dict[tuple[Any, ...], list[float]]:
    """Numbers of each model in each way, by the model and the way."""
    mesh = fjoin.mesh({"data": -1})
    return {
        (make.__name__, body, how, threaded): make(mesh, body, how, threaded).flatten().tolist()
        for make, body in ((looped, "psum"), (looped, "sync_batch_norm"), (by_hand, "psum"))
        for how in HOW
        for threaded in (False, True)
    }


def without_bindings() -> None:
    with mock.patch.object(_axis_env, "bindings_of_caller", _axis_env._Bindings):
        looped(fjoin.mesh({"data": -1}), "psum", "checkpoint", True)


def test_what_is_computed_again_there_communicates(pool: Any) -> None:
    for found in pool.run(2, threaded_models):
        for name, values in found.items():
            assert values == pytest.approx(found[*name[:2], "plain", False], rel=1e-6, abs=1e-7), name


def test_a_thread_without_bindings_is_found(pool: Any) -> None:
    raises_text(JobFailed, lambda: pool.run(2, without_bindings), "UnboundAxis")


def test_torch_keeps_nothing_in_threads_that_end_on_the_host() -> None:
    """It would be freed behind the thread's end in Python, and abort the process where that ends at the same time."""

    def stashed() -> bool:
        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        step(step.init(params()), torch.ones(2, 3))
        return torch._C._is_key_in_tls(_axis_env._KEY)

    assert tx.simulate(stashed, {"data": 2}) == [False, False]
    with mock.patch.object(devices, "in_use", lambda: True):
        assert tx.simulate(stashed, {"data": 2}) == [True, True]
