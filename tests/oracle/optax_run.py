"""optax, fed given gradients, in float64. No fjoin here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor


def run(transform: Any, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The displacement of each parameter after all steps."""
    with jax.enable_x64(True):
        first = [jnp.asarray(p.numpy()) for p in start]
        params, state = first, transform.init(first)
        for step in grads:
            updates, state = transform.update([jnp.asarray(g.numpy()) for g in step], state, params)
            params = optax.apply_updates(params, updates)
        return [torch.from_numpy(np.array(p - s)) for p, s in zip(params, first, strict=True)]
