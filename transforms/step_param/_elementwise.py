"""Whether an optimizer steps each element by itself, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tree._tree import plain


def acts_elementwise(
    init_param: Callable[[Tensor], Any], step_param: Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]
) -> bool:
    """Whether the step of a small parameter is that of its parts; True where that cannot be found out.

    It cannot for a step that draws random numbers, or that raises.
    """
    param = torch.linspace(-1.0, 1.0, 8, dtype=torch.float32, device="cpu")
    grad = torch.linspace(0.5, -2.0, 8, dtype=torch.float32, device="cpu")
    if not plain(param):
        return True
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            whole = step_param(param, grad, init_param(param))[0]
            pairs = zip(param.split([3, 5]), grad.split([3, 5]), strict=True)
            parts = torch.cat([step_param(p, g, init_param(p))[0] for p, g in pairs])
        random = not torch.equal(torch.get_rng_state(), before)
        return random or torch.allclose(whole, parts, rtol=1e-4, atol=1e-6, equal_nan=True)
    except Exception:
        return True
    finally:
        torch.set_rng_state(before)
