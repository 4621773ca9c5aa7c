"""optax, fed given gradients, in float64. No fjoin here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch


def run(transform: Any, start: Any, grads: list[Any]) -> Any:
    """The displacement of each parameter of a tree after all steps."""
    with jax.enable_x64(True):
        first = jax.tree.map(lambda p: jnp.asarray(p.numpy()), start)
        params, state = first, transform.init(first)
        for step in grads:
            updates, state = transform.update(jax.tree.map(lambda g: jnp.asarray(g.numpy()), step), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda p, s: torch.from_numpy(np.array(p - s)), params, first)
