"""A loop of one's own in which each rank has pieces of the parameters: as one process on the batches of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff

RANKS, STEPS = 3, 4
MEAN, CLIP, ADAM = tx.mean("data"), tx.clip_by_global_norm(0.1), tx.adamw(0.1)


def start() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(6, 4, generator=g).double(), "b": torch.randn(6, generator=g).double()}


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step)).double()


def weight(rank: int, step: int) -> float:
    """Uneven; the last rank has no input from step 2 on."""
    return 0.0 if rank == 2 and step > 1 else 1.0 + (rank + step) % 3


def loss(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return (x @ w.T + b).tanh().square().mean()


def on_pieces(pipeline: tx.Pipeline, donate: bool, over: str = "weight") -> dict[str, Tensor]:
    def one_rank(rank: int) -> Any:
        params = {path: p.chunk(RANKS)[rank].clone() for path, p in start().items()}
        state = pipeline.init(params)
        for step in range(STEPS):
            counted = weight(rank, step) if over == "weight" else float(weight(rank, step) > 0)

            def loss_fn(p: Any, step: int = step, counted: float = counted) -> Tensor:
                w, b = (tx.all_gather(p[path], "data", tiled=True) for path in ("w", "b"))
                return loss(w, b, batch(rank, step)) * counted

            grads = torch.func.grad(loss_fn)(params)
            given = {path: g.clone() for path, g in grads.items()}
            params, state = pipeline.step(params, grads, state, weight=weight(rank, step), donate=donate)
            assert donate or not max_diff(grads, given)
        return params

    found = tx.simulate(one_rank, {"data": RANKS}, list(range(RANKS)))
    return {path: torch.cat([one[path] for one in found]) for path in start()}


def in_one_process(pipeline: tx.Pipeline, over: str = "weight") -> dict[str, Tensor]:
    params = start()
    state = pipeline.init(params)
    for step in range(STEPS):
        weights = [weight(rank, step) for rank in range(RANKS)]
        counts = weights if over == "weight" else [float(w > 0) for w in weights]
        total = RANKS if over == "world" else sum(counts)

        def loss_fn(p: Any, step: int = step, counts: Any = counts, total: Any = total) -> Tensor:
            losses = [loss(p["w"], p["b"], batch(rank, step)) for rank in range(RANKS)]
            return sum(c * one for c, one in zip(counts, losses, strict=True)) / total  # type: ignore[no-any-return]

        params, state = pipeline.step(params, torch.func.grad(loss_fn)(params), state, weight=sum(weights))
    return params


def fused(*rest: tx.Transform, over: Any = "weight", **options: Any) -> tx.Pipeline:
    return tx.fuse(tx.chain(tx.mean("data", over), *rest), ADAM, sharded_over="data", **options)


ROWS = {
    "mean": (fused(), tx.fuse(tx.identity(), ADAM)),
    "live": (fused(over="live"), tx.fuse(tx.identity(), ADAM)),
    "world": (fused(over="world"), tx.fuse(tx.identity(), ADAM)),
    "clip": (fused(CLIP), tx.fuse(CLIP, ADAM)),
    "skip": (tx.skip_if_nonfinite(fused(CLIP)), tx.skip_if_nonfinite(tx.fuse(CLIP, ADAM))),
    "average": (fused(CLIP, after=tx.ema(0.5)), tx.fuse(CLIP, ADAM, after=tx.ema(0.5))),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_pieces_are_trained_as_in_one_process(name: str, donate: bool) -> None:
    sharded, whole = ROWS[name]
    over = name if name in ("live", "world") else "weight"
    assert max_diff(on_pieces(sharded, donate, over), in_one_process(whole, over)) < 1e-12


def test_without_the_axis_each_rank_is_clipped_by_its_own_norm() -> None:
    alone = tx.fuse(CLIP, ADAM)

    def one_rank(rank: int) -> float:
        grads = {path: p.chunk(RANKS)[rank] for path, p in start().items()}
        return float(sum(g.square().sum() for g in alone.hook.update(grads, ())[0].values()))

    assert tx.simulate(one_rank, {"data": RANKS}, list(range(RANKS))) == pytest.approx([0.01] * RANKS, rel=1e-4)
