"""The common part of the collectives of the backend "fjoin"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._channel import HostChannel
from .._links import HostLinks
from ._work import Kept, SharedWork, Started, Waiter

Values = list[Tensor]


class Calls:
    """A rank of a group, and its channels: for collectives, for messages from lower to higher ranks, and back."""

    _links: HostLinks
    _channels: list[HostChannel]
    _waiter: Waiter
    _kept: Kept
    _ranks: int
    _me: int

    def _all(self, started: Sequence[Started], result: Values) -> SharedWork:
        work = SharedWork(started, result, self._waiter)
        self._kept.keep(work, result)
        return work

    def _root(self, opts: Any) -> int:
        """The root of a collective, from torch's options or a number."""
        root = getattr(opts, "rootRank", opts)
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self._ranks:
            raise ValueError(f"invalid root rank: {root!r}; the ranks of this group are 0 to {self._ranks - 1}")
        return root


def several(tensors: Sequence[Tensor] | Tensor) -> Values:
    """A list of tensors, from one or several: methods of torch's groups take both."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(lists: Sequence[Any]) -> list[Values]:
    """A list of lists of tensors, from one list or several."""
    return [list(lists)] if lists and isinstance(lists[0], Tensor) else [list(one) for one in lists]


def nothing() -> None:
    return None
