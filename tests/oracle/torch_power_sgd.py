"""torch's PowerSGD in a DistributedDataParallel of one bucket, on this rank. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    """Matrices of two equal shapes and of two others, a convolution, vectors."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 10, 2)
        self.first, self.second = torch.nn.Linear(10, 12), torch.nn.Linear(12, 12)
        self.third, self.last = torch.nn.Linear(12, 12), torch.nn.Linear(12, 9, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))  # on one of no dimension its hook raises IndexError
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).mean((2, 3))
        x = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.last(x) * self.scale


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 2, 4, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 9, (4,), generator=g)


def loss(module: Callable[[Tensor], Tensor], given: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(module(given[0]), given[1])


def train(steps: int, rank: int, first_q: Mapping[str, Tensor], feedback: bool) -> list[dict[str, Tensor]]:
    """Stochastic gradient descent; the first two steps are plain, as torch wants it.

    Args:
        first_q: Path -> (columns, rank), the factor that the third step starts from.

    Returns:
        The parameters after each step.
    """
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1000)
    state = power.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1.0, use_error_feedback=feedback
    )  # fmt: skip
    path_of = {p: path for path, p in ddp.module.named_parameters()}

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if state.iter == 2:
            by_shape: dict[Any, list[str]] = {}
            for p in bucket.parameters():
                if path_of[p] in first_q:
                    by_shape.setdefault(p.view(p.shape[0], -1).shape, []).append(path_of[p])
            order = [path for paths in by_shape.values() for path in paths]
            rows = [dict(ddp.module.named_parameters())[path].shape[0] for path in order]
            state.q_memory_dict[0] = torch.cat([first_q[path].reshape(-1).clone() for path in order])
            state.p_memory_dict[0] = torch.empty(sum(n * rank for n in rows)).double()
        return power.powerSGD_hook(state, bucket)

    ddp.register_comm_hook(state, lambda state, bucket: hook(state, bucket))  # whose annotations are no strings
    seen: list[dict[str, Tensor]] = []
    for step in range(steps):
        ddp.zero_grad()
        loss(ddp, batch(dist.get_rank(), step)).backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.3 * p.grad
        seen.append({path: p.detach().clone() for path, p in ddp.module.named_parameters()})
    return seen
