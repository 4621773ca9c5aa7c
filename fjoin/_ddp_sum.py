"""A plain weighted sum of gradients, in the buckets of torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import math

import torch

from ._ddp_buckets import FromDDP
from ._mesh import Mesh
from .transforms._plan import Plan


class PlainSum:
    """The sum of one pass; the weights are summed in a message of their own, which goes first.

    Args:
        weight: Of this rank in this pass.
        device: Of the module.
    """

    def __init__(self, mesh: Mesh, plan: Plan, weight: float, device: torch.device) -> None:
        self._mesh, self._axes = mesh, plan.axes
        self._factor = weight if plan.by_weight else float(weight > 0)
        self._words = torch.full((1,), self._factor, dtype=torch.float64, device=device)
        self._work = mesh.reduce_(self._words, plan.axes)

    @functools.cached_property
    def total(self) -> float:
        """What all ranks count together; it is waited for, once."""
        self._work.wait()
        return float(self._words.item())

    def send(self, out: FromDDP) -> None:
        """Sum a bucket in place, times its `unit`."""
        if out.grads.dtype.itemsize < 4 and 0 < self.total < math.inf:
            # Sums of gradients times weights would not fit: a power of two near 1 / total, which costs no bit.
            out.unit = 2.0 ** -math.floor(math.log2(self.total))
        factor = self._factor * out.unit
        if factor == 0.0:
            out.grads.zero_()  # 0 times NaN is NaN
        elif factor != 1.0:
            out.grads.mul_(factor)
        out.work = self._mesh.reduce_(out.grads, self._axes)
