"""What optimizers and averagers in torch's form refuse: the call, the error, and words of it. Nothing changes then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.optim.test_optimizer import make_model, train
from tests.optimizer_table import OPTIMIZERS

V, T, R = ValueError, TypeError, RuntimeError
NAN, INF, ONE = float("nan"), float("inf"), torch.tensor(0.9)
Periodic, Levels, Zero = fjoin.PeriodicModelAverager, fjoin.HierarchicalModelAverager, fjoin.ZeroRedundancyOptimizer
P = nn.Parameter(torch.ones(2, 2))
AVERAGER, SGD = fjoin.PeriodicModelAverager(2), torch.optim.SGD([P], 0.1)


def own(opt: Any, params: Any = None, **group: Any) -> Callable[[], Any]:
    params = list(make_model().named_parameters()) if params is None else params
    return lambda: fjoin.Optimizer([{"params": params, **group}] if group else params, opt)


def averages(params: Any) -> Callable[[], Any]:
    return lambda: fjoin.PeriodicModelAverager(2).average_parameters(params)


ROWS: list[tuple[Any, ...]] = [
    # -- fjoin.Optimizer
    (own(torch.optim.SGD), T, "adamw()"), (own(tx.muon()), V, "matrices only", "(8,)"),
    (own(tx.mixed_precision(tx.partition({"*bias": tx.sgd(0.1), "*": tx.adamw()})), [P]), V, "named_parameters()"),
    *((own(opt, **{key: value}), V, key) for opt, key, value in (
        (tx.adamw(), "amsgrad", True), (tx.sgd(0.1), "maximize", True), (tx.adam(), "decoupled_weight_decay", True),
        (tx.mixed_precision(tx.adamw()), "amsgrad", True), (tx.partition({"*": tx.adamw()}), "betas", (0.5, 0.9)),
        (tx.adafactor(), "eps", (1e-3, 1e-3)), (tx.sgd(lambda step: 0.1), "lr", 0.5))),
    *((lambda make=make, betas=betas: make(betas=betas), V, *words)
      for make in (tx.adam, tx.adamw, tx.lion, tx.lamb) for betas, *words in (
        ((0.9, ONE), "two numbers or two tensors"), ((ONE, torch.ones(2)), "betas[1]", "(2,)"),
        ((ONE, torch.tensor(1.5)), "betas", "1.5"), (0.9, "betas", "0.9"))),
    # -- averagers
    (lambda: Periodic(0), V, "period must be a whole number, at least 1, got 0"), (lambda: Periodic(1.5), V, "got 1.5"),  # type: ignore[arg-type]
    (lambda: Periodic(2, -1), V, "warmup_steps must be a whole number, at least 0"),
    (lambda: Levels({2: 1}, -1), V, "warmup_steps must be"), (lambda: Levels(), V, "at least one period"),
    *((lambda levels=levels: Levels(levels), V, words) for levels, words in (
        ({}, "at least one period"), ({0: 1}, "a period must be"), ({2: 0}, "a size must be"), ({2: 1, 3: 1}, "got 3 after 2"),
        ({4: 1, 2: 1}, "got 2 after 4"), ({2: 2, 4: 3}, "got 3 after 2"), ({2: 2, 4: 4}, "process_group, 1, got 4"))),
    (averages(torch.ones(2)), T, "got Tensor"), (averages([3]), T, "got int"),
    (averages(make_model().named_parameters()), T, "got tuple"),
    *((lambda optim=optim: fjoin.PostLocalSGDOptimizer(optim, AVERAGER), T, "optim must be", words)  # type: ignore[arg-type]
      for optim, words in ((make_model(), "Sequential"), (tx.sgd(0.1), "sgd"), (AVERAGER, "Averager"))),
    (lambda: fjoin.PostLocalSGDOptimizer(SGD, AVERAGER).load_state_dict({**SGD.state_dict(), "step": -1}), V, "step", "-1"),
    (lambda: fjoin.ddp.PostLocalSGDState(None, None, -1), V, "start_localSGD_iter", "-1"),
    (lambda: fjoin.ddp.PostLocalSGDState(3, None, 1), T, "process_group", "3"),
    (lambda: fjoin.ddp.PostLocalSGDState(None, 3, 1), T, "subgroup", "3"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[f"{i} {row[2]}" for i, row in enumerate(ROWS)])
def test_it_is_refused(row: tuple[Any, ...]) -> None:
    call, kind, *words = row
    raises_text(kind, call, *words)


# -- complex parameters, wherever an optimizer takes parameters --------------------------------------------


def _complex() -> Tensor:
    return torch.tensor([1 + 1j, 2 - 1j])


ENTRANCES: dict[str, Callable[[tx.Optimizer], Any]] = {
    "init": lambda opt: opt.init({"w": _complex()}), "init_param": lambda opt: opt.init_param(_complex()),
    "a gradient": lambda opt: opt.step_param_(torch.zeros(2), _complex(), opt.init_param(torch.zeros(2))),
    "step": lambda opt: opt.step({"w": _complex()}, {"w": _complex()}, opt.init({"w": torch.zeros(2)})),
    "step_param_": lambda opt: opt.step_param_(_complex(), _complex(), opt.init_param(torch.zeros(2))),
    "step_params_": lambda opt: opt.step_params_([_complex()], [_complex()], [opt.init_param(torch.zeros(2))]),  # type: ignore[misc]
    "fjoin.Optimizer": lambda opt: fjoin.Optimizer([nn.Parameter(_complex())], opt),
    "pipeline": lambda opt: tx.fuse(tx.mean("data"), opt).init({"w": _complex()}),
    "train_step": lambda opt: fjoin.train_step(lambda p, b: b, tx.fuse(tx.identity(), opt)).init({"w": _complex()}),
}  # fmt: skip
# One of a kind; without kernels for lists, or hyperparameters that fjoin.Optimizer keeps itself.
LACKS = {
    "step_params_": lambda opt: opt.step_params_ is None,
    "fjoin.Optimizer": lambda opt: opt.spec.name.startswith("inject"),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_complex_parameters_are_refused(entrance: str) -> None:
    for name, made in OPTIMIZERS.items():
        opt = made[0]()
        opt = opt.at("a.bias") if opt.select else opt
        if name not in ("frozen", "partition") and not LACKS.get(entrance, lambda opt: False)(opt):
            raises_text(TypeError, lambda opt=opt: ENTRANCES[entrance](opt), "view_as_real")  # type: ignore[misc]


# -- steps and loads, which change nothing -----------------------------------------------------------------


def spoiled(**changed: Any) -> Callable[[Any, Any], Any]:
    """A step whose last parameter, or gradient, has changed."""

    def step(optimizer: Any, params: Any) -> None:
        for name, value in changed.items():
            setattr(params[-1], name, value)
        return optimizer.step()  # type: ignore[no-any-return]

    return step


def sets(key: str, value: Any) -> Callable[[Any, Any], Any]:
    def step(optimizer: Any, params: Any) -> None:
        held, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
        try:
            optimizer.step()
        finally:
            optimizer.param_groups[0][key] = held

    return step


def loads(key: str, value: Any) -> Callable[[Any, Any], Any]:
    """A state dict with another rate, and another value of the second parameter's state."""

    def load(optimizer: Any, params: Any) -> None:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.01
        saved["state"][1] = {**saved["state"][1], key: value}
        optimizer.load_state_dict(saved)

    return load


def of_maximize(optimizer: Any, params: Any) -> None:
    model = make_model()
    theirs = torch.optim.Adam(model.parameters(), maximize=True)
    train(model, theirs, 1)
    fjoin.Optimizer(make_model().parameters(), tx.adam()).load_state_dict(theirs.state_dict())


def rate(value: Any) -> tx.Optimizer:
    def spoils(step: Any) -> Any:
        return value if step >= 1 else 0.1

    return tx.partition({"0": tx.adamw(0.1), "*": tx.sgd(spoils)})


D = torch.float64
MOMENTUM, ADAMW, MATRICES = tx.sgd(0.1, momentum=0.9), tx.adamw(0.1), [P, nn.Parameter(torch.ones(2))]
NARROW = spoiled(data=torch.ones(3).half(), grad=torch.ones(3).half())
UNCHANGED: list[tuple[Any, ...]] = [
    *((opt, spoiled(data=torch.ones(4, dtype=D), grad=torch.ones(4, dtype=D)), V, "shape (4,)", "change the parameters first")
      for opt in (MOMENTUM, ADAMW, tx.rmsprop(0.1))),
    *((opt, NARROW, V, "change the parameters first") for opt in (MOMENTUM, ADAMW, tx.rmsprop(0.1))),
    *((opt, spoiled(grad=torch.ones(3, dtype=D).to_sparse()), T, "sparse") for opt in (MOMENTUM, ADAMW, tx.rmsprop(0.1))),
    *((rate(value), spoiled(), V if isinstance(value, (float, Tensor)) else T, "spoils", "in step 1", "expected")
      for value in (NAN, INF, "x", None, torch.ones(2))),
    (ADAMW, sets("lr", -1.0), V, "lr must be at least 0"),
    *((opt, sets("momentum", 0.9), V, "momentum is 0.9", "begin with a small momentum")
      for opt in (tx.sgd(0.1), tx.mixed_precision(tx.sgd(0.1)))),
    *((tx.mixed_precision(ADAMW), sets("betas", betas), V, "betas", repr(betas)) for betas in ("x", None, (0.9,), (0.9, "x"))),
    (ADAMW, loads("exp_avg", torch.zeros(1)), V, "'exp_avg'", "(1,)"), (ADAMW, loads("step", "two"), T, "'step'", "'two'"),
    *((ADAMW, loads("step", count), V, "shape (3,)", f"step is {float(count)}") for count in (-1, NAN, torch.tensor(INF))),
    (ADAMW, lambda o, p: o.load_state_dict(train_state()), V, "momentum", "exp_avg"),
    (ADAMW, of_maximize, V, "'maximize'", "True", "False"),
    (ADAMW, lambda o, p: o.add_param_group({"params": [nn.Parameter(_complex())]}), T, "the parameter '3'", "complex64"),
]  # fmt: skip


def train_state() -> Any:
    params = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, D, D)]
    optimizer = fjoin.Optimizer([{"params": params[:1]}, {"params": params[1:]}], MOMENTUM)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("row", UNCHANGED, ids=[f"{i} {row[3]}" for i, row in enumerate(UNCHANGED)])
def test_what_is_refused_changes_nothing(row: tuple[Any, ...]) -> None:
    opt, call, kind, *words = row
    params = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, D, D)]
    named = list(zip("012", params, strict=True))
    optimizer = fjoin.Optimizer(
        named if "partition" in repr(opt) else [{"params": params[:1]}, {"params": params[1:]}], opt
    )
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy((params[:2], optimizer.state_dict()))
    raises_text(kind, lambda: call(optimizer, params), *words)
    assert max_diff((params[:2], optimizer.state_dict()["state"]), (before[0], before[1]["state"])) == 0
    assert repr(optimizer.state_dict()["param_groups"]) == repr(before[1]["param_groups"])


# -- ZeroRedundancyOptimizer, on all ranks -----------------------------------------------------------------


def allreduce_hook(state: Any, bucket: Any) -> Any: ...  # a user's own of the name of one of torch's


def zero_rows() -> list[tuple[Any, ...]]:
    ddp = DistributedDataParallel(nn.Linear(4, 3))
    weight, bias, hook, torchs = ddp.module.weight, ddp.module.bias, fjoin.ddp.hook_with_zero_step, torch.optim.SGD
    made, late = Zero([bias], torchs, lr=0.1), Zero([bias], torchs, overlap_with_ddp=True, lr=0.1)
    hooked = Zero(ddp.parameters(), torchs, overlap_with_ddp=True, lr=0.1)
    lion = Zero(ddp.parameters(), tx.lion, overlap_with_ddp=True)
    ddp(torch.ones(2, 4)).sum().backward()
    ddp.register_comm_hook(None, hook(fjoin.ddp.allreduce_hook, ddp, hooked))
    stepped = Zero([weight], torchs, lr=0.1)
    stepped.step()
    sparse = Zero([one := nn.Parameter(torch.ones(3))], torchs, lr=0.1)
    one.grad = torch.ones(3).to_sparse()

    def passes() -> None:
        ddp(torch.ones(2, 4)).sum().backward()

    def late_momentum() -> None:
        passes()
        hooked.param_groups[0]["momentum"] = 0.9
        passes()

    def scaled() -> None:
        hooked.grad_scale = torch.ones(())  # as a GradScaler does
        hooked.step()

    return [
        (lambda: Zero([bias], nn.Linear), T, "optimizer_class", "torch.optim"),
        (lambda: Zero([bias], tx.partition, parts={"*": tx.sgd(0.1)}), T, "by path"),
        (lambda: Zero([], torchs), V, "empty"), (lambda: Zero([bias], torchs, lr=-1.0), V, "-1.0"),
        *((lambda late=late: Zero([{"params": [weight]}, {"params": [bias], "nesterov": True}], torchs, overlap_with_ddp=late, lr=0.1),
           V, "'nesterov' cannot differ") for late in (False, True)),
        (lambda: stepped.add_param_group({"params": [bias], "maximize": True}), V, "'maximize' cannot differ"),
        (lambda: copy.deepcopy(stepped), T, "state_dict"),
        (made.state_dict, R, "consolidate_state_dict"), (lambda: made.state[bias], R, "consolidate_state_dict"),
        (lambda: made.load_state_dict({"state": {}, "param_groups": []}), V, "groups of []"),
        *((early, R, "hook_with_zero_step") for early in (late.step, late.consolidate_state_dict)),
        (lambda: TorchJoin([ddp, made]), T, "fjoin.Join([ddp, zero])"),
        (sparse.step, T, "sparse gradients are not supported", "sparse=False"),
        *((lambda many=many: Zero([bias], many, lr=0.1).step(lambda: 0.0), V, "may call its closure again", "step()")
          for many in (torch.optim.LBFGS, type("Sam", (torchs,), {}))),
        (lambda: hook(tx.mean("data"), ddp, made), V, "overlap_with_ddp=True"),
        (lambda: hook(tx.mean("data"), ddp, late), V, "exactly"),
        *((lambda bad=bad: hook(bad, ddp, lion), T, "hook must be") for bad in (len, allreduce_hook)),
        (late_momentum, V, "momentum is 0.9", "begin with a small momentum"),
        (scaled, R, "dynamic_loss_scale"),
    ]  # fmt: skip


def zero_refuses() -> None:
    for call, kind, *words in zero_rows():
        raises_text(kind, call, *words)


def bad_states(hooked: bool) -> None:
    """Nothing of the state is loaded, on any rank."""
    ddp = DistributedDataParallel(make_model())
    params = list(ddp.parameters())
    groups = [{"params": params[1::2], "lr": 0.03}, {"params": params[::2]}]
    torchs = torch.optim.SGD(copy.deepcopy(groups), 0.1, momentum=0.9)
    for group in torchs.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    torchs.step()
    zero = Zero(groups, torch.optim.SGD, overlap_with_ddp=hooked, lr=0.5)
    if hooked:
        ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, ddp, zero))
    state = torchs.state_dict()
    for change in ({"momentum_buffer": torch.zeros(9, 9)}, {"other": torch.zeros(())}, {}):
        bad = copy.deepcopy(state)
        bad["state"][0] |= change
        bad["param_groups"] = bad["param_groups"][: 1 + bool(change)]
        raises_text(V, lambda bad=bad: zero.load_state_dict(bad), "the state")  # type: ignore[misc]
        assert [(group["lr"], group["momentum"]) for group in zero.param_groups] == [(0.03, 0), (0.5, 0)]


ON_RANKS = [(zero_refuses,), (bad_states, False), (bad_states, True)]


@pytest.mark.parametrize("call", ON_RANKS, ids=[f"{call[0].__name__}{call[1:]}" for call in ON_RANKS])
def test_zero_refuses_on_all_ranks(pool: Any, call: tuple[Any, ...]) -> None:
    for ranks in (1, 2):
        pool.run(ranks, *call)
