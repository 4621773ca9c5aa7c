"""What is summed over the ranks in the buckets of torch's DistributedDataParallel, and beside them."""

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


class Counts:
    """The sum of some ranks' weights, and a bit for each of those that say something, in a message of its own.

    Args:
        axes: The axes of these ranks; there may be none.
        weight: Of this rank.
        says: Whether this rank says it, 0 or 1.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], weight: float, says: float) -> None:
        with bind_axes(mesh.axes):
            word, bit = rank_bit(int(axis_index(axes)) if axes else 0)
        words = torch.zeros(1 + mask_words(math.prod(axis.size for axis in mesh.over(axes))), dtype=torch.float64)
        words[0], words[1 + word] = weight, says * bit
        self._words = to_device(mesh.device, words)
        self._work = mesh.reduce_(self._words, axes) if axes else None

    def wait(self) -> dict[str, float]:
        """The sum, and by name the words with the bits."""
        if self._work is not None:
            self._work.wait()
        weight, *masks = self._words.tolist()
        return {"weight": weight, **{f"nonfinite{i}": mask for i, mask in enumerate(masks)}}


class WeightedSum:
    """The sum of one pass; the weights are summed in a message of their own, which goes first.

    Args:
        weight: Of this rank in this pass.
        weighs: Whether the sum of the weights is wanted besides what the ranks count in the mean.
        device: Of the module.
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
        """What all ranks count together; it is waited for, once."""
        self._work.wait()
        return list(self._words.tolist())

    @property
    def total(self) -> float:
        """What all ranks count together in the mean."""
        return self._sums[0]

    @property
    def weight(self) -> float:
        """The sum of their weights, where it is wanted."""
        return self._sums[-1]

    def send(self, out: DDPBucket) -> None:
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
