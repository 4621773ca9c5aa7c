"""How the ranks of a mesh exchange tensors on the CPU: through shared memory, or over the process group."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from .._errors import TransportError
from ..shared_memory._connect import connect
from ..shared_memory._doorway import Doorway
from ..shared_memory._links import HostLinks
from ._from_group import timeout_of
from ._group_mesh import GroupMesh
from ._mesh import Mesh
from .failures._connections import Connections
from .failures._meetings import Meetings
from .failures._store import Store

TRANSPORTS = ("auto", "gloo", "shared")


def chosen_transport(transport: str) -> str:
    """The transport that is meant; "auto" reads the environment.

    Raises:
        ValueError: there is no such transport.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    transport = os.environ.get("FJOIN_TRANSPORT", transport) if transport == "auto" else transport
    if transport not in TRANSPORTS:
        raise ValueError(f"FJOIN_TRANSPORT must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    return transport


def links_to_host(
    doorway: Doorway, doorways: Mapping[int, tuple[str, str]], meetings: Meetings, timeout_s: float, required: bool
) -> HostLinks | None:
    """Connections to the other ranks of this host; None where there are none, or where a rank of any host cannot connect.

    Args:
        doorways: Rank -> its host, and the address of its doorway; of all ranks, which all call this.
        meetings: Where the ranks agree.
        required: Whether to raise where a rank cannot connect.

    Raises:
        TransportError: on all ranks: one of them cannot connect.
        CollectiveTimeout: a rank does not come in time.
    """
    me, store = dist.get_rank(), Store()
    if len({host for host, _ in doorways.values()}) == len(doorways):
        return None
    addresses = {rank: at for rank, (host, at) in doorways.items() if host == doorway.host and rank != me}
    name = {rank: f"refused/{at}" for rank, (_, at) in doorways.items()}
    links, reason = None, ""
    if addresses:
        links, reason = connect(
            doorway,
            me,
            addresses,
            timeout_s,
            lambda text: store.set(timeout_s, name[me], text),
            lambda rank: store.get(timeout_s, name[rank]),
        )
    try:
        reasons = meetings.exchange("fjoin.mesh", reason, lambda values: values, list(doorways))
    except BaseException:
        if links is not None:
            links.close()
        raise
    found = [one for one in reasons if one]
    if not found:
        return links
    if links is not None:
        links.close()
    if required:
        raise TransportError(
            f"transport='shared': {found[0]}; raise the limit, or use transport='auto', which then takes gloo"
        )
    return None


def linked_mesh(group: dist.ProcessGroup, name: str, occasion: str) -> Mesh:
    """A mesh of one axis over the user's process group, with shared memory where all its ranks are on one host.

    Args:
        name: The axis.
        occasion: The place in the program, in words, for ranks that are elsewhere.

    Raises:
        DesyncError: on all ranks: some rank is at another place in the program.
        CollectiveTimeout: not all ranks arrive in time.
    """
    timeout_s, ranks = timeout_of(group), dist.get_process_group_ranks(group)
    links = None
    if len(ranks) > 1:
        with Doorway() as doorway:
            shares = chosen_transport("auto") != "gloo" and dist.get_backend(group) == "gloo"
            meetings = Meetings(Store(), group.group_name, timeout_s, lambda rank: None)
            own = [doorway.host if shares else "", doorway.address]
            found = meetings.exchange(occasion, own, lambda values: values, ranks)
            if len({host for host, _ in found}) == 1 and shares:
                links = links_to_host(doorway, dict(zip(ranks, found, strict=True)), meetings, timeout_s, False)
    return GroupMesh({name: len(ranks)}, {name: group}, group, timeout_s, False, Connections(()), False, links)
