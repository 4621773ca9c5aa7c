"""Sums of 16-bit numbers over many ranks, calls or weights: added in more bits, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.shared_memory import combine
from tests.helpers import same_bits

DTYPES = [torch.bfloat16, torch.float16]
RANKS = 64


def _given(dtype: torch.dtype, size: int = 200) -> list[Tensor]:
    return [(torch.randn(size, generator=torch.Generator().manual_seed(i)) + 0.5).to(dtype) for i in range(RANKS)]


def _exact(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).double().sum(0)


def _close(got: Tensor, exact: Tensor, dtype: torch.dtype, roundings: float) -> bool:
    """Whether it is the exact value, with this many roundings of the largest value that occurs."""
    room = roundings * torch.finfo(dtype).eps / 2 * exact.abs().clamp(min=exact.abs().max() / 64)
    return got.dtype is dtype and bool(((got.double() - exact).abs() <= room * 1.01).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_round_a_sum_once(dtype: torch.dtype) -> None:
    xs = _given(dtype)
    total = _exact(xs)
    run: Any = tx.simulate
    for rank, got in enumerate(run(lambda x: tx.psum(x, "data"), {"data": RANKS}, xs)):
        assert _close(got, total, dtype, 1), rank
    rows = [x.view(-1)[: RANKS * 3].view(RANKS, 3) for x in _given(dtype, size=RANKS * 3)]
    scattered = run(lambda x: tx.psum_scatter(x, "data"), {"data": RANKS}, rows)
    for rank, got in enumerate(scattered):
        assert _close(got, _exact(rows)[rank], dtype, 1), rank
    # The sum is rounded, and then the quotient.
    assert _close(run(lambda x: tx.pmean(x, "data"), {"data": RANKS}, xs)[0], total / RANKS, dtype, 2)


HOOKS: dict[str, Callable[[], tx.Transform]] = {
    "mean": lambda: tx.mean("data"), "scatter_mean": lambda: tx.scatter_mean("data"),
    "sum_over": lambda: tx.chain(tx.sum_over("data")), "accumulate": lambda: tx.accumulate(1, tx.mean("data")),
    "every": lambda: tx.every(1, tx.mean("data")), "cast": lambda: tx.compress(torch.float16, tx.mean("data")),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weight", [None, 1.0, 100.0, 4097.0])
@pytest.mark.parametrize(("name", "ranks"), [("mean", 300), *((name, 5) for name in HOOKS if name != "sum_over")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_equal_gradients_is_their_value(
    dtype: torch.dtype, name: str, ranks: int, weight: float | None, as_tensor: bool
) -> None:
    """Of many ranks and large weights; a power of two, to which two roundings lead back. 512 additions in bfloat16 stop at 256."""
    one = torch.full((1,), 16.0, dtype=dtype)
    given = torch.tensor(weight) if as_tensor and weight else weight

    def rank() -> Tensor:
        hook = HOOKS[name]()
        return hook.update(one, hook.init(one), weight=given)[0]

    found = [x for x in tx.simulate(rank, {"data": ranks}) if x.numel()]
    assert found and all(x.dtype is dtype and x.item() == 16.0 for x in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulated_gradients_are_added_in_float32(dtype: torch.dtype, k: int = 512) -> None:
    hook, g = tx.accumulate(k, tx.identity()), torch.ones(1, dtype=dtype)
    state = hook.init(g)
    assert state.grads.dtype is torch.float32
    for _ in range(k):
        out, state = hook.update(g, state)
    assert out is not None and out.item() == 1.0 and out.dtype is dtype


def _windows(dtype: torch.dtype, k: int, **settings: Any) -> tuple[Any, Any]:
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b).sum() + (p["v"].sum() * b[0] if b[0] > 0 else 0), tx.fuse(tx.mean("data"), tx.sgd(0.5)),
        accumulate=k, **settings,
    )  # fmt: skip
    return step, step.init({"w": torch.zeros(3, dtype=dtype), "v": torch.zeros(2, dtype=dtype)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_of_a_train_step_is_added_in_float32(dtype: torch.dtype) -> None:
    """Also for a parameter whose last micro-batch has no gradient, and in a state cloned within the window."""
    step, state = _windows(dtype, 512)
    for i in range(512):
        if i == 300:
            state = state.clone()
            state, _ = step(state, torch.ones(3, dtype=dtype))
            continue
        state, _ = step(state, torch.ones(3, dtype=dtype) * (1 if i < 511 else -1))
    want = -0.5 * 510 / 512
    assert state.params["w"].tolist() == [torch.tensor(want, dtype=dtype).item()] * 3
    assert state.params["v"].tolist() == [torch.tensor(-0.5 * 511 / 512, dtype=dtype).item()] * 2
    state, _ = step(state, torch.ones(3, dtype=dtype))  # a new window begins at zero
    for _ in range(511):
        state, _ = step(state, torch.zeros(3, dtype=dtype))
    assert (state.params["w"].double() - want + 0.5 / 512).abs().max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 300_000])
def test_shared_memory_rounds_a_sum_once(dtype: torch.dtype, size: int) -> None:
    xs = [(torch.arange(size) % 7 + i % 3).to(dtype) for i in range(RANKS)]
    out = torch.empty(size, dtype=dtype)
    combine(xs, [out])
    assert same_bits(out, _exact(xs).to(dtype))
