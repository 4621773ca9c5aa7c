"""Unusable arguments, and values that user functions may not return: a typed error that names the value.

For gradients and states transforms/test_optimizer_checks.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text

P = {"w": torch.ones(3)}
PIPE = tx.fuse(tx.mean("data"), tx.sgd(0.1))
Case = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]


def loss(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch).sum()  # type: ignore[no-any-return]


def run(loss_fn: Callable[..., Any] = loss, params: Any = P, buffers: Any = None, **options: Any) -> Any:
    step = fjoin.train_step(loss_fn, PIPE, **options)
    return step(step.init(params, buffers), torch.ones(3))[1]


def with_sum(value: Any) -> Case:
    return lambda: run(lambda p, b: (loss(p, b), {"sum": value})), TypeError, ("aux['sum']",)


def summed(value: Any) -> Callable[[], Any]:
    return lambda: run(lambda p, b: (loss(p, b), {"sum": {"a": value}}))


def weighed(value: Any) -> Callable[[], Any]:
    return lambda: run(weight=lambda b: value)


def reduced(**given: Any) -> Callable[[], Any]:
    def one_rank() -> Any:
        hook = tx.mean("data")
        return hook.update(torch.ones(2), hook.init(()), **given)

    return lambda: tx.simulate(one_rank, {"data": 2})


def sent(collective: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tx.simulate(collective, {"data": 2})


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), 1)


def under_inference_mode(first: bool) -> None:
    step = fjoin.train_step(loss, PIPE)
    state = None if first else step.init(P)
    with torch.inference_mode():
        step(step.init(P) if state is None else state, torch.ones(3))


def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 1)


MEAN, CLIP = tx.mean("data"), tx.clip_by_value(1.0)
NAN, INF = math.nan, math.inf
TWICE: Any = ("data", "data")

RATES: dict[str, Case] = {
    **{
        f"{make.__name__}({value!r})": (lambda make=make, value=value: make(value), TypeError, ("lr", repr(value)))
        for make in (tx.sgd, tx.adamw, tx.adafactor, tx.muon, tx.rprop, tx.lion)
        for value in ("x", None, [1], True, int)
    },
    "a torch scheduler as lr": (lambda: tx.sgd(scheduler()), TypeError, ("StepLR", "from_torch_scheduler")),
    "lr of several elements": (lambda: tx.adam(torch.ones(2)), ValueError, ("lr", "(2,)")),
    "lr of bool": (lambda: tx.adam(torch.tensor(True)), ValueError, ("lr", "torch.bool")),
    "momentum of a text": (lambda: tx.sgd(0.1, momentum="0.9"), TypeError, ("momentum", "'0.9'")),  # type: ignore[arg-type]
    "rho of a text": (lambda: tx.adadelta(rho="x"), TypeError, ("rho", "'x'")),  # type: ignore[arg-type]
    "steps of muon": (lambda: tx.muon(ns_steps=2.5), ValueError, ("ns_steps", "2.5")),  # type: ignore[arg-type]
    "eps of adafactor": (lambda: tx.adafactor(eps=1e-3), ValueError, ("eps", "0.001")),  # type: ignore[arg-type]
    "etas of rprop": (lambda: tx.rprop(etas=("a", 2)), ValueError, ("etas", "'a'")),  # type: ignore[arg-type]
    "step sizes of rprop": (lambda: tx.rprop(step_sizes=1.0), ValueError, ("step_sizes", "1.0")),  # type: ignore[arg-type]
}  # fmt: skip

MESHES: dict[str, Case] = {
    "train_step(mesh='data')": (lambda: fjoin.train_step(loss, PIPE, mesh="data"), TypeError, ("train_step: mesh", "'data'")),  # type: ignore[arg-type]
    "mesh('data')": (lambda: fjoin.mesh("data"), TypeError, ("'data'", "mapping")),  # type: ignore[arg-type]
    "mesh(['data'])": (lambda: fjoin.mesh(["data"]), TypeError, ("['data']", "mapping")),  # type: ignore[arg-type]
    "mesh(None)": (lambda: fjoin.mesh(None), TypeError, ("None", "mapping")),  # type: ignore[arg-type]
    "mesh({1: 1})": (lambda: fjoin.mesh({1: 1}), TypeError, ("{1: 1}",)),  # type: ignore[dict-item]
    "mesh(ordered='yes')": (lambda: fjoin.mesh({"data": 1}, ordered="yes"), TypeError, ("ordered", "'yes'")),  # type: ignore[arg-type]
    **{
        f"timeout_s={t!r}": (lambda t=t: fjoin.mesh({"data": -1}, timeout_s=t), ValueError, ("timeout_s", "seconds", repr(t)))
        for t in (-1, 0, NAN, INF, 1e30, "5", True, None)
    },
    "bind(None)": (lambda: fjoin.bind(None).__enter__(), TypeError, ("bind: mesh", "None", "fjoin.mesh")),  # type: ignore[arg-type]
    "evaluate(mesh='data')": (lambda: fjoin.evaluate(loss, [1], mesh="data"), TypeError, ("evaluate: mesh", "'data'")),  # type: ignore[arg-type]
    "evaluate(3)": (lambda: fjoin.evaluate(3, [1]), TypeError, ("metric_fn", "3")),  # type: ignore[arg-type]
    "evaluate(loader=3)": (lambda: fjoin.evaluate(loss, 3), TypeError, ("loader", "iterable", "3")),  # type: ignore[arg-type]
    "join(mesh='data')": (lambda: fjoin.join([1], mesh="data"), TypeError, ("join: mesh", "'data'")),  # type: ignore[call-overload]
    "join(3)": (lambda: list(fjoin.join(3)), TypeError, ("loader", "iterable", "3")),  # type: ignore[call-overload]
    "step.join(3)": (lambda: list(fjoin.train_step(loss, PIPE).join(3)), TypeError, ("loader", "iterable", "3")),  # type: ignore[arg-type]
}  # fmt: skip

STEPS: dict[str, Case] = {
    "donate='yes'": (lambda: fjoin.train_step(loss, PIPE, donate="yes"), TypeError, ("donate", "'yes'")),  # type: ignore[arg-type]
    "weight=3": (lambda: fjoin.train_step(loss, PIPE, weight=3), TypeError, ("weight", "function", "3")),  # type: ignore[arg-type]
    "params=None": (lambda: run(params=None), TypeError, ("params", "None")),
    "params of a module": (lambda: run(params=model()), TypeError, ("Linear", "fjoin.functional(module)")),
    "params of functional": (lambda: run(params=fjoin.functional(model())), TypeError, ("tuple", "fjoin.functional(module)")),
    "a generator": (lambda: run(params=model().parameters()), TypeError, ("params", "generator")),
    "params on meta": (lambda: run(params={"w": torch.ones(3, device="meta")}), ValueError, ("params['w']", "meta")),
    "sparse params": (lambda: run(params={"w": torch.ones(3).to_sparse()}), TypeError, ("params['w']", "sparse")),
    "buffers of a list": (lambda: run(buffers=[torch.ones(1)]), TypeError, ("buffers", "tensor([1.])")),
    "buffers of numbers": (lambda: run(buffers={"n": 3}), TypeError, ("buffers", "{'n': 3}")),
    "buffers and a loss of two": (lambda: run(buffers={"n": torch.ones(1)}), TypeError,
                                   ("with buffers", "loss_fn(params, buffers, batch)", "(params: 'Any', batch: 'Any')")),
    "a loss of three, no buffers": (lambda: run(lambda p, buffers, b: loss(p, b)), TypeError,
                                    ("without buffers", "loss_fn(params, batch)", "(p, buffers, b)")),
    "a loss of one": (lambda: run(lambda p: p["w"].sum()), TypeError, ("loss_fn(params, batch)", "(p)")),
    "buffers returned as a list": (lambda: run(lambda p, s, b: (loss(p, b), None, [1]), buffers={"n": torch.ones(1)}),
                                   TypeError, ("buffers", "[1]")),
    "init in inference_mode": (lambda: under_inference_mode(True), ValueError, ("init", "inference_mode")),
    "step in inference_mode": (lambda: under_inference_mode(False), ValueError, ("a step", "inference_mode")),
    "aux['sum'] of a list": with_sum([1]),
    "aux['sum'] of None": with_sum(None),
    "aux['sum'] by number": with_sum({3: 1.0}),
    "a text to be summed": (summed("1"), TypeError, ("aux['sum']['a']", "'1'")),
    "a vector to be summed": (summed(torch.ones(2)), ValueError, ("aux['sum']['a']", "(2,)")),
    "a complex number to be summed": (summed(torch.tensor(1j)), ValueError, ("aux['sum']['a']", "complex64")),
    "10**400 to be summed": (summed(10**400), ValueError, ("aux['sum']['a']", "1329 bits")),
    "1e300 to be summed": (summed(1e300), ValueError, ("'a'", "1e+300", "float32", "scale it")),
    "weight 10**400": (weighed(10**400), ValueError, ("weight(batch)", "finite", "1000000")),
    "weight 1e300": (weighed(1e300), ValueError, ("weight(batch)", "1e+300", "ratios")),
    "weight 1e-42": (weighed(1e-42), ValueError, ("weight(batch)", "1e-42", "ratios")),
    "weight '3'": (weighed("3"), TypeError, ("weight(batch)", "'3'")),
    "weight None": (weighed(None), TypeError, ("weight(batch)", "None")),
    "weight [1]": (weighed([1]), TypeError, ("weight(batch)", "[1]")),
    "weight of two": (weighed(torch.ones(2)), ValueError, ("weight(batch)", "scalar", "tensor([1., 1.])")),
    "weight 1j": (weighed(1j), TypeError, ("weight(batch)", "1j")),
    **{f"weight {w!r}": (weighed(w), ValueError, ("weight(batch)", "finite", repr(w))) for w in (-1, NAN, INF)},
}  # fmt: skip

TRANSFORMS: dict[str, Case] = {
    "stateless(3)": (lambda: tx.stateless(3), TypeError, ("stateless", "3")),  # type: ignore[arg-type]
    "masked(t, 3)": (lambda: tx.masked(CLIP, 3), TypeError, ("which", "3")),  # type: ignore[arg-type]
    "masked(t, ())": (lambda: tx.masked(CLIP, ()), ValueError, ("which", "()", "nothing")),
    "masked(t, [3])": (lambda: tx.masked(CLIP, [3]), TypeError, ("which", "[3]")),  # type: ignore[list-item]
    "partition of a list": (lambda: tx.partition([tx.sgd(0.1)]), TypeError, ("mapping", "sgd(lr=0.1)")),  # type: ignore[call-overload]
    "partition(None)": (lambda: tx.partition(None), TypeError, ("mapping", "None")),  # type: ignore[call-overload]
    "partition by number": (lambda: tx.partition({3: tx.sgd(0.1)}), TypeError, ("pattern", "3")),  # type: ignore[call-overload]
    "every, 500 deep": (lambda: functools.reduce(lambda t, _: tx.every(2, t), range(500), MEAN), ValueError, ("every", "101 deep")),
    "an argument is missing": (lambda: tx.fuse(tx.sgd(0.1)), TypeError, ("fuse", "'optimizer'", "hook, optimizer, after")),  # type: ignore[call-arg,arg-type]
    "an argument too many": (lambda: tx.adamw(1e-3, fused=True), TypeError, ("adamw", "'fused'", "betas")),  # type: ignore[call-arg]
    **{
        f"{make.__name__}({axis!r})": (lambda make=make, axis=axis: make(axis), kind, (text,))
        for make in (tx.mean, tx.sum_over, tx.average_buffers, tx.broadcast_buffers,
                     tx.power_sgd, tx.batched_power_sgd, tx.broadcast_from_last, lambda axis: tx.compress(tx.int8(), tx.mean(axis)))
        for axis, kind, text in ((3, TypeError, "got 3"), (None, TypeError, "got None"), (["data"], TypeError, "['data']"),
                                 (TWICE, ValueError, "('data', 'data') names an axis twice"), ((), ValueError, "at least one axis"))
    },
    "hierarchical_mean(3, ...)": (lambda: tx.hierarchical_mean(3, "node"), ValueError, ("local", "3")),  # type: ignore[arg-type]
    "a mean of weight 10**400": (reduced(weight=10**400), ValueError, ("weight", "finite")),
    "a mean of weight 1e300": (reduced(weight=1e300), ValueError, ("weight", "1e+300")),
    "a mean of weight 'x'": (reduced(weight="x"), TypeError, ("weight", "'x'")),
}  # fmt: skip

COLLECTIVES: dict[str, Case] = {
    **{
        f"{name} over {axis!r}": (lambda call=call, axis=axis: call(axis), kind, (text,))
        for name, call in {
            "psum": lambda a: tx.psum(1.0, a), "pmean": lambda a: tx.pmean(1.0, a), "pmax": lambda a: tx.pmax(1.0, a),
            "pmin": lambda a: tx.pmin(1.0, a), "all_gather": lambda a: tx.all_gather(1.0, a), "axis_size": tx.axis_size,
            "axis_index": tx.axis_index, "psum_scatter": lambda a: tx.psum_scatter(torch.ones(4), a),
        }.items()
        for axis, kind, text in ((TWICE, ValueError, "names an axis twice"), (3, TypeError, "got 3"), (None, TypeError, "got None"))
    },
    **{
        f"{name} of {dtype}": (lambda call=call, dtype=dtype: call({"a": torch.ones(2).to(dtype)}), TypeError, ("'a'", str(dtype)))
        for name, call in {
            "psum": lambda x: tx.psum(x, "data"), "pmax": lambda x: tx.pmax(x, "data"), "all_gather": lambda x: tx.all_gather(x, "data"),
            "pbroadcast": lambda x: tx.pbroadcast(x, "data", 0), "psum_scatter": lambda x: tx.psum_scatter(x, "data"),
            "all_to_all": lambda x: tx.all_to_all(x, "data"), "ppermute": lambda x: tx.ppermute(x, "data", [(0, 1)]),
        }.items()
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn)
    },
    "pmax of complex": (lambda: tx.pmax(torch.ones(3) * 1j, "data"), TypeError, ("complex64", "order")),
    "psum of sparse": (lambda: tx.psum(torch.ones(3).to_sparse(), "data"), TypeError, ("sparse", "to_dense")),
    "psum of a text": (lambda: tx.psum("x", "data"), TypeError, ("'x'", "tensors and numbers")),
    "pbroadcast from True": (lambda: tx.pbroadcast(1.0, "data", True), ValueError, ("source", "True")),
    "pbroadcast from 1.0": (lambda: tx.pbroadcast(1.0, "data", 1.0), ValueError, ("source", "1.0")),  # type: ignore[arg-type]
    "ppermute of ranks": (lambda: tx.ppermute(1.0, "data", [1]), TypeError, ("perm", "pairs", "[1]")),  # type: ignore[list-item]
}  # fmt: skip

SIZES: dict[str, Case] = {
    **{case: (sent(call), kind, parts) for case, (call, kind, parts) in COLLECTIVES.items()},
    **{
        f"explain over {n!r} ranks": (lambda n=n: tx.explain(PIPE, P, {"data": n}), ValueError, ("'data'", repr(n)))
        for n in (0, -2, 1.5, True, "2", None, 10**30, 2**21)
    },
    "explain over 'data'": (lambda: tx.explain(PIPE, P, "data"), TypeError, ("mapping", "'data'")),  # type: ignore[arg-type]
    "explain over nothing": (lambda: tx.explain(PIPE, P, {}), ValueError, ("{'data': 4}",)),
    "explain of a number": (lambda: tx.explain(PIPE, {"w": 3}, {"data": 2}), TypeError, ("params['w']", "3", "tensor")),
    "explain of whole numbers": (lambda: tx.explain(PIPE, {"w": torch.ones(3).int()}, {"data": 2}), TypeError, ("params['w']", "int32")),
    "explain in buckets of 0": (lambda: tx.explain(PIPE, P, {"data": 2}, bucket_bytes=0), ValueError, ("bucket_bytes", "0")),
    "explain in buckets of '1'": (lambda: tx.explain(PIPE, P, {"data": 2}, bucket_bytes="1"), ValueError, ("bucket_bytes", "'1'")),  # type: ignore[arg-type]
    **{
        f"{n!r} simulated ranks": (lambda n=n: tx.simulate(lambda: 1, {"data": n}), ValueError, ("'data'", repr(n)))
        for n in (0, -2, 1.5, True, "2", None, 10**30, 4097)
    },
    "simulate(3)": (lambda: tx.simulate(3, {"data": 2}), TypeError, ("function", "3")),  # type: ignore[arg-type]
    "simulate of a number": (lambda: tx.simulate(lambda x: x, {"data": 2}, 3), TypeError, ("argument 0", "3")),  # type: ignore[arg-type]
    "a sparse state": (lambda: tx.from_state_dict(P, {"w": torch.ones(3).to_sparse()}), TypeError, ("'w'", "sparse")),
    "a state on meta": (lambda: tx.from_state_dict(P, {"w": torch.ones(3, device="meta")}), TypeError, ("'w'", "meta")),
}  # fmt: skip

CASES = {**RATES, **MESHES, **STEPS, **TRANSFORMS, **SIZES}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str) -> None:
    function, kind, parts = CASES[case]
    raises_text(kind, function, *parts)


def test_nothing_is_lost_by_an_error_in_a_step() -> None:
    """The state is unchanged, and the next step takes it."""
    weights = iter((1.0, 1e300, "3", 1.0))
    sums = iter((1.0, 1e300, 1.0))
    step = fjoin.train_step(lambda p, b: (loss(p, b), {"sum": {"a": next(sums)}}), PIPE, weight=lambda b: next(weights))  # type: ignore[arg-type,return-value]
    state, _ = step(step.init(P), torch.ones(3))
    before = {path: p.clone() for path, p in state.params.items()}
    raises_text(ValueError, lambda: step(state, torch.ones(3)), "weight(batch)")
    raises_text(TypeError, lambda: step(state, torch.ones(3)), "weight(batch)")
    raises_text(ValueError, lambda: step(state, torch.ones(3)), "1e+300")
    assert max_diff(state.params, before) == 0


@pytest.mark.long
def test_values_just_within_the_limits_are_accepted() -> None:
    for weight in (1e-30, 1e30, torch.tensor(2.0), True, 0):
        assert run(weight=lambda b, w=weight: w).loss == pytest.approx(3.0 if weight else NAN, rel=1e-6, nan_ok=True)
    assert run(lambda p, b: (loss(p, b), {"sum": {"a": 1e40}})).sums == {"a": pytest.approx(1e40, rel=1e-6)}
    assert tx.explain(PIPE, P, {"data": 2**20}).messages == 1
    assert len(tx.simulate(lambda: tx.axis_size("data"), {"data": 300})) == 300
    assert fjoin.mesh({"data": 1}, timeout_s=0.5).size == 1


def on_real_ranks() -> None:
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for function, kind, parts in COLLECTIVES.values():
            raises_text(kind, function, *parts)


def test_real_ranks_refuse_the_same(pool: Any) -> None:
    pool.run(2, on_real_ranks)
