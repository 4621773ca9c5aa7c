"""Weighted sums over the ranks: of the buckets of torch's DistributedDataParallel, and of the weights."""

from __future__ import annotations

import functools
import math

import torch

from ..groups._mesh import Mesh
from ..transforms._axis_env import bind_axes
from ..transforms._lane import mask_words, rank_bit
from ..transforms._tree import to_device
from ..transforms.axes._collectives import axis_index
from ..transforms.plan._plan import Plan
from ._buckets import DDPBucket
from ._module_scatter import ModuleScatter


class Counts:
    """The sum of some ranks' weights, and one bit from each of them, in a message of its own.

    Args:
        axes: The axes of these ranks; there may be none.
        weight: This rank's weight.
        flag: This rank's bit, 0 or 1.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], weight: float, flag: float) -> None:
        with bind_axes(mesh.axes):
            word, bit = rank_bit(int(axis_index(axes)) if axes else 0)
        words = torch.zeros(1 + mask_words(math.prod(axis.size for axis in mesh.over(axes))), dtype=torch.float64)
        words[0], words[1 + word] = weight, flag * bit
        self._words = to_device(mesh.device, words)
        self._work = mesh.reduce_(self._words, axes) if axes else None

    def wait(self) -> dict[str, float]:
        """Wait for the message; returns the sum, and by name the words with the bits."""
        if self._work is not None:
            self._work.wait()
        weight, *masks = self._words.tolist()
        return {"weight": weight, **{f"nonfinite{i}": mask for i, mask in enumerate(masks)}}


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
        words = [self._factor, weight] if weighs else [self._factor]
        self._words = torch.tensor(words, dtype=torch.float64).to(device)
        self._work = mesh.reduce_(self._words, self._axes)

    @functools.cached_property
    def _sums(self) -> list[float]:
        """The summed words; the first read waits for the message."""
        self._work.wait()
        return list(self._words.tolist())

    @property
    def total(self) -> float:
        """The sum of the ranks' factors in the mean: their weights, or 1 for each rank with a weight above 0."""
        return self._sums[0]

    @property
    def weight(self) -> float:
        """The sum of the ranks' weights, where `weighs` is set."""
        return self._sums[-1]

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
