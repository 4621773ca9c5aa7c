"""The error for a step that is not finite."""

from __future__ import annotations

import math
from typing import Any

from .._errors import NonFinite
from ..transforms.transform._lane import NONFINITE, ranks_in


def masks(sums: dict[str, Any]) -> list[Any]:
    """The words of the lane that hold one bit per rank."""
    return [value for name, value in sums.items() if name.startswith(NONFINITE)]


def error_of_step(step: int, sums: dict[str, float], paths: tuple[str, ...]) -> NonFinite:
    """The error of a step that all ranks leave out."""
    ranks = ranks_in(masks(sums))
    parts = []
    if ranks:
        cause = "a gradient" if math.isfinite(sums["loss"]) else "the loss"
        parts.append(f"{cause} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} is not finite")
    if paths:
        shown = ", ".join(map(repr, paths[:5])) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        parts.append(f"the {'' if ranks else 'summed '}gradient of {shown} is not finite")
    return NonFinite(
        f"step {step}: {'; '.join(parts) or 'a gradient or a weight is not finite'}. Parameters and state are unchanged; wrap the "
        f"pipeline in skip_if_nonfinite(...) to leave such steps out",
        step=step,
        ranks=ranks,
        paths=paths,
    )


def error_of_some(step: int, counts: dict[str, float], all_ranks: int) -> NonFinite:
    """The error of a step that some ranks left out and others may have taken."""
    ranks = ranks_in(masks(counts))
    which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    others = ", which the others took, since the hook does not reduce over all of them"
    return NonFinite(
        f"step {step}: the loss or a gradient of {which} is not finite. {which.capitalize()} left step {step} out"
        f"{others if len(ranks) < all_ranks else ''}; wrap the pipeline in skip_if_nonfinite(...) to go on after such steps",
        step=step,
        ranks=ranks,
    )
