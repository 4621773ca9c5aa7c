"""A budget of bytes holds at every moment, and its plan is the fastest."""

from __future__ import annotations

import itertools
import random
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.remat._budget import measured
from fjoin.transforms.remat.costs._knapsack import Choice, Cost, least, plan
from fjoin.transforms.remat.values._offload import store_for
from tests.helpers import raises_text

from .transformer import Counted, Transformer, tokens

# Forward-mode derivatives compile their formulas by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def seconds(blocks: list[dict[Choice, Cost]], choices: Any) -> float:
    return sum(block[choice].seconds for block, choice in zip(blocks, choices, strict=True))


def most(blocks: list[dict[Choice, Cost]], choices: Any) -> int:
    """The most bytes at any time: in each block's backward pass, what it and the blocks before keep."""
    held, found = 0, 0
    for block, choice in zip(blocks, choices, strict=True):
        held += block[choice].held
        found = max(found, held + block[choice].extra)
    return found


def of_seed(seed: int, blocks: int) -> list[dict[Choice, Cost]]:
    draw = random.Random(seed)
    out = []
    for _ in range(blocks):
        whole, entry, time = draw.randrange(100, 2000), draw.randrange(1, 90), draw.random()
        out.append(
            {
                Choice.KEEP: Cost(whole, 0, 0.0),
                Choice.RECOMPUTE: Cost(entry, whole - entry, time),
                Choice.OFFLOAD: Cost(draw.randrange(3), whole, time * draw.choice([0.2, 0.9, 3.0])),
            }
        )
    return out


@pytest.mark.parametrize("seed", range(4))
def test_plan_is_near_the_optimum_on_twelve_blocks(seed: int) -> None:
    blocks = of_seed(seed, 12)
    everything = sum(block[Choice.KEEP].held for block in blocks)
    budget = least(blocks) + int((everything - least(blocks)) * [0.05, 0.2, 0.5, 0.8][seed])
    # All 3 ** 12 plans, as (bytes held, most bytes, seconds).
    table = torch.zeros(1, 3, dtype=torch.float64)
    for block in blocks:
        rows = []
        for cost in block.values():
            held = table[:, 0] + cost.held
            rows.append(
                torch.stack([held, torch.maximum(table[:, 1], held + cost.extra), table[:, 2] + cost.seconds], 1)
            )
        table = torch.cat(rows)
    best = table[table[:, 1] <= budget, 2].min().item()
    found = plan(blocks, budget)
    assert found is not None and most(blocks, found) <= budget
    assert seconds(blocks, found) <= 1.05 * best
    assert least(blocks) == int(table[:, 1].min()) and plan(blocks, least(blocks) - 1) is None


@pytest.mark.parametrize("seed", range(20))
def test_few_blocks(seed: int) -> None:
    blocks = of_seed(seed, seed % 5)
    for budget in (0, 500, 1500, 4000, 10**6):
        plans = [c for c in itertools.product(Choice, repeat=len(blocks)) if most(blocks, c) <= budget]
        found = plan(blocks, budget)
        assert (found is None) == (not plans)
        if found is not None:
            assert seconds(blocks, found) == pytest.approx(min(seconds(blocks, c) for c in plans))


def test_many_blocks() -> None:
    blocks = of_seed(0, 60)
    budget = sum(block[Choice.KEEP].held for block in blocks) // 2
    found = plan(blocks, budget)
    assert found is not None and most(blocks, found) <= budget


def model_and_loss(offload: Any = None, budget: int | None = None) -> tuple[Transformer, Any]:
    model = Transformer(5, wide=lambda i: 1 + i % 4)

    def loss(x: Tensor) -> Tensor:
        return model(x, tx.remat)  # type: ignore[no-any-return]

    return model, tx.remat(loss, offload=offload, budget_bytes=budget) if budget is not None else loss


@pytest.mark.sample(6)
@pytest.mark.parametrize("offload", [None, tempfile.gettempdir()], ids=["", "file"])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.4, 0.7, 1.0])
def test_never_above_the_budget(part: float, offload: str | None) -> None:
    x, (model, loss) = tokens(), model_and_loss()
    plain = tx.saved_residuals(model, x, lambda f: f).activation_bytes
    fixed, blocks = measured(loss, None if offload is None else store_for(offload), (x,), {})
    low = fixed + least(blocks)
    budget = low + int((plain - low) * part)
    loss(x).backward()
    want = [p.grad for p in model.parameters()]
    model, loss = model_and_loss(offload, budget)
    predicted = tx.saved_residuals(loss, x).activation_bytes
    counted = Counted([*model.parameters(), x])
    with counted.context():
        out = loss(x)
        assert counted.now == predicted
        out.backward()
    assert counted.most <= budget
    torch.testing.assert_close([p.grad for p in model.parameters()], want, rtol=0, atol=0)
    if part == 1.0:
        assert predicted == plain  # all are kept
    if part == 0.0:
        raises_text(
            ValueError, lambda: model_and_loss(offload, budget - 1)[1](x), "too small", f"at least {low - fixed}"
        )


def test_under_transforms() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w)

    calls = itertools.count()  # unlike a list, it goes on in a second run

    def counted(x: Tensor, w: Tensor) -> Tensor:
        next(calls)
        return block(x, w)

    def loss(run: Any) -> Any:
        return lambda w, x: run(run(run(x, w), w), w).square().sum()

    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    of_rows = lambda f: torch.func.vmap(torch.func.grad(f), (None, 0))  # noqa: E731
    fixed, costs = measured(loss(tx.remat(block)), None, (w.clone().requires_grad_(), x), {})
    low, again = fixed + least(costs), {}
    for budget, grads in (
        (10**6, (torch.func.grad, of_rows, torch.func.jacfwd, torch.func.hessian)),
        (low, (torch.func.grad, of_rows)),
    ):
        for grad in grads:
            got = grad(tx.remat(loss(tx.remat(counted)), budget_bytes=budget))  # type: ignore[operator]
            torch.testing.assert_close(got(w, x), grad(loss(block))(w, x), rtol=1e-12, atol=1e-12)  # type: ignore[operator]
            before = next(calls)
            got(w, x)
            again[budget, grad] = next(calls) - before - 1
    assert again[10**6, torch.func.grad] == again[10**6, of_rows] == 3
    assert again[low, torch.func.grad] > 3 and again[low, of_rows] > 3


def test_the_form_of_the_call_matters() -> None:
    dropout, runs = torch.nn.Dropout(0.5), []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.tanh(dropout(x))

    def loss(x: Tensor) -> Tensor:
        return tx.remat(block)(x).sum()  # type: ignore[no-any-return]

    # In training the block keeps 100 numbers and the mask, otherwise 100 numbers.
    chosen = tx.remat(loss, budget_bytes=400)
    for training, count in ((False, 1), (True, 2), (False, 1)):
        dropout.train(training)
        x = torch.ones(100, requires_grad=True)
        try:
            chosen(x)
        except ValueError:
            assert training
            continue
        runs.clear()
        chosen(x).backward()
        assert len(runs) == count and not training
    with torch.no_grad():
        dropout.train()
        assert not chosen(torch.ones(100)).requires_grad


def test_without_blocks_and_nested() -> None:
    x = torch.ones(10, requires_grad=True)
    raises_text(ValueError, lambda: tx.remat(lambda x: x.exp().sin(), budget_bytes=39)(x), "0 blocks", "keeps 40")
    tx.remat(lambda x: x.exp().sin(), budget_bytes=40)(x).sum().backward()
    inner = tx.remat(lambda x: tx.remat(torch.exp)(tx.remat(torch.exp)(x)), budget_bytes=1000)
    (tx.remat(inner)(x * 0).sum() + tx.remat(inner, budget_bytes=1000)(x).sum()).backward()


def test_bad_input() -> None:
    raises_text(ValueError, lambda: tx.remat(torch.exp, tx.dots_saveable, budget_bytes=3), "takes no policy")
    for wrong in (-1, 2.5, "all", True):
        raises_text(ValueError, lambda: tx.remat(torch.exp, budget_bytes=wrong), "budget_bytes")  # type: ignore[arg-type]  # noqa: B023
