"""A backend of torch.distributed, "fjoin": process groups of one host, whose CPU tensors travel through shared memory."""

# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..._errors import TransportError
from .._channel import HostChannel
from .._connect import connect
from .._doorway import Doorway
from .._links import HostLinks
from ._copies import Copies
from ._rank_to_rank import RankToRank
from ._reductions import Reductions
from ._work import Kept, Waiter


class HostGroup(Reductions, Copies, RankToRank, dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose ranks are on one host.

    Its collectives are those of gloo, in rank order, so that all ranks have the same bits on every run. Only CPU
    tensors, and only on Linux.

    Raises:
        ValueError: the ranks are on several hosts, or on one that is not Linux.
        TransportError: the system refuses one of the ranks shared memory or a descriptor.
        RuntimeError: a tensor on another device, or an operation that the backend lacks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg,arg-type]
        self._name = self._description = ""
        self._links = links = _connect(store, rank, size, timeout.total_seconds())
        self._channels = [HostChannel(links, number, range(size), rank) for number in range(3)]
        self._passed = {}
        self._waiter, self._kept = Waiter(links), Kept()
        self._ranks, self._me = size, rank
        weakref.finalize(self, _close, links, self._waiter, self._kept).atexit = False

    def getBackendName(self) -> str:
        return "fjoin"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return Settings.of(self._links)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the limit of later waits."""
        self._links.timeout_s = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        return self._links.count

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        _close(self._links, self._waiter, self._kept)

    abort = shutdown


class Settings(dist.ProcessGroupGloo):
    """The settings of a group, for functions of torch that look for gloo, such as the one that sets the time-out."""

    _links: HostLinks

    @classmethod
    def of(cls, links: HostLinks) -> Settings:
        made: Settings = cls.__new__(cls)  # without a group of gloo
        made._links = links
        return made

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self._links.timeout_s = timeout.total_seconds()

    @property
    def options(self) -> Any:
        return _Options(datetime.timedelta(seconds=self._links.timeout_s))

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def name(self) -> str:
        return "fjoin"


class _Options:
    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout


def _close(links: HostLinks, waiter: Waiter, kept: Kept) -> None:
    links.close()
    waiter.stop()
    kept.clear()


def _connect(store: Any, rank: int, size: int, timeout_s: float) -> HostLinks:
    def tell(text: str) -> None:
        store.set(f"fjoin/connected/{rank}", text)

    def told(other: int) -> str | None:
        key = f"fjoin/connected/{other}"
        return store.get(key).decode() if store.check([key]) else None

    with Doorway() as doorway:
        store.set(f"fjoin/{rank}", f"{doorway.host}\n{doorway.address}")
        found = [store.get(f"fjoin/{other}").decode().split("\n") for other in range(size)]
        if len({host for host, _ in found}) > 1:
            raise ValueError(
                "the backend 'fjoin' needs all ranks of a group on one host, with Linux, of one user, and without a limit of "
                "the size of files (ulimit -f); use gloo"
            )
        addresses = {other: address for other, (_, address) in enumerate(found) if other != rank}
        links, reason = connect(doorway, rank, addresses, timeout_s, tell, told)
    tell(reason)  # also where this rank has learned it from another one
    reasons = [reason, *(store.get(f"fjoin/connected/{other}").decode() for other in addresses if links is not None)]
    for one in reasons:
        if one:
            if links is not None:
                links.close()
            raise TransportError(f"the backend 'fjoin': {one}; raise the limit, or use gloo")
    assert links is not None
    return links


if "FJOIN" not in dist.Backend._plugins:
    dist.Backend.register_backend("fjoin", HostGroup, devices=["cpu"])
