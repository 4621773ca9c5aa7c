"""Modules whose batch normalization is over the batches of all ranks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._check import AxisName
from ._batch_norm import BatchNormState, sync_batch_norm

M = TypeVar("M", bound=nn.Module)
_KEPT, _TENSORS = (
    ("affine", "track_running_stats", "training"),
    ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization by `sync_batch_norm`, with the parameters and buffers of torch's; made by `convert_sync_batchnorm`.

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
        mean, var, momentum = self.running_mean, self.running_var, self.momentum
        if mean is None or var is None:
            like = torch.promote_types(x.dtype, torch.float32)
            mean, var = (torch.zeros(x.shape[1:2], dtype=like, device=x.device) for _ in range(2))
        training = self.training or self.running_mean is None
        updates = self.training and self.running_mean is not None
        if updates and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # the average of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        y, new = sync_batch_norm(
            x,
            BatchNormState(mean, var),
            self.weight,
            self.bias,
            axis=self.axis,
            training=training,
            momentum=0.0 if momentum is None else momentum,
            eps=self.eps,
        )
        if updates:
            mean.copy_(new.mean)
            var.copy_(new.var)
        return y

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, axis={self.axis!r}"


def convert_sync_batchnorm(module: M, axis: AxisName = "data") -> M:
    """A module whose batch normalization, of any number of dimensions, is over the batches of all ranks, whatever their sizes.

    The converted layers hold the parameters and buffers of the original ones, under the same paths, so checkpoints fit. Call it before
    `fjoin.functional`. Where ranks have different numbers of batches, loop over `step.join(loader, when_exhausted="replay")`, since
    the forward pass then communicates.

    Args:
        module: Any module. Layers inside it are replaced in place.
        axis: The axis, or a tuple of axes, to normalize over.

    Returns:
        The module, or its replacement where it is itself a batch normalization.

    Raises:
        TypeError: `module` is no nn.Module.

    Same as: torch.nn.SyncBatchNorm.convert_sync_batchnorm, which refuses CPUs and uneven inputs.

    >>> from fjoin import transforms as tx
    >>> model = tx.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.BatchNorm2d(8)))
    >>> model[1]
    SyncBatchNorm(8, eps=1e-05, momentum=0.1, axis='data')
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_sync_batchnorm takes a module, got {module!r}")
    made: dict[int, nn.Module] = {}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        above, _, name = path.rpartition(".")
        if path and (new := _converted(part, axis, made)) is not part:
            setattr(module.get_submodule(above), name, new)
    return _converted(module, axis, made)  # type: ignore[return-value]


def _converted(module: nn.Module, axis: AxisName, made: dict[int, nn.Module]) -> nn.Module:
    if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
        return module
    if id(module) not in made:
        new = SyncBatchNorm(axis, module.num_features, module.eps, module.momentum, device="meta")
        for name in (*_KEPT, *_TENSORS):
            setattr(new, name, getattr(module, name))
        made[id(module)] = new
    return made[id(module)]
