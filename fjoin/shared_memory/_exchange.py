"""Messages between the ranks of one host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._errors import DesyncError
from ..transforms._uncompiled import uncompiled
from ._memory import HostMemory, Region

if TYPE_CHECKING:
    from ._links import HostLinks

_NOTHING = torch.empty(0)


class Exchange:
    """A message in which every rank gives each other rank a part.

    Args:
        links: The connections.
        key: The number of the axis, and that of the message on it.
        source: This rank's values, 1-d and contiguous.
        given: Rank -> the range of `source` that it gets.
        fingerprint: Of the call; it must be the same on all ranks.
        take: Gets rank -> its part, of `source`'s dtype, and copies what it needs. It may return a number, which travels
            with the answer that the part has been taken.
        pushes: Whether `take` writes into the parts, for their ranks. Then `source` holds their results once all others
            have taken theirs.
        settles: Whether a wait also waits until all others have taken their parts, so that `source` may be written into. It
            does where others read `source` itself, and not a copy.
        inline: Whether small parts may travel in the packets, which are not answered.
        failing: Raises where a rank has failed; called at intervals of a wait.

    Attributes:
        number: That of this rank's `take`.
        waiting: A context in which the host waits.
        total: The sum of the numbers of this rank's `take` and those of all ranks that have answered; the same on all ranks
            once all have answered.
    """

    def __init__(
        self,
        links: HostLinks,
        key: tuple[int, int],
        source: Tensor,
        given: dict[int, tuple[int, int]],
        fingerprint: int,
        take: Callable[[dict[int, Tensor]], float | None],
        pushes: bool = False,
        settles: bool = False,
        inline: bool = True,
        failing: Callable[[], None] = lambda: None,
    ) -> None:
        self._links, self.key, self.source, self.given = links, key, source, given
        self.fingerprint, self.pushes, self._failing = fingerprint, pushes, failing
        self._take: Callable[[dict[int, Tensor]], float | None] | None = take
        self._settles, self.inline = settles or pushes, inline and not pushes
        self.number, self._numbers = 0.0, list[float]()
        self.taken, self.is_settled, self.untaken, self.from_memory = False, False, set[int](), list[int]()
        self.failed: Exception | None = None
        self.waiting: AbstractContextManager[None] = nullcontext()
        self._copy: Region | None = None
        self._result: Tensor | None = None

    def place(self, memory: HostMemory) -> tuple[int, int, int]:
        """Where other ranks can read `source`, or a copy of it: a region, its size, and the first byte in it."""
        lazy = self.source.is_conj() or self.source.is_neg()  # its memory does not hold its values
        found = None if lazy else memory.find(self.source)
        if found is not None:
            self._settles = True
            return found
        nbytes = self.source.numel() * self.source.element_size()
        self._copy = memory.borrow(nbytes)
        staged = self._copy.bytes[:nbytes].view(self.source.dtype)
        staged.copy_(self.source)
        self._result, self.source = self.source, staged
        return self._copy.first, self._copy.size, 0

    def try_take(self) -> bool:
        """Take the parts, if all are here. An error is kept for this message's `wait`, whichever thread takes the parts."""
        peers = self._links.peers
        if not all(self.key in peers[rank].parts for rank in self.given):
            return False
        packets = {rank: peers[rank].parts.pop(self.key) for rank in self.given}
        take, self._take = self._take, None  # it may refer to this object
        self.taken = True
        odd = [rank for rank, packet in packets.items() if packet.fingerprint != self.fingerprint]
        if odd:
            self.failed = DesyncError(
                f"rank {odd[0]} of this host has called another collective, or with another size, shape, dtype, root or pairs; run "
                f"the same program on all ranks"
            )
            return True
        assert take is not None
        self.from_memory = [rank for rank, packet in packets.items() if packet.shared]
        try:
            self.number = take({rank: one.values.view(self.source.dtype) for rank, one in packets.items()}) or 0.0
        except Exception as error:
            self.failed = error
        self._numbers.append(self.number)
        return True

    def settle(self) -> bool:
        """Whether all other ranks have taken their parts, so that `source` may be overwritten."""
        for rank in list(self.untaken):
            value = self._links.peers[rank].taken.pop(self.key, None)
            if value is not None:
                self._numbers.append(value)
                self.untaken.discard(rank)
        if self.untaken or not self.taken:
            return False
        if self._copy is not None:
            if self.pushes and self._result is not None:
                self._result.copy_(self.source)
            self._links.memory.give_back(self._copy)
            self._copy = self._result = None
        self.source, self.is_settled = _NOTHING, True
        return True

    @property
    def total(self) -> float:
        return sum(sorted(self._numbers))  # in one order on all ranks

    def arrived(self) -> bool:
        """Whether a wait would not wait."""
        self._links.progress()
        return self.is_done() or self.failed is not None or self._links.lost(self.needed())

    def is_done(self) -> bool:
        return self.taken and self.failed is None and (not self._settles or self.is_settled)

    @uncompiled
    def wait(self) -> None:
        """Wait for the parts, and where `settles` until all have taken theirs."""
        with self.waiting:
            self._links.wait(lambda: self.failed is not None or self.is_done(), self.needed, self._failing)
        if self.failed is not None:
            raise self.failed

    def needed(self) -> list[int]:
        """The ranks that a wait would wait for."""
        peers = self._links.peers
        if not self.taken:
            return [rank for rank in self.given if self.key not in peers[rank].parts]
        return list(self.untaken)
