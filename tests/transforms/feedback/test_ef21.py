"""ef21: estimates are the same on all ranks, for any dtype, and after loading on other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_constant_gradients_converge_to_dtype_precision(dtype: torch.dtype) -> None:
    hook = tx.ef21(tx.compress(tx.int4(block=4), tx.mean("data")))
    xs = [torch.randn(16, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]

    def one_rank(g: Tensor) -> Any:
        state = hook.init(g)
        for _ in range(40):
            out, state = hook.update(g, state)
        return out, state.own[""], state.whole[""]

    ranks = tx.simulate(one_rank, {"data": 3}, xs)
    want = torch.stack(xs).double().mean(0)
    for out, _, whole in ranks:
        assert out.dtype is dtype and (out.double() - want.to(dtype).double()).abs().max() <= torch.finfo(dtype).eps * 2
        assert (whole - sum(own for _, own, _ in ranks)).abs().max() < 1e-5


LOADED = {
    "fewer ranks": ([0, 1], 2), "more": ([0, 1, 2, 3], 4), "one that is new": ([0, 1, 2, None], 4),
    "all from one": ([0, 0, 0], 3), "in another order": ([1, 2, 0], 3), "as it was": ([0, 1, 2], 3),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("flush", ["freeze", "flush"])
@pytest.mark.parametrize("case", LOADED)
def test_loaded_on_other_ranks(case: str, flush: Any, over: Any) -> None:
    """It converges to the mean again, of ranks with input and of the last gradients of ranks without."""
    hook = tx.ef21(tx.compress(tx.int8(block=4), tx.mean("data", over)), flush)
    xs = [torch.randn(12, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    idle_last = [1.0, 1.0, 0.0]

    def before(g: Tensor) -> Any:
        state = hook.init(g)
        for weight in (2.0, idle_last[int(tx.axis_index("data"))]):
            _, state = hook.update(g, state, weight=weight)
        return tx.to_state_dict(state)

    saved = tx.simulate(before, {"data": 3}, xs[:3])
    whose, ranks = LOADED[case]
    states = [None if who is None else saved[who % 3] for who in whose]

    def after(g: Tensor, loaded: Any) -> Any:
        state, rank = hook.init(g), int(tx.axis_index("data"))
        if loaded is not None:
            state = tx.from_state_dict(state, loaded)
        for step in range(12):
            out, state = hook.update(g, state, weight=0.0 if step == 0 and rank == 0 else 1.0)
        return out

    want = torch.stack(xs[:ranks]).mean(0)
    for out in tx.simulate(after, {"data": ranks}, xs[:ranks], states):
        assert (out - want).abs().max() < 1e-5


def test_lossless_codec_gives_the_mean_for_changing_weights() -> None:
    weights = [[256.0, 1.0], [2.0, 1.0], [2.0, 256.0], [64.0, 512.0], [256.0, 2.0]]
    hook, mean = tx.ef21(tx.compress(tx.top_k(1.0), tx.mean("data"))), tx.mean("data")

    def one_rank(rank: int) -> float:
        state, gap = hook.init(torch.zeros(30)), 0.0
        for step, of in enumerate(weights):
            grad = torch.randn(30, generator=torch.Generator().manual_seed(10 * step + rank))
            out, state = hook.update(grad, state, weight=of[rank])
            gap = max(gap, max_diff(out, mean.update(grad, mean.init(grad), weight=of[rank])[0]))
        return gap

    assert max(tx.simulate(one_rank, {"data": 2}, [0, 1])) < 1e-4
