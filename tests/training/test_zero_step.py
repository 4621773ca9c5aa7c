"""A sharded pipeline in train_step equals the unsharded one, and the pure one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_table import OPTIMIZERS
from torch import Tensor

import fjoin
from fjoin import transforms as tx

SHAPES = {
    "a.weight": (9, 7), "a.bias": (9,), "b.weight": (33, 3), "scale": (), "empty": (0, 3), "b.bias": (33,), "c.weight": (4, 4),
}  # fmt: skip


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return {path: torch.randn(shape, generator=gen).to(dtype) for path, shape in SHAPES.items()}


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], float]:
    gen = torch.Generator().manual_seed(100 * rank + step)
    return {path: torch.randn(shape, generator=gen).to(dtype) for path, shape in SHAPES.items()}, 1.0 + (
        rank + step
    ) % 3


def loss_fn(params: Any, batch: Any) -> Tensor:
    return sum((p * g).sum() for p, g in zip(params.values(), batch[0].values(), strict=True))  # type: ignore[return-value]


def train(pipeline: tx.Pipeline, sizes: dict[str, int], steps: int = 5, **options: Any) -> list[Any]:
    dtype = options.pop("dtype", torch.float32)

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(
            loss_fn,
            pipeline,
            mesh=fjoin.mesh(sizes),
            weight=lambda b: b[1],
            bucket_bytes=options.pop("bucket_bytes", 512),
        )
        state = step.init(start(dtype))
        for b in step.join([batch(rank, i, dtype) for i in range(steps - rank % 3)], empty=batch(0, 0, dtype)):
            state, _ = step(state, b)
        state = step.flush(state)
        return state.clone()

    ranks = 1
    for n in sizes.values():
        ranks *= n
    return tx.simulate(one_rank, sizes, list(range(ranks)))


def same(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        for path, value in other.params.items():
            assert torch.equal(one.params[path], value), path


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name, i", [(name, i) for name, rows in OPTIMIZERS.items() for i in range(len(rows))])
def test_every_optimizer(name: str, i: int, ranks: int) -> None:
    optimizer, dtype = OPTIMIZERS[name][i](), torch.bfloat16 if name == "mixed_precision" else torch.float32
    want = train(tx.fuse(tx.chain(tx.mean("data"), tx.identity()), optimizer), {"data": ranks}, dtype=dtype)
    got = train(tx.zero(tx.mean("data"), optimizer, "data"), {"data": ranks}, dtype=dtype)
    same(got, want)
