"""Models that communicate in their forward pass, on uneven inputs: batch normalization over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.helpers import max_diff, raises_text, same_bits, seen_by, stepped
from tests.training.small import product, step_of

F64 = torch.float64


def inputs(sizes: list[int], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 4, generator=g, dtype=F64) * 3 + 100 for n in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_of_16_bits_is_computed_in_32(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + 100.2).to(dtype)
    want = nn.functional.batch_norm(x.double(), None, None, training=True)
    state = BatchNormState(torch.zeros(4), torch.ones(4))
    with fjoin.bind(fjoin.mesh({"data": -1})):
        y, new = tx.sync_batch_norm(x, state, torch.ones(4), torch.zeros(4), axis="data")
    assert y.dtype == dtype and new.mean.dtype == torch.float32
    assert (y.double() - want).abs().max() < 8 * torch.finfo(dtype).eps


# -- in a step ---------------------------------------------------------------------------------------


def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
    state = BatchNormState(buffers["mean"], buffers["var"])
    y, new = tx.sync_batch_norm(batch @ params["w"], state, params["scale"], params["bias"], axis="data")
    return (torch.tanh(y) @ params["v"]).square().mean(), None, {"mean": new.mean, "var": new.var}


def train(batches: list[Tensor], window: int = 1) -> Any:
    g = torch.Generator().manual_seed(3)
    shapes = {"w": (4, 4), "scale": (4,), "bias": (4,), "v": (4,)}
    params = {path: torch.randn(s, generator=g, dtype=F64) for path, s in shapes.items()}
    buffers, mesh = {"mean": torch.zeros(4, dtype=F64), "var": torch.ones(4, dtype=F64)}, fjoin.mesh({"data": -1})
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    step, state = step_of(
        loss_fn, pipeline, params, buffers, weight=len, mesh=mesh, accumulate=window, bucket_bytes=100
    )
    for batch in step.join(batches, when_exhausted="replay", empty=torch.ones(2, 4, dtype=F64)):
        state, metrics = step(state, batch)
    return {k: p.clone() for k, p in state.params.items()}, dict(state.buffers or {}), metrics.loss


@pytest.mark.parametrize(("sizes", "window"), [([[3, 2, 4], [5]], 1), ([[], [2, 3], [4, 1]], 2)], ids=str)
def test_training_with_batch_norm_on_uneven_inputs(pool: Any, sizes: list[list[int]], window: int) -> None:
    """One process on the ranks' batches together computes the same, running statistics included."""
    given = [inputs(own, seed=7 + rank) for rank, own in enumerate(sizes)]
    most = max(map(len, sizes))
    whole = [torch.cat([own[i] for own in given if i < len(own)]) for i in range(most)]
    ((params, buffers, loss),) = tx.simulate(lambda b: train(b, window), {"data": 1}, [whole])
    simulated = tx.simulate(lambda b: train(b, window), {"data": len(sizes)}, given)
    real = pool.each(train, given, window)
    for own, stats, own_loss in simulated + real:
        assert max_diff(own, params) < 1e-12 and max_diff(stats, buffers) < 1e-11
        assert abs(own_loss - loss) < 1e-12 or own_loss != own_loss
    assert all(same_bits(one[:2], simulated[0][:2]) for one in simulated)
    assert all(same_bits(one[:2], real[0][:2]) for one in real)


def test_replayed_batches_do_not_count() -> None:
    """Loss, gradients and sums of a replayed batch are ignored, even if they are NaN."""

    def one_rank(batches: list[float]) -> Any:
        weights = []

        def loss(params: Any, batch: float) -> Any:
            weights.append(tx.current_weight())
            total = tx.psum(torch.tensor(1.0), "data")  # every rank is here
            return product(params, batch) * total / total, {"sum": {"calls": 1}}

        def look(state: Any, metrics: Any) -> Any:
            return metrics.sums["calls"], metrics.weight, metrics.aux is None, float(state.params["w"][0])

        step, state = step_of(loss)
        return seen_by(look, step, state, step.join(batches, when_exhausted="replay", empty=float("nan"))), weights

    (a, wa), (b, wb), (c, wc) = tx.simulate(one_rank, {"data": 3}, [[1.0, 2.0], [3.0], []])
    assert a[-1][3] == b[-1][3] == c[-1][3] == pytest.approx(1 - 0.1 * (2 + 2))
    assert [s[:2] for s in a] == [(2, 2), (1, 1)] and [s[2] for s in b] == [False, True]
    assert (wa, wb, wc) == ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0])


def test_replay_raises_on_a_bad_mode_or_a_missing_batch() -> None:
    step, _ = step_of()
    raises_text(ValueError, lambda: next(iter(step.join([1.0], when_exhausted="repeat"))), "'shadow' or 'replay'")

    def one_rank(n: int) -> None:
        step, state = step_of()
        stepped(step, state, step.join([torch.ones(2)] * n, when_exhausted="replay"))

    raises_text(
        fjoin.NoBatch,
        lambda: tx.simulate(one_rank, {"data": 2}, [1, 0]),
        "runs the model on every rank",
        "empty=a_batch",
    )
