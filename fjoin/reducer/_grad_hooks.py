"""Hooks on the leaves of a state, which notice when a gradient has arrived."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ._buckets import BucketQueue, unshare_grad
from ._flat_params import Storage


class GradHooks:
    """The hooks on the leaves of one state.

    The leaves' hooks know this object weakly, and it its state: hooks that held a step would keep all its
    memory for ever.

    Attributes:
        queue: Who is told of gradients.
    """

    def __init__(self) -> None:
        self.queue: BucketQueue | None = None
        self._keeping = False
        self._handles: list[Any] = []
        self._attached: Callable[[], Storage | None] = _nothing

    def attach(self, storage: Storage) -> None:
        """Have every leaf tell when its gradient has arrived, and those of another state no more."""
        if self._attached() is storage:
            return
        self.detach()
        self._attached = weakref.ref(storage)
        me = weakref.ref(self)

        def hook_of(bucket: int, leaf: int) -> Callable[[Tensor], None]:
            def arrived(tensor: Tensor) -> None:
                taps = me()
                if taps is not None and taps._keeping:
                    unshare_grad(tensor)  # what comes in later calls of the window is added in place
                elif taps is not None and taps.queue is not None:
                    taps.queue.arrived(bucket, leaf)

            return arrived

        for i, leaves in enumerate(storage.by_bucket):
            self._handles += [leaf.register_post_accumulate_grad_hook(hook_of(i, j)) for j, leaf in enumerate(leaves)]

    def detach(self) -> None:
        self._attached = _nothing
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Within an accumulation window: gradients stay at the leaves."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False


def _nothing() -> None:
    return None
