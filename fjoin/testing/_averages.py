"""The laws of averages and of error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import transforms as tx
from ._compare import grads_of, on_ranks, params_like, ranks_of, same_bits

_CALLS = 12


def _trained(make: Callable[[], tx.Transform], weight: Callable[[int, int], float], nan: bool = False) -> list[Any]:
    """For each rank and call, the parameters before and after the call; between calls each rank changes its own.

    Args:
        weight: `(rank, call) -> weight`.
        nan: Whether the parameters of a rank are NaN before a call in which it has weight 0.
    """

    def one_rank(part: tx.Transform, params: Any, me: int) -> list[Any]:
        state, seen = part.init(params), []
        for call in range(_CALLS):
            if own := weight(me, call):
                grads = grads_of(10 * call + me)
                params = {path: p + 0.1 * grads[path] for path, p in params.items()}
            elif nan:
                params = {path: torch.full_like(p, math.nan) for path, p in params.items()}
            before = params
            params, state = part.update(params, state, params, weight=own, step=call, persistent=True)
            seen.append((before, params))
        return seen

    return on_ranks(make, one_rank)


def makes_ranks_equal(make: Callable[[], tx.Transform]) -> None:
    """After a call each parameter is unchanged on all ranks, or equal on all ranks to the bit; each changes at some
    time.
    """
    ranks = _trained(make, lambda rank, call: 1.0 + (rank + call) % 3)
    missing = {path for path, p in params_like().items() if p.numel()}
    for calls in zip(*ranks, strict=True):
        for path in params_like():
            if not all(same_bits(before[path], after[path]) for before, after in calls):
                missing.discard(path)
                equal = all(same_bits(calls[0][1][path], after[path]) for _, after in calls)
                assert equal, f"{path} differs between ranks"
    assert not missing, f"never averaged: {sorted(missing)}"


def gives_the_average_to_ranks_without_input(make: Callable[[], tx.Transform]) -> None:
    """A rank without input gets the same parameters as the others, whatever its own were."""
    clean, poisoned = (_trained(make, lambda rank, call: float(rank != 1), nan) for nan in (False, True))
    for rank, (calls, others) in enumerate(zip(clean, poisoned, strict=True)):
        for (_, after), (_, other) in zip(calls, others, strict=True):
            assert rank == 1 or same_bits(after, other), "parameters of a rank without input have an effect"


def keeps_parameters_without_input(make: Callable[[], tx.Transform]) -> None:
    """While no rank has input nothing changes, except by the average of earlier training."""
    for calls in _trained(make, lambda rank, call: float(call < 3)):
        assert same_bits(calls[_CALLS // 2][1], calls[-1][1]), "parameters change although no rank has input"


# The weights of up to four ranks, step by step: in the third step no rank has input.
INPUTS = [(1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 1.0, 1.0), (0.0,) * 4, (1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)]


def pays_what_it_owes(make: Callable[[], tx.Transform]) -> None:
    """Over all steps, the results plus the final residuals equal the inputs."""
    outs, errors = _run(make)
    ranks, reduction = ranks_of(make), make().one_reduction
    for path, p in params_like().items():
        inputs = torch.zeros_like(p)
        for i, all_weights in enumerate(INPUTS):
            weights = all_weights[:ranks]
            if reduction is not None and reduction.over != "weight":
                weights = tuple(float(w > 0) for w in weights)
            total = ranks if reduction is not None and reduction.over == "world" else sum(weights)
            inputs = inputs + sum(w / total * grads_of(10 * i + r)[path] for r, w in enumerate(weights) if w)
        results, residual = sum(out[path] for out in outs), sum(error[path] for error in errors if path in error)
        gap = torch.as_tensor(results + residual - inputs)
        assert p.numel() == 0 or gap.abs().max() < 1e-5, f"{path}: off by {gap.abs().max()}"


def forgets_what_is_not_finite(make: Callable[[], tx.Transform]) -> None:
    """A step that is not finite on one rank is not finite on the others either, and leaves the residuals finite."""
    for bad in (math.nan, math.inf):
        outs, errors = _run(make, bad, at=1)
        finite = [all(torch.isfinite(leaf).all() for leaf in out.values()) for out in outs]
        assert not finite.pop(1), "it came out finite"
        assert all(finite), "it is remembered in later steps"
        assert all(torch.isfinite(leaf).all() for error in errors for leaf in error.values())


def _run(make: Callable[[], tx.Transform], bad: float = 0.0, at: int = -1) -> tuple[list[Any], list[Any]]:
    """The results of rank 0, and all ranks' residuals at the end."""

    def one_rank(hook: tx.Transform, params: Any, me: int) -> Any:
        state, outs = hook.init(params), []
        for i, weights in enumerate(INPUTS):
            grads = grads_of(10 * i + me)
            if i == at and me == 1:
                grads = {path: torch.full_like(g, bad) for path, g in grads.items()}
            out, state = hook.update(grads, state, params, weight=weights[me])
            outs.append(out)
        return outs, state.error

    results = on_ranks(lambda: tx.error_feedback(make()), one_rank)
    return results[0][0], [error for _, error in results]
