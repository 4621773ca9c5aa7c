"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._call_env import current_weight
from .._check import AxisName
from ..axes._gather_scatter import all_gather
from ..transform._weights import check_weight
from ..tree._tree import to_device


class BatchNormState(NamedTuple):
    """Running statistics, the same on all ranks."""

    mean: Tensor  # (channels,)
    var: Tensor  # (channels,), unbiased


def sync_batch_norm(
    x: Tensor,
    state: BatchNormState,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axis: AxisName,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    weight: Any = None,
) -> tuple[Tensor, BatchNormState]:
    """Normalize with the statistics of all ranks' batches together, whatever their sizes.

        y = (x - mean) / sqrt(var + eps) scale + bias

    mean and var are over all samples and positions of the ranks whose weight is not 0, as in one process on the whole
    batch. A rank of weight 0 takes part and gets its own y, but does not count.

    Args:
        x: (samples, channels, ...), samples and positions may differ between ranks.
        state: The running statistics.
        scale, bias: (channels,), or None.
        axis: The axis, or a tuple of axes, to normalize over.
        training: Use and update batch statistics; if False, use the running statistics and send nothing.
        momentum: Share of this batch in the running statistics.
        eps: Added to the variance.
        weight: This rank counts if its weight is not 0; by default its weight in the current step.

    Returns:
        y, like x, and the new state. One message forward and one backward.

    Raises:
        ValueError: x has fewer than two dimensions, or is not floating-point.
        UnboundAxis: nothing binds the axis.

    Same as: torch.nn.SyncBatchNorm, which refuses uneven inputs.

    >>> from fjoin import transforms as tx
    >>> def one_rank(x):
    ...     state = tx.BatchNormState(torch.zeros(1), torch.ones(1))
    ...     return tx.sync_batch_norm(x, state, axis="data")[1].mean
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])])
    [tensor([0.3000]), tensor([0.3000])]
    """
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating-point (samples, channels, ...), got {x.dtype} of shape {tuple(x.shape)}")
    over = [d for d in range(x.dim()) if d != 1]
    form = [1, -1] + [1] * (x.dim() - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if training:
        counts = to_device(wide.device, check_weight(current_weight() if weight is None else weight) != 0)
        here = counts.to(wide) * (x.numel() / max(x.shape[1], 1))
        own_mean = wide.mean(over) if x.numel() else wide.new_zeros(x.shape[1])
        own_square = (wide - own_mean.view(form)).square().sum(over)
        # Each rank's count, mean and sum of squares are combined after Chan et al., so no large numbers cancel.
        own = torch.stack([torch.ones_like(own_mean) * here, own_mean, own_square])
        n, means, squares = all_gather(torch.where(here > 0, own, torch.zeros_like(own)), axis).unbind(1)
        total = n.sum(0)
        safe = torch.where(total > 0, total, torch.ones_like(total))
        mean = (n * means).sum(0) / safe
        square = squares.sum(0) + (n * (means - mean).square()).sum(0)
        var = square / safe
        unbiased = (square / torch.where(total > 1, total - 1, torch.ones_like(total))).detach()
        # The results of a rank of weight 0 do not affect the others' gradients, even if they are NaN.
        mean, var = torch.where(counts, mean, mean.detach()), torch.where(counts, var, var.detach())
        share = (total > 0).to(state.mean) * momentum
        state = BatchNormState(
            torch.lerp(state.mean, mean.detach().to(state.mean), share),
            torch.lerp(state.var, unbiased.to(state.var), share),
        )
    else:
        mean, var = state.mean, state.var
    y = (wide - mean.view(form)) * torch.rsqrt(var + eps).view(form)
    if scale is not None:
        y = y * scale.view(form)
    if bias is not None:
        y = y + bias.view(form)
    return y.to(x.dtype), state
