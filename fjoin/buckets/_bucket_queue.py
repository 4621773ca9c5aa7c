"""The queue of buckets: they are launched in a fixed order, whatever order they fill in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..transforms._axis_env import Work
from ._flat_params import Storage
from ._grad_buffer import GradBuffer


class BucketQueue:
    """Launches the buckets' messages in the buckets' order, whatever order they fill in.

    Args:
        outgoing: The buckets.
        launch: Starts the hook of one bucket, given its index and buffer; called in the thread that fills the bucket.
    """

    outgoing: list[GradBuffer]

    def __init__(self, outgoing: list[GradBuffer], launch: Callable[[int, GradBuffer], Work | None]) -> None:
        self.outgoing, self._launch = outgoing, launch
        self._next = len(outgoing)
        self._open = False
        self._kept: dict[Tensor, Tensor | None] | None = None  # the gradients set aside while muted

    def start(self, storage: Storage) -> None:
        self._next, self._open = 0, True
        for out, leaves in zip(self.outgoing, storage.by_bucket, strict=True):
            out.start(leaves, storage.window)

    @contextlib.contextmanager
    def muted(self, storage: Storage) -> Iterator[None]:
        """Discard gradients that arrive within the with block. A factor of 0 would not do: 0 * inf is nan."""
        try:
            with storage.grads_aside() as self._kept:
                yield
        finally:
            self._kept = None

    def stop(self) -> None:
        """Take no more gradients until the next start."""
        self._open = False
        for out in self.outgoing:
            out.work = None

    def free(self) -> None:
        """Free the gradients after the step; see `GradBuffer.free`."""
        for out in self.outgoing:
            out.free()

    def arrived(self, index: int, i: int, leaf: Tensor) -> None:
        """Take the gradient of the i-th leaf of this bucket, and launch the buckets that are ready."""
        if not self._open:
            return  # a backward pass over these leaves outside the step
        if self._kept is not None:
            kept = self._kept.pop(leaf, None)
            leaf.grad = torch.zeros_like(leaf) if kept is None else kept
        if leaf.grad is None:
            return  # a function's backward gave none; `finish` fills in zeros
        out = self.outgoing[index]
        out.copy_grad(i, leaf)
        if out.missing == 0:
            out.filled = True
            self._advance()

    def _advance(self) -> None:
        while self._next < len(self.outgoing) and self.outgoing[self._next].filled:
            out = self.outgoing[self._next]
            out.work = self._launch(self._next, out)
            self._next += 1

    def finish(self) -> None:
        """Fill and launch the buckets that backward did not complete, after it has ended."""
        self._open = False
        for out in self.outgoing:
            if not out.filled:
                out.fill()
                out.filled = True
        self._advance()
