"""What a place is where values wait, and what waits there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Handle:
    """A value that waits elsewhere.

    Attributes:
        where: "cpu", or the name of the codec.
        held: Bytes on the device that wait in its place.
    """

    where: str
    held = 0

    def get(self) -> Tensor:
        """The value, on its device again; a new tensor on each call."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let what follows on the device wait until the value may be written into."""


class Store(Protocol):
    """A place for values."""

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        """Handles of values that wait there; those that it does not take stay as they are."""


def is_abstract(x: Tensor) -> bool:
    """Whether a tensor has no values."""
    return x.device.type == "meta" or isinstance(x, FakeTensor)


class Abstract(Handle):
    """A tensor without values, which could wait elsewhere."""

    def __init__(self, x: Tensor, where: str, held: int = 0) -> None:
        self._x, self.where, self.held = x.detach(), where, held

    def get(self) -> Tensor:
        return self._x.clone()
