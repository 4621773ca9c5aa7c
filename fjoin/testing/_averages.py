"""The laws of averages and of error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from .. import transforms as tx
from ._compare import axes_for, grads_of, params_like, rank_in, ranks_of, same_bits

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


# The weights of up to four ranks, step by step: in the third step no rank has input.
INPUTS = [(1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 1.0, 1.0), (0.0,) * 4, (1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)]


def pays_what_it_owes(make: Callable[[], tx.Transform]) -> None:
    """Over all steps, the results plus the final residuals (divided as in the last step) equal the inputs."""
    for without_input in ("freeze", "flush"):
        outs, errors = _run(make, without_input)
        totals = [total for _, total in outs]
        for path, p in params_like().items():
            inputs = sum(
                w * grads_of(10 * i + r)[path] / totals[i]
                for i, ws in enumerate(INPUTS)
                for r, w in enumerate(ws[: ranks_of(make)])
                if w
            )
            results = sum(out[path] for out, _ in outs)
            residual = sum(error[path] for error in errors if path in error) / [t for t in totals if t][-1]
            gap = torch.as_tensor(results + residual - inputs)
            assert p.numel() == 0 or gap.abs().max() < 1e-5, f"{path} with {without_input}: off by {gap.abs().max()}"


def forgets_what_is_not_finite(make: Callable[[], tx.Transform]) -> None:
    """A step that is not finite on one rank is not finite on the others either, and leaves the residuals finite."""
    for bad in (math.nan, math.inf):
        outs, errors = _run(make, "freeze", bad, at=1)
        assert not all(torch.isfinite(leaf).all() for leaf in outs[1][0].values()), "it came out finite"
        for out, _ in [outs[0], *outs[2:]]:
            assert all(torch.isfinite(leaf).all() for leaf in out.values()), "it is remembered in later steps"
        assert all(torch.isfinite(leaf).all() for error in errors for leaf in error.values())


def _run(
    make: Callable[[], tx.Transform], without_input: Literal["freeze", "flush"], bad: float | None = None, at: int = -1
) -> tuple[list[Any], list[Any]]:
    """The results of rank 0 with their total weights, and all ranks' residuals at the end."""

    def one_rank() -> Any:
        hook, params = tx.error_feedback(make(), without_input), params_like()
        state, me, outs = hook.init(params), rank_in(make), []
        for i, weights in enumerate(INPUTS):
            grads = grads_of(10 * i + me)
            if i == at and me == 1:
                grads = {path: torch.full_like(g, bad) for path, g in grads.items()}  # type: ignore[arg-type]
            out, state = hook.update(grads, state, params, weight=weights[me])
            assert hook.sums is not None, "it has no sums"
            outs.append((out, hook.sums(state).total.item()))
        return outs, state.error

    results = tx.simulate(one_rank, axes_for(make))
    return results[0][0], [error for _, error in results]


FEEDBACK_LAWS: list[Callable[..., None]] = [pays_what_it_owes, forgets_what_is_not_finite]
