"""The gradient that a backward pass starts from: the rank's share in the mean, times the scale of the loss."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...buckets._grad_buffer import GradBuffer
from ...reducer._step_hook import StepHook
from ...transforms._axis_env import Work


class GradOutput(NamedTuple):
    """What a backward pass starts from, so that the gradients carry this rank's share and the scale of the loss."""

    start: Any = 1.0  # the gradient of the loss: a number, or a 0-d tensor like the loss
    share: float = 0.0  # the share of this rank's gradients in the mean
    rest: Tensor | None = None  # the part of the factor that `start` cannot carry, for the gradients; 0-d float64

    def backward(self, loss: Tensor) -> None:
        start = self.start
        if isinstance(start, float):
            start = None if start == 1.0 else torch.full_like(loss, start)
        loss.backward(start)


def grad_output_of(loss: Tensor | None, share: float, hook: StepHook, scale: Tensor | None, adds: bool) -> GradOutput:
    """The gradient to start backward from: the loss factor of `hook`, times the loss scale if there is one.

    Args:
        loss: The loss; a 16-bit loss rounds the share to its own precision. None where this rank has no batch.
        share: This rank's share in the mean.
        scale: The scale of the loss, 0-d float32, or None.
        adds: Whether gradients of several micro-batches are added before they are sent, so that each must already
            carry its share.

    Raises:
        ValueError: the share does not fit into the loss's dtype.
    """
    if loss is None:
        return GradOutput(0.0, 0.0, 1 / scale.double() if adds and scale is not None else None)
    factor, narrow = hook.loss_factor(share), loss.dtype.itemsize < 4
    if scale is None:
        if narrow and factor != 1.0:
            factor = _rounded(factor, loss.dtype)
            if not math.isfinite(factor):
                raise ValueError(
                    f"the weight {share!r} of this batch is too large for a loss of {loss.dtype}; return the loss as float32, "
                    f"or use smaller weights (only their ratios matter)"
                )
            share = factor / hook.unit
        return GradOutput(factor, share)
    wide = scale.to(loss.device, torch.float64)
    if not adds:
        start = wide.to(loss.dtype)
        return GradOutput(start, share, factor / start.double())
    if narrow:
        rounded = _rounded(wide.item() * factor, loss.dtype)
        if math.isfinite(rounded):  # otherwise the gradients overflow, and the step is left out
            share = rounded / wide.item() / hook.unit
    return GradOutput((wide * factor).to(loss.dtype), share, 1 / wide)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype).item())


class Unscaler:
    """Removes the loss's scale from each bucket of gradients before the hook.

    Attributes:
        rest: See `GradOutput`; None where nothing remains to be applied, as in a step without a batch on this rank.
    """

    def __init__(self, hook: StepHook) -> None:
        self._hook = hook
        self.rest: Tensor | None = None

    def launch(self, index: int, out: GradBuffer) -> Work | None:
        if self.rest is not None:
            unscale(out.grads, self.rest)
        return self._hook.launch(index, out)


def unscale(grads: Tensor, factor: Tensor) -> None:
    """Multiply in place. Infinite elements become NaN, which no later stage makes finite again."""
    torch.nan_to_num_(grads.mul_(factor), nan=math.nan, posinf=math.nan, neginf=math.nan)
