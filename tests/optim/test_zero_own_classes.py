"""Optimizer classes of a user's own in ZeroRedundancyOptimizer, beside torch's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.helpers import raises_text

with warnings.catch_warnings():  # of torch's own code
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer


class Plain(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, p: Tensor) -> Tensor:
        return p.grad.clone()  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.change(p), alpha=-group["lr"])


class StateOfTheConstructor(Plain):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = 0

    def change(self, p: Tensor) -> Tensor:
        self.state[p]["calls"] += 1
        return super().change(p) / self.state[p]["calls"]


class StridedState(Plain):
    def change(self, p: Tensor) -> Tensor:
        if p.dim() == 2:
            self.state[p]["one"] = p.grad[:1, 0]  # type: ignore[index]
            self.state[p]["column"] = p.grad[:, 1]  # type: ignore[index]
        return super().change(p)


class OwnStateDict(Plain):
    def change(self, p: Tensor) -> Tensor:
        self.state[p]["mean"] = self.state[p].get("mean", torch.zeros_like(p)) * 0.5 + p.grad
        return self.state[p]["mean"]  # type: ignore[no-any-return]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "version": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state["version"] == 1
        super().load_state_dict({key: value for key, value in state.items() if key != "version"})


CLASSES = [StateOfTheConstructor, StridedState, OwnStateDict]


def trained(zero_class: Any, name: str, steps: int) -> tuple[list[Tensor], list[Any]]:
    """The parameters after some steps in two parts, with a state saved by one optimizer and loaded into the next."""
    make = {one.__name__: one for one in CLASSES}[name]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    ddp = DistributedDataParallel(module)
    saved, losses = [None], []
    for _ in range(2):
        groups = [{"params": list(module[0].parameters())}, {"params": list(module[1].parameters()), "lr": 0.05}]
        zero = zero_class(groups, make)
        if saved[0] is not None:
            zero.load_state_dict(copy.deepcopy(saved[0]))

        def closure(zero: Any = zero) -> Tensor:
            zero.zero_grad()
            loss = ddp(torch.ones(2, 5).double() + dist.get_rank()).square().mean()
            loss.backward()
            return loss.detach()

        for _ in range(steps):
            losses.append(closure())
            zero.step()
        zero.consolidate_state_dict(0)
        saved = [zero.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved, 0)
    return [p.detach().clone() for p in module.parameters()], [None if one is None else float(one) for one in losses]


def both(name: str) -> None:
    want, got = trained(ZeroRedundancyOptimizer, name, 3), trained(fjoin.ZeroRedundancyOptimizer, name, 3)
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    assert got[1] == pytest.approx(want[1])


@pytest.mark.parametrize("kind", CLASSES)
def test_training_saving_and_loading_match_torch(pool: Any, kind: Any) -> None:
    for ranks in (1, 2):
        pool.run(ranks, both, kind.__name__)


class Unserved(Plain):
    def change(self, p: Tensor) -> Tensor:
        if p.shape == (7, 5):
            self.state[p]["m"] = {"deep": [torch.Generator()]}
        return super().change(p)


class Sparse(Plain):
    def change(self, p: Tensor) -> Tensor:
        if p.shape == (7, 5):
            self.state[p]["m"] = torch.ones(3).to_sparse()
        return super().change(p)


def unserved(kind: Any) -> str:
    module = nn.Linear(5, 7)
    zero = fjoin.ZeroRedundancyOptimizer(module.parameters(), kind)
    DistributedDataParallel(module)(torch.ones(2, 5)).sum().backward()
    zero.step()
    return raises_text(TypeError, lambda: zero.consolidate_state_dict(0), "consist of tensors")


def test_a_state_that_cannot_travel_is_an_error_on_all_ranks(pool: Any) -> None:
    for kind, text in ((Unserved, "a Generator"), (Sparse, "memory format")):
        assert sum(text in found for found in pool.run(2, unserved, kind)) == 1, "on the rank that owns it"


def with_a_closure() -> None:
    module = nn.Linear(5, 7)
    zero = fjoin.ZeroRedundancyOptimizer(module.parameters(), Plain)
    before = module.weight.detach().clone()

    def closure() -> Tensor:
        loss = module(torch.ones(2, 5)).sum()
        loss.backward()
        return loss.detach()

    assert zero.step(closure) is not None and not torch.equal(before, module.weight)


def test_a_closure_is_called_before_the_step(pool: Any) -> None:
    pool.run(1, with_a_closure)
