"""Gradients on their way: one buffer and one message per bucket, launched in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ._axis import Work
from ._storage import views
from .transforms._layout import Bucket
from .transforms._tree import check_dense


class Outgoing:
    """The gradients of one bucket in one step.

    Attributes:
        wire: What is sent: the gradients, and behind them the lane if this bucket carries it.
        grads: The gradients' part of it.
        lane: The lane's part of it, maybe empty.
    """

    def __init__(self, bucket: Bucket, shapes: Mapping[str, torch.Size], lane_words: int) -> None:
        self.bucket, self._shapes = bucket, shapes
        numel = 0 if bucket.direct else bucket.numel
        self.wire = torch.zeros(numel + lane_words, dtype=bucket.dtype, device=bucket.device)
        self.grads, self.lane = self.wire[:numel], self.wire[numel:]
        self._views = [] if bucket.direct else views(bucket, self.grads, shapes)
        self.leaves: list[Tensor] = []
        self.work: Work | None = None
        self.seen = torch.zeros((), device=bucket.device)  # what the guard saw in the sums
        self.missing, self.filled = 0, False

    def start(self, leaves: list[Tensor]) -> None:
        """Make ready for the gradients of these leaves."""
        self.leaves, self.missing, self.filled, self.work = leaves, len(leaves), False, None

    def fill(self) -> None:
        """Take over the gradients that autograd has left at the leaves; a missing one counts as 0."""
        self.filled = True
        grads = [leaf.grad for leaf in self.leaves]
        for path, grad in zip(self.bucket.paths, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                check_dense(f"the gradient of {path!r}", grad)
        if self.bucket.direct:
            # What autograd hands over is ours alone: it becomes the message, without a copy.
            (grad,) = grads
            self.wire = torch.zeros_like(self.leaves[0]).view(-1) if grad is None else grad.contiguous().view(-1)
            self.grads = self.wire
        elif all(grad is None for grad in grads):
            self.grads.zero_()
        elif any(grad is None for grad in grads):
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
        else:
            torch._foreach_copy_(self._views, grads)
        for leaf in self.leaves:
            leaf.grad = None

    def arrive(self) -> None:
        """Wait for the message; on CUDA only the stream waits."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def by_path(self) -> dict[str, Tensor]:
        """Path -> view of its gradient."""
        return dict(zip(self.bucket.paths, views(self.bucket, self.grads, self._shapes), strict=True))


class Queue:
    """Launches the buckets' messages in the buckets' order, whatever order they fill in.

    Args:
        outgoing: The buckets.
        launch: Starts one buffer's sum; called from the thread that fills.
    """

    def __init__(self, outgoing: list[Outgoing], launch: Callable[[Tensor], Work]) -> None:
        self.outgoing, self._launch = outgoing, launch
        self._next = len(outgoing)
        self._sending = False

    def start(self, by_bucket: list[list[Tensor]], send: bool) -> None:
        self._next, self._sending = 0, send
        for out, leaves in zip(self.outgoing, by_bucket, strict=True):
            out.start(leaves)

    def stop(self) -> None:
        """Take no more gradients, until the next start."""
        self._next = len(self.outgoing)

    def arrived(self, index: int) -> None:
        """A leaf of this bucket has its gradient."""
        if self._next >= len(self.outgoing):
            return  # somebody else's backward pass over these leaves
        out = self.outgoing[index]
        out.missing -= 1
        if out.missing == 0:
            out.fill()
            self._advance()

    def _advance(self) -> None:
        while self._next < len(self.outgoing) and self.outgoing[self._next].filled:
            out = self.outgoing[self._next]
            if self._sending:
                out.work = self._launch(out.wire)
            self._next += 1

    def finish(self) -> None:
        """Fill and launch what backward did not complete, after it has ended."""
        for out in self.outgoing:
            if not out.filled:
                out.fill()
        self._advance()
