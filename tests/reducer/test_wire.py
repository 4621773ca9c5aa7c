"""Encoded messages in a step: the same on all ranks, near those that are not encoded. test_nonfinite.py has values that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, same_bits
from tests.training.small import net_batch, net_loss, net_params

CODECS: dict[str, Any] = {
    "bfloat16": tx.bfloat16, "float16": tx.float16, "fp8": lambda: tx.fp8(block=8), "int8": lambda: tx.int8(block=8),
    "int4": lambda: tx.int4(block=8), "bfloat16 by chance": lambda: tx.bfloat16(stochastic=True),
    "qsgd": lambda: tx.qsgd(levels=127, block=8), "uint8": lambda: tx.uint8(block=8), "top_k": lambda: tx.top_k(0.5),
}  # fmt: skip
SIZES = [5, 3, 0]  # batches of each rank


def net_trained(hook: tx.Transform) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """A rank's run over its batches, rank r with weight 1 + r: parameters, and each step's (loss, weight)."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    step = fjoin.train_step(
        net_loss, tx.fuse(hook, tx.adam(0.05)), mesh=mesh, weight=lambda b: 1.0 + mesh.rank, bucket_bytes=200
    )
    state, seen = step.init(net_params()), []
    for batch in step.join([net_batch(mesh.rank, i) for i in range(SIZES[mesh.rank])]):
        state, metrics = step(state, batch)
        seen.append((metrics.loss, metrics.weight))
    out = {path: p.clone() for path, p in state.params.items()}
    step.close()
    return out, seen


def trained() -> list[Any]:
    """A rank's run with each codec: parameters, and each step's (loss, weight)."""
    return [net_trained(tx.error_feedback(tx.compress(make(), tx.mean("data")))) for make in CODECS.values()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_processes_as_simulated(pool: Any, ranks: int) -> None:
    """To the bit, without an ordered reduction; the weights and the first loss are exact, even where gradients are lossy."""
    real, simulated = pool.run(ranks, trained), tx.simulate(trained, {"data": ranks})
    (_, losses), *_ = tx.simulate(lambda: net_trained(tx.mean("data")), {"data": ranks})
    for of_rank, wanted in zip(real, simulated, strict=True):
        for codec, (params, seen), want, first in zip(CODECS, of_rank, wanted, real[0], strict=True):
            assert same_bits((params, seen), want) and same_bits(params, first[0]), codec
            assert [w for _, w in seen] == [w for _, w in losses] and seen[0] == losses[0]
            assert not same_bits(params, net_params()) and all(torch.isfinite(p).all() for p in params.values())


@pytest.mark.parametrize(
    "hook",
    [tx.compress(torch.bfloat16, tx.mean("data")), tx.compress(tx.bfloat16(), tx.hierarchical_mean("local", "data"))],
    ids=repr,
)
def test_a_code_has_no_derivative(hook: tx.Transform) -> None:

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: hook.update(y, hook.init(y))[0].sum())(x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return hook.update(x.requires_grad_(), hook.init(x))[0]

    for run in (outer, plain):
        two = [torch.ones(2), torch.ones(2)]
        raises_text(RuntimeError, lambda: tx.simulate(run, {"data": 2, "local": 1}, two), "no derivative")  # noqa: B023
