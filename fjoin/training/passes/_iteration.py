"""One iteration of a loop over uneven inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Iteration:
    """One iteration of the loop, as the step sees it."""

    number: int
    live: bool  # whether this rank has a batch
    has_next: bool  # whether it has another batch after this one
    replays: bool = False  # whether ranks without weight still run `loss_fn`
    called: bool = False  # whether the body has called the step
    others: Callable[[], float] | None = None  # the number of ranks that have another batch, once a window has ended
