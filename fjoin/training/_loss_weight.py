"""What a backward pass starts from: the rank's share in the mean, and the scale of the loss."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups._axis import Work
from ..reducer._bucket_hooks import StepHook
from ..reducer._buckets import GradBuffer


class GradOutput(NamedTuple):
    start: Any = 1.0  # what the gradient of the loss is: a number, or a 0-d tensor like the loss
    share: float = 0.0  # what this rank's gradients count
    rest: Tensor | None = None  # what gradients are to be multiplied with once backward has ended, 0-d float64

    def backward(self, loss: Tensor) -> None:
        start = self.start
        if isinstance(start, float):
            start = None if start == 1.0 else torch.full_like(loss, start)
        loss.backward(start)


def grad_output_of(loss: Tensor | None, share: float, hook: StepHook, scale: Tensor | None, adds: bool) -> GradOutput:
    """Start backward from the share where that makes the weighting free, and from the scale where there is one.

    Args:
        loss: The loss; one of 16 bits rounds the share to its own precision. None where this rank has no batch.
        share: What this rank counts.
        scale: Of the loss, 0-d float32, or None.
        adds: Whether gradients of several micro-batches are added before they are sent, so that all must have their
            shares already.

    Raises:
        ValueError: the share does not fit into the loss's dtype.
    """
    if loss is None:
        return GradOutput(0.0, 0.0, 1 / scale.double() if adds and scale is not None else None)
    seed, narrow = hook.loss_factor(share), loss.dtype.itemsize < 4
    if scale is None:
        if narrow and seed != 1.0:
            seed = _rounded(seed, loss.dtype)
            if not math.isfinite(seed):
                raise ValueError(
                    f"the weight {share!r} of this batch is too large for a loss of {loss.dtype}; return the loss as float32, "
                    f"or use smaller weights (only their ratios matter)"
                )
            share = seed / hook.unit
        return GradOutput(seed, share)
    wide = scale.to(loss.device, torch.float64)
    if not adds:
        start = wide.to(loss.dtype)
        return GradOutput(start, share, seed / start.double())
    if narrow:
        rounded = _rounded(wide.item() * seed, loss.dtype)
        if math.isfinite(rounded):  # else the gradients overflow, which leaves the step out
            share = rounded / wide.item() / hook.unit
    return GradOutput((wide * seed).to(loss.dtype), share, 1 / wide)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype).item())


class Unscaler:
    """Sends buckets of gradients that have had the loss's scale.

    Attributes:
        rest: See `Seed`; None in a step in which this rank has no gradients.
    """

    def __init__(self, hook: StepHook) -> None:
        self._hook = hook
        self.rest: Tensor | None = None

    def launch(self, index: int, out: GradBuffer) -> Work | None:
        if self.rest is not None:
            unscale(out.grads, self.rest)
        return self._hook.launch(index, out)


def unscale(grads: Tensor, factor: Tensor) -> None:
    """Multiply in place. What has overflowed becomes NaN, which no later stage makes finite again."""
    torch.nan_to_num_(grads.mul_(factor), nan=math.nan, posinf=math.nan, neginf=math.nan)
