"""Autograd hooks on the leaves of a state, called when a gradient has arrived."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ._bucket_queue import BucketQueue
from ._flat_params import Storage
from ._grad_buffer import keep_grad


class GradHooks:
    """The autograd hooks on the leaves of one state.

    The hooks hold this object by a weak reference, and it holds the state by one: hooks that held a step would
    keep all its memory forever.

    Attributes:
        queue: The queue that takes the gradients; None where none does.
    """

    def __init__(self) -> None:
        self.queue: BucketQueue | None = None
        self._keeping = False
        self._handles: list[Any] = []
        self._attached: Callable[[], Storage | None] = _nothing

    def attach(self, storage: Storage) -> None:
        """Attach a hook to each leaf of this storage, and remove the hooks from the previous one."""
        if self._attached() is storage:
            return
        self.detach()
        self._attached = weakref.ref(storage)
        me = weakref.ref(self)

        def hook_of(bucket: int, leaf: int) -> Callable[[Tensor], None]:
            def arrived(tensor: Tensor) -> None:  # it runs for every leaf in every step
                hooks = me()
                if hooks is None:
                    return
                if hooks._keeping:
                    keep_grad(tensor, hooks._attached())
                elif hooks.queue is not None:
                    hooks.queue.arrived(bucket, leaf, tensor)

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
        """Leave gradients at the leaves within the with block: for an accumulation window."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False


def _nothing() -> None:
    return None
