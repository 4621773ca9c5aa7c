"""PowerSGD in a step: as torch's, as simulated, in any buckets, on uneven inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN
from tests.oracle import torch_power_sgd as torchs
from tests.oracle.whole_batch import make_batches, make_model


def made(rank: int = 1, **settings: Any) -> tx.Transform:
    return tx.power_sgd("data", rank, **{"min_compression_rate": 1.0, **settings})


# -- torch's ---------------------------------------------------------------------------------------


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


# -- steps -----------------------------------------------------------------------------------------

PARAMS = {"a.weight": (8, 6), "a.bias": (6,), "b.weight": (6, 7), "b.bias": (7,), "c.weight": (7, 6), "scale": ()}


def net() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {path: torch.randn(shape, generator=g) * 0.5 for path, shape in PARAMS.items()}


def net_loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(torch.tanh(batch @ p["a.weight"] + p["a.bias"]) @ p["b.weight"] + p["b.bias"])
    return ((x @ p["c.weight"]).tanh() * p["scale"] - batch[:, :6]).square().mean()


def test_only_compressed_leaves_have_residuals() -> None:
    def kept() -> Any:
        step = fjoin.train_step(net_loss, tx.fuse(tx.error_feedback(made()), tx.adam(0.02)), bucket_bytes=300)
        state, _ = step(step.init(net()), torch.ones(4, 8))
        return tx.to_state_dict(state.pipeline.hook)

    matrices, found = {"a.weight", "b.weight", "c.weight"}, tx.simulate(kept, {"data": 2})[0]
    assert {name.removeprefix("error.") for name in found if name.startswith("error.")} == matrices
    assert {name.removeprefix("inner.q.") for name in found if name.startswith("inner.q.")} == matrices


def in_their_memory(module: bool) -> list[bool]:
    """Whether the means of a step lie where its gradients lay, bucket by bucket."""
    hook, seen = tx.error_feedback(made()), []

    def update(grads: Any, *args: Any, donated: bool = False, wire: Any = None, **extra: Any) -> Any:
        out, state = hook.update(grads, *args, donated=donated, wire=wire, **extra)
        seen.append(all(out[path].data_ptr() == g.data_ptr() for path, g in grads.items() if g.dim() == 2))
        return out, state

    spied = tx.fuse(dataclasses.replace(hook, update=update), tx.sgd(0.1))
    if module:
        ddp = DistributedDataParallel(make_model(dtype=torch.float32))
        fjoin.ddp.register(ddp, spied)
        ddp(make_batches(1, EVEN, torch.float32)[0][0][0]).sum().backward()
    else:
        step = fjoin.train_step(net_loss, spied, mesh=fjoin.mesh({"data": -1}), bucket_bytes=300)
        step(step.init(net()), torch.ones(4, 8))
        step.close()
    return seen


@pytest.mark.parametrize("module", [False, True], ids=["step", "module"])
def test_means_are_written_over_the_gradients(pool: Any, module: bool) -> None:
    for seen in pool.run(2, in_their_memory, module):
        assert seen and all(seen)
