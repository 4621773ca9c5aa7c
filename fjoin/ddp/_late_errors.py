"""Functions and errors that wait until the backward pass has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch


def after_backward(function: Callable[[], None]) -> None:
    """Call a function once the module has finished its pass, or now outside of a pass."""
    if torch._C._current_graph_task_id() < 0:
        function()
        return
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(function))  # after the module's own callback, not yet queued


def raise_after_backward(error: Exception) -> None:
    """Raise an error after the module has finished its pass; the module would be unusable if its hook raised."""

    def last() -> None:
        raise error

    after_backward(last)
