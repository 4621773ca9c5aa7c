"""Loss scaling for a module, with a check that its backward passes start from scaled losses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class ScaledLoss:
    """Scales losses, and detects backward passes of losses that were not scaled.

    Attributes:
        missed: Whether a pass since the last step came from a loss that was not scaled.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.missed: bool = False
        self._running: Callable[[], _Pass | None] = _nothing
        me = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            scaling = me()
            if scaling is not None:
                scaling.check()

        for p in params:
            p.register_post_accumulate_grad_hook(arrived)

    def __call__(self, loss: Tensor, scale: Tensor) -> Tensor:
        """The loss times its scale, with a hook that marks its backward pass as running."""
        scaled = loss * scale.to(loss.device)

        def begins(grad: Tensor) -> None:
            # Only the pass holds this object, until it ends or fails. Nested passes, of checkpoints, are part of it.
            running = _Pass()
            self._running = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]

        scaled.register_hook(begins)
        return scaled

    def check(self) -> None:
        """Record whether the current backward pass comes from a scaled loss; called in every backward pass."""
        self.missed = self.missed or self._running() is None

    def take_error(self) -> RuntimeError | None:
        """The error to raise in this step, or None; clears `missed`."""
        missed, self.missed = self.missed, False
        if not missed:
            return None
        return RuntimeError(
            "the pipeline takes gradients of a scaled loss, and a backward pass since its last step had none; write "
            "handle.scale(loss).backward(), under no_sync too. This step is left out; call zero_grad()"
        )


class _Pass:
    """A backward pass of a scaled loss."""

    def __call__(self) -> None: ...


def _nothing() -> _Pass | None:
    return None
