"""The allowed dtypes and memory formats of a registered module's parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, samples
from tests.helpers import max_diff, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss


class TwoDtypes(nn.Module):
    """Whose gradients never lie in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).double()).square().mean()


def two_dtypes(codec: str | None, static: bool) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(TwoDtypes(), static_graph=static)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    if codec is not None:
        fjoin.ddp.register(ddp, tx.compress(tx.float32(), tx.mean("data")) if codec else tx.mean("data"))
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for batch in x:
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_parameters_of_two_dtypes(pool: Any, static: bool) -> None:
    """In the first pass of a static graph both buckets have index 0, and none says that it is the last."""
    want = pool.run(2, two_dtypes, None, static)
    for codec in ("", "float32"):
        for got, expected in zip(pool.run(2, two_dtypes, codec, static), want, strict=True):
            assert max_diff(got, expected) < 1e-6


class Images(nn.Module):
    """A convolution whose weights lie in channels-last order, and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 2, dtype=torch.float64).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.turned @ self.conv(x).amax((2, 3)).t()).square().mean()


def layouts(how: str) -> Any:
    ddp = DistributedDataParallel(Images(), gradient_as_bucket_view=how == "views")
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.05, weight_decay=0.1)
    if ours := how in ("fused", "views"):
        clipped = tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1))
        fjoin.ddp.register(ddp, tx.fuse(clipped, tx.adamw(0.05, weight_decay=0.1)))
    rank = dist.get_rank()
    with contextlib.nullcontext() if how == "plain" else fjoin.Join([ddp] if ours else [ddp, optimizer]):
        for step in range(3 - (rank if how == "join" else 0)):
            g = torch.Generator().manual_seed(10 * step + rank)
            ddp.zero_grad()
            ddp(torch.randn(2, 3, 5, 5, generator=g, dtype=torch.float64)).backward()
            if how == "plain":
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            if not ours:
                optimizer.step()
    params = {path: p.detach().clone() for path, p in ddp.module.named_parameters()}
    moments = {
        f"{path}, moment": optimizer.state[p]["exp_avg"] for path, p in ddp.module.named_parameters() if how == "join"
    }
    return params | moments


@pytest.mark.parametrize("how", ["fused", "views"])
def test_parameters_with_other_memory_layouts(pool: Any, how: str) -> None:
    """torch's views in a bucket have other strides than the parameters."""
    ours, theirs = pool.run(2, layouts, how), pool.run(2, layouts, "plain")
    assert max_diff(ours[0], theirs[0]) < 1e-12 and same_bits(ours[0], ours[1])


def test_parameters_with_other_memory_layouts_in_a_join(pool: Any) -> None:
    """A rank without input steps with the gradients it receives: the optimizer's state stays equal too."""
    a, b = pool.run(2, layouts, "join")
    assert len(a) == 6 and same_bits(a, b)


def widely_weighted(hook: str, dtype: torch.dtype) -> Any:
    """The gradient of each pass, which is 0.5 for any weights, also without an optimizer, and the parameter after the first."""
    module = nn.Linear(3, 1, bias=False, dtype=dtype)
    nn.init.ones_(module.weight)
    mean = tx.mean("data")
    made = {"mean": mean, "mean, clip": tx.chain(mean, tx.clip_by_global_norm(100.0)), "alone": mean}[hook]
    ddp = DistributedDataParallel(module)
    handle = fjoin.ddp.register(ddp, made if hook == "alone" else tx.fuse(made, tx.sgd(1.0)))
    grads, params = [], []
    for weight in (512.0, 1e-6, 3.0, 50000.0):
        ddp.zero_grad()
        handle.weight(weight * (1 + dist.get_rank() * (dtype is torch.float16)))
        ddp(torch.full((1, 3), 0.5, dtype=dtype)).sum().backward()
        grads += module.weight.grad.flatten().tolist()
        params += module.weight.flatten().tolist()
    return grads, params[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hook", ["mean", "mean, clip", "alone"])
def test_weights_of_any_size_in_low_precision(pool: Any, hook: str, dtype: torch.dtype) -> None:
    """The scale of gradients in messages is removed once; sums fit when weights suddenly grow."""
    for grads, param in pool.run(2, widely_weighted, hook, dtype):
        assert grads == pytest.approx([0.5] * 12, rel=1e-3) and param == (1.0 if hook == "alone" else 0.5)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: tx.adamw(0.05),
    "sgd": lambda: tx.sgd(0.05, momentum=0.9),
    "lion": lambda: tx.lion(0.05),
    "masters": lambda: tx.mixed_precision(tx.adamw(0.05)),
    "frozen": lambda: tx.partition({"*bias": tx.frozen(), "*": tx.adamw(0.05)}),  # its kernel divides nothing
    "skipped": lambda: tx.adamw(0.05),
}


def gradients_left(optimizer: str, dtype: torch.dtype) -> Any:
    """After the first pass: with a pipeline, and with its hook alone."""
    left = []
    for alone in (False, True):
        ddp = DistributedDataParallel(make_model().to(dtype))
        pipeline = tx.fuse(tx.mean("data"), OPTIMIZERS[optimizer]())
        handle = fjoin.ddp.register(ddp, tx.mean("data") if alone else tx.skip_if_nonfinite(pipeline))
        x, y = make_batches(1, EVEN)[dist.get_rank()][0]
        x = x * float("inf") if optimizer == "skipped" else x
        handle.weight(samples((x, y)))
        mean_loss(ddp, (x.to(dtype), y)).backward()
        left.append({path: p.grad.clone() for path, p in ddp.module.named_parameters() if p.grad is not None})
    return left


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_left_as_the_hook_made_them(pool: Any, optimizer: str, dtype: torch.dtype) -> None:
    """Means, where the optimizer's kernel has divided the sums too."""
    for with_pipeline, alone in pool.run(2, gradients_left, optimizer, dtype):
        assert len(alone) == 4
        for path, g in alone.items():
            assert torch.allclose(with_pipeline[path], g, rtol=1e-6, atol=0, equal_nan=True), path
