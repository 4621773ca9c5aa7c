"""The bytes of the tensors that are alive, as a device's allocator would count them."""

from __future__ import annotations

import weakref
from typing import Any

import optree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Memory(TorchDispatchMode):
    """Counts the memory that operations make in this thread, until it is freed.

    Attributes:
        now: Bytes that are alive.
        start: Bytes that were alive at the last `reset`.
        peak: The most of them since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start = self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def reset(self) -> None:
        self.start = self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x)
        return out

    def _add(self, x: Tensor) -> None:
        memory = x.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        if key in self._known or not size:
            return

        def freed() -> None:
            self.now -= size
            del self._known[key]

        # The Python object of a storage lives as long as the storage itself.
        self._known[key] = weakref.finalize(memory, freed)
        self._known[key].atexit = False
        self.now += size
        self.peak = max(self.peak, self.now)
