"""Hyperparameters in the state, mapped over, and master copies of parameters of few bits."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff, params_like, same_bits
from tests.optimizer_table import OPTIMIZERS
from tests.parity_table import KINDS


def _trees(steps: int, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    trees = [{k: v for k, v in params_like(i, dtype).items() if v.numel()} for i in range(steps + 1)]
    return trees[0], trees[1:]


def _steps(opt: tx.Optimizer, params: Any, state: Any, grads: list[Any]) -> tuple[Any, Any]:
    for g in grads:
        params, state = opt.step(params, g, state)
    return params, state


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.matrices])
def test_injected_optimizer_matches_the_plain_one(name: str) -> None:
    """Every third combination of options gives bitwise equal results."""
    params, grads = _trees(4)
    for options in KINDS[name].options[::3]:
        plain = KINDS[name].ours(**options)
        opt = tx.inject_hyperparameters(plain)
        want, want_state = _steps(plain, params, plain.init(params), grads)
        got, state = _steps(opt, params, opt.init(params), grads)
        assert same_bits(got, want) and same_bits({k: s.inner for k, s in state.items()}, want_state)


def test_change_at_run_time_matches_param_groups() -> None:
    params, grads = _trees(6)
    own = [p.clone().requires_grad_() for p in params.values()]
    torchs = torch.optim.SGD(own, 0.1, momentum=0.9, weight_decay=0.1, fused=True)
    opt = tx.inject_hyperparameters(tx.sgd(0.1, momentum=0.9, weight_decay=0.1))
    ours, state = params, opt.init(params)
    for i, g in enumerate(grads):
        if i == 3:
            torchs.param_groups[0].update(lr=0.01, momentum=0.5, weight_decay=0.0)
            before = state
            state = tx.with_hyperparameters(state, lr=0.01, momentum=0.5, weight_decay=0.0)
            assert before["scale"].hyperparameters["lr"] == 0.1, "a new state"
        for p, gradient in zip(own, g.values(), strict=True):
            p.grad = gradient.clone()
        torchs.step()
        ours, state = opt.step(ours, g, state)
    assert max_diff(list(ours.values()), [p.detach() for p in own]) < 1e-15


def test_schedules_of_any_hyperparameter() -> None:
    params, grads = _trees(5)
    table = [0.0, 0.1, 0.2, 0.3, 0.4]  # it has no value for a sixth step
    opt = tx.inject_hyperparameters(tx.adamw(tx.linear(0.1, 0.0, 5), weight_decay=lambda step: table[int(step)]))
    state, ours, want = opt.init(params), params, params
    plain_state = tx.adamw(0.1).init(params)
    for i, g in enumerate(grads):
        ours, state = opt.step(ours, g, state)
        assert abs(state["scale"].scheduled["weight_decay"] - 0.1 * i) < 1e-15
        now = tx.adamw(0.1 - 0.02 * i, weight_decay=0.1 * i)
        want, plain_state = now.step(want, g, plain_state)
    assert max_diff(ours, want) < 1e-15


def test_a_hyperparameter_that_is_a_tensor() -> None:
    """The tensor may have any shape with one element and can be differentiated by."""
    opt, params = tx.inject_hyperparameters(tx.sgd(0.1)), {"w": torch.ones(2), "v": torch.ones(3)}
    state, lr = opt.init(params), torch.tensor([0.5])
    new = tx.with_hyperparameters(state, lr=lr)
    assert new["w"].hyperparameters["lr"] is new["v"].hyperparameters["lr"] is not lr
    assert new["w"].hyperparameters["lr"].shape == () and new["w"].hyperparameters["lr"].dtype is torch.float64

    def loss(lr: Tensor) -> Tensor:
        return opt.step(params, params, tx.with_hyperparameters(state, lr=lr))[0]["w"].sum()

    assert torch.func.grad(lambda x: loss(x).sum())(torch.tensor(0.5)) == -2
    assert torch.func.vmap(loss)(torch.tensor([0.0, 0.5])).tolist() == [2.0, 1.0]


# Hyperparameters that may be tensors, of optimizers that have them.
MAPPED: dict[str, Any] = {
    "sgd": lambda x: tx.sgd(x, momentum=x, weight_decay=x),
    "sgd, dampening": lambda x: tx.sgd(0.1, momentum=0.9, dampening=x),
    "adam": lambda x: tx.adam(x, eps=x, weight_decay=x), "adamw": lambda x: tx.adamw(x, eps=x, weight_decay=x),
    "nadam": lambda x: tx.nadam(x, eps=x, weight_decay=x, momentum_decay=x),
    "radam": lambda x: tx.radam(x, eps=x, weight_decay=x), "adamax": lambda x: tx.adamax(x, eps=x, weight_decay=x),
    "adagrad": lambda x: tx.adagrad(x, lr_decay=x, weight_decay=x, initial_accumulator_value=x, eps=x),
    "adadelta": lambda x: tx.adadelta(x, rho=x, eps=x, weight_decay=x),
    **{f"{make.__name__}, betas": lambda x, make=make: make(0.1, betas=(x, x)) for make in (
        tx.adam, tx.adamw, tx.adamax, tx.nadam, tx.lion, tx.lamb)},
    "rmsprop": lambda x: tx.rmsprop(x, alpha=x, eps=x, weight_decay=x, momentum=x),
    "asgd": lambda x: tx.asgd(x, lambd=x, alpha=x, weight_decay=x), "lion": lambda x: tx.lion(x, weight_decay=x),
    "lamb": lambda x: tx.lamb(x, eps=x, weight_decay=x), "adafactor": tx.adafactor, "rprop": tx.rprop, "muon": tx.muon,
    "mixed_precision": lambda x: tx.mixed_precision(tx.sgd(x)),
}  # fmt: skip


def test_every_optimizer_is_mapped_over() -> None:
    mapped = {name.split(",")[0] for name in MAPPED}
    assert mapped | {"frozen", "partition", "inject_hyperparameters"} == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", MAPPED)
def test_an_ensemble_and_a_sweep_in_one_call(name: str) -> None:
    """Parameters, gradients and hyperparameters are mapped over."""
    start, of_steps = _trees(3)
    params, *grads = ({k: v for k, v in tree.items() if v.dim() == 2 or name != "muon"} for tree in (start, *of_steps))
    values = torch.tensor([0.01, 0.1, 0.3, 0.9], dtype=torch.float64)

    def one(x: Any, member: Any) -> Any:
        opt, own = MAPPED[name](x), {k: p * (1 + member) for k, p in params.items()}
        return _steps(opt, own, opt.init(own), [{k: g * (1 - 3 * member) for k, g in step.items()} for step in grads])[
            0
        ]

    out, room = (
        torch.func.vmap(one)(values, values),
        0.1 if name == "muon" else 1e-13,
    )  # muon's products are in bfloat16
    for i, x in enumerate(values.tolist()):
        assert max_diff({k: v[i] for k, v in out.items()}, one(x, x)) < room
        assert max_diff(one(torch.tensor(x, dtype=torch.float64), x), one(x, x)) < room


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.matrices])
@pytest.mark.parametrize("pure", [False, True])
def test_masters_are_torchs_float32(name: str, pure: bool) -> None:
    """bfloat16 parameters, stepped through float32: torch.optim on the master copies, 100 steps, to the tolerance."""
    kind = KINDS[name]
    start = {k: v for k, v in params_like(0, torch.bfloat16).items() if v.numel()}
    g = torch.Generator().manual_seed(1)
    grads = [{k: torch.randn(p.shape, generator=g).bfloat16() for k, p in start.items()} for _ in range(100)]
    for options in kind.options[::7]:
        masters = [p.float().requires_grad_() for p in start.values()]
        torchs = kind.torchs(masters, foreach=False, **options)
        opt, params = tx.mixed_precision(kind.ours(**options)), start
        state = opt.init(params)
        for step in grads:
            for p, gradient in zip(masters, step.values(), strict=True):
                p.grad = gradient.float()
            torchs.step()
            if pure:
                both = {k: opt.step_param(p, step[k], state[k]) for k, p in params.items()}
                params, state = {k: p for k, (p, _) in both.items()}, {k: s for k, (_, s) in both.items()}
            else:
                params, state = opt.step(params, step, state)
        for (k, p), master in zip(params.items(), masters, strict=True):
            room = 1e-7 * (master.abs().max() + 3) * 50
            assert p.dtype == torch.bfloat16 and (state[k].master - master.detach()).abs().max() <= room
            assert torch.equal(p, state[k].master.bfloat16())


def test_0d_parameters_keep_their_dtype() -> None:
    params = {"w": torch.tensor(1.0), "v": torch.ones(2)}
    for opt in (
        tx.inject_hyperparameters(tx.adamw(0.1)),
        tx.adamw(torch.tensor(0.1).double(), weight_decay=torch.tensor(0.1).double()),
    ):
        state = opt.init(params)
        for grads in (params, {k: p.clone().requires_grad_() for k, p in params.items()}):
            out, after = opt.step(params, grads, state)
            assert out["w"].dtype is out["v"].dtype is torch.float32
            pairs = zip(optree.tree_leaves(after), optree.tree_leaves(state), strict=True)
            assert all(a.dtype is b.dtype for a, b in pairs)


def test_small_numbers_beside_large_ones() -> None:
    """The moments as torch's lerp: without betas nothing of the old moment remains, for any size."""
    opt, p = tx.adam(0.1, betas=(0.0, 0.0)), torch.zeros(1)
    state = opt.init_param(p)._replace(exp_avg=torch.tensor([1e8]))
    assert opt.step_param(p, torch.ones(1), state)[1].exp_avg.item() == 1.0
    half = torch.ones(100_000).half()
    out, _ = tx.lamb(0.1).step_param(half, half, tx.lamb(0.1).init_param(half))
    assert torch.isfinite(out).all() and out[0] < 1
