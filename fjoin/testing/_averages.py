"""The laws of averages of parameters, such as those of local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import transforms as tx
from ._compare import params_like, same_bits
from ._ranks import axes_for, grads_of, rank_in

_CALLS = 12


def _trained(make: Callable[[], tx.Transform], weight: Callable[[int, int], float], nan: bool = False) -> list[Any]:
    """For each rank and call, the parameters before and after the call; between calls each rank changes its own.

    Args:
        weight: `(rank, call) -> weight`.
        nan: Whether the parameters of a rank are NaN before a call in which it has weight 0.
    """

    def one_rank() -> list[Any]:
        part, params, me = make(), params_like(), rank_in(make)
        state, seen = part.init(params), []
        for call in range(_CALLS):
            own = weight(me, call)
            if own:
                params = {
                    path: p + 0.1 * g
                    for (path, p), g in zip(params.items(), grads_of(10 * call + me).values(), strict=True)
                }
            elif nan:
                params = {path: torch.full_like(p, float("nan")) for path, p in params.items()}
            before = params
            params, state = part.update(params, state, params, weight=own, step=call, persistent=True)
            seen.append((before, params))
        return seen

    return tx.simulate(one_rank, axes_for(make))


def makes_ranks_equal(make: Callable[[], tx.Transform]) -> None:
    """After a call each parameter is unchanged on all ranks, or equal on all ranks to the bit; each changes at some time."""
    ranks = _trained(make, lambda rank, call: 1.0 + (rank + call) % 3)
    changed = set()
    for calls in zip(*ranks, strict=True):
        for path in params_like():
            if all(same_bits(before[path], after[path]) for before, after in calls):
                continue
            changed.add(path)
            assert all(same_bits(calls[0][1][path], after[path]) for _, after in calls), f"{path} differs between ranks"
    missing = {path for path, p in params_like().items() if p.numel()} - changed
    assert not missing, f"never averaged: {sorted(missing)}"


def gives_the_average_to_ranks_without_input(make: Callable[[], tx.Transform]) -> None:
    """A rank without input gets the same parameters as the others, whatever its own were."""

    def weight(rank: int, call: int) -> float:
        return 0.0 if rank == 1 else 1.0

    clean, poisoned = _trained(make, weight), _trained(make, weight, nan=True)
    for rank, (calls, others) in enumerate(zip(clean, poisoned, strict=True)):
        for (_, after), (_, other) in zip(calls, others, strict=True):
            if rank != 1:
                assert same_bits(after, other), "parameters of a rank without input have an effect"


def keeps_parameters_without_input(make: Callable[[], tx.Transform]) -> None:
    """While no rank has input nothing changes, except by the average of earlier training."""
    ranks = _trained(make, lambda rank, call: float(call < 3))
    for calls in ranks:
        last = calls[-1][1]
        settled = [same_bits(after, last) for _, after in calls]
        assert settled[_CALLS // 2], "parameters change although no rank has input"


AVERAGE_LAWS: list[Callable[..., None]] = [
    makes_ranks_equal,
    gives_the_average_to_ranks_without_input,
    keeps_parameters_without_input,
]
