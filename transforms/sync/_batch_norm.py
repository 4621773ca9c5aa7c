"""Batch normalization over all ranks, as a function and as modules."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..axes import all_gather, current_weight
from ..base import AxisName, checks, shares, trees


class BatchNormState(NamedTuple):
    """Running statistics, the same on all ranks."""

    mean: Tensor  # (channels,)
    var: Tensor  # (channels,), unbiased


def sync_batch_norm(
    x: Tensor,
    state: tuple[Tensor, Tensor],
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
        state: The running mean and variance, each (channels,).
        scale, bias: (channels,), or None.
        axis: The axis, or a tuple of axes, to normalize over.
        training: Use and update batch statistics; if False, use the running statistics and send nothing.
        momentum: Share of this batch in the running statistics.
        eps: Added to the variance.
        weight: This rank counts if its weight is not 0; by default its weight in the current step.

    Returns:
        y, like x, and the new state, with the fields `mean` and `var`. One message forward and one backward.

    Raises:
        UnboundAxis: nothing binds the axis.
        ValueError: x, the state, scale or bias has another shape. On all ranks, on the host: they have one value per
            channel together, whose variance is none.
        TypeError: the state is no pair.

    Same as: torch.nn.SyncBatchNorm, which refuses uneven inputs.

    >>> from fjoin import transforms as tx
    >>> def one_rank(x):
    ...     state = torch.zeros(1), torch.ones(1)
    ...     return tx.sync_batch_norm(x, state, axis="data")[1].mean
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])])
    [tensor([0.3000]), tensor([0.3000])]
    """
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"sync_batch_norm takes floating-point (N, C, ...), got {got}")
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(f"sync_batch_norm: state must be a pair (mean, variance), got {state!r}")
    for name, one in (("state[0]", state[0]), ("state[1]", state[1]), ("scale", scale), ("bias", bias)):
        if (one is not None or name.startswith("state")) and getattr(one, "shape", None) not in (x.shape[1:2], ()):
            raise ValueError(f"sync_batch_norm: {name} must be a tensor of shape {tuple(x.shape[1:2])}, got {one!r}")
    over = [d for d in range(x.dim()) if d != 1]
    form = [-1] + [1] * (x.dim() - 2)
    running_mean, running_var = state
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if training:
        counts = trees.to_device(wide.device, shares.check_weight(current_weight() if weight is None else weight) != 0)
        here = counts.to(wide) * (x.numel() / max(x.shape[1], 1))
        own_mean = wide.mean(over) if x.numel() else wide.new_zeros(x.shape[1])
        own_square = (wide - own_mean.view(form)).square().sum(over)
        # Each rank's count, mean and sum of squares are combined after Chan et al., so no large numbers cancel.
        own = torch.stack([torch.ones_like(own_mean) * here, own_mean, own_square])
        n, means, squares = all_gather(torch.where(here > 0, own, torch.zeros_like(own)), axis).unbind(1)
        total = n.sum(0)
        if _is_one(total):
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.size()}, and the ranks have one in all"
            )
        safe = torch.where(total > 0, total, torch.ones_like(total))
        mean = (n * means).sum(0) / safe
        square = squares.sum(0) + (n * (means - mean).square()).sum(0)
        var = square / safe
        unbiased = (square / torch.where(total > 1, total - 1, torch.ones_like(total))).detach()
        # The results of a rank of weight 0 do not affect the others' gradients, even if they are NaN.
        mean, var = torch.where(counts, mean, mean.detach()), torch.where(counts, var, var.detach())
        share = (total > 0).to(running_mean) * momentum
        running_mean = torch.lerp(running_mean, mean.detach().to(running_mean), share)
        running_var = torch.lerp(running_var, unbiased.to(running_var), share)
    else:
        mean, var = running_mean, running_var
    y = (wide - mean.view(form)) * torch.rsqrt(var + eps).view(form)
    if scale is not None:
        y = y * scale.view(form)
    if bias is not None:
        y = y + bias.view(form)
    return y.to(x.dtype), BatchNormState(running_mean, running_var)


def _is_one(total: Tensor) -> bool:
    """Whether all counts are 1, as far as Python can read them without waiting for a device."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(total):
        total = torch._C._functorch.get_unwrapped(total)
    plain = type(total) is Tensor and total.is_cpu and torch._C._len_torch_dispatch_stack() == 0
    return plain and bool(total.numel()) and bool((total == 1).all())


M = TypeVar("M", bound=nn.Module)
_KEPT = tuple("affine track_running_stats training weight bias running_mean running_var num_batches_tracked".split())


class SyncBatchNorm(_BatchNorm):
    """Batch normalization by `sync_batch_norm`, with the parameters and buffers of torch's; made by
    `convert_sync_batchnorm`.

    Args:
        axis: The axis, or a tuple of axes, to normalize over.
        args, kwargs: As for torch.nn.BatchNorm1d.
    """

    def __init__(self, axis: AxisName, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (samples, channels, ...).

        Raises:
            UnboundAxis: nothing binds the axis, as where the module is called outside a step and `fjoin.bind`.
        """
        momentum, is_kept = self.momentum, self.running_mean is not None
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # the average of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        none = torch.zeros((), device=x.device)
        state: Any = (self.running_mean, self.running_var) if is_kept else (none, none)
        how: Any = dict(axis=self.axis, training=self.training or not is_kept, momentum=momentum or 0.0, eps=self.eps)
        y, new = sync_batch_norm(x, state, self.weight, self.bias, **how)
        if self.training and is_kept:
            for old, value in zip(state, new, strict=True):
                old.copy_(value)
        return y

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, axis={self.axis!r}"


def convert_sync_batchnorm(module: M, axis: AxisName = "data") -> M:
    """A module whose batch normalization, of any number of dimensions, is over the batches of all ranks, whatever their
    sizes.

    The converted layers hold the parameters and buffers of the original ones, under the same paths, so checkpoints fit.
    Call it before `fjoin.functional`. Where ranks have different numbers of batches, loop over `step.join(loader,
    when_exhausted="replay")`, since the forward pass then communicates.

    Args:
        module: Any module. Layers inside it are replaced in place.
        axis: The axis, or a tuple of axes, to normalize over.

    Returns:
        The module, or its replacement where it is itself a batch normalization.

    Same as: torch.nn.SyncBatchNorm.convert_sync_batchnorm, which refuses CPUs and uneven inputs.

    >>> from fjoin import transforms as tx
    >>> model = tx.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.BatchNorm2d(8)))
    >>> model[1]
    SyncBatchNorm(8, eps=1e-05, momentum=0.1, axis='data')
    """
    checks.some_axes("convert_sync_batchnorm", axis)
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_sync_batchnorm takes a module, got {module!r}")
    made: dict[nn.Module, nn.Module] = {}

    def converted(part: nn.Module) -> nn.Module:
        if not isinstance(part, _BatchNorm) or isinstance(part, SyncBatchNorm):
            return part
        if part not in made:
            made[part] = new = SyncBatchNorm(axis, part.num_features, part.eps, part.momentum, device="meta")
            for name in _KEPT:
                setattr(new, name, getattr(part, name))
        return made[part]

    for path, part in list(module.named_modules(remove_duplicate=False)):
        if path:
            above, _, name = path.rpartition(".")
            setattr(module.get_submodule(above), name, converted(part))
    return converted(module)  # type: ignore[return-value]
