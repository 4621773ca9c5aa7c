"""fjoin.Optimizer where torch.optim.Optimizer is expected: it trains as torch's does, and goes on from what was saved."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests import rows
from tests.helpers import max_diff, raises_text
from tests.optimizer_table import OPTIMIZERS
from tests.test_places import check

LR = torch.optim.lr_scheduler


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def batch(i: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(dtype)


def train(
    model: nn.Module, optimizer: Any, steps: int = 6, scheduler: Any = None, first: int = 0,
    before: Callable[[nn.Module, Any, int], None] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    for i in range(first, first + steps):
        if before is not None:
            before(model, optimizer, i)
        optimizer.zero_grad()
        model(batch(i, next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {path: p.detach().clone() for path, p in model.named_parameters()}


# -- beside torch's ----------------------------------------------------------------------------------------


def parts(model: Any, **first: Any) -> list[dict[str, Any]]:
    """Two groups, of which the first has options of its own."""
    return [
        {"params": list(model[0].parameters()), **first},
        {"params": list(model[2].parameters()) + list(model[4].parameters())},
    ]


def momentum_goes(model: nn.Module, optimizer: Any, i: int) -> None:
    optimizer.param_groups[0]["momentum"] = (0.9, 0.0, 0.5, 0.5)[i // 2]


def freezes(model: Any, optimizer: Any, i: int) -> None:
    """Step counts stay too; parameters that shared a count with them go on counting."""
    for p in model[2].parameters():
        p.requires_grad_(i not in (2, 3))


# Our optimizer, torch's, and torch's arguments in addition to lr=0.01.
PAIRS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "adam": (tx.adam, torch.optim.Adam, {}), "adamw": (tx.adamw, torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "nadam": (tx.nadam, torch.optim.NAdam, {}), "sgd": (tx.sgd, torch.optim.SGD, {}),
    "sgd, momentum": (tx.sgd, torch.optim.SGD, {"momentum": 0.9}),
    "sgd, dampening": (tx.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd, nesterov": (tx.sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "a master": (lambda lr, **options: tx.mixed_precision(tx.sgd(lr, **options)), torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (tx.rmsprop, torch.optim.RMSprop, {"momentum": 0.1}),
    **{f"{cls.__name__}, tensors{shape}": (make, cls, {"betas": tuple(torch.full(shape, b).double() for b in (0.8, 0.95))})
       for make, cls in ((tx.adam, torch.optim.Adam), (tx.adamw, torch.optim.AdamW)) for shape in ((), (1,))},
}  # fmt: skip
CYCLES: list[Callable[[Any], Any]] = [
    lambda o: LR.OneCycleLR(o, max_lr=0.05, total_steps=12),
    lambda o: LR.CyclicLR(o, base_lr=0.001, max_lr=0.05, step_size_up=3),
]
Made = Callable[[Any], Any]


def _pair(name: str) -> tuple[Made, Made]:
    make, torchs, options = PAIRS[name]
    return (
        lambda m: fjoin.Optimizer(m.parameters(), make(0.01, **options)),
        lambda m: torchs(m.parameters(), lr=0.01, foreach=False, **options),
    )


def _with_torchs_groups(name: str) -> tuple[Made, Made]:
    """Groups that hold all of torch's options: foreach, capturable, ..."""
    make, torchs, options = PAIRS[name]

    def ours(model: nn.Module) -> Any:
        group = torchs(make_model().parameters(), lr=0.01, **options).param_groups[0]
        opt = make(0.5, **{**options, "weight_decay": 0.0})
        return fjoin.Optimizer([{**group, "params": list(model.parameters())}], opt)

    return ours, lambda m: torchs(m.parameters(), lr=0.01, **options)


# Ours, torch's, and how they are trained.
BESIDE: dict[str, tuple[Made, Made, dict[str, Any]]] = {
    "groups, a schedule": (
        lambda m: fjoin.Optimizer(parts(m, lr=0.1, weight_decay=0.0), tx.adamw(0.01, weight_decay=0.1)),
        lambda m: torch.optim.AdamW(parts(m, lr=0.1, weight_decay=0.0), 0.01, weight_decay=0.1, fused=True),
        {"steps": 12, "scheduler": lambda o: LR.CosineAnnealingLR(o, 10)},
    ),
    "betas of a group": (
        lambda m: fjoin.Optimizer(parts(m, betas=[0.5, 0.6]), tx.mixed_precision(tx.adamw(0.01))),
        lambda m: torch.optim.AdamW(parts(m, betas=[0.5, 0.6]), 0.01, foreach=False), {},
    ),
    "momentum off and on": (*_pair("sgd, momentum"), {"steps": 8, "before": momentum_goes}),
    "no gradients for a while": (*_pair("adamw"), {"before": freezes}),
    **{name: (*_pair(name), {}) for name in PAIRS if "tensors" in name},
    # A scheduler cycles the momentum, if there is one from the start.
    **{f"{name}, cycle {i}": (*_pair(name), {"steps": 10, "scheduler": cycle})
       for name in PAIRS if name != "sgd" and "tensors" not in name for i, cycle in enumerate(CYCLES)},
    **{f"{name}, torch's group": (*_with_torchs_groups(name), {}) for name in PAIRS if "tensors" not in name},
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_it_trains_as_torchs(name: str) -> None:
    (ours, theirs, settings), a, b = BESIDE[name], make_model(), make_model()
    schedule = settings.get("scheduler", lambda optimizer: None)
    one, other = ours(a), theirs(b)
    moved = train(a, one, **settings | {"scheduler": schedule(one)})
    assert max_diff(moved, train(b, other, **settings | {"scheduler": schedule(other)})) < 1e-13
    counts = [
        {int(o.state[p]["step"]) for p in m.parameters()} if "no gradients" in name else {}
        for m, o in ((a, one), (b, other))
    ]
    assert counts[0] == counts[1]


WHOLE = [
    pytest.param(make, id=f"{name}{i}")
    for name, made in OPTIMIZERS.items() if name not in ("partition", "frozen") for i, make in enumerate(made)
]  # fmt: skip


@pytest.mark.parametrize("make", WHOLE)
def test_training_matches_the_pure_optimizer(make: Callable[[], tx.Optimizer]) -> None:
    model, opt = make_model(), make()
    params = {path: p.detach().clone() for path, p in model.named_parameters()}
    if opt.spec.name == "inject_hyperparameters":
        raises_text(TypeError, lambda: fjoin.Optimizer(model.named_parameters(), opt), "param_groups")
        return
    state, other = opt.init(params), make_model()
    for i in range(3):
        x = batch(i)
        grads = torch.func.grad(lambda p, x=x: torch.func.functional_call(other, p, x).square().mean())(params)
        params, state = opt.step(params, grads, state)
    assert max_diff(train(model, fjoin.Optimizer(model.named_parameters(), opt), 3), params) < 1e-12


@pytest.mark.sample(8)
@pytest.mark.parametrize("make", WHOLE)
@pytest.mark.parametrize("sizes", ["ended", "poisoned"])
@pytest.mark.parametrize("place", ["simulated", "device"])
def test_in_a_train_step(make: Any, place: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On flat buffers, fused into the hook, and where a step is left out."""
    opt = tx.partition({"conv.weight": tx.adamw(0.1), "*": make()}) if "muon" in repr(make()) else make()
    monkeypatch.setitem(rows.ROWS, "it", rows.Row(lambda: tx.fuse(tx.mean("data"), opt)))
    check("it", place, sizes)


def test_with_a_gradient_scaler() -> None:
    """Gradients are divided in the kernel, and a step with an infinity is left out."""

    def run(make: Callable[[Any], Any]) -> Any:
        model = make_model(torch.float32)
        optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 4), float("inf") if i == 2 else float(i + 1))
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return {k: v.clone() for k, v in model.state_dict().items()}, scaler.get_scale()

    ours, scale = run(lambda m: fjoin.Optimizer(m.parameters(), tx.adamw(0.01)))
    theirs, want = run(lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True))
    assert max_diff(ours, theirs) < 1e-7 and scale == want == 512.0


def test_one_kernel_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **more: calls.append(len(args[0])) or real(*args, **more))
    train(model := make_model(), fjoin.Optimizer(model.parameters(), tx.adamw(0.1)), 3)
    assert calls == [6, 6, 6]


# -- states ------------------------------------------------------------------------------------------------


def by_file(model: nn.Module, optimizer: Any, twin: nn.Module, fresh: Any) -> None:
    """A file of plain tensors, which keeps the dtype of master copies."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    twin.load_state_dict(weights)
    fresh.load_state_dict(saved)


def by_numbers(model: nn.Module, optimizer: Any, twin: nn.Module, fresh: Any) -> None:
    """Torch before 1.12 saved counts as numbers, and other libraries do."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    twin.load_state_dict(model.state_dict())
    fresh.load_state_dict(saved)


def by_torchs_functions(model: nn.Module, optimizer: Any, twin: nn.Module, fresh: Any) -> None:
    """torch.distributed.checkpoint keys states by name, and takes a step where there is none yet."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    before = {k: v.clone() for k, v in twin.state_dict().items()}
    get_optimizer_state_dict(twin, fresh)
    assert max_diff(dict(twin.state_dict()), before) == 0, "looking changes nothing"
    saved = get_optimizer_state_dict(model, optimizer)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, fresh, saved)
    assert max_diff(dict(twin.state_dict()), dict(model.state_dict())) == 0


def of(opt: tx.Optimizer) -> Made:
    return lambda model: fjoin.Optimizer(model.parameters(), opt)


# What is trained first, what goes on, and how it gets the state.
RESUMED: dict[str, tuple[Made, Made, Any, torch.dtype]] = {
    "masters": (of(tx.mixed_precision(tx.adamw(0.01))), of(tx.mixed_precision(tx.adamw(0.5))), by_file, torch.bfloat16),
    "no masters": (of(tx.mixed_precision(tx.adamw(0.01))), of(tx.mixed_precision(tx.adamw(0.01))), by_file, torch.float64),
    "numbers": (of(tx.adam(0.1)), of(tx.adam(0.1)), by_numbers, torch.float64),
    "torch's functions": (of(tx.adamw(0.1, weight_decay=0.5)), of(tx.adamw(0.1, weight_decay=0.5)), by_torchs_functions, torch.float64),
    "momentum": (of(tx.sgd(0.1, momentum=0.5)), of(tx.sgd(0.1)), by_file, torch.float64),
    # Our fields have torch's names, counts and moments.
    "torch's": (lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True), of(tx.adamw(0.01)), by_file, torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_from_a_state(name: str) -> None:
    first, then, load, dtype = RESUMED[name]
    model, twin = make_model(dtype), make_model(dtype)
    optimizer, fresh = first(model), then(twin)
    train(model, optimizer)
    load(model, optimizer, twin, fresh)
    assert max_diff(train(model, optimizer, first=6), train(twin, fresh, first=6)) <= (
        1e-14 if name == "torch's" else 0
    )
    counts = {id(state.get("step", state.get("inner.step"))) for state in fresh.state.values()}
    assert len(counts) == 1, "parameters share a count"


def test_closures_and_cleared_states() -> None:
    model = make_model()
    optimizer = fjoin.Optimizer(model.parameters(), tx.adamw(0.01))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    assert "lr: 0.01" in repr(optimizer)
    optimizer.state.clear()
    train(model, optimizer, 1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}, "cleared states begin anew"


def test_steps_on_real_views_of_complex_parameters_are_torchs() -> None:
    start, grad = torch.tensor([1 + 1j, 2 - 1j]), torch.tensor([1 + 2j, -1j])
    param, want = nn.Parameter(torch.view_as_real(start).clone()), nn.Parameter(start.clone())
    param.grad, want.grad = torch.view_as_real(grad).clone(), grad.clone()
    fjoin.Optimizer([param], tx.adagrad(0.1)).step()
    torch.optim.Adagrad([want], 0.1).step()
    assert torch.allclose(torch.view_as_complex(param.detach()), want.detach(), rtol=1e-6)


def test_a_derivative_by_betas() -> None:
    params = {"w": torch.ones(2, dtype=torch.float64)}

    def loss(beta: Tensor) -> Tensor:
        opt, p = tx.adam(0.1, betas=(beta, beta)), params
        state = opt.init(params)
        for _ in range(2):
            p, state = opt.step(p, {"w": p["w"] * torch.tensor([1.0, 3.0])}, state)
        return p["w"].sum()

    beta = torch.tensor(0.5, dtype=torch.float64)
    by_hand = (loss(beta + 1e-6) - loss(beta - 1e-6)) / 2e-6
    leaf = beta.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None and abs(leaf.grad - by_hand) < 1e-7
    assert abs(torch.func.grad(loss)(beta) - by_hand) < 1e-7
