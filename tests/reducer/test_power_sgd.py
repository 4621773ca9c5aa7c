"""PowerSGD in a step, in any buckets: as torch's hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.oracle import torch_power_sgd as torchs
from tests.power_problem import made


def by_torch(rank: int, feedback: bool) -> Any:
    params = {path: p.detach() for path, p in torchs.Net().named_parameters()}
    first = {path: q.T for path, q in made(rank).init(params).q.items()}
    return torchs.train(14, rank, first, feedback=feedback)


def by_us(rank: int, feedback: bool, bucket_bytes: int) -> Any:
    net = torchs.Net()
    apply, params, _ = fjoin.functional(net)
    hook = made(rank, warmup_steps=2)
    step = fjoin.train_step(
        lambda p, b: torchs.loss(lambda x: apply(p, {}, x), b),
        tx.fuse(tx.error_feedback(hook) if feedback else hook, tx.sgd(0.3)),
        mesh=fjoin.mesh({"data": -1}), bucket_bytes=bucket_bytes,
    )  # fmt: skip
    state, seen = step.init(params), []
    for i in range(14):
        state, _ = step(state, torchs.batch(dist.get_rank(), i))
        seen.append({path: p.clone() for path, p in state.params.items()})
    step.close()
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("feedback", [True, False], ids=["fed back", "alone"])
@pytest.mark.parametrize("rank", [1, 4])
def test_equal_to_torchs_hook(pool: Any, rank: int, feedback: bool) -> None:
    """Displacements over two plain and twelve compressed steps, from the same first Q."""
    (want, *_), start = pool.run(2, by_torch, rank, feedback), dict(torchs.Net().named_parameters())
    for bucket_bytes in (10**8, 500):
        for seen in pool.run(2, by_us, rank, feedback, bucket_bytes):
            for ours, theirs in zip(seen, want, strict=True):
                for path, p in theirs.items():
                    way = (p - start[path]).norm()
                    assert (ours[path] - p).norm() < 1e-9 * way, (path, bucket_bytes)
