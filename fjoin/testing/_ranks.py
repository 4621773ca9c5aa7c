"""The simulated ranks on which laws are checked, and their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import transforms as tx
from ..transforms.plan._plan import axes_of
from ._compare import params_like


def axes_for(make: Callable[[], tx.Transform], alone: bool = False) -> dict[str, int]:
    """Sizes of the axes that a transform names, or of "data": 3 for one axis, 2 each for two; 1 if `alone`."""
    found = sorted(axes_of(make(), ())) or ["data"]
    sizes = [1] if alone else [3] if len(found) == 1 else [2, 2]
    return {name: sizes[i] if i < len(sizes) else 1 for i, name in enumerate(found)}


def ranks_of(make: Callable[[], tx.Transform]) -> int:
    return math.prod(axes_for(make).values())


def rank_in(make: Callable[[], tx.Transform]) -> int:
    return int(tx.axis_index(tuple(axes_for(make))))


def grads_of(seed: int) -> dict[str, Tensor]:
    return params_like(100 + seed)


def on_ranks(make: Callable[[], tx.Transform], weights: list[Any], steps: int = 3) -> list[Any]:
    """The resulting gradients of each rank in each step, and the last state."""

    given = [[grads_of(10 * step + rank) for step in range(steps)] for rank in range(len(weights))]
    params = params_like()

    def one_rank(mine: list[Any], weight: Any) -> Any:
        part = make()
        state = part.init(params)
        outs = []
        for grads in mine:
            out, state = part.update(grads, state, params, weight=weight)
            outs.append(out)
        return outs, state

    return tx.simulate(one_rank, axes_for(make, alone=len(weights) == 1), given, weights)
