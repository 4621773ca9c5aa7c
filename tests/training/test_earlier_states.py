"""Going back to an earlier state: the steps after it leave nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import same_bits, stepped

X = torch.tensor([1.0, 2.0])
# The records of these are read one step late.
PIPELINES: dict[str, Any] = {
    "local_sgd": lambda: tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 4),
    "averaged": lambda: tx.fuse(tx.identity(), tx.sgd(0.1), after=tx.every(4, tx.mean("data"))),
    "mean": lambda: tx.fuse(tx.mean("data"), tx.sgd(0.1)),
}


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return ((params["w"] * batch - 1) ** 2).mean()


def gone_back(name: str, donate: bool, steps: int) -> Any:
    """The parameters after 5 steps, and after as many where `steps` others were taken from the second state first."""
    step = fjoin.train_step(loss_fn, PIPELINES[name](), donate=donate)
    state, _ = step(step.init({"w": torch.ones(2)}), X)
    kept = state.clone() if donate else state
    for _ in range(steps):
        state, _ = step(state, X * 3)
    state = kept
    state = stepped(step, state, [X] * 4)
    return state.params, state.step


@pytest.mark.sample(2)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_goes_on_from_an_earlier_state(name: str, donate: bool) -> None:
    for steps in (1, 2, 3):
        results = tx.simulate(
            lambda rank: (gone_back(name, donate, steps), gone_back(name, donate, 0)),  # noqa: B023
            {"data": 2},
            [0, 1],
        )
        for (params, number), (want, wanted) in results:
            assert number == wanted == 5 and same_bits(params, want)


def test_a_rank_that_alone_goes_back_is_an_error_on_all_ranks() -> None:
    def one_rank(rank: int) -> str:
        step = fjoin.train_step(loss_fn, PIPELINES["local_sgd"](), donate=False)
        first, _ = step(step.init({"w": torch.ones(2)}), X)
        second, _ = step(first, X)
        try:
            for _ in range(2):
                second, _ = step(first if rank == 1 else second, X)
        except fjoin.DesyncError as error:
            return str(error)
        return "no error"

    for text in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        assert "the ranks have called different train_steps" in text


def test_a_registered_module_goes_on_from_a_loaded_state(pool: Any) -> None:
    for back, straight in pool.run(2, module_gone_back):
        assert same_bits(back, straight)


def module_gone_back() -> Any:
    results = []
    for others in (2, 0):
        torch.manual_seed(0)
        inner = nn.Linear(3, 2)
        model = DistributedDataParallel(inner)
        handle = fjoin.ddp.register(model, PIPELINES["averaged"]())

        def train(steps: int, scale: float, model: Any = model) -> None:
            for _ in range(steps):
                model.zero_grad()
                (model(torch.ones(4, 3) * scale) ** 2).mean().backward()

        train(1, 1.0)
        kept = copy.deepcopy((inner.state_dict(), handle.state_dict()))
        train(others, 3.0)
        inner.load_state_dict(kept[0])
        handle.load_state_dict(kept[1])
        train(4, 1.0)
        assert handle.step == 5
        results.append({path: p.detach().clone() for path, p in inner.named_parameters()})
    return results
