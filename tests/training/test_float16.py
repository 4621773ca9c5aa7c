"""float16 parameters whose batches weigh thousands, as tokens do: messages stay within the range of float16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, raises_text, stepped

HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"),
    "clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1e4)),
    "rest": lambda: tx.chain(tx.mean("data"), tx.clip_by_value(1e4)),
}


def trained(
    hook: tx.Transform, batches: list[tuple[float, float]], on_device: bool = False, loss_dtype: Any = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """Each batch is (gradient of every element, weight)."""

    def loss(params: Any, batch: Any) -> Tensor:
        out = (params["w"] * batch[0]).sum() + (params["v"] * batch[0]).sum().half()
        return out if loss_dtype is None else out.to(loss_dtype)

    step = judged(fjoin.train_step(loss, tx.fuse(hook, tx.sgd(1.0)), weight=lambda b: b[1], **settings), on_device)
    state, seen = step.init({"w": torch.zeros(3, dtype=torch.float16), "v": torch.zeros(2)}), []
    for batch in step.join(batches):
        state, metrics = step(state, batch)
        if metrics.stepped:
            seen.append((state.params["w"].tolist()[0], state.params["v"].tolist()[0], metrics.weight))
    return seen


def of(ranks: int, hook: Any, weights: list[float], **settings: Any) -> Any:
    """Rank r has gradients of 16 (r + 1)."""
    per_rank = [[(16.0 * (r + 1), w) for w in weights] for r in range(ranks)]
    return tx.simulate(lambda b: trained(hook(), b, **settings), {"data": ranks}, per_rank)


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("loss_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_weights_of_thousands(hook: str, loss_dtype: Any, on_device: bool) -> None:
    """The mean of 16 and 32 is 24; the parameters are exact."""
    settings = {"on_device": on_device, "loss_dtype": loss_dtype}
    for weight in (1.0, 4096.0, 5120.0, 2.0**19):  # which float16 holds, scaled
        for seen in of(2, HOOKS[hook], [weight] * 4, **settings):
            assert seen == [(-24.0 * n, -24.0 * n, 2 * weight) for n in (1, 2, 3, 4)]


BEHIND: dict[str, Any] = {
    "clip, mean": lambda: tx.chain(tx.clip_by_value(1e4), tx.mean("data")),
    "leaf, mean": lambda: tx.chain(tx.stateless(torch.clone), tx.mean("data")),
    "by path": lambda: tx.partition({"w": tx.mean("data"), "*": tx.mean("data")}),
    "whole tree, mean": lambda: tx.chain(tx.clip_by_global_norm(1e4), tx.mean("data")),
    "twice": lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")),
    "sum": lambda: tx.chain(tx.sum_over("data"), tx.stateless(lambda g: g / 8.0)),
    "late": lambda: tx.switch_after(2, tx.chain(tx.clip_by_value(1e4), tx.mean("data")), tx.mean("data")),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hook", [name for name in BEHIND if name != "sum"])
def test_weights_of_thousands_in_a_mean_behind_other_stages(hook: str, on_device: bool) -> None:
    for weight in (1.0, 5120.0, 500_000.0):
        for seen in of(2, BEHIND[hook], [weight] * 4, on_device=on_device):
            assert seen == [(-24.0 * n, -24.0 * n, 2 * weight) for n in (1, 2, 3, 4)]


def test_two_levels() -> None:
    def one_rank(w: float) -> Any:
        hook = tx.chain(tx.mean("local"), tx.mean("node"))
        step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(1.0)), weight=lambda b: w,
                                mesh=fjoin.mesh({"node": 2, "local": 2}))  # fmt: skip
        state = stepped(step, step.init({"w": torch.zeros(3, dtype=torch.float16)}), [16.0] * 3)
        return state.params["w"].tolist()

    out = tx.simulate(one_rank, {"node": 2, "local": 2}, [4096.0, 1024.0, 100_000.0, 8.0])
    assert all(w == out[0] for w in out) and out[0] == pytest.approx([-48.0] * 3, rel=2e-3)


def test_sum_is_not_divided() -> None:
    """A sum without a division at the end must fit float16 itself."""
    for seen in of(2, BEHIND["sum"], [4.0] * 2):
        assert [w for w, _, _ in seen] == [-24.0, -48.0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sum_over_uneven_ranks(accumulate: int) -> None:
    per_rank = [[(16.0, 2.0)] * 2, [(32.0, 1.0), (8.0, 5.0)], [(4.0, 0.0), (4.0, 3.0)]]
    seen = tx.simulate(lambda b: trained(tx.sum_over("data"), b, accumulate=accumulate), {"data": 3}, per_rank)
    want = [-64.0, -148.0] if accumulate == 1 else [-148.0]
    assert [[(w, v) for w, v, _ in rank] for rank in seen] == [[(w, w) for w in want]] * 3


@pytest.mark.parametrize("hook", [*HOOKS, "clip, mean"])
def test_step_without_weight(hook: str) -> None:
    """It changes nothing, and the next one goes on."""
    make = {**HOOKS, **BEHIND}[hook]
    per_rank = [[(16.0, w) for w in (1.0, 0.0, 3.0)], [(32.0, w) for w in (1.0, 0.0, 3.0)]]
    for seen in tx.simulate(lambda b: trained(make(), b), {"data": 2}, per_rank):
        assert [w for w, _, _ in seen] == [-24.0, -24.0, -48.0]


@pytest.mark.parametrize("weight", [1e-9, 1e9])
def test_weight_that_a_loss_of_float16_cannot_hold_in_a_window(weight: float) -> None:
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum().half(), tx.fuse(tx.mean("data"), tx.sgd(1.0)), accumulate=2,
                            weight=lambda b: weight, mesh=fjoin.mesh({"data": 1}))  # fmt: skip
    text = ("too small" if weight < 1 else "too large", "torch.float16", "float32")
    raises_text(ValueError, lambda: step(step.init({"w": torch.zeros(3)}), 16.0), *text)


@pytest.mark.parametrize("hook", [*HOOKS, "clip, mean"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_weights_of_thousands_in_windows(hook: str, accumulate: int) -> None:
    """If the hook applies the weights itself, only the gradients accumulated before it are scaled."""
    make = HOOKS.get(hook, lambda: tx.chain(tx.clip_by_value(1e4), tx.mean("data", over="live")))
    for seen in of(2, make, [4096.0] * 2 * accumulate, accumulate=accumulate):
        assert [w for w, _, _ in seen] == [-24.0, -48.0]
        assert [total for *_, total in seen] == [4096.0 * 2 * accumulate] * 2


def test_weights_that_change_from_step_to_step() -> None:
    """The table includes ranks without input, batches without weight, and a first step without any weight."""
    per_rank = [[(16.0, 0.0), (16.0, 3000.0), (16.0, 30_000.0), (16.0, 800.0)], [(32.0, 0.0), (64.0, 1000.0)]]
    a, b = tx.simulate(lambda batches: trained(HOOKS["mean"](), batches), {"data": 2}, per_rank)
    assert a == b and [w for w, _, _ in a] == [0.0, -28.0, -44.0, -60.0]


def test_scaling_all_weights_by_a_power_of_two_changes_nothing() -> None:
    """Results are bitwise equal if float16 holds them in full precision, so a resumed run gives the same result."""
    gradients = [0.3, 1.7, 11.1, 130.0]

    def run(times: float) -> Any:
        per_rank = [[(g * (r + 1), times * (3 + r)) for g in gradients] for r in range(3)]
        return tx.simulate(lambda b: trained(tx.mean("data"), b), {"data": 3}, per_rank)

    want = [[seen[:2] for seen in rank] for rank in run(1.0)]
    for times in (2.0**4, 2.0**10, 2.0**18):
        assert [[seen[:2] for seen in rank] for rank in run(times)] == want


def real_ranks(weights: list[float]) -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    return trained(tx.mean("data"), [(16.0 * (mesh.rank + 1), w) for w in weights], mesh=mesh)


def test_on_processes(pool: Any) -> None:
    for seen in pool.run(2, real_ranks, [4096.0, 500_000.0]):
        assert seen == [(-24.0, -24.0, 8192.0), (-48.0, -48.0, 1_000_000.0)]
