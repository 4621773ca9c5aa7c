"""Small tensors on a device that the host reads later, without waiting for the device now."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..groups._mesh import Mesh
from ..transforms._devices import is_accelerator, to_host


class DeviceReads:
    """Values under way to the host, in order.

    Args:
        mesh: Detects failed ranks while the host waits for a device. It is not kept alive.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh: Callable[[], Mesh | None] = (lambda: None) if mesh is None else weakref.ref(mesh)
        self._under_way: list[tuple[Any, Tensor, Any]] = []

    def add(self, what: Any, words: Tensor, event: Any = None) -> None:
        """Start copying a vector to the host.

        Args:
            what: Returned with its values.
            event: The event that ends the copy; by default that of the current stream.
        """
        if is_accelerator(words.device):
            words, event = to_host(words)
        self._under_way.append((what, words, event))

    def synchronize(self) -> None:
        """Wait until the newest values are on the host."""
        if self._under_way:
            self._await(self._under_way[-1][2])

    def read(self, newest: bool, keep: bool = False) -> Iterator[tuple[Any, list[float]]]:
        """The values in order, each with its `what`.

        Args:
            newest: Whether to read the newest too, which may wait.
            keep: Whether they can be read again.
        """
        count = len(self._under_way) - (not newest)
        for i in range(count):
            what, words, event = self._under_way[i] if keep else self._under_way.pop(0)
            self._await(event)
            yield what, words.tolist()

    def clear(self) -> None:
        """Forget all values."""
        self._under_way = []

    def _await(self, event: Any) -> None:
        if event is None:
            return
        if (mesh := self._mesh()) is not None:
            mesh.await_event(event)
        else:
            event.synchronize()
