"""How the ranks of a mesh meet and choose their transport."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import CollectiveTimeout, DesyncError, PeerLost, TransportError
from ..shared_memory import Doorway, HostLinks, PeerGone, connect
from ..transforms.base import devices
from ._axis import backend_of
from ._failures import LATE, Processes, Store, Unanswered, is_backend_error, within
from ._group_mesh import GroupMesh, timeout_of
from ._meetings import Meetings
from ._mesh import Communicator
from ._message import poll

TRANSPORTS = ("auto", "gloo", "shared")


def chosen_transport(transport: str) -> str:
    """The transport that is meant; "auto" reads the environment.

    Raises:
        ValueError: there is no such transport.
    """
    name = "transport"
    if transport == "auto":
        name, transport = "FJOIN_TRANSPORT", os.environ.get("FJOIN_TRANSPORT", transport)
    if transport not in TRANSPORTS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    return transport


def links_to_host(
    doorway: Doorway, doorways: Mapping[int, tuple[str, str]], meetings: Meetings, timeout_s: float, required: bool
) -> HostLinks | None:
    """Connections to the other ranks of this host; None if there are none, or where a rank of any host cannot
    connect.

    Args:
        doorways: Rank -> its host, and the address of its doorway; of all ranks, which all call this.
        meetings: Where the ranks compare values.
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
        meetings.check(me)

    links, failed = None, False
    with contextlib.ExitStack() as given_up:
        try:
            if addresses:
                links = connect(doorway, me, addresses, timeout_s, check)
                given_up.callback(links.close)
        except (PeerGone, OSError, TransportError) as error:
            failed = True
            if not isinstance(error, PeerGone):  # which has told its own reason
                store.set(timeout_s, refused, f"rank {me}: {error}" if isinstance(error, OSError) else str(error))
        if not any(meetings.exchange("fjoin.mesh", failed, list, list(doorways))):
            given_up.pop_all()
            return links
    if required:
        remedy = "raise the limit, or use transport='auto', which then takes gloo"
        raise TransportError(f"transport='shared': {store.get(timeout_s, refused)}; {remedy}")
    return None


T = TypeVar("T")


def connected_mesh(
    occasion: str,
    shape: dict[str, int],
    grid: Tensor,
    timeout_s: float,
    transport: str,
    ordered: bool = False,
    owned: bool = False,
    groups: dict[str, Any] | None = None,
    connect_timeout_s: float | None = None,
) -> Communicator:
    """A mesh whose ranks meet before they connect: they compare what they make, and those of one host share memory.

    Args:
        occasion: The place in the program, in words.
        grid: The ranks of the mesh, which all call this, along its axes.
        groups: The groups by axis, see `GroupMesh`; by default new ones.

    Raises:
        DesyncError: a rank makes another mesh, or is at another place in the program.
        ValueError: `transport` is "shared", and the ranks are on several hosts.
        PeerLost: the process of a rank, or the one that hosts the store, has ended.
        CollectiveTimeout, TransportError: see `limited` and `links_to_host`.
    """
    connect_s, store = timeout_s if connect_timeout_s is None else connect_timeout_s, Store()
    own, ranks = f"a mesh of shape {shape}, ordered={ordered}, transport={transport!r}", grid.flatten().tolist()
    processes = Processes(store)
    processes.introduce(dist.get_rank())

    def look() -> None:
        for rank in sorted(processes.ended(ranks)):
            raise PeerLost(f"rank {rank} has ended while the ranks made their mesh; look at its output", rank=rank)

    meetings, links = Meetings(store, "meshes", connect_s, lambda rank: look()), None
    try:
        with Doorway() as doorway:
            found = meetings.exchange(occasion, [own, doorway.host, doorway.address], list, ranks)
            for rank, (other, *_) in zip(ranks, found, strict=True):
                if other != found[0][0]:
                    both = f"rank {rank} makes {other}, but rank {ranks[0]} {found[0][0]}"
                    raise DesyncError(f"{both}; make the same meshes in the same order on all ranks", rank=rank)
            if transport == "shared" and len({host for _, host, _ in found}) > 1:
                remedy = "with transport='auto' those of one host share memory"
                raise ValueError(f"transport='shared' needs all ranks on one Linux host; {remedy}")
            look()  # while groups are connected, the store does not answer
            if groups is None:
                groups = limited(connect_s, lambda: new_groups(shape, grid, connect_s), look)
                set_timeout(groups.values(), connect_s, timeout_s)
            if transport != "gloo":
                doorways = {rank: (host, address) for rank, (_, host, address) in zip(ranks, found, strict=True)}
                links = links_to_host(doorway, doorways, meetings, connect_s, transport == "shared")
                if links is not None:
                    links.timeout_s = timeout_s
    except dist.DistNetworkError as error:
        host = "the process that hosts the rendezvous store, rank 0 if nothing else is set"
        raise PeerLost(f"{host}, has ended while the ranks made their mesh; look at its output. {error}") from error
    return GroupMesh(shape, groups, timeout_s, ordered, owned, links)


def linked_mesh(group: dist.ProcessGroup, name: str, occasion: str) -> Communicator:
    """A mesh of one axis over the user's process group, with shared memory where all its ranks are on one host.

    Args:
        name: The axis.
        occasion: The place in the program, in words, for ranks that are elsewhere.

    Raises:
        DesyncError: on all ranks: some rank is at another place in the program, or FJOIN_TRANSPORT differs.
        CollectiveTimeout: not all ranks arrive in time.
    """
    ranks = dist.get_process_group_ranks(group)
    shares = chosen_transport("auto") != "gloo" and dist.get_backend(group) == "gloo"
    shape, transport = {name: len(ranks)}, "auto" if shares else "gloo"
    return connected_mesh(occasion, shape, torch.tensor(ranks), timeout_of(group), transport, groups={name: group})


def new_groups(
    shape: Mapping[str, int], grid: Tensor, timeout_s: float, whole: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """New process groups over a grid of ranks: axis name -> the group, and "" -> that of all ranks where there are
    several axes.

    A grid of all ranks of the run is that of a mesh that all of them make, and all make all groups: their names are not
    used again. Otherwise each rank makes its own ones, which must stay until the program ends: torch names them by
    their ranks and by the current number of groups, so a later one could get the name of a destroyed one, and with it
    the addresses.

    An accelerator's communicators are made here. They would be made by the first message, where nothing limits the wait
    for a rank that has failed before it.

    Args:
        whole: A group of all ranks of the grid, instead of a new one.

    Raises:
        CollectiveTimeout: a rank has not made its communicators in time.
    """
    ranks, me, timeout = sorted(grid.flatten().tolist()), dist.get_rank(), datetime.timedelta(seconds=timeout_s)
    everyone, groups = len(ranks) == dist.get_world_size(), dict[str, Any]()
    lines = {name: grid.movedim(dim, -1).reshape(-1, shape[name]).tolist() for dim, name in enumerate(shape)}
    if len(shape) > 1:
        lines[""] = [ranks]
    for name, all_of in lines.items():
        for line in all_of:
            if whole is not None and len(line) == len(ranks):
                groups[name] = whole
            elif everyone or me in line:
                group = dist.new_group(line, timeout=timeout, use_local_synchronization=not everyone)
                if me in line:
                    groups[name] = group
    speaking = [group for group in groups.values() if group is not whole and speaks(group, devices.kind())]
    if speaking:
        words = torch.zeros(1, device=devices.current())
        for group in speaking:  # in the same order on all ranks
            dist.all_reduce(words, group=group)
        if not poll(devices.here(words.device).query, timeout_s):
            raise CollectiveTimeout(f"not all ranks have made their communicators within {timeout_s:g} s")
    return groups


def speaks(group: Any, kind: str | None) -> bool:
    """Whether a group has messages of its own between devices of a kind."""
    return kind is not None and backend_of(group, kind) not in ("", "gloo")


def await_port(timeout_s: float) -> None:
    """Wait until a program listens where the ranks meet: torch tries ever more rarely, and ends late.

    Raises:
        Unanswered: none does in time.
    """
    meet = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(meet, timeout_s):  # type: ignore[arg-type]
            return True
        return False

    if all(meet) and not poll(listens, timeout_s, longest_s=0.1):
        raise Unanswered("nothing listens there")


def set_timeout(groups: Iterable[Any], connect_s: float, timeout_s: float) -> None:
    """Give the messages of groups that are connected a limit of their own."""
    for group in groups if timeout_s != connect_s else ():  # torch can do it for gloo and NCCL alone
        # torch 2.14 has a public function, and deprecates the other.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(datetime.timedelta(seconds=timeout_s), group)


def limited(timeout_s: float, call: Callable[[], T], check: Callable[[], None] | None = None) -> T:
    """The result of a call that connects the ranks, with a time limit even where the store's host does not answer.

    Args:
        check: Raises where a rank has ended.

    Raises:
        CollectiveTimeout: not all ranks have connected in time.
        TransportError: on rank 0: the port is taken.
    """
    device = devices.current() if devices.in_use() else None

    def on_device() -> T:
        if device is not None:  # each thread has its own current device
            devices.use(device)
        return call()

    try:
        return within(timeout_s + 0.5, on_device, check)
    except RuntimeError as error:
        if not (isinstance(error, Unanswered) or is_backend_error(error) or LATE.search(str(error))):
            raise
        meet = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if "EADDRINUSE" in str(error):
            taken = f"the port of {meet}, where the ranks meet, is taken by another program on the host of rank 0"
            remedy = "set MASTER_PORT to a free one on all ranks, or start by torchrun --standalone, which finds one"
            raise TransportError(f"{taken}: {remedy}") from error
        why = "one of them has not started, has ended, or cannot be reached, or another program holds that port"
        text = f"the ranks could not be connected within {timeout_s:g} s, by {meet}: {why}"
        raise CollectiveTimeout(f"{text}; look at the other ranks' output. {error}") from error
