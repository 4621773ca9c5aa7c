"""Results of messages that are sent before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor


class Prefetch(Protocol):
    """Begins the messages of a function in one call, for a later call that needs its result.

    A transform without it runs the function in that later call.
    """

    def begin(self, values: Mapping[str, Tensor], function: Callable[[], Any], calls: int) -> None:
        """Begin the messages of a function.

        Args:
            values: The tensors that it sends, which the state keeps; they identify the result.
            calls: Its result is needed so many calls later.
        """

    def result(self, values: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
        """The result of the function that was begun for these tensors; if there is none, that of `function`."""
