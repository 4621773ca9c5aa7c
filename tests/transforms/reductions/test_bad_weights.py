"""A weight is 0, or from 1e-30 to 1e30, in every form and wherever one is given; None is 1."""

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
