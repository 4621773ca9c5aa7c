"""Other parameters in a state, and those of a state in a module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped

START = {"w": torch.linspace(-1, 1, 40).view(8, 5), "b": torch.ones(5)}
OTHER = {"w": torch.linspace(2, 3, 40).view(8, 5), "b": torch.zeros(5)}


def loss_fn(params: Any, x: Any) -> Any:
    return (x @ params["w"].float() + params["b"].float()).square().mean()


PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "plain": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.1)),
    "masters": lambda: tx.fuse(tx.mean("data"), tx.mixed_precision(tx.adamw(0.1))),
    "zero": lambda: tx.zero(tx.mean("data"), tx.adamw(0.1), "data"),
    "zero, masters, encoded": lambda: tx.zero(tx.mean("data"), tx.mixed_precision(tx.adamw(0.1)), "data", gather_codec=tx.int8()),
    "zero, encoded": lambda: tx.zero(tx.mean("data"), tx.adamw(0.1), "data", gather_codec=tx.int8()),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_from_other_parameters_is_that_of_a_pure_pipeline(name: str) -> None:
    dtype = torch.bfloat16 if "masters" in name else torch.float32

    def one_rank(rank: int) -> Any:
        pipeline = PIPELINES[name]()
        step = fjoin.train_step(loss_fn, pipeline)
        start, other = ({path: p.to(dtype) for path, p in tree.items()} for tree in (START, OTHER))
        state, _ = step(step.init(start), torch.ones(2, 8) * (rank + 1))
        state = state.replace(params=other)
        assert all(torch.equal(p, other[path]) for path, p in state.params.items()) and state.step == 1
        state, _ = step(state, torch.ones(2, 8))
        return {path: (p - other[path]).float().clone() for path, p in state.params.items()}

    a, b = tx.simulate(one_rank, {"data": 2}, [0, 1])
    for path, moved in a.items():
        assert torch.equal(moved, b[path]) and 0.01 < moved.abs().max() < 0.2, "it steps from the new values"


def test_buffers_and_bad_values() -> None:
    def with_buffers(params: Any, buffers: Any, x: Any) -> Any:
        return (params["w"] * x).sum(), None, {"count": buffers["count"] + 1}

    step = fjoin.train_step(with_buffers, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
    state = step.init({"w": torch.ones(3)}, {"count": torch.zeros(())})
    state, _ = step(step.init({"w": torch.ones(3)}, {"count": torch.zeros(())}), torch.ones(3))
    raises_text(ValueError, lambda: state.replace(params={"w": torch.ones(3)}), "accumulation window")
    state, _ = step(state, torch.ones(3))
    state = state.replace(buffers={"count": torch.tensor(7.0)})
    assert state.buffers == {"count": 7.0}
    raises_text(ValueError, lambda: state.replace(params={"w": torch.ones(4)}), "(4,)", "expected", "(3,)")
    raises_text(ValueError, lambda: state.replace(params={}), "params", "expected")
    raises_text(ValueError, lambda: state.replace(buffers={"n": torch.zeros(())}), "buffers", "'n'", "'count'")


def test_views_of_the_own_parameters() -> None:
    step = fjoin.train_step(lambda p, x: (p["a"] * x).sum() + p["b"].sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = step.init({"a": torch.zeros(2, 2), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    own = state.params
    state = state.replace(params={"a": own["b"].t(), "b": own["a"]})
    assert state.params["a"].tolist() == [[1.0, 3.0], [2.0, 4.0]] and not state.params["b"].any()
    raises_text(ValueError, lambda: state.replace(buffers={}), "has none")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.embed(x)))


def test_a_module_with_tied_weights_and_buffers() -> None:
    model = Tied()
    other = copy.deepcopy(model)
    apply, params, buffers = fjoin.functional(model)

    def loss(params: Any, buffers: Any, x: Any) -> Any:
        out, buffers = apply.with_buffers(params, buffers, x)
        return out.square().mean(), None, buffers

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = stepped(step, step.init(params, buffers), (torch.arange(5) + i % 2 for i in range(3)))
    assert fjoin.load_into(other, state) is other and other.head.weight is other.embed.weight
    other.eval()
    want = apply.eval()(state.params, state.buffers, torch.arange(7))
    assert torch.equal(other(torch.arange(7)), want) and int(other.norm.num_batches_tracked) == 3
    assert not torch.equal(model.embed.weight, other.embed.weight), "the module that was taken stays as it is"
    by_the_other_name = {"head.weight": torch.zeros(7, 4)}
    assert not fjoin.load_into(other, by_the_other_name).embed.weight.any()


def test_values_that_do_not_fit_change_nothing() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    two = {"head.weight": torch.zeros(7, 4), "embed.weight": torch.ones(7, 4)}
    raises_text(ValueError, lambda: fjoin.load_into(model, {"norm.weight": torch.zeros(4), "x": torch.zeros(1)}), "['x']")  # fmt: skip
    raises_text(ValueError, lambda: fjoin.load_into(model, {"norm.weight": torch.zeros(5)}), "(5,)", "(4,)")
    raises_text(ValueError, lambda: fjoin.load_into(model, two), "shares", "head.weight", "embed.weight")
    raises_text(TypeError, lambda: fjoin.load_into({}, {}), "module")  # type: ignore[type-var]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
