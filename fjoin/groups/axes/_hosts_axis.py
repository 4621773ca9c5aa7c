"""An axis whose ranks are on several hosts, equally many on each: sums are taken inside each host first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...shared_memory._packets import INLINE_BYTES
from ...transforms._axis_env import Done, Work
from ._axis import GroupAxis
from ._host_axis import HostAxis


class HostsAxis(GroupAxis):
    """An axis over a process group whose ranks are on several hosts.

    A large sum on the CPU: in each host rank i sums the i-th pieces through shared memory, then the i-th ranks of all
    hosts sum theirs over the network, then the ranks of a host exchange their pieces. So a byte of a buffer leaves a
    host once, and not once for each of its ranks. Everything else uses the group.

    Args:
        inside: The axis of this host's ranks.
        across: The axis of the ranks with this rank's place in their hosts.
    """

    def __init__(self, inside: HostAxis, across: GroupAxis, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inside, self.across = inside, across
        links, number, ranks = inside.channel.links, inside.channel.number, inside.channel.ranks
        self._behind = HostAxis(links, ~number & 0xFF, ranks, inside.group, check=inside.check, traffic=inside.traffic)
        self._waiting: list[Staged] = []  # whose sum between hosts has not begun

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A buffer whose messages inside the host need no copy."""
        return self.inside.zeros(numel, dtype)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for `start_`, on the CPU without a copy inside the host."""
        return self.inside.empty(numel, dtype, device)

    def begin_reduce(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        if buffer.device.type != "cpu" or buffer.nbytes <= INLINE_BYTES:
            return super().begin_reduce(buffer) if buffer.numel() else Done()
        while self._waiting and self._waiting[0].first.arrived():
            self._begin()
        self._waiting.append(Staged(self, buffer.detach().view(-1)))
        return self._waiting[-1]

    def _begin(self) -> None:
        """Begin the next sum between hosts: in the order in which they were called, which is the same on all ranks."""
        self._waiting.pop(0).begin()

    def begin_until(self, work: Staged) -> None:
        """Begin the sums between hosts of this work and of those before it."""
        while work in self._waiting:
            self._begin()

    def finish(self, work: Staged) -> None:
        """Give all ranks of this host the pieces of a sum."""
        sizes = [stop - start for start, stop in zip(work.bounds, work.bounds[1:], strict=False)]
        self._behind.begin_gather(work.flat, sizes, self._behind.rank, work.number).wait()


class Staged:
    """A sum under way: inside the host, then between hosts, then inside the host again."""

    def __init__(self, axis: HostsAxis, flat: Tensor) -> None:
        self._axis, self.flat = axis, flat
        n, ranks = len(flat), axis.inside.size
        self.bounds: Sequence[int] = [i * n // ranks for i in range(ranks + 1)]
        self.first = axis.inside.scatter_(flat, self.bounds)
        self.number = self.first.key[1]
        self._second: Work | None = None
        self._ended = False

    def begin(self) -> None:
        """Wait for the sum inside the host, and begin that between hosts."""
        self.first.wait()
        start, stop = self.bounds[self._axis.inside.rank :][:2]
        self._second = self._axis.across.begin_reduce(self.flat[start:stop])

    def wait(self) -> None:
        if self._ended:
            return
        try:
            self._axis.begin_until(self)
            assert self._second is not None
            self._second.wait()
            self._axis.finish(self)
        except BaseException:
            self._axis.broken = True
            raise
        self._ended = True
