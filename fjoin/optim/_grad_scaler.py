"""What torch.amp.GradScaler sets on an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def guards_of(optimizer: Any) -> dict[str, Tensor | None]:
    """The divisor of the gradients, and whether they are to be skipped, where a GradScaler has set them."""
    return {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}


def step_as(front: Any, local: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer with what a GradScaler has set on the one in front of it; None where it is not to step."""
    given = {name: value for name, value in guards_of(front).items() if value is not None}
    if getattr(local, "_step_supports_amp_scaling", False):
        for name, value in given.items():
            setattr(local, name, value)
        try:
            return local.step(*args, **kwargs)
        finally:
            for name in given:
                delattr(local, name)
    if "found_inf" in given and given["found_inf"].item():
        return None
    if "grad_scale" in given:
        for group in local.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(given["grad_scale"].to(p.grad.device))
    return local.step(*args, **kwargs)
