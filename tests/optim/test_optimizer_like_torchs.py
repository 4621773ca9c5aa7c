"""fjoin.Optimizer where code that was written for torch.optim reaches into it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.optim.test_optimizer_front import make_model, train

LR = torch.optim.lr_scheduler

# Our optimizer, torch's, and torch's arguments in addition to lr=0.01.
PAIRS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "adam": (tx.adam, torch.optim.Adam, {}), "adamw": (tx.adamw, torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "nadam": (tx.nadam, torch.optim.NAdam, {}), "sgd": (tx.sgd, torch.optim.SGD, {}),
    "sgd, momentum": (tx.sgd, torch.optim.SGD, {"momentum": 0.9}),
    "sgd, dampening": (tx.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd, nesterov": (tx.sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "a master": (lambda lr, **options: tx.mixed_precision(tx.sgd(lr, **options)), torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (tx.rmsprop, torch.optim.RMSprop, {"momentum": 0.1}),
}  # fmt: skip
CYCLES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: LR.OneCycleLR(o, max_lr=0.05, total_steps=12),
    "CyclicLR": lambda o: LR.CyclicLR(o, base_lr=0.001, max_lr=0.05, step_size_up=3),
}


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("name", PAIRS)
def test_schedulers_that_cycle_the_momentum(name: str, cycle: str) -> None:
    """One that has a momentum from the start."""
    make, torchs, options = PAIRS[name]
    a, b = make_model(), make_model()
    if name == "sgd":
        options = {"momentum": 0.9}
    ours = fjoin.Optimizer(a.parameters(), make(0.01, **options))
    theirs = torchs(b.parameters(), lr=0.01, foreach=False, **options)
    assert max_diff(train(a, ours, 10, CYCLES[cycle](ours)), train(b, theirs, 10, CYCLES[cycle](theirs))) < 1e-13
    assert len({id(state[f"{'inner.' * (name == 'a master')}step"]) for state in ours.state.values()}) == 1


def test_momentum_may_be_turned_off_and_on() -> None:
    a, b = make_model(), make_model()
    ours, theirs = (
        fjoin.Optimizer(a.parameters(), tx.sgd(0.1, momentum=0.9)),
        torch.optim.SGD(b.parameters(), 0.1, momentum=0.9, foreach=False),
    )
    for i, momentum in enumerate((0.9, 0.0, 0.5, 0.5)):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = momentum
        assert max_diff(train(a, ours, 2, first=2 * i), train(b, theirs, 2, first=2 * i)) < 1e-14
    saved = copy.deepcopy(ours.state_dict())
    c = make_model()
    c.load_state_dict(a.state_dict())
    resumed = fjoin.Optimizer(c.parameters(), tx.sgd(0.1))
    resumed.load_state_dict(saved)
    assert max_diff(train(a, ours, 2, first=8), train(c, resumed, 2, first=8)) == 0


@pytest.mark.parametrize("wrap", [lambda opt: opt, tx.mixed_precision])
def test_raises_if_momentum_starts_late(wrap: Any) -> None:
    model = make_model()
    late = fjoin.Optimizer(model.parameters(), wrap(tx.sgd(0.1)))
    before = train(model, late, 2)
    late.param_groups[0]["momentum"] = 0.9
    raises_text(ValueError, lambda: train(model, late, 1, first=2), "momentum is 0.9", "begin with a small momentum")
    assert max_diff(dict(model.named_parameters()), before) == 0


@pytest.mark.parametrize("name", PAIRS)
def test_groups_may_hold_all_options_of_torch(name: str) -> None:
    make, torchs, options = PAIRS[name]
    a, b = make_model(), make_model()
    theirs = torchs(b.parameters(), lr=0.01, **options)
    group = {**theirs.param_groups[0], "params": list(a.parameters())}  # with foreach, capturable, ...
    ours = fjoin.Optimizer([group], make(0.5, **{**options, "weight_decay": 0.0}))
    assert max_diff(train(a, ours), train(b, theirs)) < 1e-13


def test_groups_with_different_betas() -> None:
    def parts(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(model[0].parameters()), "betas": [0.5, 0.6]},
            {"params": list(model[2].parameters()) + list(model[4].parameters())},
        ]

    a, b = make_model(), make_model()
    ours = fjoin.Optimizer(parts(a), tx.mixed_precision(tx.adamw(0.01)))
    theirs = torch.optim.AdamW(parts(b), 0.01, foreach=False)
    assert max_diff(train(a, ours), train(b, theirs)) < 1e-13
    for wrong in ("x", None, (0.9,), (0.9, "x")):
        ours.param_groups[0]["betas"] = wrong
        raises_text(ValueError, lambda: train(a, ours, 1), "betas", repr(wrong))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_betas_that_are_tensors(name: str, shape: tuple[int, ...]) -> None:
    make, torchs, _ = PAIRS[name]
    betas = torch.full(shape, 0.8, dtype=torch.float64), torch.full(shape, 0.95, dtype=torch.float64)
    a, b = make_model(), make_model()
    ours = fjoin.Optimizer(a.parameters(), make(0.01, betas=betas))
    theirs = torchs(b.parameters(), lr=0.01, betas=betas, foreach=False)
    want = train(b, theirs)
    assert max_diff(train(a, ours), want) < 1e-13
    start = dict(make_model().named_parameters())
    params = {path: p.detach().clone() for path, p in start.items()}
    opt, grads = make(0.01, betas=betas), {path: torch.full_like(p, 0.5) for path, p in params.items()}
    state = opt.init(params)
    for _ in range(3):
        params, state = opt.step(params, grads, state)
    for p in start.values():
        p.grad = torch.full_like(p, 0.5)
    theirs = torchs(start.values(), lr=0.01, betas=betas, foreach=False)
    for _ in range(3):
        theirs.step()
    assert max_diff(params, {path: p.detach() for path, p in start.items()}) < 1e-13
    p = params["0.weight"].clone()
    opt.step_param_(p, torch.ones_like(p), opt.init_param(p))
    want_p, _ = opt.step_param(params["0.weight"], torch.ones_like(p), opt.init_param(p))
    assert max_diff(p, want_p) == 0 and want_p.shape == p.shape
    assert opt.step_param(p.new_ones(()), p.new_ones(()), opt.init_param(p.new_ones(())))[0].shape == ()


def test_raises_on_bad_betas() -> None:
    one = torch.tensor(0.9)
    for make in (tx.adam, tx.adamw, tx.lion, tx.lamb):
        raises_text(ValueError, lambda make=make: make(betas=(0.9, one)), "two numbers or two tensors")  # type: ignore[misc]
        raises_text(ValueError, lambda make=make: make(betas=(one, torch.ones(2))), "betas[1]", "(2,)")  # type: ignore[misc]
        raises_text(ValueError, lambda make=make: make(betas=(one, torch.tensor(1.5))), "betas", "1.5")  # type: ignore[misc]
        raises_text(ValueError, lambda make=make: make(betas=0.9), "betas", "0.9")  # type: ignore[misc]


def test_a_derivative_by_betas() -> None:
    opt, params = tx.adam, {"w": torch.ones(2, dtype=torch.float64)}

    def loss(beta: Tensor) -> Tensor:
        o = opt(0.1, betas=(beta, beta))
        state, p = o.init(params), params
        for _ in range(2):
            p, state = o.step(p, {"w": p["w"] * torch.tensor([1.0, 3.0])}, state)
        return p["w"].sum()

    beta = torch.tensor(0.5, dtype=torch.float64)
    by_hand = (loss(beta + 1e-6) - loss(beta - 1e-6)) / 2e-6
    assert abs(torch.func.grad(loss)(beta) - by_hand) < 1e-7
    leaf = beta.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None and abs(leaf.grad - by_hand) < 1e-7


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_parameters_with_gaps_in_memory(name: str) -> None:
    made = []
    for ours in (True, False):
        p = torch.nn.Parameter(torch.ones(4, 5, 2, dtype=torch.float64)[..., 0])
        cls = getattr(torch.optim, name)
        optimizer = (
            fjoin.Optimizer([p], tx.as_functional_optim(cls, lr=0.1)) if ours else cls([p], lr=0.1, foreach=False)
        )
        for i in range(3):
            p.grad = torch.cos(torch.arange(20.0, dtype=torch.float64) + i).view(4, 5)
            optimizer.step()
        assert p.stride() == (10, 2)
        made.append(p.detach())
    assert max_diff(*made) < 1e-14


def _changed(p: Tensor) -> None:
    p.data = torch.ones(4, dtype=p.dtype)
    p.grad = torch.ones(4, dtype=p.dtype)


def _narrowed(p: Tensor) -> None:
    p.data = p.data.half()
    p.grad = torch.ones(3, dtype=torch.float16)


BAD: dict[str, tuple[type[Exception], Callable[[Tensor], Any], tuple[str, ...]]] = {
    "shape": (ValueError, _changed, ("shape (4,)", "change the parameters first")),
    "dtype": (ValueError, _narrowed, ("change the parameters first",)),
    "sparse": (TypeError, lambda p: setattr(p, "grad", torch.ones(3, dtype=p.dtype).to_sparse()), ("sparse",)),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("make", [lambda: tx.sgd(0.1, momentum=0.9), lambda: tx.adamw(0.1), lambda: tx.rmsprop(0.1)])
def test_a_step_that_is_refused_changes_nothing(make: Callable[[], tx.Optimizer], bad: str) -> None:
    kind, spoil, texts = BAD[bad]
    a, b, c = (torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64, torch.float64))
    optimizer = fjoin.Optimizer([{"params": [a]}, {"params": [b, c], "lr": 0.5}], make())
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    optimizer.step()
    spoil(c)
    before = copy.deepcopy((a, b, optimizer.state_dict()["state"]))
    raises_text(kind, optimizer.step, *texts)
    assert max_diff((a, b, optimizer.state_dict()["state"]), before) == 0


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "x", None, torch.ones(2)])
def test_step_with_a_bad_schedule_value_changes_nothing(rate: Any) -> None:
    a, b = (torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64))

    def spoils(step: Any) -> Any:
        return rate if step >= 1 else 0.1

    named = [("a", a), ("b", b)]
    optimizer = fjoin.Optimizer(named, tx.partition({"a": tx.adamw(0.1), "b": tx.sgd(spoils)}))
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy((a, b, optimizer.state_dict()["state"]))
    kind = ValueError if isinstance(rate, (float, Tensor)) else TypeError
    raises_text(kind, optimizer.step, "spoils", "in step 1", "expected")
    assert max_diff((a, b, optimizer.state_dict()["state"]), before) == 0


def test_a_count_may_be_a_number() -> None:
    """Torch before 1.12 saved numbers, and other libraries do."""
    model = make_model()
    optimizer = fjoin.Optimizer(model.parameters(), tx.adam(0.1))
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = 2
    twin = copy.deepcopy(model)
    other = fjoin.Optimizer(twin.parameters(), tx.adam(0.1))
    other.load_state_dict(saved)
    assert max_diff(train(model, optimizer, 2, first=2), train(twin, other, 2, first=2)) == 0
    saved["state"][0]["step"] = "two"
    raises_text(TypeError, lambda: other.load_state_dict(saved), "'step'", "'two'")


def test_saved_groups_that_differ_are_refused() -> None:
    a, b = make_model(), make_model()
    theirs = torch.optim.Adam(a.parameters(), maximize=True)
    train(a, theirs, 1)
    ours = fjoin.Optimizer(b.parameters(), tx.adam())
    raises_text(ValueError, lambda: ours.load_state_dict(theirs.state_dict()), "'maximize'", "True", "False")


def test_its_states_are_freed_with_it() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fjoin.Optimizer([p], tx.adam())
    p.grad = torch.ones(3)
    optimizer.step()
    state = weakref.ref(optimizer.state[p]["exp_avg"])
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert state() is None
    finally:
        gc.enable()
