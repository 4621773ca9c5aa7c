"""Bad input: a clear error on every rank, parameters unchanged, nothing hung."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.training.small import MEAN_SGD, product, step_of

X = torch.ones(2)


@pytest.mark.parametrize(
    ("make", "kind", "texts"),
    [
        (lambda: fjoin.train_step(None, MEAN_SGD), TypeError, ["loss_fn must be a function", "None"]),
        (lambda: fjoin.train_step(product, tx.mean("data")), TypeError, ["pipeline must be a Pipeline", "fuse(hook, optimizer)"]),
        (lambda: fjoin.train_step(product, tx.sgd(0.1)), TypeError, ["pipeline must be a Pipeline"]),
        (lambda: fjoin.train_step(product, MEAN_SGD, accumulate=0), ValueError, ["accumulate", "at least 1", "0"]),
        (lambda: fjoin.train_step(product, MEAN_SGD, bucket_bytes=0), ValueError, ["bucket_bytes", "at least 1"]),
        (lambda: fjoin.train_step(product, tx.fuse(tx.accumulate(2, tx.mean("data")), tx.sgd(0.1))), ValueError, ["accumulate=k"]),
        (lambda: fjoin.train_step(product, tx.fuse(tx.mean("rows"), tx.sgd(0.1))), NameError, ["'rows'", "['data']"]),
        (lambda: fjoin.mesh({}), ValueError, ["at least one axis"]),
        (lambda: fjoin.mesh({"data": 2}), ValueError, ["does not fit 1 ranks"]),
        (lambda: fjoin.mesh({"a": -1, "b": -1}), ValueError, ["one of them may be -1"]),
        (lambda: fjoin.mesh({"a": 0}), ValueError, ["does not fit"]),
        (lambda: fjoin.mesh({"a": torch.ones(2)}), ValueError, ["does not fit", "tensor"]),
        (lambda: fjoin.functional(torch.ones(1)), TypeError, ["nn.Module"]),
        (lambda: tx.chain(tx.sgd(0.1), tx.mean("data")), TypeError, ["argument 0", "an optimizer comes last"]),
        (
            lambda: tx.chain(tx.accumulate(2, tx.identity()), tx.mean("data")),
            ValueError, ["after accumulate", "accumulate(steps, chain(...))"],
        ),
        (
            lambda: tx.chain(tx.skip_if_nonfinite(tx.accumulate(2, tx.identity())), tx.mean("data")),
            ValueError, ["after accumulate", "accumulate(steps, chain(...))"],
        ),
        (lambda: tx.chain(tx.mean), TypeError, ["forget to call the factory"]),
        (lambda: tx.chain(MEAN_SGD), TypeError, ["pipeline is complete already"]),
        (lambda: tx.fuse(tx.mean("data"), tx.mean("data")), TypeError, ["optimizer must be an Optimizer", "fuse(hook, optimizer)"]),
        (lambda: tx.fuse(tx.sgd(0.1), tx.mean("data")), TypeError, ["an optimizer comes last"]),
        (lambda: tx.fuse(tx.mean("data"), tx.sgd(0.1), after=3), TypeError, ["fuse: after", "3"]),
        (lambda: tx.partition({}), ValueError, ["at least one pattern"]),
        (lambda: tx.partition({"*": 3}), TypeError, ["'*'", "3"]),
        (lambda: tx.partition({"a": tx.sgd(0.1), "*": tx.mean("data")}), TypeError, ["must be a Transform"]),
        (lambda: tx.mean("data", over="ranks"), ValueError, ["'weight', 'live' or 'world'", "'ranks'"]),
        (lambda: tx.switch_after(-1, tx.identity(), tx.identity()), ValueError, ["step", "-1"]),
        (lambda: tx.every(0, tx.identity()), ValueError, ["steps", "0"]),
        (lambda: tx.accumulate(1.5, tx.identity()), ValueError, ["steps", "1.5"]),
        (lambda: tx.skip_if_nonfinite(tx.sgd(0.1)), TypeError, ["fuse(hook, optimizer)"]),
        (lambda: tx.clip_by_global_norm(0), ValueError, ["max_norm", "0"]),
        (lambda: tx.clip_by_value(-1.0), ValueError, ["max_value", "-1.0"]),
        (lambda: tx.clip_by_global_norm("1"), ValueError, ["max_norm must be a number", "'1'"]),
        (lambda: tx.dynamic_loss_scale(MEAN_SGD, init_scale="1"), ValueError, ["init_scale", "'1'"]),
        (lambda: tx.dynamic_loss_scale(MEAN_SGD, backoff_factor=None), ValueError, ["backoff_factor", "None"]),
        (lambda: tx.dynamic_loss_scale(MEAN_SGD, growth_factor=None), ValueError, ["growth_factor", "None"]),

        (lambda: tx.masked(3, "*"), TypeError, ["3"]),
        (lambda: tx.power_sgd("data").init({"a": {"b": X}, "a.b": X}), ValueError, ["several leaves", "'a.b'", "rename"]),
        (lambda: tx.stateless(torch.sign, elementwise="tree"), TypeError, ["elementwise", "'tree'"]),
        (lambda: tx.sgd(-0.1), ValueError, ["lr", "-0.1"]),
        (lambda: tx.sgd(0.1, nesterov=True), ValueError, ["nesterov needs momentum"]),
        (lambda: tx.adamw(0.1, betas=(0.9, 1.0)), ValueError, ["betas", "1.0"]),
        (lambda: tx.adam(0.1, eps=-1e-8), ValueError, ["eps"]),
        (lambda: tx.warmup_cosine(0.1, 10, 10), ValueError, ["total_steps", "11"]),
        (lambda: tx.explain(3, {}, {"data": 2}), TypeError, ["takes a pipeline or a transform"]),
        (lambda: tx.simulate(lambda: None, {}), ValueError, ["axes is empty"]),
        (lambda: tx.simulate(lambda: None, {"data": 0}), ValueError, ["'data'", "at least 1"]),
        (lambda: tx.simulate(lambda x: x, {"data": 2}, [1]), ValueError, ["1 values for 2 ranks"]),
        (lambda: tx.psum(torch.ones(1), "rows"), tx.UnboundAxis, ["'rows'", "Bound here: []", "fjoin.bind", "simulate"]),
    ],
)  # fmt: skip
def test_raises_on_bad_arguments(make: Any, kind: Any, texts: list[str]) -> None:
    raises_text(kind, make, *texts)


@pytest.mark.parametrize(
    ("params", "kind", "texts"),
    [
        ({"w": torch.ones(2, dtype=torch.int64)}, TypeError, ["params['w']", "int64"]),
        ({"w": torch.ones(2, dtype=torch.complex64)}, TypeError, ["params['w']", "complex64", "view_as_real"]),
        ({"w": torch.ones(2).to_sparse()}, TypeError, ["params['w']", "sparse"]),
        ({"w": 3.0}, TypeError, ["params['w']", "float"]),
        (
            {"w": torch.ones(2), "v": torch.ones(2, device="meta")},
            ValueError,
            ["params['v'] lies on meta", "params['w'] on cpu", "fjoin.join(loader)"],
        ),
        ({"w": TwoTensor(torch.ones(2), torch.ones(2))}, TypeError, ["params['w']", "TwoTensor", "fjoin.join(loader)"]),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ValueError, ["'a.b'", "rename"]),
    ],
)
def test_parameters_that_cannot_be_trained(params: Any, kind: Any, texts: list[str]) -> None:
    step = fjoin.train_step(product, MEAN_SGD)
    raises_text(kind, lambda: step.init(params), *texts)


@pytest.mark.parametrize(
    ("loss", "kind", "texts"),
    [
        (lambda p, b: p["w"] * b, ValueError, ["0-d floating-point loss", "(2,)"]),
        (lambda p, b: 3.0, ValueError, ["0-d floating-point loss", "3.0"]),
        (lambda p, b: b.sum(), ValueError, ["does not depend on params"]),
        (lambda p, b: ((p["w"] * b).sum(), 1, 2), TypeError, ["loss or (loss, aux)", "3 values"]),
        (lambda p, b: ((p["w"] * b).sum(), {"sum": {"n": "x"}}), TypeError, ["aux['sum']['n']", "'x'"]),
        (lambda p, b: ((p["w"] * b).sum(), {"sum": {"n": torch.ones(2)}}), ValueError, ["aux['sum']['n']", "(2,)"]),
    ],
)
def test_losses_that_cannot_be_used(loss: Any, kind: Any, texts: list[str]) -> None:
    step, state = step_of(loss)
    raises_text(kind, lambda: step(state, X), *texts)
    assert torch.equal(state.params["w"], torch.ones(2))


@pytest.mark.parametrize("rows", [2, 2_000_000])
def test_sparse_gradients_are_refused(rows: int) -> None:
    """This holds in a bucket with other leaves and in a separate message."""

    def loss(params: Any, batch: Any) -> Tensor:
        return torch.nn.functional.embedding(torch.tensor([0]), params["table"], sparse=True).sum()

    step = fjoin.train_step(loss, MEAN_SGD)
    state = step.init({"table": torch.ones(rows, 1)})
    raises_text(TypeError, lambda: step(state, None), "'table'", "sparse", "to_dense")
    assert torch.equal(state.params["table"], torch.ones(rows, 1))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_used(weight: float) -> None:
    step, state = step_of(weight=lambda _: weight)
    raises_text(ValueError, lambda: step(state, X), "weight(batch) must be a finite number", repr(weight))
    hook = tx.mean("data")
    run = lambda g: hook.update(g, hook.init(g), weight=weight)  # noqa: E731
    raises_text(ValueError, lambda: tx.simulate(run, {"data": 1}, [X]), "weight must be a finite number", repr(weight))


def test_raises_on_bad_states_and_gradients() -> None:
    step, state = step_of()
    raises_text(TypeError, lambda: step({"w": X}, X), "from step.init", "dict")
    pipeline, params = MEAN_SGD, {"w": X}
    with fjoin.bind(fjoin.mesh({"data": -1})):
        raises_text(ValueError, lambda: pipeline.step(params, {"w": X}, ()), "a tuple", "init or step returned")
        raises_text(
            ValueError,
            lambda: pipeline.step(params, {"v": X}, pipeline.init(params)),
            "lacks ['w']",
            "additional ['v']",
        )
        raises_text(
            ValueError,
            lambda: pipeline.step(params, {"w": torch.ones(3)}, pipeline.init(params)),
            "grads['w']",
            "(3,)",
            "(2,)",
        )
        raises_text(TypeError, lambda: pipeline.step(params, {"w": X.double()}, pipeline.init(params)), "float64", "float32")  # fmt: skip
        other = pipeline.init({"w": X, "v": X})
        raises_text(ValueError, lambda: pipeline.step(params, {"w": X}, other), "another tree or another pipeline")
        chain = tx.chain(tx.mean("data"), tx.clip_by_value(1.0))
        raises_text(ValueError, lambda: chain.update({"w": X}, ((),), None), "2 stages, but the state has 1")


def test_patterns_that_match_nothing() -> None:
    params = {"a.weight": X, "a.bias": X}
    raises_text(ValueError, lambda: tx.partition({"*.weight": tx.sgd(0.1)}).init(params), "'a.bias'", "add '*'")
    raises_text(ValueError, lambda: tx.partition({"b.*": tx.sgd(0.1), "*": tx.sgd(0.1)}).init(params), "['b.*']", "'a.bias'")  # fmt: skip
    raises_text(ValueError, lambda: tx.masked(tx.identity(), "b.*").init(params), "'b.*' matches no path")
    step = fjoin.train_step(product, tx.fuse(tx.mean("data"), tx.partition({"nope": tx.sgd(0.1), "*": tx.sgd(0.2)})))
    raises_text(ValueError, lambda: step.init({"w": X}), "['nope']")


def test_raises_if_a_tensor_occurs_twice_in_params() -> None:
    w = torch.ones(2)
    step = fjoin.train_step(lambda p, b: (p["a"] * p["b"]).sum(), MEAN_SGD)
    raises_text(ValueError, lambda: step.init({"a": w, "b": w}), "'b'", "'a'", "same tensor", "fjoin.functional")


def test_a_donated_state_names_the_call_that_took_it() -> None:
    step, state = step_of(accumulate=2)
    step(state, X)
    raises_text(fjoin.DonatedState, lambda: step(state, X), "donated to step 0,")
