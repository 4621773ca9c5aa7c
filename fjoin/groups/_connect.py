"""How the ranks of a mesh meet and choose their transport."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import CollectiveTimeout, DesyncError, PeerLost, TransportError
from ..shared_memory import Doorway, HostLinks, PeerGone, connect
from ..transforms.base import devices
from ._failures import BACKEND_ERROR, Store, Unanswered, within
from ._group_mesh import GroupMesh, timeout_of
from ._meetings import Meetings
from ._mesh import Communicator
from ._message import comes

TRANSPORTS = ("auto", "gloo", "shared")
_GONE = "? "  # before the reason of a rank that has only noticed that another one gave up


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
    me, store, refused = dist.get_rank(), Store(), f"refused/{doorways[min(doorways)][1]}"
    if len({host for host, _ in doorways.values()}) == len(doorways):
        return None
    addresses = {rank: at for rank, (host, at) in doorways.items() if host == doorway.host and rank != me}

    def check() -> None:
        if (text := store.get(timeout_s, refused)) is not None:
            raise TransportError(text)

    links, reason = None, ""
    try:
        links = connect(doorway, me, addresses, timeout_s, check) if addresses else None
    except PeerGone as error:  # its own reason follows
        reason = f"{_GONE}{error}"
    except (OSError, TransportError) as error:
        reason = str(error) if isinstance(error, TransportError) else f"rank {me}: {error}"
        store.set(timeout_s, refused, reason)
    try:
        reasons = meetings.exchange("fjoin.mesh", reason, lambda values: values, list(doorways))
    except BaseException:
        if links is not None:
            links.close()
        raise
    found = sorted(filter(None, reasons), key=lambda text: text.startswith(_GONE))
    if not found:
        return links
    if links is not None:
        links.close()
    if required:
        raise TransportError(
            f"transport='shared': {found[0]}; raise the limit, or use transport='auto', which then takes gloo"
        )
    return None


def linked_mesh(group: dist.ProcessGroup, name: str, occasion: str) -> Communicator:
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
    return GroupMesh({name: len(ranks)}, {name: group}, group, timeout_s, False, False, links)


T = TypeVar("T")
_CONNECTED_S = 30.0  # torch's attempts to connect end by themselves, later than their time-out


def meet_and_connect(
    sizes: dict[str, int],
    grid: Tensor,
    connect: Callable[[], dict[str, Any]],
    timeout_s: float,
    ordered: bool,
    transport: str,
    owned: bool = True,
) -> Communicator:
    """The mesh over new groups.

    Args:
        connect: Makes the groups by axis, that of all ranks under "" or the only one.

    Raises:
        PeerLost: the process that hosts the store has ended.
        DesyncError, ValueError, CollectiveTimeout, TransportError: see `_meet`, `limited` and `links_to_host`.
    """
    meetings = Meetings(Store(), "meshes", timeout_s, lambda rank: None)
    try:
        with Doorway() as doorway:
            doorways = _meet(meetings, sizes, grid, timeout_s, ordered, transport, doorway)
            shares = transport != "gloo"
            groups = limited(timeout_s, lambda: _communicating(connect(), timeout_s))
            world_mesh = groups.pop("", None) or next(iter(groups.values()))
            links = links_to_host(doorway, doorways, meetings, timeout_s, transport == "shared") if shares else None
    except dist.DistNetworkError as error:
        raise PeerLost(
            f"the process that hosts the rendezvous store, rank 0 where nothing else is set, has ended while the ranks made "
            f"their mesh; look at its output. {error}"
        ) from error
    return GroupMesh(sizes, groups, world_mesh, timeout_s, ordered, owned, links)


def _communicating(made: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The groups, with an accelerator's communicators made.

    They would be made by the first message, where nothing limits the wait for a rank that has failed before it.

    Raises:
        CollectiveTimeout: a rank has not come in time.
    """
    groups = [group for group in made.values() if speaks(group, devices.kind())]
    if groups:
        words = torch.zeros(1, device=devices.current())
        for group in groups:  # in the same order on all ranks
            dist.all_reduce(words, group=group)
        if not comes(devices.here(words.device), timeout_s):
            raise CollectiveTimeout(f"not all ranks have made their communicators within {timeout_s:g} s")
    return made


def speaks(group: Any, kind: str | None) -> bool:
    """Whether a group has messages of its own between devices of a kind."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return kind is not None and backends.get(kind, "gloo") != "gloo"


def _meet(
    meetings: Meetings,
    sizes: dict[str, int],
    grid: Tensor,
    timeout_s: float,
    ordered: bool,
    transport: str,
    doorway: Doorway,
) -> dict[int, tuple[str, str]]:
    """Compare the mesh with the other ranks' meshes, before any group is made.

    Returns:
        Rank -> its host, and the address of its doorway.

    Raises:
        DesyncError: they differ.
        ValueError: `transport` is "shared", and the ranks are on several hosts.
        CollectiveTimeout: a rank does not arrive.
    """
    ranks = grid.flatten().tolist()
    mine = f"a mesh of shape {sizes}, timeout_s={timeout_s:g}, ordered={ordered}, transport={transport!r}"
    all_of = meetings.exchange("fjoin.mesh", [mine, doorway.host, doorway.address], lambda values: values, ranks)
    odd = [rank for rank, (other, *_) in zip(ranks, all_of, strict=True) if other != all_of[0][0]]
    if odd:
        raise DesyncError(
            f"rank {odd[0]} makes {all_of[ranks.index(odd[0])][0]}, but rank {ranks[0]} {all_of[0][0]}; make the same meshes in the "
            f"same order on all ranks",
            rank=odd[0],
        )
    if transport == "shared" and len({host for _, host, _ in all_of}) > 1:
        raise ValueError(
            "transport='shared' needs all ranks on one host, with Linux; with transport='auto' those of one host share memory"
        )
    return {rank: (host, address) for rank, (_, host, address) in zip(ranks, all_of, strict=True)}


def limited(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of a call that connects the ranks, with a time limit even where the store's host does not answer.

    Raises:
        CollectiveTimeout: not all ranks have connected in time.
    """
    cause: RuntimeError
    device = devices.current() if devices.in_use() else None

    def on_device() -> T:
        if device is not None:  # each thread has its own current device
            devices.use(device)
        return call()

    try:
        return within(timeout_s + 0.5, on_device, _CONNECTED_S)
    except (Unanswered, dist.DistError) as error:
        cause = error
    except RuntimeError as error:
        if not BACKEND_ERROR.search(str(error)) and "imed out" not in str(error) and "imeout" not in str(error):
            raise
        cause = error
    raise CollectiveTimeout(
        f"the ranks could not be connected within {timeout_s:g} s: one of them has not started, has "
        f"ended, or cannot be reached; look at the other ranks' output. {cause}"
    ) from cause
