"""Encoded messages in a step: the same on all ranks, near those that are not encoded; tests/training/test_verdicts.py has NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, same_bits
from tests.oracle import torch_power_sgd as torchs
from tests.power_problem import made
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


# -- PowerSGD in a step, in any buckets: as torch's hook --


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
