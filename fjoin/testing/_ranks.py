"""The simulated ranks on which laws are tried, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import transforms as tx
from ..transforms._plan import axes_of
from ._compare import params_like

RANKS = 3


def axes_for(make: Callable[[], tx.Transform], ranks: int) -> dict[str, int]:
    """The axes that a transform names, all ranks along the first; "data" where it names none."""
    found = sorted(axes_of(make(), ())) or ["data"]
    return {name: ranks if i == 0 else 1 for i, name in enumerate(found)}


def rank_in(make: Callable[[], tx.Transform]) -> int:
    return int(tx.axis_index(tuple(axes_for(make, 1))))


def grads_of(seed: int) -> dict[str, Tensor]:
    return params_like(100 + seed)


def on_ranks(
    make: Callable[[], tx.Transform], weights: list[Any], steps: int = 3, engine: Any = "lockstep", seed: int = 0
) -> list[Any]:
    """The gradients that come out on each rank in each step, and the last state."""

    # Drawn outside: inside vmap a draw would be one per rank, even from a seeded generator.
    given = [[grads_of(seed + 10 * step + rank) for step in range(steps)] for rank in range(len(weights))]
    params = params_like()

    def one_rank(mine: list[Any], weight: Any) -> Any:
        part = make()
        state = part.init(params)
        outs = []
        for grads in mine:
            out, state = part.update(grads, state, params, weight=weight)
            outs.append(out)
        return outs, state

    return tx.simulate(one_rank, axes_for(make, len(weights)), given, weights, engine=engine)
