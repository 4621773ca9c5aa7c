"""Weighted sums over the ranks: of the buckets of torch's DistributedDataParallel, and of the weights."""

from __future__ import annotations

import math

import torch

from ..groups._mesh import Mesh
from ..groups._record import Record
from ..transforms.plan._plan import Plan
from ._buckets import DDPBucket
from ._module_scatter import ModuleScatter


class WeightedSum:
    """The sums of one pass; the weights are summed in a message of their own, which is sent first.

    Args:
        weight: This rank's weight in this pass.
        weighs: Whether the sum of the weights is needed in addition to the divisor of the mean.
        device: The device of the module.
    """

    def __init__(self, mesh: Mesh, plan: Plan, weight: float, weighs: bool, device: torch.device) -> None:
        self._mesh, self._axes = mesh, plan.reduced(0).axes
        self.ranks = math.prod(axis.size for axis in mesh.over(self._axes))
        self._factor = weight if plan.by_weight else float(weight > 0)
        values = {"total": self._factor, **({"weight": weight} if weighs else {})}
        self._sums = Record(mesh, self._axes, values, device=device)

    @property
    def total(self) -> float:
        """The sum of the ranks' factors in the mean: their weights, or 1 for each rank with a weight above 0."""
        return self._sums["total"]

    @property
    def weight(self) -> float:
        """The sum of the ranks' weights, where `weighs` is set."""
        return self._sums["weight"]

    def send(self, out: DDPBucket) -> None:
        """Start summing a bucket in place, times its `unit`, or this rank's piece of it."""
        if out.grads.dtype.itemsize < 4 and 0 < self.total < math.inf:
            # Weighted sums of gradients would overflow: scale by a power of two near 1 / total, which loses no bit.
            out.unit = 2.0 ** -math.floor(math.log2(self.total))
        factor = self._factor * out.unit
        if factor == 0.0:
            out.grads.zero_()  # 0 times NaN is NaN
        elif factor != 1.0:
            out.grads.mul_(factor)
        if out.pieces is not None:
            out.work = ModuleScatter(out, self._mesh.axes[out.pieces.axis])
        else:
            out.work = self._mesh.reduce_(out.grads, self._axes)
