"""Results of messages that travel while training continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias


class Later(Protocol):
    """A result that may not be there yet."""

    def get(self) -> Any:
        """The result; waits for it."""


# Starts a function that sends messages. The number says in which call from now the result is needed.
Defer: TypeAlias = Callable[[Callable[[], Any], int], Later]
