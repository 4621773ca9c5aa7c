"""A transform around the reduction that changes the weight changes the divisor in a step too, on real ranks as well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.changed_weights import ALL, CHANGES, MEANS, MOST, WEIGHTS, axes_for, by_hand, values, with_weights
from tests.helpers import max_diff

RANKS = [0, 1, 2, 3]
STEPS = 2
# Gossip averages parameters, and a step accumulates by an argument of its own.
NAMES = [name for name in ALL if name != "accumulated"]


def pipeline_of(hook: tx.Transform) -> tx.Pipeline:
    return tx.fuse(hook, tx.sgd(1.0))


def product(params: Any, batch: Tensor) -> Tensor:
    return (params["w"].flatten() * batch).sum()


def by_step(hook: tx.Transform, rank: int, weight: float, axes: dict[str, int]) -> list[Tensor]:
    """The parameters after each step, whose gradients are `values`."""
    step = fjoin.train_step(product, pipeline_of(hook), mesh=fjoin.mesh(axes), weight=lambda batch: weight)
    state, seen = step.init({"w": torch.zeros(4, 2, dtype=torch.float64)}), []
    for i in range(STEPS):
        state, _ = step(state, values(rank, i))
        seen.append(state.params["w"].flatten().clone())
    return seen


def purely(hook: tx.Transform, rank: int, weight: float) -> list[Tensor]:
    pipeline, params = pipeline_of(hook), {"w": torch.zeros(4, 2, dtype=torch.float64)}
    state, seen = pipeline.init(params), []
    for i in range(STEPS):
        params, state = pipeline.step(params, {"w": values(rank, i).view(4, 2)}, state, weight=weight)
        seen.append(params["w"].flatten())
    return seen


def expected(name: str, change: str, ranks: int = 4) -> list[list[Tensor]]:
    """Of each rank: sums by hand, or the pure pipeline of the reduction itself on the changed weights."""
    shares = [CHANGES[change](w) for w in WEIGHTS[:ranks]]
    if name not in MEANS or ranks < 4:
        make, axes = ALL[name], axes_for(name) if ranks == 4 else {"data": ranks}
        return tx.simulate(lambda rank, weight: purely(make(), rank, weight), axes, RANKS[:ranks], shares)
    means = [by_hand(shares, MEANS[name][1], [values(rank, i) for rank in RANKS]) for i in range(STEPS)]
    return [[-sum(means[: i + 1]) for i in range(STEPS)]] * 4  # type: ignore[misc]


def compare(found: Any, wanted: Any) -> None:
    for seen, want in zip(found, wanted, strict=True):
        for a, b in zip(seen, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", MOST)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_divides_by_the_changed_weights(name: str, change: str) -> None:
    hook, axes = with_weights(CHANGES[change], ALL[name]()), axes_for(name)
    compare(tx.simulate(lambda r, w: by_step(hook, r, w, axes), axes, RANKS, WEIGHTS), expected(name, change))


def test_roots_of_weights_1_and_9_in_a_step() -> None:
    """Gradients 0 and 4 with weights 1 and 3: 12 / 4. The metrics count the weights themselves: 10."""

    def one_rank(gradient: float, weight: float) -> Any:
        pipeline = pipeline_of(with_weights(CHANGES["root"], tx.mean("data")))
        step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline, weight=lambda b: weight)
        state, metrics = step(step.init({"w": torch.zeros((), dtype=torch.float64)}), gradient)
        return state.params["w"].item(), metrics.weight

    assert tx.simulate(one_rank, {"data": 2}, [0.0, 4.0], [1.0, 9.0]) == [(-3.0, 10.0)] * 2


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return product({"w": self.w}, batch)


def registered(hook: tx.Transform, rank: int, weight: float) -> list[Tensor]:
    model = torch.nn.parallel.DistributedDataParallel(Holder())
    handle, seen = fjoin.ddp.register(model, pipeline_of(hook)), []
    for i in range(STEPS):
        handle.weight(weight)
        model.zero_grad()
        model(values(rank, i)).backward()
        seen.append(model.module.w.detach().flatten().clone())
    return seen


ON_TWO = [name for name in NAMES if axes_for(name) == {"data": 4}]
SOME = [
    "mean", "mean of all ranks", "sum", "masked", "encoded, live", "top_k", "low rank, fed back", "two means",
]  # fmt: skip


def on_a_process(names: list[str]) -> Any:
    rank, found = torch.distributed.get_rank(), {}
    for name in names:
        hook = with_weights(CHANGES["root"], ALL[name]())
        found[name] = (by_step(hook, rank, WEIGHTS[rank], {"data": 2}), registered(hook, rank, WEIGHTS[rank]))
    return found


@pytest.mark.parametrize("names", [SOME, pytest.param(ON_TWO, marks=pytest.mark.long)], ids=["some", "all"])
def test_real_ranks_and_registered_modules_divide_by_the_changed_weights(pool: Any, names: list[str]) -> None:
    for of_rank, found in enumerate(pool.run(2, on_a_process, names)):
        for name, (seen, of_module) in found.items():
            want = expected(name, "root", 2)[of_rank]
            compare([seen, of_module], [want, want])
            if name == "mean":  # weights 1 and 3, gradients 0 and 4 in the first number
                assert math.isclose(seen[0][0].item(), -3.0) and max_diff(seen, of_module) < 1e-12
