"""Derivatives of trained parameters by the ranks' weights, through whole steps: those of the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx

RATE = 0.5
GRADS = torch.tensor([1.0, 2.0, 6.0, -3.0], dtype=torch.float64)  # of four ranks, in the first step
WEIGHTS = torch.tensor([1.0, 3.0, 5.0, 2.0], dtype=torch.float64)
SGD = tx.sgd(RATE)


def grads(step: int) -> Tensor:
    return GRADS * (1 + step) + step


def mean(weights: Tensor, step: int = 0) -> Tensor:
    return (weights * grads(step)).sum() / weights.sum()


def two_steps(weights: Tensor) -> Tensor:
    return -RATE * (mean(weights) + mean(weights, 1))


def with_momentum(weights: Tensor) -> Tensor:
    first = mean(weights)
    return -RATE * (first + 0.9 * first + mean(weights, 1))


def clipped(weights: Tensor) -> Tensor:
    """To a norm of 20, of the 32 numbers of the gradient, as by torch's clip_grad_norm_."""
    means = [mean(weights, i) for i in range(2)]
    return torch.stack([-RATE * g * (20 / (g.abs() * 32**0.5 + 1e-6)).clamp(max=1.0) for g in means]).sum()


def accumulated(weights: Tensor) -> Tensor:
    """One step on the mean over both calls and all ranks."""
    return -RATE * (weights * (grads(0) + grads(1))).sum() / (2 * weights.sum())


def summed(weights: Tensor) -> Tensor:
    return -RATE * (weights * (grads(0) + grads(1))).sum()


def averaged(weights: Tensor) -> Tensor:
    """Each rank trains alone; the average weighs by two weights."""
    return (2 * weights * -RATE * (grads(0) + grads(1))).sum() / (2 * weights).sum()


def between_nodes(weights: Tensor) -> Tensor:
    """Means in nodes; the average between nodes weighs by the sums of their weights."""
    nodes, sums = weights.view(2, 2), weights.view(2, 2).sum(1)
    trained = sum(-RATE * (nodes * grads(i).view(2, 2)).sum(1) / sums for i in range(2))
    return (sums * trained).sum() / sums.sum()


def live(weights: Tensor) -> Tensor:
    return -RATE * (grads(0) + grads(1)).mean() + 0 * weights.sum()


Case = tuple[Callable[[], tx.Pipeline], Callable[[Tensor], Tensor]]
CASES: dict[str, Case] = {
    "mean": (lambda: tx.fuse(tx.mean("local"), SGD), two_steps),
    "live": (lambda: tx.fuse(tx.mean("local", over="live"), SGD), live),
    "world": (lambda: tx.fuse(tx.mean("local", over="world"), SGD), live),
    "sum": (lambda: tx.fuse(tx.sum_over("local"), SGD), summed),
    "mean, momentum": (lambda: tx.fuse(tx.mean("local"), tx.sgd(RATE, momentum=0.9)), with_momentum),
    "mean, clip": (lambda: tx.fuse(tx.chain(tx.mean("local"), tx.clip_by_global_norm(20.0)), SGD), clipped),
    "accumulate": (lambda: tx.fuse(tx.accumulate(2, tx.mean("local")), SGD), accumulated),
    "masked": (lambda: tx.fuse(tx.masked(tx.mean("local"), "w"), SGD), two_steps),
    "average": (lambda: tx.local_sgd(SGD, tx.mean("local"), 2), averaged),
    "outer": (lambda: tx.diloco(SGD, tx.mean("local"), 2, tx.sgd(1.0)), averaged),
    "both axes": (lambda: tx.fuse(tx.mean(("node", "local")), SGD), two_steps),
    "chain": (lambda: tx.fuse(tx.chain(tx.mean("local"), tx.mean("node")), SGD), two_steps),
    "hierarchical": (lambda: tx.fuse(tx.hierarchical_mean("local", "node"), SGD), two_steps),
    "nodes": (lambda: tx.fuse(tx.mean("local"), SGD, after=tx.every(2, tx.average_parameters("node"))), between_nodes),
    "pieces": (lambda: tx.zero(tx.mean("local"), SGD, "local"), two_steps),
    "pieces, nodes": (lambda: tx.zero(tx.mean(("node", "local")), SGD, "local"), two_steps),
}  # fmt: skip


def axes_for(name: str) -> dict[str, int]:
    return {"node": 2, "local": 2} if "'node'" in repr(CASES[name][0]()) else {"local": 4}


def trained(name: str, weight: Tensor, of_steps: tuple[Tensor, ...], numel: int = 32) -> Tensor:
    """This rank's parameter after two steps, as a function of its weight."""
    pipeline, params = CASES[name][0](), {"w": torch.zeros(numel, dtype=torch.float64)}
    state = pipeline.init(params)
    for g in of_steps:
        params, state = pipeline.step(params, {"w": g * torch.ones_like(params["w"])}, state, weight=weight)
    return params["w"].mean()


STEPS = [list(grads(i).unbind()) for i in range(2)]


def derivatives(name: str, weights: Tensor) -> Tensor:
    """Each rank's derivative by its own weight."""

    def one_rank(weight: Tensor, *of_steps: Tensor) -> Tensor:
        return torch.func.grad(lambda w: trained(name, w, of_steps))(weight)

    return torch.stack(tx.simulate(one_rank, axes_for(name), list(weights.unbind()), *STEPS))


@pytest.mark.parametrize("name", CASES)
def test_the_derivative_in_lockstep(name: str) -> None:
    """torch.func.grad in each rank, by its own weight: that of the sum over the ranks, which are equal."""

    def one_rank(weight: Tensor, *of_steps: Tensor) -> Any:
        return torch.func.grad_and_value(lambda w: trained(name, w, of_steps))(weight)

    formula = CASES[name][1]
    found = tx.simulate(one_rank, axes_for(name), list(WEIGHTS.unbind()), *STEPS)
    for (got, value), want in zip(found, torch.func.grad(formula)(WEIGHTS), strict=True):
        torch.testing.assert_close(value, formula(WEIGHTS), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got, 4 * want, rtol=1e-12, atol=1e-12)


def test_derivatives_by_the_other_weights_if_one_is_zero() -> None:
    weights = torch.tensor([1.0, 3.0, 0.0, 4.0], dtype=torch.float64)
    got = derivatives("mean", weights) / 4
    torch.testing.assert_close(got[[0, 1, 3]], torch.func.grad(two_steps)(weights)[[0, 1, 3]])


@pytest.mark.xfail(
    strict=True,
    raises=tx.CollectiveMismatch,
    reason="ranks without a piece send nothing in backward, where the formula is meant",
)
def test_the_derivative_where_one_rank_owns_all_pieces() -> None:
    def one_rank(weight: Tensor, *of_steps: Tensor) -> Any:
        return torch.func.grad(lambda w: trained("pieces", w, of_steps, 2))(weight)

    found = tx.simulate(one_rank, {"local": 4}, list(WEIGHTS.unbind()), *STEPS)
    torch.testing.assert_close(torch.stack(found), 4 * torch.func.grad(two_steps)(WEIGHTS), rtol=1e-12, atol=1e-12)
