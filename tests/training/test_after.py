"""Parameter transforms run in every step, those left out and those without input included: as in the pure pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, raises_text, same_bits

NAN = float("nan")


def _plus_one(p: Tensor) -> Tensor:
    return p + 1


def product(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch).sum()


def counted(hook: tx.Transform, steps: int = 2) -> tx.Pipeline:
    """Adds 1 to the parameters in every second step."""
    return tx.skip_if_nonfinite(tx.fuse(hook, tx.sgd(0.5), after=tx.every(steps, tx.stateless(_plus_one))))


def averaged(hook: tx.Transform) -> tx.Pipeline:
    return tx.skip_if_nonfinite(tx.fuse(hook, tx.sgd(0.5), after=tx.every(2, tx.mean("data"))))


def by_step(pipeline: tx.Pipeline, batches: list[Any], on_device: bool) -> Any:
    """A batch of None is one of weight 0."""
    step = judged(
        fjoin.train_step(product, pipeline, weight=lambda batch: 1.0 if batch is not None else 0.0), on_device
    )
    state, seen = step.init({"w": torch.zeros(2)}), []
    for batch in batches:
        state, _ = step(state, batch)
        seen.append(state.params["w"].tolist())
    return seen, state.pipeline


def by_pipeline(pipeline: tx.Pipeline, batches: list[Any]) -> Any:
    params: Any = {"w": torch.zeros(2)}
    state, seen = pipeline.init(params), []
    for batch in batches:
        grads = {"w": torch.full((2,), 0.0 if batch is None else batch)}
        params, state = pipeline.step(params, grads, state, weight=0.0 if batch is None else 1.0)
        seen.append(params["w"].tolist())
    return seen, state


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("batches", [[1.0, NAN, 1.0, 1.0], [NAN, 1.0, 1.0, NAN], [1.0, 1.0, NAN, NAN]])
def test_periods_advance_in_skipped_steps(batches: list[Any], on_device: bool) -> None:
    pipeline = counted(tx.mean("data"))
    with fjoin.bind(fjoin.mesh({"data": -1})):
        want, pure = by_pipeline(pipeline, batches)
    got, state = by_step(pipeline, batches, on_device)
    assert got == want and got[1][0] - got[0][0] == 1 - (0.5 if batches[1] == 1.0 else 0)
    assert same_bits(state.inner.after, pure.inner.after) and state.skipped == pure.skipped
    assert state.inner.after.step == 4


@pytest.mark.parametrize("on_device", [False, True])
def test_periods_advance_in_steps_without_input(on_device: bool) -> None:
    """An average that is due leaves the parameters as they are; other transforms run as in any step."""
    batches = [1.0, None, 1.0, None, None, 1.0]
    with fjoin.bind(fjoin.mesh({"data": -1})):
        want, pure = by_pipeline(counted(tx.mean("data"), 3), batches)
    got, state = by_step(counted(tx.mean("data"), 3), batches, on_device)
    assert got == want and [w for w, _ in got] == [-0.5, -0.5, 0.0, 0.0, 0.0, 0.5]
    assert same_bits(state.inner.after, pure.inner.after)
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.5), after=tx.every(2, tx.mean("data")))
    with fjoin.bind(fjoin.mesh({"data": -1})):
        want, pure = by_pipeline(pipeline, batches)
    got, state = by_step(pipeline, batches, on_device)
    assert got == want == [[-0.5, -0.5]] * 2 + [[-1.0, -1.0]] * 3 + [[-1.5, -1.5]]
    assert state.after.step == pure.after.step == 6


@pytest.mark.parametrize("on_device", [False, True])
def test_due_average_is_taken_in_a_skipped_step(on_device: bool) -> None:
    """The rank with nonfinite gradients takes part, with the weight of its earlier steps."""

    def pure(batches: list[Any]) -> Any:
        return by_pipeline(averaged(tx.identity()), batches)[0]

    per_rank = [[1.0, NAN], [2.0, 3.0], [3.0, 2.0]]
    second = float(torch.tensor((1 * -0.5 + 2 * -2.5 + 2 * -2.5) / 5))
    want = tx.simulate(pure, {"data": 3}, per_rank)
    assert want == [
        [[first, first], [second, second]] for first in (-0.5, -1.0, -1.5)
    ]  # fmt: skip
    shell = tx.simulate(lambda b: by_step(averaged(tx.identity()), b, on_device)[0], {"data": 3}, per_rank)
    assert shell == want


@pytest.mark.parametrize("on_device", [False, True])
def test_nonfinite_step_changes_nothing(on_device: bool) -> None:
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.5), after=tx.stateless(_plus_one))
    step = judged(fjoin.train_step(product, pipeline), on_device)
    state = step.init({"w": torch.zeros(2)})
    try:
        state, _ = step(state, NAN)
        raises_text(fjoin.NonFinite, lambda: step.close())
    except fjoin.NonFinite:
        assert not on_device
    assert state.params["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("on_device", [False, True])
def test_buffers_are_transformed_in_every_step_too(on_device: bool) -> None:
    """A skipped step transforms the buffers of the step before it."""

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        return (params["w"] * batch).sum(), None, {"n": buffers["n"] + 10}

    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    step = judged(fjoin.train_step(loss, pipeline, on_buffers=tx.every(2, tx.stateless(_plus_one))), on_device)
    state, seen = step.init({"w": torch.zeros(2)}, {"n": torch.tensor(0.0)}), []
    for batch in (1.0, NAN, 1.0, 1.0):
        state, _ = step(state, batch)
        seen.append(state.buffers["n"].item())  # type: ignore[index]
    assert seen == [10.0, 11.0, 21.0, 32.0]


def registered(batches: list[Any]) -> Any:
    linear = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    model = torch.nn.parallel.DistributedDataParallel(linear)
    handle = fjoin.ddp.register(model, counted(tx.mean("data")))
    seen = []
    for batch in batches:
        model.zero_grad()
        model(torch.full((2,), batch)).sum().backward()
        seen.append(linear.weight.detach().view(2).tolist())
    return seen, handle.state_dict()["after"], handle.skipped


def test_periods_advance_under_ddp(pool: Any) -> None:
    batches = [1.0, NAN, 1.0, 1.0]
    with fjoin.bind(fjoin.mesh({"data": -1})):
        want, _ = by_pipeline(counted(tx.mean("data")), batches)
    for seen, after, skipped in pool.run(2, registered, batches):
        assert seen == want and after["step"] == 4 and skipped == 1
