"""The connections of a host: all of its ranks make them, or none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .._errors import TransportError
from ._doorway import Doorway
from ._links import HostLinks


class _Elsewhere(OSError):
    """Another rank of this host cannot connect."""


def connect(
    doorway: Doorway,
    rank: int,
    addresses: Mapping[int, str],
    timeout_s: float,
    refuse: Callable[[str], None],
    refused: Callable[[int], str | None],
) -> tuple[HostLinks | None, str]:
    """Connections to other ranks of this host, and the reason where there are none.

    Limits, such as that of descriptors, are met here and not later in a step. Ranks must compare the reasons before they use
    the connections, since another rank may have failed after this one has connected.

    Args:
        addresses: Rank -> the address of its doorway.
        refuse: Tells the other ranks the reason why this one cannot connect.
        refused: The reason of another rank, if it has called `refuse`.

    Raises:
        CollectiveTimeout, PeerLost: a rank has not come in time, or has ended.
    """

    def check() -> None:
        for other in addresses:
            if reason := refused(other):
                raise _Elsewhere(reason)

    try:
        found = doorway.connect(rank, addresses, timeout_s, check)
        try:
            links = HostLinks(found, timeout_s)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        try:
            links.meet(check)
        except BaseException:
            links.close()
            raise
        return links, ""
    except _Elsewhere as error:
        return None, str(error)
    except (OSError, TransportError) as error:
        reason = f"rank {rank}: {error}"
        refuse(reason)
        return None, reason
