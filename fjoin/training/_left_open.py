"""What a run leaves undone: averages that were not taken, gradients of an unfinished accumulation window."""

from __future__ import annotations

from collections.abc import Iterable

from ..transforms.transform._timing import unfinished
from ..transforms.transform._transform import Transform


def left_open(parts: Iterable[Transform], steps: int, gathers: bool) -> list[str]:
    """What is left undone, in words, with the call that finishes it.

    Args:
        parts: The transforms of the parameters and buffers.
        steps: The number of steps; 0 after a flush, until the next step.
        gathers: Whether there are gradients of an accumulation window.
    """
    found = []
    if steps and (left := [part for part in parts if unfinished(part, steps)]):
        found.append(
            f"after step {steps - 1} a window of {left[0]!r} is unfinished, so the ranks' values may differ; call "
            f"state = step.flush(state) at the end of training"
        )
    if gathers:
        found.append(
            "the gradients of an unfinished accumulation window are lost: the last micro-batches have had no step; loop over "
            "step.join(loader), which steps an incomplete window too, or call the step as often as accumulate= says"
        )
    return found
