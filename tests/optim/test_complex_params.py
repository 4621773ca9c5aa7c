"""Complex parameters: torch's classes step them, ours refuse them by name wherever an optimizer takes parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.optimizer_table import OPTIMIZERS

REAL = [(name, make) for name, row in OPTIMIZERS.items() for make in row[:1] if name not in ("frozen", "partition")]


def _made(make: Callable[[], tx.Optimizer]) -> tx.Optimizer:
    opt = make()
    return opt.at("a.bias") if opt.select else opt


def _complex() -> Tensor:
    return torch.tensor([1 + 1j, 2 - 1j])


def _in_lists(opt: tx.Optimizer) -> None:
    if opt.step_params_ is None:
        pytest.skip("it has no kernel for lists")
    opt.step_params_([_complex()], [_complex()], [opt.init_param(torch.zeros(2))])


def _in_torchs_form(opt: tx.Optimizer) -> None:
    if opt.spec.name == "inject_hyperparameters":
        pytest.skip("fjoin.Optimizer keeps hyperparameters itself")
    fjoin.Optimizer([torch.nn.Parameter(_complex())], opt)


ENTRANCES: dict[str, Callable[[tx.Optimizer], Any]] = {
    "init": lambda opt: opt.init({"w": _complex()}), "init_param": lambda opt: opt.init_param(_complex()),
    "a gradient": lambda opt: opt.step_param_(torch.zeros(2), _complex(), opt.init_param(torch.zeros(2))),
    "step": lambda opt: opt.step({"w": _complex()}, {"w": _complex()}, opt.init({"w": torch.zeros(2)})),
    "step_param_": lambda opt: opt.step_param_(_complex(), _complex(), opt.init_param(torch.zeros(2))),
    "step_params_": _in_lists, "fjoin.Optimizer": _in_torchs_form,
    "pipeline": lambda opt: tx.fuse(tx.mean("data"), opt).init({"w": _complex()}),
    "train_step": lambda opt: fjoin.train_step(lambda p, b: b, tx.fuse(tx.identity(), opt)).init({"w": _complex()}),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(("name", "make"), REAL, ids=[name for name, _ in REAL])
def test_complex_parameters_are_refused(name: str, make: Callable[[], tx.Optimizer], entrance: str) -> None:
    opt = _made(make)
    raises_text(TypeError, lambda: ENTRANCES[entrance](opt), "view_as_real")


def test_a_group_of_complex_parameters_is_not_added() -> None:
    real = torch.nn.Parameter(torch.ones(2))
    optimizer = fjoin.Optimizer([real], tx.adagrad(0.1))
    added = {"params": [torch.nn.Parameter(_complex())]}
    raises_text(TypeError, lambda: optimizer.add_param_group(added), "the parameter '1'", "complex64")
    assert [group["params"] for group in optimizer.param_groups] == [[real]]


def test_step_on_the_real_view_matches_torch() -> None:
    """The remedy that the error names."""
    grad = torch.tensor([1 + 2j, -1j])
    param = torch.nn.Parameter(torch.view_as_real(_complex()).clone())
    param.grad = torch.view_as_real(grad).clone()
    fjoin.Optimizer([param], tx.adagrad(0.1)).step()
    want = torch.nn.Parameter(_complex())
    want.grad = grad.clone()
    torch.optim.Adagrad([want], 0.1).step()
    assert torch.allclose(torch.view_as_complex(param.detach()), want.detach(), rtol=1e-6)
