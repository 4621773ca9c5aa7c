"""Errors that are raised after the backward pass has ended."""

from __future__ import annotations

import torch


def raise_after_backward(error: Exception) -> None:
    """Raise an error after the module has finished its pass; the module would be unusable if its hook raised."""
    if torch._C._current_graph_task_id() < 0:
        raise error
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

    def last() -> None:
        raise error

    engine.queue_callback(lambda: engine.queue_callback(last))  # after the module's own callback, not yet queued
