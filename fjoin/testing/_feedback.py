"""The laws of lossy means that work with `error_feedback`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from .. import transforms as tx
from ._compare import params_like
from ._ranks import axes_for, grads_of, rank_in, ranks_of

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
