"""What torch.amp.GradScaler sets on an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def guards_of(optimizer: Any) -> dict[str, Tensor | None]:
    """The divisor of the gradients, and whether they are to be skipped, where a GradScaler has set them."""
    return {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}


@contextlib.contextmanager
def guarded(local: torch.optim.Optimizer, guards: dict[str, Tensor | None]) -> Iterator[bool]:
    """A context in which a GradScaler's settings are those of another optimizer; yields whether it steps."""
    given = {name: value for name, value in guards.items() if value is not None}
    if not given or getattr(local, "_step_supports_amp_scaling", False):
        for name, value in given.items():
            setattr(local, name, value)
        try:
            yield True
        finally:
            for name in given:
                delattr(local, name)
        return
    if "found_inf" in given and given["found_inf"].item():
        yield False
        return
    if "grad_scale" in given:
        for group in local.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(given["grad_scale"].to(p.grad.device))
    yield True
