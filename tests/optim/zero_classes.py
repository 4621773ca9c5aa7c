"""Optimizer classes for ZeroRedundancyOptimizer: torch's, and some of a user's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Plain(torch.optim.Optimizer):
    """It subtracts what `change` returns."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        return p.grad.clone()  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, self.state[p]), alpha=group["lr"] * group["count"])


class States(Plain):
    """With states of every kind but strings: torch's own load_state_dict makes another string of a string."""

    def change(self, p: Any, state: dict[str, Any]) -> Tensor:
        rows = p.grad.reshape(len(p) if p.dim() else 1, -1).sum(1)
        if not state:
            state.update(nothing=None, number=0, flag=True, scale=torch.ones((), dtype=p.dtype))
            state.update(average=torch.zeros_like(p), flat=torch.zeros(p.numel()), rows=torch.zeros_like(rows))
            state.update(last=[], pair=(p.new_zeros(1), 2), nested={"sum": [p.new_zeros(2)], 3: 4.0})
        assert state["nothing"] is None and state["flag"] is True
        assert state["flat"].shape == (p.numel(),) and state["nested"][3] == 4.0 and state["pair"][1] == 2
        state["number"] += 1
        state["scale"] *= 0.9
        state["rows"] += rows
        state["nested"]["sum"][0] += p.grad.sum()
        state["last"] = [*state["last"][-1:], p.grad.clone()]
        state["average"] += torch.stack(state["last"]).mean(0) * state["scale"] / state["number"]
        moved: Tensor = state["average"] + 0.01 * (state["rows"].sum() + state["nested"]["sum"][0].sum())
        return moved


class StateOfTheConstructor(Plain):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = 0

    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        state["calls"] += 1
        return super().change(p, state) / state["calls"]


class StridedState(Plain):
    def change(self, p: Any, state: dict[str, Any]) -> Tensor:
        if p.dim() == 2:
            state["one"], state["column"] = p.grad[:1, 0], p.grad[:, 1]
        return super().change(p, state)


class OwnStateDict(Plain):
    def change(self, p: Any, state: dict[str, Any]) -> Tensor:
        state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.5 + p.grad
        return state["mean"]  # type: ignore[no-any-return]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "version": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state.get("version") == 1 or not dist.is_initialized()  # the state of all ranks has none
        super().load_state_dict({key: value for key, value in state.items() if key != "version"})


class Unserved(Plain):
    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dim() == 2:
            state["m"] = {"deep": [torch.Generator()]}
        return super().change(p, state)


class Sparse(Plain):
    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dim() == 2:
            state["m"] = torch.ones(3).to_sparse()
        return super().change(p, state)


# With hyperparameters to save, and to begin with where a state is loaded, which must then not matter.
CLASSES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.8}, {}), "Adafactor": (torch.optim.Adafactor, {"lr": 0.02}, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "lr": 0.1}, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "lr": 0.02}, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"betas": (0.8, 0.9), "lr": 0.02}, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.02}, {}), "ASGD": (torch.optim.ASGD, {"lambd": 0.1, "t0": 2.0}, {}),
    "Muon": (torch.optim.Muon, {"momentum": 0.8, "lr": 0.02}, {}), "NAdam": (torch.optim.NAdam, {"lr": 0.02}, {}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.2}, {}), "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}, {}),
    "RMSprop centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, {"centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.02}, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.1}, {}),
    "SGD without momentum": (torch.optim.SGD, {"lr": 0.1}, {}),
    **{kind.__name__: (kind, {"lr": 0.01}, {}) for kind in (States, StateOfTheConstructor, StridedState, OwnStateDict)},
}  # fmt: skip
HOOKED = [name for name, (kind, *_) in CLASSES.items() if not issubclass(kind, Plain)]
