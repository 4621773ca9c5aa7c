"""The faults of torch's functional optimizers, and their counterparts."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.oracle import optim

# torch's functional class, the module it is in, and options.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sgd": ("sgd", "_FunctionalSGD", dict(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)),
    "sgd, plain": ("sgd", "_FunctionalSGD", dict(lr=0.1)),
    "adagrad": ("adagrad", "_FunctionalAdagrad", dict(lr=0.1, initial_accumulator_value=0.5)),
}


def torchs(name: str, params: list[Tensor] | None = None, **options: Any) -> Any:
    module, cls, usual = KINDS[name]
    with warnings.catch_warnings(record=True):  # at its import, and at each construction, whatever the filter says
        warnings.simplefilter("always")
        made = getattr(importlib.import_module(f"torch.distributed.optim.functional_{module}"), cls)
        return made(params or [], **{**usual, **options}, _allow_empty_param_list=True)


# -- counterparts of as_functional_optim and register_functional_optim ---------------------------------


@pytest.mark.parametrize(
    "cls",
    [
        "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Adafactor", "RMSprop", "Rprop",
        "ASGD", "Muon",
    ],
)  # fmt: skip
def test_every_class_has_a_counterpart(cls: str) -> None:
    """One step with the defaults of the class gives the same result."""
    made = getattr(torch.optim, cls)
    p, g = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    opt = tx.as_functional_optim(made)
    out, _ = opt.step({"p": p}, {"p": g}, opt.init({"p": p}))
    (want,) = optim.run(lambda ps: made(ps), [p], [[g]])
    assert max_diff(out["p"] - p, want) < 1e-6


def test_arguments_of_a_class() -> None:
    assert tx.as_functional_optim(torch.optim.Adam, 0.1, (0.5, 0.9), fused=True) == tx.adam(0.1, (0.5, 0.9))
    raises_text(TypeError, lambda: tx.as_functional_optim(torch.optim.SGD, learning_rate=0.1), "learning_rate")
    raises_text(ValueError, lambda: tx.as_functional_optim(torch.optim.SGD, lr=-1.0), "lr must be at least 0")
    raises_text(ValueError, lambda: tx.as_functional_optim(torch.optim.LBFGS), "LBFGS", "register_functional_optim", "AdamW")  # fmt: skip


def test_a_key_can_be_taken_once() -> None:
    tx.register_functional_optim("mine", lambda lr: tx.sgd(lr))
    assert tx.as_functional_optim("mine", 0.5) == tx.sgd(0.5)
    raises_text(ValueError, lambda: tx.register_functional_optim("mine", tx.adam), "'mine'", "already")
    raises_text(TypeError, lambda: tx.register_functional_optim("other", 3), "factory", "3")  # type: ignore[arg-type]


# -- torch's own faults: where one of these fails, torch has fixed it ------------------------------------


def test_torchs_derivative_is_still_zero() -> None:
    """Ours is the derivative."""

    def after(lr_times_grad: Tensor) -> Tensor:
        p = torch.ones(2)
        torchs("sgd, plain").step_param(p := p * 1.0, lr_times_grad)
        return p.sum()

    assert torch.func.grad(after)(torch.ones(2)).tolist() == [0.0, 0.0], "torch differentiates now"
    opt = tx.sgd(0.1)
    own = torch.func.grad(lambda g: opt.step_param(torch.ones(2), g, opt.init_param(torch.ones(2)))[0].sum())
    assert torch.allclose(own(torch.ones(2)), torch.full((2,), -0.1))


def test_torchs_sgd_still_takes_a_negative_rate() -> None:
    assert torchs("sgd", lr=-1.0).defaults["lr"] == -1.0
    raises_text(ValueError, lambda: tx.sgd(-1.0), "lr", "-1.0")


def test_torchs_adagrad_still_fails_where_a_gradient_is_missing() -> None:
    params = [torch.ones(2), torch.ones(3)]
    raises_text(RuntimeError, lambda: torchs("adagrad", params).step([None, torch.ones(3)]), "size")
    opt, tree = tx.adagrad(0.1), {"a": torch.ones(2), "b": torch.ones(3)}
    raises_text(ValueError, lambda: opt.step(tree, {"b": torch.ones(3)}, opt.init(tree)), "lacks ['a']")


def test_torchs_registration_is_still_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import utils
    first, second = object(), object()
    utils.register_functional_optim("fjoin test", first)
    utils.register_functional_optim("fjoin test", second)
    assert utils.functional_optim_map["fjoin test"] is first, "torch refuses or replaces now"


def test_torchs_state_is_still_lost_in_a_copy() -> None:
    """The keys of a copy are other tensors. Our state is a tree of tensors."""
    p = torch.ones(2)
    one = torchs("sgd", [p])
    one.step([torch.ones(2)])
    assert p in one.state
    assert p not in copy.deepcopy(one).state, "a copy knows the parameter now"


def test_torch_schedulers_still_reject_functional_optimizers() -> None:
    """A scheduler needs param_groups; the optimizer reads its rate from defaults."""
    one = torchs("sgd, plain", [torch.ones(1)])
    assert not hasattr(one, "param_groups")
    raises_text(TypeError, lambda: torch.optim.lr_scheduler.StepLR(one, 1), "not an Optimizer")


def test_torch_still_warns_at_every_construction() -> None:
    torchs("sgd")  # imported
    cls = importlib.import_module("torch.distributed.optim.functional_sgd")._FunctionalSGD
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="TorchScript"):
            cls([torch.ones(1)], lr=0.1)
