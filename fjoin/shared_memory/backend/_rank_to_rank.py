"""Messages of the backend "fjoin" from one rank to another."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._channel import HostChannel
from .._exchange import Exchange
from .._flat import fill, flat_of
from ._calls import Calls, Values, nothing, several
from ._work import SharedWork

_UP, _DOWN = 1, 2  # channels: from lower to higher ranks, and back


class RankToRank(Calls):
    """send and recv."""

    _passed: dict[tuple[int, int, int], int]  # channel, peer and tag -> messages so far

    def send(self, tensors: Values | Tensor, rank: int, tag: int = 0) -> SharedWork:
        (x,) = several(tensors)
        flat = flat_of(x)
        return self._all([(self._pass_on(flat, self._me, rank, tag, lambda part: None), nothing)], [x])

    def recv(self, tensors: Values | Tensor, rank: int, tag: int = 0) -> SharedWork:
        (x,) = several(tensors)
        work = self._pass_on(flat_of(x)[:0], rank, self._me, tag, lambda part: fill(x, part), x.numel())
        return self._all([(work, nothing)], [x])

    def recv_anysource(self, tensors: Values | Tensor, tag: int = 0) -> SharedWork:
        """Receive from the first rank that sends with this tag; blocks until there is one."""
        peers, found = self._links.peers, list[int]()

        def some() -> bool:
            found[:] = [r for r in peers if self._key(r, self._me, tag) in peers[r].parts]
            return bool(found)

        self._links.wait(some, list, lambda: None)
        work = self.recv(tensors, found[0], tag)
        work.source = found[0]
        return work

    def _key(self, source: int, target: int, tag: int) -> tuple[int, int]:
        """The channel and the number of the next message from one rank to another."""
        number = _UP if source < target else _DOWN
        peer = target if source == self._me else source
        return number, (tag << 32) + self._passed.get((number, peer, tag), 0)

    def _pass_on(
        self,
        flat: Tensor,
        source: int,
        target: int,
        tag: int,
        take: Callable[[Tensor], object],
        size: int | None = None,
    ) -> Exchange:
        if source == target or not 0 <= min(source, target) <= max(source, target) < self._ranks:
            raise ValueError(f"rank {self._me} of {self._ranks} cannot send from rank {source} to rank {target}")
        number, message = self._key(source, target, tag)
        peer = target if source == self._me else source
        self._passed[number, peer, tag] = (message & (2**32 - 1)) + 1
        pair = HostChannel(self._links, number, sorted((source, target)), int(self._me > peer))
        at = int(source > target)
        n = len(flat) if source == self._me else size

        def taken(parts: Values) -> None:
            if source != self._me:
                take(parts[at])

        ranges = [(0, len(flat)), (0, len(flat))] if source == self._me else [(0, 0), (0, 0)]
        return pair.exchange("send", flat, ranges, taken, settles=True, same=n, message=message)
