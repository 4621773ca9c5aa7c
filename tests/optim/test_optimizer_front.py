"""fjoin.Optimizer: ours where torch.optim.Optimizer is expected."""

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
from tests.helpers import max_diff, raises_text
from tests.optimizer_table import OPTIMIZERS
from tests.parity_table import KINDS


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 6, scheduler: Any = None, first: int = 0) -> dict[str, Tensor]:
    for i in range(first, first + steps):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(16, 4, generator=g, dtype=torch.float64).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {path: p.detach().clone() for path, p in model.named_parameters()}


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.matrices])
def test_it_trains_as_torch_does(name: str) -> None:
    kind = KINDS[name]
    for options in kind.options[::5]:
        ours, theirs = make_model(), make_model()
        a = train(ours, fjoin.Optimizer(ours.parameters(), kind.ours(**options)))
        b = train(theirs, kind.torchs(theirs.parameters(), **(kind.kernel or {}), **options))
        assert max_diff(a, b) < 1e-12, options


@pytest.mark.parametrize(
    "make", [make for name, rows in OPTIMIZERS.items() if name != "inject_hyperparameters" for make in rows]
)
def test_training_matches_the_pure_optimizer(make: Callable[[], tx.Optimizer]) -> None:
    model, opt = make_model(), make()
    start = {path: p.detach().clone() for path, p in model.named_parameters()}
    state, params = opt.init(start), start
    other = make_model()
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(16, 4, generator=g, dtype=torch.float64)
        grads = torch.func.grad(lambda p, x=x: torch.func.functional_call(other, p, x).square().mean())(params)
        params, state = opt.step(params, grads, state)
    got = train(model, fjoin.Optimizer(model.named_parameters(), opt), steps=3)
    assert max_diff(got, params) < 1e-12


def test_groups_and_schedulers() -> None:
    def parts(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.0},
            {"params": list(model[2].parameters()) + list(model[4].parameters())},
        ]

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    a, b = make_model(), make_model()
    ours = fjoin.Optimizer(parts(a), tx.adamw(0.01, weight_decay=0.1))
    theirs = torch.optim.AdamW(parts(b), 0.01, weight_decay=0.1, fused=True)
    assert max_diff(train(a, ours, 12, scheduler(ours)), train(b, theirs, 12, scheduler(theirs))) < 1e-14


def test_by_path_and_master_copies() -> None:
    model = make_model(torch.bfloat16)
    opt = tx.mixed_precision(tx.partition({"*bias": tx.sgd(0.1), "*": tx.adamw(0.01)}))
    optimizer = fjoin.Optimizer(model.named_parameters(), opt)
    train(model, optimizer)
    weight, bias = model[0].weight, model[0].bias
    assert set(optimizer.state[weight]) == {"inner.step", "inner.exp_avg", "inner.exp_avg_sq", "master"}
    assert optimizer.state[weight]["master"].dtype == torch.float32
    assert set(optimizer.state[bias]) == {"inner.step", "master"}
    assert torch.equal(weight.detach(), optimizer.state[weight]["master"].bfloat16())
    raises_text(ValueError, lambda: fjoin.Optimizer(model.parameters(), opt), "named_parameters()")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_training_resumes_after_save_and_load(dtype: torch.dtype) -> None:
    """A file of plain tensors keeps the dtype of master copies; parameters share a step count again after loading."""

    def fresh(model: nn.Module) -> fjoin.Optimizer:
        return fjoin.Optimizer(model.parameters(), tx.mixed_precision(tx.adamw(0.01)))

    model = make_model(dtype)
    optimizer = fresh(model)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    other = make_model(dtype)
    other.load_state_dict(weights)
    resumed = fresh(other)
    resumed.load_state_dict(saved)
    assert max_diff(train(model, optimizer, first=6), train(other, resumed, first=6)) == 0
    assert len({id(state["inner.step"]) for state in resumed.state.values()}) == 1
    wrong = fjoin.Optimizer(other.parameters(), tx.sgd(0.1, momentum=0.9))
    raises_text(ValueError, lambda: wrong.load_state_dict(saved), "momentum", "exp_avg")


def test_training_resumes_from_a_torch_adamw_state() -> None:
    """Its fields have torch's names, step counts and moments."""
    a, b = make_model(), make_model()
    torchs, ours = torch.optim.AdamW(a.parameters(), 0.01, fused=True), fjoin.Optimizer(b.parameters(), tx.adamw(0.01))
    train(a, torchs)
    b.load_state_dict(a.state_dict())
    ours.load_state_dict(torchs.state_dict())
    assert max_diff(train(a, torchs, first=6), train(b, ours, first=6)) < 1e-14


def test_parameters_without_gradient_do_not_change() -> None:
    """Their step counts stay too, as in torch; parameters that shared a step count with them continue counting."""
    a, b = make_model(), make_model()
    pairs = [
        (a, fjoin.Optimizer(a.parameters(), tx.adamw(0.1))),
        (b, torch.optim.AdamW(b.parameters(), 0.1, fused=True)),
    ]
    for model, optimizer in pairs:
        train(model, optimizer, 2)
        for p in model[2].parameters():
            p.requires_grad_(False)
        train(model, optimizer, 2, first=2)
        for p in model[2].parameters():
            p.requires_grad_(True)
        train(model, optimizer, 2, first=4)
    assert max_diff(dict(a.state_dict()), dict(b.state_dict())) < 1e-14
    steps = [int(pairs[0][1].state[p]["step"]) for p in a.parameters()]
    assert steps == [6, 6, 4, 4, 6, 6] == [int(pairs[1][1].state[p]["step"]) for p in b.parameters()]


def test_one_kernel_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **kwargs: calls.append(len(args[0])) or real(*args, **kwargs)
    )
    model = make_model()
    optimizer = fjoin.Optimizer(model.parameters(), tx.adamw(0.1))
    train(model, optimizer, 3)
    assert calls == [6, 6, 6]


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


def test_closures_copies_and_errors() -> None:
    model = make_model()
    optimizer = fjoin.Optimizer(model.parameters(), tx.sgd(0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    assert "sgd" in repr(optimizer) or "lr: 0.1" in repr(optimizer)
    assert copy.deepcopy(optimizer.state_dict())["param_groups"][0]["lr"] == 0.1
    raises_text(TypeError, lambda: fjoin.Optimizer(model.parameters(), torch.optim.SGD), "adamw()")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: fjoin.Optimizer(model.parameters(), tx.muon()), "matrices only", "(8,)")
    optimizer.param_groups[0]["lr"] = -1.0
    raises_text(ValueError, lambda: optimizer.step(closure), "lr must be at least 0")
    sparse = nn.Embedding(3, 2, sparse=True)
    front = fjoin.Optimizer(sparse.parameters(), tx.sgd(0.1))
    sparse(torch.tensor([0])).sum().backward()
    raises_text(TypeError, front.step, "(3, 2)", "sparse")


def test_deepcopy_trains_like_the_original() -> None:
    model = make_model()
    optimizer = fjoin.Optimizer(model.parameters(), tx.adamw(0.1))
    train(model, optimizer, 2)
    twin, twins = copy.deepcopy((model, optimizer))
    assert max_diff(train(model, optimizer, 2, first=2), train(twin, twins, 2, first=2)) == 0
    assert max_diff(dict(model.state_dict()), dict(twin.state_dict())) == 0


def test_torchs_checkpoint_functions() -> None:
    """torch.distributed.checkpoint keys states by name, and takes a step where there is none yet."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = make_model()
    optimizer = fjoin.Optimizer(model.parameters(), tx.adamw(0.1, weight_decay=0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    get_optimizer_state_dict(model, optimizer)
    assert max_diff(dict(model.state_dict()), before) == 0, "looking changes nothing"
    train(model, optimizer, 3)
    saved = get_optimizer_state_dict(model, optimizer)
    other = make_model()
    other.load_state_dict(model.state_dict())
    resumed = fjoin.Optimizer(other.parameters(), tx.adamw(0.1, weight_decay=0.5))
    set_optimizer_state_dict(other, resumed, saved)
    assert max_diff(dict(other.state_dict()), dict(model.state_dict())) == 0
    assert max_diff(train(model, optimizer, 2, first=3), train(other, resumed, 2, first=3)) == 0


def test_groups_and_states_that_do_not_fit() -> None:
    model = make_model()
    first, second = list(model[0].parameters()), list(model[2].parameters())
    for opt, extra in (
        (tx.adamw(), {"amsgrad": True}), (tx.sgd(0.1), {"maximize": True}),
        (tx.adam(), {"decoupled_weight_decay": True}), (tx.mixed_precision(tx.adamw()), {"amsgrad": True}),
        (tx.partition({"*": tx.adamw()}), {"betas": (0.5, 0.9)}), (tx.adafactor(), {"eps": (1e-3, 1e-3)}),
        (tx.sgd(lambda step: 0.1), {"lr": 0.5}),
    ):  # fmt: skip
        raises_text(
            ValueError,
            lambda opt=opt, extra=extra: fjoin.Optimizer([{"params": zip("ab", first, strict=True), **extra}], opt),
            next(iter(extra)),
        )
    optimizer = fjoin.Optimizer([{"params": [first[0]]}], tx.muon())
    raises_text(ValueError, lambda: optimizer.add_param_group({"params": [second[1]]}), "matrices only")
    assert len(optimizer.param_groups) == 1
    raises_text(TypeError, lambda: fjoin.Optimizer(first, tx.inject_hyperparameters(tx.sgd(0.1))), "param_groups")

    ours = fjoin.Optimizer(model.parameters(), tx.adamw(0.1))
    train(model, ours, 2)
    saved = copy.deepcopy(ours.state_dict())
    bad = copy.deepcopy(saved)
    bad["param_groups"][0]["lr"], bad["state"][0]["exp_avg"] = 0.01, torch.zeros(1)
    raises_text(ValueError, lambda: ours.load_state_dict(bad), "'exp_avg'", "(1,)")
    assert ours.param_groups[0]["lr"] == 0.1 and max_diff(ours.state_dict()["state"], saved["state"]) == 0
    for count in (-1, float("nan"), torch.tensor(float("inf"))):
        bad = copy.deepcopy(saved)
        bad["param_groups"][0]["lr"], bad["state"][1]["step"] = 0.01, count
        raises_text(ValueError, lambda bad=bad: ours.load_state_dict(bad), "shape (8,)", f"step is {float(count)}")  # type: ignore[misc]
        assert ours.param_groups[0]["lr"] == 0.1 and max_diff(ours.state_dict()["state"], saved["state"]) == 0
    ours.state.clear()
    train(model, ours, 1)
    assert {int(state["step"]) for state in ours.state.values()} == {1}, "cleared states begin anew"
