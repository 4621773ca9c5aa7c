"""How the ranks of a mesh exchange tensors on the CPU: through shared memory, or over the process group."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from ..shared_memory._hosts import Doorway
from ..shared_memory._links import HostLinks
from ._connections import Connections
from ._group_mesh import GroupMesh, timeout_of
from ._meetings import Meetings
from ._mesh import Mesh
from ._store import Store

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


def links_to_host(doorway: Doorway, doorways: Mapping[int, tuple[str, str]], timeout_s: float) -> HostLinks | None:
    """Connections to the other ranks of this host; None where there are none.

    Args:
        doorways: Rank -> its host, and the address of its doorway.
    """
    me = dist.get_rank()
    addresses = {rank: at for rank, (host, at) in doorways.items() if host == doorway.host and rank != me}
    return HostLinks(doorway.connect(me, addresses, timeout_s), timeout_s) if addresses else None


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
                links = links_to_host(doorway, dict(zip(ranks, found, strict=True)), timeout_s)
    return GroupMesh({name: len(ranks)}, {name: group}, group, timeout_s, False, Connections(()), False, links)
