"""torch.amp.GradScaler on CPU, fed given gradients of the unscaled loss. No fjoin here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def run(start: Tensor, grads: Sequence[Tensor], lr: float, **options: Any) -> tuple[list[Tensor], list[float]]:
    """The parameter and the scale after each step of SGD with momentum."""
    p = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **options)
    params, scales = [], []
    for g in grads:
        scaled = scaler.scale(torch.ones(()))
        p.grad = g * scaled
        scaler.step(optimizer)
        scaler.update()
        params.append(p.detach().clone())
        scales.append(scaler.get_scale())
    return params, scales
