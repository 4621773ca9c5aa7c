"""Large gradients are sent from the memory in which autograd hands them over, unless others share it."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.buckets import GradBuffer

SIDE = 1024  # float32 matrices of 4 MB, each a bucket of its own


def loss_fn(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(torch.tanh(x @ p["first"] + p["bias"]) @ p["second"])
    both = p["left"].view(-1) + p["right"].view(-1)  # its gradient is that of either, in one memory
    return (hidden**2).mean() + (both**2).mean() + p["expanded"].sum()


def taken(loss: Any) -> tuple[dict[str, bool], dict[str, int], dict[str, float]]:
    """By path, in the third step: whether the gradient's memory is sent, its address, and an error of the parameters."""
    torch.manual_seed(0)
    shapes = dict.fromkeys(("first", "second", "left", "right", "expanded"), (SIDE, SIDE)) | {"bias": (SIDE,)}
    params = {path: torch.randn(shape) / SIDE for path, shape in shapes.items()}
    own, sent, inner = {k: p.clone() for k, p in params.items()}, dict[str, tuple[int, int]](), GradBuffer.copy_grad

    def copy_grad(out: GradBuffer, i: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        given = leaf.grad.data_ptr()
        inner(out, i, leaf)
        if out.direct:
            sent[out.bucket.paths[i]] = given, out.buffer.data_ptr()

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=fjoin.mesh({"data": 1}))
    state = step.init(params)
    with mock.patch.object(GradBuffer, "copy_grad", copy_grad):
        for _ in range(3):
            x = torch.randn(8, SIDE)
            sent.clear()
            grads = torch.func.grad(loss_fn)(own, x)
            own = {path: p - 0.1 * grads[path] for path, p in own.items()}
            state, _ = step(state, x)
    errors = {path: float((p.detach() - own[path]).abs().max()) for path, p in state.params.items()}
    step.close()
    return {path: a == b for path, (a, b) in sent.items()}, {path: b for path, (_, b) in sent.items()}, errors


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gradient_alone_is_sent_without_a_clone_and_a_shared_one_is_not(compiled: bool) -> None:
    sent, places, errors = taken(torch.compile(loss_fn, backend="aot_eager") if compiled else loss_fn)
    assert sent.keys() == {"first", "second", "left", "right", "expanded"}
    assert sent["first"] and sent["second"] and sent["expanded"], (
        "a gradient was cloned although nothing shares its memory"
    )
    # Once the first of a pair has been cloned, the other one is alone.
    assert sent["left"] + sent["right"] == 1
    assert len(set(places.values())) == len(places), "two buckets are in one memory"
    assert max(errors.values()) < 1e-6


def test_a_use_count_that_takes_shared_gradients_is_found() -> None:
    with mock.patch("fjoin.buckets._grad_buffer._ALONE", 4):
        sent, places, _ = taken(loss_fn)
    assert sent["left"] and sent["right"] and places["left"] == places["right"]


def test_a_use_count_that_clones_every_gradient_is_found() -> None:
    with mock.patch("fjoin.buckets._grad_buffer._ALONE", 1):
        assert not any(taken(loss_fn)[0].values())


def in_any_order(params: Any, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
    """Its gradients come in the order of the number in the batch; of 6 on, the first parameter has none."""
    number, x = batch
    for name in list(itertools.permutations("abc"))[number % 6][number // 6 :]:
        x = torch.tanh(x @ params[name])
    return x.square().mean()


def test_gradients_come_in_another_order_than_in_the_step_before() -> None:
    params = {name: torch.eye(4) + 0.1 * i for i, name in enumerate("abc")}
    own = {name: p.clone() for name, p in params.items()}
    step = fjoin.train_step(in_any_order, tx.fuse(tx.mean("data"), tx.sgd(0.5)), mesh=fjoin.mesh({"data": 1}))
    state = step.init(params)
    for number in (0, 0, 1, 5, 6, 0, 11, 2, 2, 3):
        batch = number, torch.linspace(-1, 1, 12).view(3, 4) + number
        grads = torch.func.grad(in_any_order)(own, batch)
        own = {name: p - 0.5 * grads[name] for name, p in own.items()}
        state, _ = step(state, batch)
        assert all(torch.equal(state.params[name], own[name]) for name in own), number
