"""Whether the backward passes of a module come from losses that were scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class ScaledLoss:
    """Scales losses, and notices backward passes of others.

    Attributes:
        missed: Whether some pass since the last step came from a loss that was not scaled.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.missed = False
        self._running: Callable[[], _Pass | None] = _nothing
        me = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            scaling = me()
            if scaling is not None:
                scaling.check()

        for p in params:
            p.register_post_accumulate_grad_hook(arrived)

    def __call__(self, loss: Tensor, scale: Tensor) -> Tensor:
        """The loss times its scale, which tells when its backward pass begins and ends."""
        scaled = loss * scale.to(loss.device)

        def begins(grad: Tensor) -> None:
            # Held by the pass alone, and so until it ends or fails; nested passes, of checkpoints, belong to it.
            running = _Pass()
            self._running = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]

        scaled.register_hook(begins)
        return scaled

    def check(self) -> None:
        """Called in every backward pass."""
        self.missed = self.missed or self._running() is None

    def take_error(self) -> RuntimeError | None:
        """At a step: what is to be raised."""
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
