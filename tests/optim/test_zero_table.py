"""Each optimizer class in ZeroRedundancyOptimizer beside torch's own: steps, saving, loading elsewhere, in both modes."""

from __future__ import annotations

import copy
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.helpers import raises_text


class Own(torch.optim.Optimizer):
    """A class that fjoin does not know, with values in its groups and states of every kind but strings.

    torch's own load_state_dict makes another string of a string.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(nothing=None, number=0, flag=True, scale=torch.ones((), dtype=p.dtype))
                    state.update(average=torch.zeros_like(p), flat=torch.zeros(p.numel()), rows=p.new_zeros(len(p)))
                    state.update(last=[], pair=(p.new_zeros(1), 2), nested={"sum": [p.new_zeros(2)], 3: 4.0})
                assert state["nothing"] is None and state["flag"] is True
                assert state["flat"].shape == (p.numel(),) and state["nested"][3] == 4.0 and state["pair"][1] == 2
                state["number"] += 1
                state["scale"] *= 0.9
                state["rows"] += p.grad.reshape(len(p), -1).sum(1)
                state["nested"]["sum"][0] += p.grad.sum()
                state["last"] = [*state["last"][-1:], p.grad.clone()]
                state["average"] += torch.stack(state["last"]).mean(0) * state["scale"] / state["number"]
                moved = state["average"] + 0.01 * (state["rows"].sum() + state["nested"]["sum"][0].sum())
                p.sub_(moved, alpha=group["lr"] * group["count"])


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
    "SGD without momentum": (torch.optim.SGD, {"lr": 0.1}, {}), "Own": (Own, {"lr": 0.01}, {}),
}  # fmt: skip
HOOKED = [name for name in CLASSES if name != "Own"]


class Model(nn.Module):
    def __init__(self, matrices: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=not matrices)
        self.unused = nn.Linear(3, 3, bias=not matrices)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.late = nn.Linear(5, 7, bias=not matrices)
        self.last = nn.Linear(7, 4, bias=not matrices)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x) + self.late(x) if step > 1 else self.first(x)
        return self.last(x.tanh()).square().mean() * self.frozen.sum()


def model(name: str) -> Model:
    torch.manual_seed(0)
    return Model(name == "Muon").double()


def groups(of: nn.Module) -> list[dict[str, Any]]:
    """Two, neither in the order of the module."""
    ps = list(of.parameters())[::-1]
    return [{"params": ps[1::2], "lr": 0.03}, {"params": ps[::2]}]


def set_rates(optimizer: Any, step: int) -> None:
    """A rate that rises from the start, so that states differ that take it before their first gradient."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (0.5 + 0.1 * step)


def batch(i: int) -> Tensor:
    return torch.randn(30, 5, generator=torch.Generator().manual_seed(i)).double()


def of_torch(name: str, state: Any, weights: Any, steps: range) -> tuple[Any, Any]:
    """The parameters and the state of the unsharded optimizer in one process, on whole batches."""
    make, arguments, _ = CLASSES[name]
    own = model(name)
    optimizer = make(groups(own), **arguments)
    if state is not None:
        own.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
    for i in steps:
        set_rates(optimizer, i)
        optimizer.zero_grad()
        own(batch(i), i).backward()
        optimizer.step()
    return own.state_dict(), optimizer.state_dict()


def of_zero(name: str, hooked: bool, state: Any, weights: Any, steps: range) -> tuple[Any, Any]:
    """The same on this rank's part of each batch. A state is loaded into an optimizer of other hyperparameters."""
    make, arguments, first = CLASSES[name]
    ddp = DistributedDataParallel(model(name), find_unused_parameters=True)
    if state is not None:
        arguments = first
        ddp.module.load_state_dict(weights)
    zero = fjoin.ZeroRedundancyOptimizer(groups(ddp.module), make, overlap_with_ddp=hooked, **arguments)
    if hooked:
        ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, ddp, zero))
    if state is not None:
        zero.load_state_dict(state)
    for i in steps:
        set_rates(zero, i)
        zero.zero_grad()
        ddp(batch(i).chunk(dist.get_world_size())[dist.get_rank()], i).backward()
        zero.step()
    last = dist.get_world_size() - 1
    zero.consolidate_state_dict(last)
    return ddp.module.state_dict(), zero.state_dict() if dist.get_rank() == last else None


def same(got: tuple[Any, Any], want: tuple[Any, Any], frozen_or_unused: set[int]) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-7, atol=1e-10)
    for ours, torchs in zip(got[1]["param_groups"], want[1]["param_groups"], strict=True):
        assert ours["params"] == torchs["params"] and ours["lr"] == torchs["lr"]
        assert ours.get("count") == torchs.get("count") and ours.get("momentum") == torchs.get("momentum")
    for index in got[1]["state"].keys() ^ want[1]["state"].keys():
        assert index in frozen_or_unused
    for index, theirs in want[1]["state"].items():
        if index in frozen_or_unused:
            continue
        ours = got[1]["state"][index]
        assert ours.keys() == theirs.keys()
        leaves, kinds = optree.tree_flatten(ours, none_is_leaf=True)
        wanted, wanted_kinds = optree.tree_flatten(theirs, none_is_leaf=True)
        assert kinds == wanted_kinds
        for leaf, other in zip(leaves, wanted, strict=True):
            if other is None:
                assert leaf is None
            else:
                torch.testing.assert_close(leaf, other, rtol=1e-7, atol=1e-10, check_dtype=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "hooked"), [(name, False) for name in CLASSES] + [(name, True) for name in HOOKED])
def test_training_matches_torch_and_states_load_anywhere(pool: Any, name: str, hooked: bool) -> None:
    own = model(name)
    order = [p for group in groups(own) for p in group["params"]]
    idle = [own.frozen, *own.unused.parameters()]
    out = {i for i, p in enumerate(order) if any(p is one for one in idle)}
    middle, end = of_torch(name, None, None, range(3)), of_torch(name, None, None, range(5))
    got = pool.run(2, of_zero, name, hooked, None, None, range(3))
    weights, state = got[0][0], got[1][1]
    same((weights, state), middle, out)
    # On with ours in torch's optimizer, with torch's in ours, and with ours on other numbers of ranks.
    same(of_torch(name, state, weights, range(3, 5)), end, out)
    for ranks, (w, s) in [(1, middle), (3, (weights, state)), (2, (weights, state))]:
        got = pool.run(ranks, of_zero, name, hooked, s, w, range(3, 5))
        same((got[0][0], got[-1][1]), end, out)


def bad_states(hooked: bool) -> None:
    state = of_torch("SGD", None, None, range(2))[1]
    ddp = DistributedDataParallel(model("SGD"), find_unused_parameters=True)
    zero = fjoin.ZeroRedundancyOptimizer(groups(ddp.module), torch.optim.SGD, overlap_with_ddp=hooked, lr=0.5)
    if hooked:
        ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, ddp, zero))
    shaped, named = copy.deepcopy(state), copy.deepcopy(state)
    index = next(iter(state["state"]))
    shaped["state"][index]["momentum_buffer"] = torch.zeros(9, 9)
    named["state"][index]["other"] = torch.zeros(())
    for bad in shaped, named, {**state, "param_groups": state["param_groups"][:1]}:
        raises_text(ValueError, lambda bad=bad: zero.load_state_dict(bad), "the state")  # on all ranks
        assert [group["lr"] for group in zero.param_groups] == [0.03, 0.5]
        assert [group["momentum"] for group in zero.param_groups] == [0, 0]


@pytest.mark.parametrize("hooked", [False, True])
def test_bad_state_raises_on_all_ranks_and_loads_nothing(pool: Any, hooked: bool) -> None:
    pool.run(3, bad_states, hooked)
