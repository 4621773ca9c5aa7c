"""Each method of local SGD equals its algorithm in plain torch over 200 steps."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.oracle import local_sgd as oracle

STEPS = 100
SHAPES = {"a": (3, 2), "b": (5,), "c": (2, 2), "d": ()}
SIZES = [6, 5, 4, 1]


@functools.cache
def problem(ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The start, a target of each rank, and the curvature."""
    gen = torch.Generator().manual_seed(ranks)
    return (
        torch.randn(16, generator=gen, dtype=torch.float64),
        torch.randn(ranks, 16, generator=gen, dtype=torch.float64),
        torch.rand(16, generator=gen, dtype=torch.float64) + 0.5,
    )


def weight(rank: int, step: int) -> float:
    """Uneven batches; the last rank has none in every third stretch of ten steps, and no rank in steps 60 to 79."""
    if 60 <= step < 80 or (rank and step // 10 % 3 == 2):
        return 0.0
    return 1.0 + (rank * 7 + step * 3) % 5


def grad(ranks: int, idle: bool, rank: int, step: int, params: Tensor) -> Tensor | None:
    _, targets, curvature = problem(ranks)
    noise = torch.sin(torch.arange(16, dtype=torch.float64) * (step + 1) + rank)
    return None if idle and not weight(rank, step) else curvature * (params - targets[rank]) + 0.3 * noise


def tree(flat: Tensor) -> dict[str, Tensor]:
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), flat.split(SIZES), strict=True)}


def flat(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in params.values()])


def run(pipeline: tx.Pipeline, sizes: dict[str, int], weights: Any, idle: bool = True) -> list[tuple[Tensor, Any]]:
    """The parameters and the states of all ranks. Weights: a function of rank and step, or whether they are those above."""
    ranks, weigh = math.prod(sizes.values()), weight if weights is True else weights

    def one_rank() -> tuple[Tensor, Any]:
        rank = int(tx.axis_index(tuple(sizes)))
        params = tree(problem(ranks)[0])
        state = pipeline.init(params)
        for step in range(STEPS):
            g = grad(ranks, bool(weights) and idle, rank, step, flat(params))
            given = tree(torch.full((16,), torch.nan, dtype=torch.float64) if g is None else g)
            params, state = pipeline.step(params, given, state, weight=weigh(rank, step) if weigh else None)
        return flat(params), state

    return tx.simulate(one_rank, sizes)


def close(found: list[tuple[Tensor, Any]], want: list[Tensor], start: Tensor) -> None:
    for (got, _), expected in zip(found, want, strict=True):
        torch.testing.assert_close(got - start, expected - start, rtol=1e-6, atol=1e-9)


def torch_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def torch_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


INNER = {"sgd": (torch_sgd, tx.sgd(0.05, momentum=0.9)), "adam": (torch_adam, tx.adam(0.01))}


@pytest.mark.sample(6)
@pytest.mark.parametrize("over", ["weight", "world"])
@pytest.mark.parametrize("inner", list(INNER))
@pytest.mark.parametrize("period, first", [(4, None), (4, 0), (4, 10), (3, 7), (1, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_local_sgd(ranks: int, period: int, first: int | None, inner: str, over: Any) -> None:
    """Averages at the end of each period; or from a first step on, as the periodic model averager of torch."""
    theirs, ours = INNER[inner]
    weighted, begin, start = over == "weight", period - 1 if first is None else first, problem(ranks)[0]
    pipeline = tx.local_sgd(ours, tx.mean("data", over=over), every=period)
    if first is not None:
        pipeline = tx.fuse(tx.identity(), ours, tx.every(period, tx.average_parameters("data", over=over), first=first))
    want = oracle.averaged(
        theirs, start, ranks, STEPS, functools.partial(grad, ranks, weighted),
        lambda step: ranks if step >= begin and (step - begin) % period == 0 else 0, [ranks], weight if weighted else None,
    )  # fmt: skip
    close(run(pipeline, {"data": ranks}, weighted), want, start)


@pytest.mark.sample(3)
@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("over", ["weight", "world"])
def test_hierarchical_average(over: Any, warmup: int) -> None:
    theirs, ours = INNER["sgd"]
    weighted = over == "weight"
    levels = {2: "local", 4: ("node", "local"), 12: ("pod", "node", "local")}
    after = tx.chain(
        *(
            tx.every(n, tx.average_parameters(axes, over), first=-(-warmup // n) * n, except_every=larger)
            for (n, axes), larger in zip(levels.items(), (4, 12, None), strict=True)
        )
    )
    start = problem(8)[0]

    def due(step: int) -> int:
        if step < warmup:
            return 0
        return next((size for period, size in ((12, 8), (4, 4), (2, 2)) if step % period == 0), 0)

    want = oracle.averaged(
        theirs, start, 8, STEPS, functools.partial(grad, 8, weighted), due, [2, 4, 8], weight if weighted else None
    )
    close(run(tx.fuse(tx.identity(), ours, after), {"pod": 2, "node": 2, "local": 2}, weighted), want, start)


@pytest.mark.sample(12)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "delay, mix, count", [(0, 0.0, 1), (0, 0.25, 2), (3, 0.0, 1), (2, 0.75, 3), (9, 0.25, 4), (0, 0.0, "SlowMo")]
)
def test_diloco(ranks: int, delay: int, mix: float, count: Any, weighted: bool) -> None:
    """SlowMo has another outer optimizer."""
    theirs, ours = INNER["adam"]
    slow, count = (
        (dict(lr=0.9, momentum=0.6), 1) if count == "SlowMo" else (dict(lr=0.7, momentum=0.9, nesterov=True), count)
    )
    pipeline = tx.diloco(
        ours,
        tx.mean("data", over="weight" if weighted else "world"),
        10,
        tx.sgd(**slow),
        fragments=count,
        delay=delay,
        mix=mix,
    )
    start = problem(ranks)[0]
    ends = {1: [16], 2: [11, 16], 3: [6, 11, 16], 4: [6, 11, 15, 16]}[count]
    want, shared = oracle.diloco(
        theirs, lambda p: torch.optim.SGD(p, **slow), start, ranks, STEPS,
        functools.partial(grad, ranks, weighted), 10, weight if weighted else None,
        list(zip([0, *ends], ends, strict=False)), delay, mix,
    )  # fmt: skip
    found = run(pipeline, {"data": ranks}, weighted)
    close(found, want, start)
    states = [state.after if count > 1 else (state.after,) for _, state in found]
    anchors = [flat({k: v for part in own for k, v in part.anchor.items()}) for own in states]
    assert all(torch.equal(anchors[0], other) for other in anchors), "the global parameters differ between ranks"
    torch.testing.assert_close(anchors[0] - start, shared - start, rtol=1e-6, atol=1e-9)


@pytest.mark.sample(12)
@pytest.mark.parametrize("over", ["weight", "world"])
@pytest.mark.parametrize("inner", list(INNER))
@pytest.mark.parametrize("ranks, warmup", [(2, 7), (3, 20), (5, 0)])
def test_post_local_sgd(ranks: int, warmup: int, inner: str, over: Any) -> None:
    theirs, ours = INNER[inner]
    weighted, start = over == "weight", problem(ranks)[0]

    def gradient(rank: int, step: int, params: Tensor) -> Tensor | None:
        if step >= warmup:
            return grad(ranks, weighted, rank, step, params)
        w = [weight(r, step) if weighted else 1.0 for r in range(ranks)]
        each = [grad(ranks, False, r, step, params) for r in range(ranks)]
        return sum(x * g for x, g in zip(w, each, strict=True)) / sum(w) if sum(w) else None

    want = oracle.averaged(
        theirs, start, ranks, STEPS, gradient,
        lambda step: ranks if step >= warmup and (step - warmup) % 4 == 0 else 0, [ranks],
        (lambda rank, step: weight(rank, step) if step >= warmup else 0.0) if weighted else None,
    )  # fmt: skip
    pipeline = tx.post_local_sgd(ours, tx.mean("data", over=over), 4, warmup)
    close(run(pipeline, {"data": ranks}, weighted), want, start)


@pytest.mark.parametrize("warmup", [0, 7])
def test_a_wire_of_post_local_sgd_sends_the_changes_since_the_warm_up(warmup: int) -> None:
    """Changes since the start would be larger, and their codes coarser."""
    sent = []

    def noted(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        sent.append(flat(grads))
        return grads, state

    changes = tx.chain(tx.Transform(lambda params: (), noted), tx.mean("data"))
    start = problem(2)[0] + 100.0
    pipeline = tx.post_local_sgd(tx.sgd(0.1), changes, 4, warmup, hook=tx.mean("data"))

    def one_rank(rank: int) -> None:
        params = tree(start)
        state = pipeline.init(params)
        for step in range(warmup + 1):
            g = grad(2, False, rank, step, flat(params))
            assert g is not None
            params, state = pipeline.step(params, tree(g), state)

    tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert len(sent) == 2 and max(change.abs().max() for change in sent) < 20.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_of_states(ranks: int) -> None:
    """Every rank has input in each step, so that all step counts are equal in torch too."""
    start = problem(ranks)[0]

    def uneven(rank: int, step: int) -> float:
        return 1.0 + (rank + step) % 3

    def at_average(step: int, optimizers: list[Any], weights: list[float]) -> None:
        oracle.average_states(optimizers, weights, ("exp_avg", "exp_avg_sq"))

    want = oracle.averaged(
        torch_adam, start, ranks, STEPS, functools.partial(grad, ranks, False),
        lambda step: 0 if (step + 1) % 4 else ranks, [ranks], uneven, at_average,
    )  # fmt: skip
    average = tx.every(4, tx.average_state("data"))
    pipeline = tx.fuse(tx.identity(), tx.adam(0.01), tx.every(4, tx.average_parameters("data")), average)
    assert pipeline == tx.local_sgd(tx.adam(0.01), tx.mean("data"), 4, state="average")
    close(run(pipeline, {"data": ranks}, uneven, idle=False), want, start)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_ema_matches_torch_averaged_model(decay: float) -> None:
    model = torch.nn.Linear(3, 2).double()
    theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    average = tx.ema(decay)
    params = {path: p.detach() for path, p in model.named_parameters()}
    state = average.init(params)
    for step in range(50):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.sin(p * step))
        theirs.update_parameters(model)
        params = {path: p.detach().clone() for path, p in model.named_parameters()}
        unchanged, state = average.update(params, state, weight=2.0)
        assert unchanged is params
        _, state = average.update({path: p + 1 for path, p in params.items()}, state, weight=0.0)
    for path, p in theirs.module.named_parameters():
        torch.testing.assert_close(tx.ema_params(params, state)[path], p.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_behind_an_average_the_moving_average_of_a_rank_without_input_goes_on(over: Any) -> None:
    """The average gives that rank new parameters too."""
    after = tx.every(2, tx.chain(tx.average_parameters("data", over), tx.ema(0.5)))
    pipeline = tx.fuse(tx.identity(), tx.sgd(1.0), after=after)
    gradients = torch.tensor([[1.0, 2.0, 4.0, 8.0, 1.0, 2.0], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]])

    def one_rank(grads: Tensor) -> float:
        params = {"w": torch.zeros(())}
        state = pipeline.init(params)
        for g in grads:
            params, state = pipeline.step(params, {"w": g}, state, weight=float(g != 0))
        return float(tx.ema_params(params, state)["w"])

    # By hand: rank 1 has no input in the second window.
    first = (-3.0 + -2.0) / 2
    second = first - 12.0 if over != "world" else (first - 12.0 + first) / 2
    third = (second - 3.0 + second - 2.0) / 2
    want = 0.5 * (0.5 * first + 0.5 * second) + 0.5 * third
    assert tx.simulate(one_rank, {"data": 2}, list(gradients)) == [want, want]


@pytest.mark.parametrize("delay", [0, 2])
def test_a_flush_gives_the_reduction_the_number_of_its_window(delay: int) -> None:
    """It begins or ends a warm-up where an uncut window would; `explain` counts alike."""
    seen: list[int] = []

    def noted(values: Any, state: Any, params: Any, call: Any) -> tuple[Any, Any]:
        seen.append(call.step)
        return values, state

    reduction = tx.chain(tx.Transform(lambda params: (), noted, facts=tx.Facts(takes=("step",))), tx.mean("data"))
    outer = tx.outer_step(reduction, tx.sgd(1.0), every=4, delay=delay)

    def flushed(calls: int) -> list[int]:
        params, state = tree(problem(1)[0]), outer.init(tree(problem(1)[0]))
        for _ in range(calls):
            params, state = outer.update(params, state)
        seen.clear()
        outer.update(params, state, flush=True)
        return list(seen)

    found = tx.simulate(lambda: [flushed(calls) for calls in range(1, 10)], {"data": 1})[0]
    late = {4: [0], 5: [0], 8: [1], 9: [1]} if delay else {}
    assert found == [late.get(calls, []) + [calls // 4] * (calls % 4 > 0) for calls in range(1, 10)]
