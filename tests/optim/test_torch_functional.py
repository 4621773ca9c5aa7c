"""torch's functional optimizers in our pipelines, their faults, and their counterparts."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, params_like, raises_text, same_bits
from tests.oracle import optim
from tests.oracle.whole_batch import make_batches
from tests.reducer.one_rank import train_one_rank

# torch's functional class, the module it is in, the class of torch.optim that it copies, and options.
KINDS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "sgd": ("sgd", "_FunctionalSGD", torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)),
    "sgd, plain": ("sgd", "_FunctionalSGD", torch.optim.SGD, dict(lr=0.1)),
    "adam": ("adam", "_FunctionalAdam", torch.optim.Adam, dict(lr=0.1, amsgrad=True)),
    "adamw": ("adamw", "_FunctionalAdamW", torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1)),
    "adagrad": ("adagrad", "_FunctionalAdagrad", torch.optim.Adagrad, dict(lr=0.1, initial_accumulator_value=0.5)),
    "adadelta": ("adadelta", "_FunctionalAdadelta", torch.optim.Adadelta, dict(lr=1.0)),
    "rmsprop": ("rmsprop", "_FunctionalRMSprop", torch.optim.RMSprop, dict(lr=0.1, momentum=0.9, centered=True)),
    "rprop": ("rprop", "_FunctionalRprop", torch.optim.Rprop, dict(lr=0.1)),
    "adamax": ("adamax", "_FunctionalAdamax", torch.optim.Adamax, dict(lr=0.1)),
}


def torchs(name: str, params: list[Tensor] | None = None, **options: Any) -> Any:
    module, cls, _, usual = KINDS[name]
    with warnings.catch_warnings(record=True):  # at its import, and at each construction, whatever the filter says
        warnings.simplefilter("always")
        made = getattr(importlib.import_module(f"torch.distributed.optim.functional_{module}"), cls)
        return made(params or [], **{**usual, **options}, _allow_empty_param_list=True)


@pytest.mark.parametrize("name", KINDS)
def test_steps_match_torch_optim(name: str) -> None:
    params = {k: v for k, v in params_like().items() if v.numel()}
    grads = [{k: v for k, v in params_like(10 + i).items() if v.numel()} for i in range(6)]
    want = optim.run(
        lambda ps: KINDS[name][2](ps, **KINDS[name][3]), list(params.values()), [list(g.values()) for g in grads]
    )
    opt = fjoin.as_step_param(torchs(name))
    own, state = params, opt.init(params)
    for g in grads:
        before = {k: p.clone() for k, p in own.items()}
        new, after = opt.step(own, g, state)
        assert same_bits(own, before), "the arguments stay as they are"
        again, _ = opt.step(own, g, state)
        assert same_bits(new, again), "nothing is remembered but in the state"
        own, state = new, after
    assert max_diff([own[k] - params[k] for k in params], want) < 1e-15


@pytest.mark.parametrize("name", KINDS)
def test_in_a_training_step(name: str) -> None:
    """On flat buffers, fused into the mean, results match our counterpart."""
    batches = make_batches(1, [[3, 2, 4], [5], []])
    opt = fjoin.as_step_param(torchs(name))
    ours = tx.as_functional_optim(KINDS[name][2], **KINDS[name][3])
    a, b = (
        tx.simulate(lambda own, o=o: train_one_rank(own, tx.fuse(tx.mean("data"), o))["params"], {"data": 3}, batches)
        for o in (opt, ours)
    )
    assert max_diff(a, b) < 1e-12


def test_step_with_found_inf_is_skipped() -> None:
    opt, p = fjoin.as_step_param(torchs("sgd")), torch.ones(3)
    state = opt.init_param(p)
    opt.step_param_(p, torch.ones(3), state, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(1.0))
    assert p.tolist() == [1.0] * 3 and state.step == 0
    opt.step_param_(p, torch.full((3,), 2.0), state, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0))
    assert torch.allclose(p, torch.full((3,), 1 - 0.1 * 1.1)) and state.step == 1


def test_raises_on_bad_input() -> None:
    raises_text(TypeError, lambda: fjoin.as_step_param(torch.optim.SGD), "functional optimizers", "SGD")
    opt = fjoin.as_step_param(torchs("adam"))
    p = torch.ones(2)
    raises_text(
        RuntimeError,
        lambda: torch.func.grad(lambda x: opt.step_param(x, x, opt.init_param(p))[0].sum())(p), "derivative", "0",
    )  # fmt: skip


# -- counterparts of as_functional_optim and register_functional_optim ---------------------------------


@pytest.mark.parametrize(
    "cls",
    [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "Adadelta",
        "Adafactor",
        "RMSprop",
        "Rprop",
        "ASGD",
        "Muon",
    ],
)
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
    raises_text(
        ValueError, lambda: tx.as_functional_optim(torch.optim.LBFGS), "LBFGS", "register_functional_optim", "AdamW"
    )


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
    with pytest.raises(RuntimeError, match="size"):
        torchs("adagrad", params).step([None, torch.ones(3)])
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
    with pytest.raises(TypeError, match="not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(one, 1)


def test_torch_still_warns_at_every_construction() -> None:
    torchs("sgd")  # imported
    cls = importlib.import_module("torch.distributed.optim.functional_sgd")._FunctionalSGD
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="TorchScript"):
            cls([torch.ones(1)], lr=0.1)
