"""The connections of a host: all of its ranks make them, or none does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from .._errors import TransportError
from ._doorway import Doorway
from ._links import HostLinks
from ._packets import PeerGone


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
        CollectiveTimeout: a rank has not come in time.
    """

    def check() -> None:
        for other in addresses:
            if reason := refused(other):
                raise _Elsewhere(reason)

    links, found, reason = None, dict[int, socket.socket](), "unfinished"
    try:
        found = doorway.connect(rank, addresses, timeout_s, check)
        links = HostLinks(found, timeout_s)
        links.report = lambda error: refuse(f"rank {rank}: {error}")
        links.meet(check)
        reason = ""
    except (_Elsewhere, TransportError) as error:
        reason = str(error)
    except PeerGone as error:
        reason = (refused(error.rank) if error.rank is not None else None) or str(error)
    except OSError as error:
        reason = f"rank {rank}: {error}"
        refuse(reason)
    finally:
        if reason:
            if links is not None:
                links.close()
            for connection in found.values():
                connection.close()
    return (None if reason else links), reason
