"""Values by name, each read where it is taken, so that a load holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

# Reads a value, into the given memory where it fits.
Read = Callable[[Tensor | None], Any]


class Values(Mapping[str, Any]):
    """Name -> value.

    Args:
        reads: Name -> the function that reads the value.
    """

    def __init__(self, reads: dict[str, Read] | None = None) -> None:
        self._reads = reads or {}

    def __getitem__(self, name: str) -> Any:
        return self._reads[name](None)

    def into(self, name: str, memory: Tensor) -> Any:
        """The value, which is `memory` itself where it could be read into that."""
        return self._reads[name](memory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, name: str, read: Read) -> None:
        """Add a value that a function reads."""
        self._reads[name] = read

    def set(self, name: str, value: Any) -> None:
        """Add a value that is there."""
        self._reads[name] = lambda memory: value

    def under(self, prefix: str, rename: Callable[[str], str] = lambda name: name) -> Values:
        """The values under a prefix, by the rest of their names."""
        start = f"{prefix}."
        return Values(
            {rename(name.removeprefix(start)): read for name, read in self._reads.items() if name.startswith(start)}
        )
