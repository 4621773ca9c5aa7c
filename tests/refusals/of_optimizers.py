"""What optimizers, states and rematerialization refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import params_like
from tests.transforms.remat.functions import Notes
from tests.transforms.remat.operations import Square


def loaded(like: Any, saved: Any) -> Callable[[], Any]:
    return lambda: tx.from_state_dict(like, saved)


def injected(opt: Any, **values: Any) -> Any:
    opt = tx.inject_hyperparameters(opt)
    params = {"w": torch.ones(2)}
    return opt.step(params, params, tx.with_hyperparameters(opt.init(params), **values))


def under_func(f: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: torch.func.grad(tx.remat(f))(torch.ones(3))


def force(x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: z.sin().sum())(x) * x


X, LEAF = torch.ones(4, 3), torch.ones(2, requires_grad=True)
SGD, MEAN, NORM = tx.sgd(0.1), tx.mean("data"), nn.BatchNorm1d(2)
MOMENTUM = tx.sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)})
SAVED = tx.to_state_dict(MOMENTUM)
NAMES = policies.save_and_offload_only_these_names
COUNTER = iter(range(9))
BOTH = {"names_which_can_be_saved": ["a", "b"], "names_which_can_be_offloaded": ["b"]}
V, T, R = ValueError, TypeError, RuntimeError
NAN, INF = float("nan"), float("inf")


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), 1)


BY_RATE: tuple[Callable[..., Any], ...] = (
    tx.sgd, tx.adam, tx.adamw, tx.nadam, tx.radam, tx.adamax, tx.adagrad, tx.adadelta, tx.adafactor, tx.rmsprop, tx.rprop, tx.asgd,
    tx.lion, tx.lamb, tx.muon,
)  # fmt: skip
ROWS: dict[str, list[tuple[Any, ...]]] = {
    # -- optimizers and states
    "skip_if_nonfinite": [(lambda: tx.skip_if_nonfinite(SGD), T, "fuse(hook, optimizer)")],
    "dynamic_loss_scale": [
        *((lambda name=name, value=value: tx.dynamic_loss_scale(tx.fuse(MEAN, SGD), **{name: value}), V, name, repr(value))
          for name, values in (("init_scale", ("1", 0.0, 1e39, 1e-50)), ("growth_factor", (None, 1.0)),
                               ("backoff_factor", (None, 1.0)), ("growth_interval", (0, 1.5))) for value in values),
    ],
    "sgd": [(lambda: tx.sgd(lambda step: {0: 0.1}.get(step, 0.0)), V, "returned 0.1 for 0, but 0.0 for a 0-d tensor", "int(step)"),
    (lambda: tx.sgd(lambda step: next(COUNTER)), V, "returned 0.0 and then 1.0 for step 0", "counter"),
    (lambda: tx.sgd(0.1, nesterov=True), V, "nesterov needs momentum"),
    (lambda: tx.sgd(0.1, momentum="0.9"), T, "momentum", "'0.9'")],
    "adamw": [(lambda: tx.adamw(0.1, betas=(0.9, 1.0)), V, "betas", "1.0"), (lambda: tx.adamw("1e-3"), T, "lr", "write float('1e-3')"),
    (lambda: tx.adamw(1e-3, fused=True), T, "adamw", "'fused'", "betas")],
    "adam": [(lambda: tx.adam(0.1, eps=-1e-8), V, "eps")], "adadelta": [(lambda: tx.adadelta(rho="x"), T, "rho", "'x'")],
    "muon": [(lambda: tx.muon(ns_steps=2.5), V, "ns_steps", "2.5")], "adafactor": [(lambda: tx.adafactor(eps=1e-3), V, "eps", "0.001")],
    "rprop": [(lambda: tx.rprop(etas=("a", 2)), V, "etas", "'a'"), (lambda: tx.rprop(step_sizes=1.0), V, "step_sizes", "1.0")],
    "warmup_cosine": [(lambda: tx.warmup_cosine(0.1, 10, 10), V, "total_steps", "11")],
    "hyperparameters": [
        (lambda: tx.adadelta(rho=1.5), V, "rho", "1.5"), (lambda: tx.adagrad(lr_decay=-0.1), V, "lr_decay", "-0.1"),
        (lambda: tx.adagrad(initial_accumulator_value=-1.0), V, "initial_accumulator_value"),
        (lambda: tx.rmsprop(alpha=-0.5), V, "alpha", "-0.5"),
        (lambda: tx.rmsprop(momentum=-0.5), V, "momentum", "-0.5"), (lambda: tx.rprop(etas=(1.1, 1.2)), V, "etas", "(1.1, 1.2)"),
        (lambda: tx.nadam(momentum_decay=-1.0), V, "momentum_decay"), (lambda: tx.lion(betas=(0.9, 1.0)), V, "betas[1]", "1.0"),
        (lambda: tx.lamb(eps=-1e-6), V, "eps"), (lambda: tx.adafactor(beta2_decay=0.8), V, "beta2_decay", "0.8"),
        (lambda: tx.adafactor(d=0.5), V, "d must be from 1", "0.5"), (lambda: tx.adafactor(eps=(-1.0, 1e-3)), V, "eps1", "-1.0"),
        (lambda: tx.muon(ns_steps=100), V, "ns_steps", "100"), (lambda: tx.muon(ns_coefficients=(1.0, 2.0)), V, "ns_coefficients"),
        (lambda: tx.muon(adjust_lr_fn="other"), V, "adjust_lr_fn", "'other'"),
        (lambda: tx.muon().init(params_like()), V, "matrices only", "'layer.bias': (3,)", "'scale': ()", "partition"),
        (lambda: tx.partition({"layer.*": tx.muon(), "*": tx.sgd()}).init(params_like()), V, "'layer.bias': (3,)"),
        *((make, V, "must be") for make in (
            lambda: tx.sgd(INF), lambda: tx.adamw(NAN), lambda: tx.sgd(torch.tensor(INF)), lambda: tx.adam(eps=INF),
            lambda: tx.sgd(weight_decay=NAN), lambda: tx.sgd(momentum=0.9, dampening=NAN), lambda: tx.linear(0.0, NAN, 5),
            lambda: tx.linear(INF, 0.0, 5), lambda: tx.cosine(NAN, 5), lambda: tx.warmup_cosine(1.0, 1, 5, end=INF),
            lambda: tx.from_torch_scheduler(lambda o: lr_scheduler.StepLR(o, 1, NAN), 0.1, 2), lambda: tx.linear(0.0, 10**400, 5))),
        (lambda: tx.linear("0", 1.0, 5), T, "start", "'0'"), (lambda: tx.warmup(3, 0.1), T, "then", "0.1", "lambda step: 0.1"),
        (lambda: tx.from_torch_scheduler(lr_scheduler.ReduceLROnPlateau, 0.1, 3), T, "ReduceLROnPlateau", "step"),
    ],
    "inject_hyperparameters": [
        (lambda: tx.inject_hyperparameters(tx.Optimizer(SGD.init_param, SGD.step_param, SGD.step_param_)), T, "made by no factory"),
        (lambda: tx.inject_hyperparameters("sgd"), T, "expected an Optimizer", "'sgd'"),
    ],
    "with_hyperparameters": [
        (lambda: injected(SGD, momentum=0.9), V, "['momentum']", "'lr'"),
        (lambda: injected(tx.sgd(tx.linear(0.1, 0.1, 1)), lr=0.2), V, "['lr']"),
        (lambda: injected(SGD, lr=-1.0), V, "lr must be at least 0"),
        *((lambda value=value: injected(SGD, lr=value), T, "lr must be a number", repr(value))
          for value in ("x", True, 1j, tx.linear(0.1, 0.1, 1))),
        *((lambda value=value: injected(SGD, lr=value), V, "lr must be a") for value in (float("nan"), float("inf"), torch.ones(2),
         torch.tensor(float("nan")))),
    ],
    "mixed_precision": [
        (lambda: tx.mixed_precision(tx.adamw(), torch.int32), T, "torch.int32"),
        (lambda: tx.mixed_precision(MEAN), T, "Optimizer", "mean('data')"),
    ],
    "from_state_dict": [
        *((loaded({"w": X}, {"w": x}), T, "'w'", text) for x, text in ((X.to_sparse(), "sparse"), (X.to("meta"), "meta"))),
        (loaded(MOMENTUM, {**SAVED, "x": 1}), V, "lacks []", "['x']"), (loaded(MOMENTUM, {}), V, "w.step", "has []"),
        (loaded(MOMENTUM, {**SAVED, "w.momentum": torch.zeros(3)}), V, "'w.momentum'", "(3,)", "(2,)"),
        (loaded(MOMENTUM, {**SAVED, "w.momentum": 3}), T, "'w.momentum'", "expected a tensor"),
        (loaded(MOMENTUM, None), T, "mapping", "None"),
        (loaded(MOMENTUM, {0: 1, "b": 2}), V, "['0', 'b']"), (loaded({}, {"a": 1, "b.c": 2}), V, "['a', 'b.c']", "lacks [], and"),
        (loaded({"n": torch.zeros((), dtype=torch.int64)}, {"n": torch.tensor(1.7)}), T, "'n'", "float32", "int64"),
        (loaded({"step": 1}, {"step": torch.tensor(1)}), T, "'step'", "expected a int"),
    ],
    "to_state_dict": [(lambda: tx.to_state_dict({"a": {"b": 1}, "a.b": 2}), V, "['a.b']", "rename")],
    # -- rematerialization
    "remat": [
        (lambda: tx.remat(3), T, "fn"), (lambda: tx.remat(torch.sin, "dots_saveable"), T, "policy"),
        (lambda: tx.remat(torch.sin, lambda op, *args: 1)(LEAF), T, "must return a bool"),
        (lambda: tx.remat(torch.sin, preserve_rng_state=1), T, "preserve_rng_state"),
        *((lambda way=way: tx.remat(torch.exp, offload=way), T, "offload must be None or 'cpu'", str(way)) for way in (3, "/folder",
         tx.int8())), (under_func(lambda x: Notes(x.sin(), [x])), T, "register the class"),
        *((under_func(f), T, "return a list") for f in (lambda x: (y for y in [x * 1]), lambda x: (x, map(abs, [x])),
         lambda x: {"a": iter([x])})),
        (lambda: tx.remat(lambda x: force(x) * Square.apply(x))(LEAF), R, "must override the setup_context"),
        (lambda: tx.remat(lambda x: NORM(x) * force(x))(LEAF.expand(3, 2)), R, "would mutate a captured Tensor"),
    ],
    "checkpoint_policies": [
        (lambda: policies.save_only_these_names("a", 3), T, "3"), (lambda: NAMES(**BOTH), V, "b cannot be both"),
        (lambda: NAMES(**{**BOTH, "names_which_can_be_saved": [3]}), T, "3"),
        (lambda: policies.offload_dot_with_no_batch_dims("device", "disk"), V, "'disk'"),
    ],
    "checkpoint_name": [(lambda: tx.checkpoint_name(LEAF, ""), T, "nonempty"), (lambda: tx.checkpoint_name(3, "x"), T, "int")],
    "saved_residuals": [
        (lambda: tx.saved_residuals(3), T, "fn must be a function"),
        *((lambda f=f: tx.saved_residuals(f, LEAF), V, "without values") for f in (
            lambda x: x.sin() if x.detach().sum() > 0 else x.cos(), lambda x: x * x.detach().sum().item(),
                lambda x: x * x.detach().tolist()[0],
            lambda x: x * float(x.detach().numpy().sum()), lambda x: x[x.detach().nonzero().squeeze(-1)].sin(), force)),
        (lambda: torch.func.grad(lambda x: tx.saved_residuals(torch.tanh, x).bytes or x.sum())(torch.ones(2)), V, "uses torch.func"),
    ],
}  # fmt: skip
RATES: dict[str, list[tuple[Any, ...]]] = {
    make.__name__: [
        (lambda make=make: make(-1.0), V, "lr", "-1.0"), (lambda make=make: make(scheduler()), T, "StepLR", "from_torch_scheduler"),
        (lambda make=make: make(torch.ones(2)), V, "lr", "(2,)"), (lambda make=make: make(torch.tensor(True)), V, "lr", "torch.bool"),
        *((lambda make=make, value=value: make(value), T, "lr", repr(value)) for value in ("x", None, [1], True, int)),
    ]
    for make in BY_RATE
}  # fmt: skip
