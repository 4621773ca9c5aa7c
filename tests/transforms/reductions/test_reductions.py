"""Reductions that are no plain sum, inspecting values that pass, and parameters; weights of 0 and 1e-30 to 1e30."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, same_bits


def grads_of(rank: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rank)
    return {path: torch.randn(shape, generator=g) for path, shape in {"a": (5, 3), "b": (), "none": (0, 2)}.items()}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_have_one_dtype_on_all_ranks(dtype: torch.dtype) -> None:
    mean, grads = tx.mean("data"), [torch.tensor([1, 0]).to(dtype), torch.tensor([0, 1]).to(dtype)]
    for found, _ in tx.simulate(lambda g, w: mean.update({"a": g}, (), weight=w), {"data": 2}, grads, [1, 3]):
        assert same_bits(found, {"a": torch.tensor([0.25, 0.75])})


def test_tap_receives_the_gradients() -> None:
    seen: list[Any] = []
    hook = tx.chain(tx.mean("data"), tx.tap(lambda g: seen.append({path: v.clone() for path, v in g.items()})))
    out = tx.simulate(lambda rank: hook.update(grads_of(rank), hook.init(grads_of(rank)))[0], {"data": 2}, [0, 1])[0]
    assert same_bits(seen[0], out) and same_bits(seen[1], out)
    del seen[:]
    tx.explain(hook, grads_of(0), {"data": 2})
    assert not seen, "explain called it"
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(0.1)))
    step(step.init({"w": torch.ones(2)}), torch.tensor([3.0, 4.0]))
    assert [g["w"].tolist() for g in seen] == [[3.0, 4.0]]
    step.close()


ALL: dict[str, Any] = {
    "mean": lambda: tx.mean("data"), "mean over two axes": lambda: tx.mean(("node", "data")),
    "live": lambda: tx.mean("data", over="live"), "world": lambda: tx.mean("data", over="world"),
    "sum": lambda: tx.sum_over("data"), "hierarchical": lambda: tx.hierarchical_mean("data", "node"),
    "hierarchical, encoded": lambda: tx.compress(tx.int8(), tx.hierarchical_mean("data", "node", over="world")),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data", over="world")),
    "bfloat16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "stochastic": lambda: tx.compress(tx.bfloat16(stochastic=True), tx.mean("data")),
    "feedback": lambda: tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
    "power_sgd": lambda: tx.power_sgd("data", min_compression_rate=0.5), "every": lambda: tx.every(1, tx.mean("data")),
    "switch": lambda: tx.switch_after(0, tx.identity(), tx.mean("data")),
    "masked": lambda: tx.masked(tx.mean("data"), "*"),
    "by path": lambda: tx.partition({"w": tx.mean("data"), "*": tx.sum_over("data")}),
    "chain": lambda: tx.chain(tx.mean("data"), tx.mean("node")), "buffers": lambda: tx.average_buffers("data"),
}  # fmt: skip


def params_of(rank: int) -> Any:
    return {"w": torch.full((4, 4), 5.0 + rank), "b": torch.tensor(-1.0 - rank)}


def one_step(make: Any, weight: Any) -> Any:
    pipeline = tx.fuse(tx.identity(), tx.sgd(1.0), after=make())
    params = params_of(int(tx.axis_index(("node", "data"))))
    grads = {path: torch.zeros_like(p) for path, p in params.items()}
    return pipeline.step(params, grads, pipeline.init(params), weight=weight)[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_without_weight_parameters_stay(name: str, as_tensor: bool, ranks: int) -> None:
    weight: Any = torch.zeros((), dtype=torch.float64) if as_tensor else 0.0
    for rank, params in enumerate(tx.simulate(lambda: one_step(ALL[name], weight), {"node": 1, "data": ranks})):
        assert same_bits(params, params_of(rank))


def test_a_node_without_weight_takes_the_others_average() -> None:
    weights = [0.0, 0.0, 1.0, 3.0]
    chain = ALL["chain"]
    for params in tx.simulate(lambda w: one_step(chain, w), {"node": 2, "data": 2}, weights):
        assert params["b"].item() == (-1.0 - 2) / 4 + 3 * (-1.0 - 3) / 4


@pytest.mark.parametrize("name", ALL)
def test_gradients_without_weight_are_zero(name: str) -> None:
    """In a hook, a gradient without weight on any rank changes no parameter."""

    def one_rank() -> Any:
        hook, grads = ALL[name](), params_of(int(tx.axis_index(("node", "data"))))
        return hook.update(grads, hook.init(grads), grads, weight=0.0)[0]

    if name in ("buffers",):
        return
    for out in tx.simulate(one_rank, {"node": 1, "data": 2}):
        assert all(not leaf.any() for leaf in out.values())


@pytest.mark.parametrize("of", [float, torch.tensor])
@pytest.mark.parametrize("weights", [[2.0, 1.0], [2.0, 0.0], [0.0, 1.0]])
def test_derivative_of_a_mean_of_idle_ranks(weights: list[float], of: Any) -> None:
    """The loss is the sum over both ranks of the squared mean, so each rank's derivative is 4 mean share."""

    def one_rank(x: torch.Tensor, weight: float) -> torch.Tensor:
        hook = tx.mean("data")
        return torch.func.grad(lambda x: (hook.update(x, hook.init(x), weight=of(weight))[0] ** 2).sum())(x)

    xs, shares = torch.tensor([[1.0, 2.0], [4.0, 5.0]]), torch.tensor(weights) / sum(weights)
    want = 4.0 * shares[:, None] * (shares @ xs)
    torch.testing.assert_close(torch.stack(tx.simulate(one_rank, {"data": 2}, list(xs), weights)), want)


BAD = {"negative": -1.0, "nan": math.nan, "inf": math.inf, "tiny": 1e-46, "huge": 1e39}
FORMS: dict[str, Callable[[float], Any]] = {
    "a number": float, "a tensor": lambda w: torch.tensor(w, dtype=torch.float64), "a numpy number": np.float64,
}  # fmt: skip
HOOKS: dict[str, Callable[[], tx.Transform]] = {
    "mean": lambda: tx.mean("data"), "live": lambda: tx.mean("data", over="live"),
    "world": lambda: tx.mean("data", over="world"), "sum_over": lambda: tx.sum_over("data"),
    "scatter_mean": lambda: tx.scatter_mean("data"), "accumulate": lambda: tx.accumulate(2, tx.mean("data")),
    "chain": lambda: tx.chain(tx.clip_by_value(9.0), tx.mean("data")),
    "masked": lambda: tx.masked(tx.mean("data"), "w"), "int8": lambda: tx.compress(tx.int8(), tx.mean("data")),
    "error feedback": lambda: tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
    "power_sgd": lambda: tx.power_sgd("data", 1), "hierarchical": lambda: tx.hierarchical_mean("data", "node"),
    "ema": lambda: tx.ema(0.9), "average": lambda: tx.average_parameters("data"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", HOOKS)
def test_a_transform_refuses_it(name: str, bad: str, form: str) -> None:
    def rank(w: float) -> Any:
        hook, g = HOOKS[name](), {"w": torch.ones(4, 4)}
        return hook.update(g, hook.init(g), g, weight=FORMS[form](w), step=0)

    text = raises_text(ValueError, lambda: tx.simulate(rank, {"node": 1, "data": 2}, [2.0, BAD[bad]]), "weight must be")
    assert str(BAD[bad]) in text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", BAD)
def test_the_shell_refuses_it(bad: str, form: str) -> None:
    given = FORMS[form](BAD[bad])
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=lambda b: given
    )
    state = step.init({"w": torch.ones(2)})
    raises_text(ValueError, lambda: step(state, torch.ones(2)), "weight(batch) must be")
    raises_text(ValueError, lambda: fjoin.evaluate(lambda x: {"m": x}, [1.0], weight=lambda x: given), "must be")
    raises_text(ValueError, lambda: list(fjoin.join([1.0], weight=lambda x: given)), "must be")
    pipeline, params = tx.fuse(tx.identity(), tx.sgd(0.1)), {"w": torch.ones(2)}
    raises_text(ValueError, lambda: pipeline.step(params, params, pipeline.init(params), weight=given), "weight must be")  # fmt: skip


@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("bad", ["negative", "nan", "tiny"])
def test_a_tensor_that_cannot_be_read_makes_the_sums_nan(bad: str, over: Any) -> None:
    """This holds under a vmap of the caller and on a device; the result counts as not finite."""

    def rank(w: Tensor) -> Tensor:
        hook, g = tx.mean("data", over), torch.ones(3)
        return torch.func.vmap(lambda w: hook.update(g, hook.init(g), weight=w)[0])(w[None])[0]

    weights = [torch.tensor(2.0), torch.tensor(BAD[bad], dtype=torch.float64).float()]
    if bad == "tiny":
        weights = [torch.tensor(2.0, dtype=torch.float64), torch.tensor(BAD[bad], dtype=torch.float64)]
    for got in tx.simulate(rank, {"data": 2}, weights):
        assert got.isnan().all()


PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "mean": lambda: tx.fuse(tx.mean("data"), tx.sgd(1.0)),
    "a part": lambda: tx.fuse(tx.masked(tx.mean("data"), "w"), tx.sgd(1.0)),
    "zero": lambda: tx.zero(tx.mean("data"), tx.sgd(1.0), "data"),
    "int8": lambda: tx.fuse(tx.compress(tx.int8(), tx.mean("data")), tx.sgd(1.0)),
    "local": lambda: tx.local_sgd(tx.sgd(1.0), tx.mean("data"), every=1),
    "skips": lambda: tx.skip_if_nonfinite(tx.fuse(tx.masked(tx.mean("data"), "w"), tx.sgd(1.0))),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_none_is_one(name: str) -> None:
    """Ranks may mix None and 1: results and messages are the same."""

    def rank(value: float, *weight: Any) -> Any:
        pipeline, params = PIPELINES[name](), {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
        grads = {path: torch.full_like(p, value) for path, p in params.items()}
        state, extra = pipeline.init(params), {"weight": weight[0]} if weight else {}
        for _ in range(2):
            params, state = pipeline.step(params, grads, state, **extra)
        return params

    values, axes = [1.0, 3.0, 8.0], {"data": 3}
    want = tx.simulate(rank, axes, values, [1.0, 1.0, 1.0])
    assert same_bits(tx.simulate(rank, axes, values), want)
    for weights in ([None, 1.0, 1], [1.0, None, torch.tensor(1.0)]):
        assert same_bits(tx.simulate(rank, axes, values, weights), want)
