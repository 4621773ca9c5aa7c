"""Unusable arguments, states and values, by public name: a typed error that says which. Others are in tests/test_bad_input.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fjoin
from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from fjoin.transforms.reductions._mean import coded_sum
from tests.helpers import params_like, raises_text

from .remat.functions import Notes
from .remat.operations import Square

NODES = {"node": 2, "local": 2}


def on(call: Callable[..., Any], *given: Any, **axes: int) -> Callable[[], Any]:
    """The call on simulated ranks, two of "data" if no axes are given."""
    return lambda: tx.simulate(call, axes or {"data": 2}, *given)


X, LEAF = torch.ones(4, 3), torch.ones(2, requires_grad=True)
SGD, MEAN, INT8, NORM = tx.sgd(0.1), tx.mean("data"), tx.int8(), nn.BatchNorm1d(2)
CODED = tx.compress(INT8, MEAN)
FED, PARAMS = tx.error_feedback(CODED), {"a": torch.zeros(9), "b": torch.zeros(1)}


def of(call: Callable[..., Any]) -> Callable[[], Any]:
    """A collective of a (4, 3) leaf on three ranks."""
    return on(lambda: call(X), data=3)


def split(gives: Any, takes: Any, x: Any = None) -> Callable[[], Any]:
    """Row counts by rank, of three rows."""

    def one_rank(give: Any, take: Any) -> Any:
        tree = {"k": torch.ones(3)} if x is None else x
        return tx.all_to_all_single(tree, "data", input_split_sizes=give, output_split_sizes=take)

    return on(one_rank, gives, takes)


def updated(make: Callable[[], Any], grads: Any, params: Any = None, **axes: int) -> Callable[[], Any]:
    def one_rank() -> Any:
        hook = make()
        return hook.update(grads, hook.init(grads if params is None else params))

    return on(one_rank, **axes)


def complex_of(make: Callable[[], Any]) -> Callable[[], Any]:
    return updated(make, {"w": torch.ones(3, dtype=torch.complex64)}, {"w": torch.ones(3)}, data=2, node=2)


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


def deep() -> Any:
    return functools.reduce(lambda hook, _: tx.every(2, hook), range(100), MEAN)


def named_mean() -> Any:
    def mean(axis: str) -> Any:
        return tx.identity()

    return tx.factory(mean)


def twice(hook: Any) -> Callable[[], Any]:
    return lambda: tx.compress(tx.int4(), hook)


def quantized(name: str, *args: Any) -> Callable[[], Any]:
    return on(lambda: tx.quantized(getattr(tx, name), tx.int8())({"w": torch.ones(3, 2)}, *args))


SPLITS = [(1, 2), (2, 1)]
MOMENTUM = tx.sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)})
SAVED = tx.to_state_dict(MOMENTUM)
NAMES = policies.save_and_offload_only_these_names
BOTH = {"names_which_can_be_saved": ["a", "b"], "names_which_can_be_offloaded": ["b"]}
BY_RATE = (tx.sgd, tx.adam, tx.adamw, tx.nadam, tx.radam, tx.adamax, tx.adagrad, tx.adadelta, tx.adafactor, tx.rmsprop, tx.rprop, tx.asgd,
    tx.lion, tx.lamb, tx.muon)  # fmt: skip
V, T, R = ValueError, TypeError, RuntimeError
# Public name -> the call, the type of its error, and words of its text.
ROWS: dict[str, list[tuple[Any, ...]]] = {
    # -- axes
    "psum": [(of(lambda x: tx.psum(x, "node")), tx.UnboundAxis, "'node'", "['data']", "fjoin.mesh"),
    (of(lambda x: tx.psum(x, 3)), T, "named by a string")],
    "psum_scatter": [
        (of(lambda x: tx.psum_scatter({"k": x}, "data")), V, "'k'", "(4, 3)", "dimension 0", "size 3"),
        (of(lambda x: tx.psum_scatter(x, "data", tiled=True)), V, "a multiple of 3"),
    ],
    "all_to_all": [(of(lambda x: tx.all_to_all(x, "data", 5)), V, "dimension 5")],
    "all_gather": [(of(lambda x: tx.all_gather({"a": x}, "data", dim=5)), V, "dim is 5")],
    "pbroadcast": [(of(lambda x: tx.pbroadcast(x, "data", 3)), V, "0 to 2", "3")],
    "ppermute": [
        (of(lambda x: tx.ppermute(x, "data", [(0, 1), (0, 2)])), V, "source twice"),
        (of(lambda x: tx.ppermute(x, "data", [(0, 3)])), V, "target outside axis 'data'"),
    ],
    "pmax": [(of(lambda x: torch.func.grad(lambda x: tx.pmax(x, "data").sum())(x)), T, "pmax has no gradient")],
    "all_to_all_single": [
        (split([(1, 2)] * 2, [None] * 2), V, "output_split_sizes", "None", "both"),
        (split([(3,)] * 2, [(3,)] * 2), V, "input_split_sizes", "2 ranks", "(3,)"),
        (split([(4, -1)] * 2, SPLITS), V, "at least 0", "(4, -1)"),
        (split([(1.5, 1.5)] * 2, SPLITS), V, "whole number", "1.5"),
        (split([(1, 1)] * 2, [(1, 1)] * 2), V, "'k'", "(3,)", "must be 2"),
        (split(SPLITS, SPLITS, {"z": torch.ones(())}), V, "'z'", "()"),
        (split(SPLITS, [(2, 2), (2, 1)]), V, "rank 0", "sends itself 1 rows", "takes 2"),
        (split(SPLITS, [(1, 4), (2, 1)]), tx.CollectiveMismatch, "rank 1 sends 2 rows to rank 0, which takes 4"),
    ],
    "simulate": [
        (on(lambda: (tx.pmax if tx.axis_index("data") == 1 else tx.psum)(torch.ones(2), "data"), data=3), tx.CollectiveMismatch,
         "axis 'data'",
         "rank 0 calls psum(float32[2])", "rank 1 calls pmax(float32[2])"),
        (on(lambda: tx.psum(torch.ones(3 if tx.axis_index("data") == 2 else 2), "data"), data=3), tx.CollectiveMismatch,
         "psum(float32[2])",
         "rank 2 calls psum(float32[3])"),
        (on(lambda: tx.axis_index("data") != 1 and tx.psum(torch.ones(2), "data"), data=3), tx.CollectiveMismatch,
         "rank 0 waits in psum(float32[2]) over 'data'", "rank 1 has returned"),
        (on(lambda: tx.pbroadcast(torch.ones(1), "data", int(tx.axis_index("data")))), tx.CollectiveMismatch, "pbroadcast(float32[1], 0)",
         "[1], 1)"),
        (on(lambda: fjoin.mesh({"rows": 2})), V, "inside simulate", "'data': 2"),
        (on(lambda: fjoin.mesh({"data": 3})), V, "does not fit 2 ranks"),
    ],
    # -- codecs and reductions
    "top_k": [
        *((lambda k=k: tx.top_k(k), V, "k must be", repr(k)) for k in (0, 1.5, True, "1")),
        (lambda: tx.top_k(5).encode(torch.ones(1, 4)), V, "k is 5", "4 elements"), (lambda: tx.top_k(0.5, tx.int8), T, "Codec"),
    ],
    "qsgd": [(lambda: tx.qsgd(0), V, "levels", "0"), (lambda: tx.qsgd(128), V, "levels", "128"),
    (lambda: tx.qsgd().keyed(0.5, 0), V, "seed", "0.5")],
    "sign": [(lambda: tx.sign(0), V, "block must be"), (lambda: tx.uint8(0), V, "block must be"), (lambda: tx.int8(None), V, "block")],
    "int8": [(lambda make=make: make(stochastic=3), T, "stochastic", "3") for make in (tx.int8, tx.int4, tx.fp8, tx.bfloat16)],
    "compress": [
        *((lambda seed=seed: tx.compress(INT8, MEAN, seed=seed), V, "seed", repr(seed)) for seed in (0.5, True, None)),
        (lambda: tx.compress(tx.qsgd().keyed(7, 0), MEAN), V, "has a key", "keyed(qsgd(), 7, 0)"),
        (on(lambda: coded_sum("data", tx.qsgd(), torch.ones(4))), V, "stochastic", "compress"),
        *((twice(hook), T, "int4()", "int8()", "leave one") for hook in (CODED, FED, tx.switch_after(5, MEAN, CODED))),
        (complex_of(lambda: CODED), T, "'w' is complex", "view_as_real"),
    ],
    "hierarchical_mean": [
        (lambda: tx.hierarchical_mean("data", "data"), V, "two axes", "'data'"),
        (lambda: tx.hierarchical_mean("local", "node", over="all"), V, "over", "'all'"),
        (complex_of(lambda: tx.hierarchical_mean("data", "node")), T, "'w' is complex", "view_as_real"),
    ],
    "error_feedback": [
        (lambda: tx.error_feedback(MEAN), T, "mean('data')", "compress(codec, mean(axis))"),
        (lambda: tx.error_feedback(tx.chain(FED, tx.clip_by_value(1.0))), T, "nothing in chain(error_feedback", "is lost"),
        (lambda: tx.error_feedback(tx.partition({"a": MEAN, "*": FED})), T, "nothing in partition(", "is lost"),
        (updated(lambda: tx.error_feedback(tx.compress(INT8, tx.mean(("node", "local")))), torch.ones(2),
        **NODES), V, "one axis", "chain"),
        (updated(lambda: tx.error_feedback(tx.chain(*(tx.compress(INT8, tx.mean(axis)) for axis in NODES))), torch.ones(2), **NODES), V,
         "twice", "chain(error_feedback(a), error_feedback(b))"),
        (updated(lambda: FED, {"w": torch.ones(4)}, {"w": torch.ones(3)}), V, "'w'", "(3,)", "(4,)"),
    ],
    "quantized": [
        (lambda: tx.quantized(tx.pmax, INT8), T, "pmax", "all_gather", "compress"),
        (lambda: tx.quantized(MEAN, INT8), T, "mean('data')", "compress(codec, hook)"),
        (lambda: tx.quantized(tx.psum, tx.int8), T, "int8", "quantized(psum, int8())"),
        (lambda: tx.quantized(tx.psum, INT8)(1.0, "data", dims=2), T, "dims"),
        (quantized("all_to_all", "data"), V, "all_to_all", "'w'"), (quantized("all_to_all", ("data",)), T, "('data',)"),
        (quantized("psum", "nowhere"), tx.UnboundAxis, "nowhere"),
        (on(lambda: tx.quantized(tx.psum, tx.qsgd())(torch.ones(3), "data")), V, "qsgd()", "keyed(seed, step)"),
    ],
    "power_sgd": [
        *((lambda rank=rank: tx.power_sgd("data", rank), V, "rank", "at least 1", repr(rank)) for rank in (0, 1.5, True)),
        *((lambda rate=rate: tx.power_sgd("data", min_compression_rate=rate), V, "min_compression_rate", repr(rate)) for rate in (0.0,
         float("nan"), "2")),
        (lambda: tx.power_sgd("data", epsilon=-1e-8), V, "epsilon", "-1e-08"),
        (lambda: tx.power_sgd("data", warmup_steps=-1), V, "warmup_steps"),
        (lambda: tx.power_sgd("data", seed=0.5), V, "seed", "0.5"), (lambda: tx.power_sgd("data", warm_start=1), T, "warm_start", "1"),
        (lambda: tx.batched_power_sgd("data", over="all"), V, "over", "'all'"),
        (complex_of(lambda: tx.power_sgd("data")), T, "'w' is complex"),
        (updated(lambda: tx.power_sgd("data"), {"a": torch.ones(9, 8)}, {"a": torch.ones(9, 7)}), V, "'a'", "(1, 8)", "another rank"),
    ],
    "mean": [
        *((on(lambda given=given: MEAN.update(torch.ones(2),
        (), weight=given), data=1), T, "must be a number") for given in (1j, torch.tensor(1j))),
        (on(lambda: MEAN.update(torch.ones(2), (), weight=torch.ones(2)), data=1), V, "must be a scalar"),
    ],
    "scatter_mean": [(lambda: tx.scatter_mean(("node", "local")), T, "one axis", "chain(scatter_mean")],
    "tap": [(lambda: tx.tap(3), T, "3")],
    "convert_sync_batchnorm": [(lambda: tx.convert_sync_batchnorm(nn.BatchNorm2d(3))(torch.ones(2, 3, 1, 1)), tx.UnboundAxis, "data")],
    # -- pipelines
    "fuse": [
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), tx.scatter_mean("local")), SGD), V, "shards twice"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), tx.power_sgd("node")), SGD), V, "power_sgd", "behind"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), MEAN), SGD), V, "mean('data')", "different pieces"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("local"), tx.compress(torch.bfloat16, tx.mean(("node", "local")))), SGD), V,
         "over 'local'", "different pieces"),
        (lambda: tx.fuse(tx.every(2, tx.scatter_mean("data")), SGD), V, "every", "cannot hold"),
        (lambda: tx.fuse(tx.masked(tx.scatter_mean("data"), "a"), SGD), V, "masked", "cannot hold"),
        (lambda: tx.fuse(tx.scatter_mean("data"), SGD, MEAN), V, "mean('data')", "different pieces"),
        (lambda: tx.fuse(MEAN, SGD, gather_codec=INT8), V, "gather_codec=int8", "no scatter_mean"),
        (lambda: tx.fuse(MEAN, SGD, on_state=SGD), T, "on_state", "sgd"),
    ],
    "zero": [
        (lambda: tx.zero(tx.mean("node"), SGD, "data"), V, "no mean over 'data'"),
        (lambda: tx.zero(MEAN, SGD, "data").init(PARAMS), tx.UnboundAxis, "'data'", "fjoin.bind"),
        (on(lambda: tx.zero(MEAN, SGD, "data").init({"a.b": torch.ones(3), "a": {"b": torch.ones(4)}})), V, "have the paths ['a.b']"),
        (on(lambda: tx.zero(MEAN, tx.muon(0.1), "data").init({"w": torch.ones(3, 4), "b": torch.ones(3)})), V, "matrices only", "'b'"),
    ],
    "local_sgd": [
        (lambda: tx.local_sgd(SGD, MEAN, 0), V, "every", "got 0"), (lambda: tx.local_sgd(MEAN, MEAN, 2), T, "Optimizer"),
        (lambda: tx.local_sgd(SGD, MEAN, 2, state="forget"), V, "'keep' or 'average'", "'forget'"),
        (lambda: tx.local_sgd(SGD, tx.chain(MEAN, tx.mean("a")), 2, state="average"), V, "one mean", "chain("),
        (lambda: tx.local_sgd(SGD, "data", 2), T, "local_sgd: reduction", "'data'", "mean('data')"),
        *((lambda opt=opt: tx.local_sgd(opt, MEAN, 2, state="average").init({"w": torch.ones(2)}), T, name, "'w'")
          for opt, name in ((tx.nadam(), "mu_product"), (tx.asgd(), "eta"))),
    ],
    "post_local_sgd": [
        (lambda: tx.post_local_sgd(SGD, MEAN, 2, -1), V, "warmup_steps", "got -1"),
        (lambda: tx.post_local_sgd(SGD, tx.mean("a"), 4, 2, local=tx.mean("b")), V, "local=", "hook="),
    ],
    "diloco": [
        (lambda: tx.diloco(SGD, MEAN, 4, delay=4), V, "delay must be below every=4", "got 4"),
        (lambda: tx.diloco(SGD, MEAN, 4, mix=1.0), V, "mix", "1.0"),
        (lambda: tx.diloco(SGD, MEAN, 4, mix="a"), V, "mix", "'a'"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=5), V, "5 fragments", "every=4"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=0), V, "fragments", "got 0"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=[]), V, "fragments", "got 0"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=["*", "b", "*"]), V, "['*'] more than once"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments="wa"), T, "list of glob patterns", "'wa'", "['wa']"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=["a", 3]), T, "a fragment", "got 3"),
        (lambda: tx.diloco(SGD, MEAN, 9, fragments=3).init(PARAMS), V, "3 fragments", "got 2", "'a', 'b'"),
        (lambda: tx.diloco(SGD, MEAN, 9, fragments=("a*",)).init(PARAMS), V, "'b'"),
        (lambda: tx.diloco(SGD, MEAN, 9, fragments=("a*", "b*", "c*")).init(PARAMS), V, "match no path", "c*"),
    ],
    "outer_step": [
        (lambda: tx.outer_step(tx.identity(), SGD), T, "identity()", "no reduction"),
        (lambda: tx.outer_step(tx.masked(MEAN, "w"), SGD), T, "no reduction"),
        (lambda: tx.outer_step(MEAN, MEAN), T, "Optimizer", "mean('data')"),
    ],
    "ema": [(lambda: tx.ema(1.0), V, "decay", "got 1.0")],
    "every": [
        (lambda: tx.every(4, MEAN, first=-1), V, "first", "got -1"),
        (lambda: tx.every(4, MEAN, except_every=0), V, "except_every", "got 0"),
        (deep, V, "every", "101 deep", "at most 100"),
    ],
    "accumulate": [(updated(lambda: tx.masked(tx.accumulate(2, tx.identity()), "w"), {"w": torch.ones(2)}), V,
        "put accumulate around it")],
    "Transform": [
        (lambda: tx.Transform(lambda params: 1, lambda g, s: (g, s), "leaf"), T, "Needs.LEAVES", "'leaf'"),
        (lambda: tx.Transform(lambda params: (), lambda g: g), T, "update(grads, state", "takes 1"),
    ],
    "factory": [(named_mean, V, "'mean' exists already")],
    # -- optimizers and states
    **{make.__name__: [(lambda make=make: make(-1.0), V, "lr", "-1.0")] for make in BY_RATE},
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
        (lambda: tx.warmup(-1, tx.linear(0.1, 0.0, 3)), V, "warmup_steps", "-1"),
        (lambda: tx.from_torch_scheduler(lambda o: lr_scheduler.StepLR(o, 1), 0.1, 0), V, "total_steps", "0"),
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
        (loaded(MOMENTUM, {**SAVED, "x": 1}), V, "'x'", "w.momentum"), (loaded(MOMENTUM, {}), V, "[]", "w.step"),
        (loaded(MOMENTUM, {**SAVED, "w.momentum": torch.zeros(3)}), V, "'w.momentum'", "(3,)", "(2,)"),
        (loaded(MOMENTUM, {**SAVED, "w.momentum": 3}), T, "'w.momentum'", "expected a tensor"),
        (loaded(MOMENTUM, None), T, "mapping", "None"),
        (loaded(MOMENTUM, {0: 1, "b": 2}), V, "['0', 'b']"), (loaded({}, {"a": 1, "b.c": 2}), V, "['a', 'b.c']", "here it has []"),
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
         tx.int8())),
        (under_func(lambda x: Notes(x.sin(), [x])), T, "register the class"),
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


@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused(name: str) -> None:
    for call, kind, *words in ROWS[name]:
        raises_text(kind, call, *words)
