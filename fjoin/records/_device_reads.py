"""Small tensors on a device that the host reads later, without waiting for the device now."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..groups import Communicator
from ..transforms.base import devices


def read_now(mesh: Communicator | None, x: Tensor) -> Any:
    """The values of a tensor as nested lists. Where it lies on a device the host waits, and hears of failed ranks
    meanwhile.

    Waits for what other ranks send go through this file: a message of a rank that has failed never ends on a device.

    Raises:
        PeerLost, CollectiveTimeout: a rank has failed, or the device does not come to an end within the mesh's
            time-out.
    """
    if not devices.is_accelerator(x.device):
        return x.tolist()
    host, event = devices.to_host(x)
    _await(mesh, event)
    return host.tolist()


def _await(mesh: Communicator | None, event: Any) -> None:
    if event is not None:
        event.synchronize() if mesh is None else mesh.await_event(event)


class DeviceReads:
    """Values under way to the host, in order.

    Args:
        mesh: Detects failed ranks while the host waits for a device. It is not kept alive.

    Attributes:
        under_way: The vectors on their way: what each is, its values, and the event that ends its copy.
    """

    def __init__(self, mesh: Communicator) -> None:
        self._mesh: Callable[[], Communicator | None] = weakref.ref(mesh)
        self.under_way: list[tuple[Any, Tensor, Any]] = []

    def add(self, what: Any, words: Tensor, event: Any = None) -> None:
        """Start copying a vector to the host.

        Args:
            what: Returned with its values.
            event: The event that ends the copy; by default that of the current stream.
        """
        if devices.is_accelerator(words.device):
            words, event = devices.to_host(words)
        self.under_way.append((what, words, event))

    def synchronize(self) -> None:
        """Wait until the newest values are on the host."""
        if self.under_way:
            _await(self._mesh(), self.under_way[-1][2])

    def now(self, x: Tensor) -> Any:
        """The values of a tensor, see `read_now`."""
        return read_now(self._mesh(), x)

    def read(self, newest: bool, keep: bool = False) -> Iterator[tuple[Any, list[float]]]:
        """The values in order, each with its `what`.

        Args:
            newest: Whether to read the newest too, which may wait.
            keep: Whether they can be read again.
        """
        count = len(self.under_way) - (not newest)
        for i in range(count):
            what, words, event = self.under_way[i] if keep else self.under_way.pop(0)
            _await(self._mesh(), event)
            yield what, words.tolist()

    def clear(self) -> None:
        """Forget all values."""
        self.under_way = []


def numbers(sums: Mapping[str, Any], read: Callable[[Tensor], Any]) -> dict[str, float]:
    """Sums as numbers; waits for a device, once.

    Args:
        read: `read_now` of a mesh, or `DeviceReads.now`.
    """
    known = list(sums.values())
    if any([isinstance(value, Tensor) for value in known]):
        known = read(torch.stack(known))
    return dict(zip(sums, map(float, known), strict=True))
