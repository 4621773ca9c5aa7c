"""torch's own DDP in torch's own Join, with an ordinary optimizer. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def spread_after_first_step_of_epoch_2(
    make_model: Callable[[], torch.nn.Module], make_optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[Any], loss: Callable[[torch.nn.Module, Any], torch.Tensor],
) -> tuple[float, float]:  # fmt: skip
    """The largest difference between ranks in any parameter: after epoch 1, and after one more step."""
    ddp = DistributedDataParallel(make_model())
    optimizer = make_optimizer(ddp.parameters())

    def one(batch: Any) -> None:
        optimizer.zero_grad()
        loss(ddp, batch).backward()
        optimizer.step()

    def spread() -> float:
        flat = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
        others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat)
        return max((flat - other).abs().max().item() for other in others)

    with Join([ddp]):
        for batch in batches:
            one(batch)
    ended = spread()
    with Join([ddp]):
        one(batches[0])
        return ended, spread()  # before the end of the context, whose broadcast hides it
