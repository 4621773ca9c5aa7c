"""Converted modules train as one process on the whole batch, whatever each rank has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped


def make_model(momentum: float | None = 0.1, affine: bool = True, tracks: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 1),
        nn.BatchNorm1d(4, momentum=momentum, affine=affine, track_running_stats=tracks),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.BatchNorm1d(5, momentum=momentum, affine=affine, track_running_stats=tracks),
    )
    return model.double()


def data(step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3 + 2 * rank, 2, 3, generator=draw, dtype=torch.float64)


def train(model: nn.Module, batches: list[torch.Tensor]) -> Any:
    apply, params, buffers = fjoin.functional(model)

    def loss_fn(params: Any, buffers: Any, x: Any) -> Any:
        out, buffers = apply.with_buffers(params, buffers, x)
        return (out * torch.linspace(-1, 1, 5, dtype=torch.float64)).sum(1).square().mean(), None, buffers

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
    state = stepped(step, step.init(params, buffers), step.join(batches, when_exhausted="replay"))
    evaluated = apply.eval()(state.params, state.buffers, data(9, 0))
    return state.clone().params, state.buffers, evaluated


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"tracks": False}], ids=str)
@pytest.mark.parametrize("counts", [(3, 3), (3, 1)])
def test_it_equals_one_process_on_the_whole_batch(options: Any, counts: tuple[int, int]) -> None:
    whole = [
        torch.cat([data(step, rank) for rank, count in enumerate(counts) if step < count])
        for step in range(max(counts))
    ]
    want = train(make_model(**options), whole)

    def one_rank(rank: int) -> Any:
        model = tx.convert_sync_batchnorm(make_model(**options))
        return train(model, [data(step, rank) for step in range(counts[rank])])

    for params, buffers, evaluated in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        for found, expected in ((params, want[0]), (buffers, want[1])):
            assert found.keys() == expected.keys()
            for path, value in found.items():
                torch.testing.assert_close(value, expected[path], rtol=1e-10, atol=1e-10)
        if options.get("tracks", True):
            torch.testing.assert_close(evaluated, want[2], rtol=1e-10, atol=1e-10)


def test_layers_keep_their_tensors_names_and_modes() -> None:
    model, one = make_model(), nn.BatchNorm2d(3).eval()
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    model.shared = model[1]
    assert tx.convert_sync_batchnorm(model, ("node", "local")) is model
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.state_dict().keys() >= state.keys() and model.load_state_dict(model.state_dict())
    assert isinstance(model[1], tx.SyncBatchNorm) and model.shared is model[1] and model[5].axis == ("node", "local")
    new = tx.convert_sync_batchnorm(one)
    assert isinstance(new, tx.SyncBatchNorm) and not new.training and new.running_mean is one.running_mean
    assert tx.convert_sync_batchnorm(new) is new
    raises_text(tx.UnboundAxis, lambda: new.train()(torch.ones(2, 3, 1, 1)), "data")


def test_a_batch_of_weight_zero_is_not_counted() -> None:
    def one_rank(rank: int, weight: float) -> Any:
        state = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        return tx.sync_batch_norm(data(0, rank), state, axis="data", weight=weight)[1]

    want = tx.simulate(one_rank, {"data": 2}, [0, 1], [1.0, 1.0])[0]
    for found in tx.simulate(one_rank, {"data": 3}, [0, 1, 2], [1.0, 1.0, 0.0]):
        torch.testing.assert_close(tuple(found), tuple(want), rtol=1e-12, atol=1e-12)


CALLS: dict[str, Any] = {
    "autograd": lambda f, x: f(x.clone().requires_grad_()), "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_one_value_per_channel_in_all_ranks_is_torchs_error(call: str) -> None:
    def one_rank(weight: float) -> Any:
        def f(x: Any) -> Any:
            return tx.sync_batch_norm(x, (torch.zeros(2), torch.ones(2)), axis="data", weight=weight)[0].sum()

        return CALLS[call](f, torch.ones(1, 2))

    want = raises_text(ValueError, lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)))
    raises_text(ValueError, lambda: tx.simulate(one_rank, {"data": 2}, [1.0, 0.0]), want, "the ranks have one in all")
    tx.simulate(one_rank, {"data": 2}, [1.0, 1.0])
