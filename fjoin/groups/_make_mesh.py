"""`mesh` and `bind`."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._errors import CollectiveTimeout, DesyncError, JoinError, PeerLost, TransportError
from ..transforms.axes import One, bind_axes, bound
from ..transforms.base import checks, devices
from ._connect import await_port, chosen_transport, connected_mesh, limited, new_groups, set_timeout
from ._failures import is_backend_error
from ._group_mesh import ENDED, MESHES, TIMEOUT_S, GroupMesh, timeout_of
from ._launch import read_launch
from ._mesh import Communicator, Mesh, SimulatedMesh, check_mesh

_SHORTEST, _LONGEST = 1e-3, 1e8  # seconds, the range of the backends' clocks


def mesh(
    axes: Mapping[str, int] | DeviceMesh,
    *,
    timeout_s: float = TIMEOUT_S,
    connect_timeout_s: float | None = None,
    ordered: bool = False,
    transport: str = "auto",
) -> Mesh:
    """Arrange the ranks of this run in named axes.

    Under torchrun, srun or mpirun (or an initialised torch.distributed) the ranks are processes, NCCL on GPUs and
    gloo on CPUs; inside `simulate` they are the simulated ranks; otherwise there is one rank, so that
    every script also runs with plain `python`. All ranks must make the same meshes in the same order.

    Args:
        axes: Axis name -> size, the slowest varying first; one size may be -1, for the remaining ranks. Or
            a torch DeviceMesh, whose dim names become the axes.
        timeout_s: Seconds after which a collective of this mesh fails if not all ranks have joined it.
        connect_timeout_s: Seconds in which all ranks must come here and connect; by default `timeout_s`.
        ordered: Sum in rank order, bit for bit as the simulator does. Slower over gloo, for tests.
        transport: How ranks exchange tensors on the CPU. With "auto" those on one host use shared memory (on Linux),
            and others gloo; "gloo" and "shared" are gloo for all, and shared memory for all. The environment variable
            FJOIN_TRANSPORT has the value for "auto".

    Returns:
        A `Mesh`. It owns its process groups: `close()`, the end of a `with` block, or the end of its last reference
        frees them. Groups over a DeviceMesh stay until the program ends.

    Raises:
        ValueError: the sizes do not fit the number of ranks; a time-out is not from 0.001 to 1e8; an unknown
            `transport`, or "shared" where ranks are on several hosts; the variables of a launcher that are incomplete.
        TransportError: on all ranks: with "shared", the system refuses a rank shared memory. "auto" then uses gloo.
        TypeError: `axes` is neither a mapping by name nor a DeviceMesh; `ordered` is no bool.
        DesyncError: on all ranks: some rank makes another mesh, or is at another place in the program.
        CollectiveTimeout: not all ranks arrive within `connect_timeout_s`.
        PeerLost: a rank of this host has ended; noticed at once, if it was connected before.

    >>> fjoin.mesh({"data": -1})
    mesh({'data': 1}, rank=0)
    """
    connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
    for name, limit in {"timeout_s": timeout_s, "connect_timeout_s": connect_s}.items():
        if not checks.is_number(limit) or not _SHORTEST <= limit <= _LONGEST:
            raise ValueError(f"{name} must be a number of seconds from {_SHORTEST:g} to {_LONGEST:g}, got {limit!r}")
    checks.flag("ordered", ordered)
    transport = chosen_transport(transport)
    if isinstance(axes, DeviceMesh):
        if not axes.mesh_dim_names:
            raise ValueError("the DeviceMesh has no mesh_dim_names; pass init_device_mesh(..., mesh_dim_names=...)")
        # Its groups are the user's, which stay when a mesh is taken down: the mesh has groups of its own.
        sizes, grid = dict(zip(axes.mesh_dim_names, axes.mesh.shape, strict=True)), axes.mesh
    elif not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f"axes must be a mapping from axis names to sizes, for example {{'data': -1}}, got {axes!r}")
    elif not axes:
        raise ValueError("a mesh needs at least one axis, for example {'data': -1}")
    elif simulated := _simulated():
        sizes = _sizes(axes, math.prod(axis.size for axis in simulated.values()))
        if sizes != (known := {name: axis.size for name, axis in simulated.items()}):
            raise ValueError(f"inside simulate the mesh must be {known}, got {sizes}")
        return SimulatedMesh(sizes, simulated, next(iter(simulated.values())).world_rank)
    elif not dist.is_initialized() and not _initialize(timeout_s, connect_s):
        sizes = _sizes(axes, 1)
        return Communicator(sizes, {name: One() for name in sizes}, 0)
    else:
        sizes = _sizes(axes, dist.get_world_size())
        grid = torch.arange(dist.get_world_size()).reshape(tuple(sizes.values()))
    owned = not isinstance(axes, DeviceMesh)
    return connected_mesh("fjoin.mesh", sizes, grid, timeout_s, transport, ordered, owned, connect_timeout_s=connect_s)


# Without these a thread of torch's ends the process about a minute after a rank has failed, whatever the program does.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


def _initialize(timeout_s: float, connect_s: float) -> bool:
    """Whether a launcher has started this process with others. Then initialize torch.distributed.

    Where each rank of this host has a GPU, both devices work, otherwise all ranks use the CPU.
    """
    if (launch := read_launch(os.environ)) is None:
        return False
    count, backend = devices.count(), "gloo"
    if count >= launch.local_size:
        backend = _use_device(launch.local_rank)
    elif count:
        fewer = f"this host has {launch.local_size} ranks, and they see fewer GPUs, {count}"
        call = "call torch.distributed.init_process_group('nccl') before fjoin.mesh"
        remedy = f"Start as many ranks as GPUs; or, where each rank sees GPUs of its own, {call}"
        warnings.warn(f"{fewer}: they use the CPU, with gloo. {remedy}", stacklevel=3)
    timeout = datetime.timedelta(seconds=connect_s)

    def connect() -> None:
        if launch.rank:
            await_port(connect_s)
        dist.init_process_group(backend, timeout=timeout, rank=launch.rank, world_size=launch.size)

    limited(connect_s, connect)
    set_timeout([dist.group.WORLD], connect_s, timeout_s)
    # Threads of groups that still exist when the interpreter ends can abort the process.
    atexit.register(_close, os.getpid())
    return True


def _use_device(number: int) -> str:
    """Use an accelerator, if there is one; returns the backend of messages."""
    if (kind := devices.kind()) is None:
        return "gloo"
    devices.use(number)
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def connect_generation(store: Any, rank: int, size: int, connect_timeout_s: float, **options: Any) -> Communicator:
    """The mesh of one axis, "data", over processes that meet in a store; they must have come already.

    Each process uses the accelerator that it sees first, so each must see another one.

    Args:
        connect_timeout_s: The time limit of connecting.
        options: As for `mesh`.
    """
    backend, limit = _use_device(0), datetime.timedelta(seconds=connect_timeout_s)

    # torch names groups by their number, which a call that has failed has raised on this rank alone.
    dist.distributed_c10d._world.group_count = 0

    def connect() -> None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)

    limited(connect_timeout_s, connect)
    return check_mesh("elastic", mesh({"data": -1}, connect_timeout_s=connect_timeout_s, **options))


def _close(process: int) -> None:
    """Close the meshes and shut down torch.distributed at the end of this process, unless the program has done so."""
    if dist.is_initialized() and process == os.getpid():
        for made in list(MESHES):
            made.close()
        dist.destroy_process_group()


def _sizes(shape: Mapping[str, int], ranks: int) -> dict[str, int]:
    bad = any(isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1 for size in shape.values())
    free = [] if bad else [name for name, size in shape.items() if size == -1]
    known = 1 if bad else math.prod(size for size in shape.values() if size != -1)
    if bad or len(free) > 1 or ranks % known or (not free and known != ranks):
        fits = f"the product must be {ranks}, and one size may be -1"
        raise ValueError(f"a mesh of shape {dict(shape)} does not fit {ranks} ranks: {fits}")
    return {name: ranks // known if size == -1 else size for name, size in shape.items()}


def _simulated() -> dict[str, Any]:
    """The axes of the simulation in which this thread is a rank."""
    return {name: axis for name, axis in bound().items() if axis.simulated}


def mesh_or_world(where: str, mesh: Mesh | None) -> Communicator:
    """The mesh that a user has passed, or one of all ranks.

    Raises:
        TypeError: it is no Mesh.
    """
    return mesh_over() if mesh is None else check_mesh(where, mesh)


def world_size() -> int:
    """The number of all ranks: processes, simulated ranks, or one. Under torchrun it initialises torch.distributed."""
    return math.prod(axis.size for axis in axes.values()) if (axes := _simulated()) else mesh_over().size


def mesh_over(group: Any = None, shape: Mapping[str, int] | None = None) -> Communicator:
    """A mesh over a process group; consecutive ranks form the groups of the last axes.

    All ranks of the group must call it. It is taken down when a rank fails, and so are the mesh's groups of parts of
    it, which otherwise stay until the program ends. Where it has not all ranks of the run, all of it must have made the
    same number of groups before, since torch names new groups by that number.

    Args:
        group: The process group; by default all ranks, processes or simulated, or one.
        shape: Axis name -> size, the slowest varying first; the product is the size of the group. By default one axis,
            "data".

    Raises:
        JoinError: the default process group was taken down after a failure, and there is no other one yet.
    """
    shape = shape or {"data": -1}
    if group is None:
        if _simulated() or not dist.is_initialized():
            if ENDED and not _simulated():
                down = f"the default process group was taken down after a failure: {ENDED[-1]}"
                again = "fjoin.mesh(...) or torch.distributed.init_process_group(...) again"
                raise JoinError(f"{down}; to train on in this process, all ranks must call {again}")
            return check_mesh("mesh", mesh(shape))
        ENDED.clear()
        group = dist.group.WORLD
    sizes = _sizes(shape, group.size())
    grid = torch.tensor(dist.get_process_group_ranks(group)).reshape(tuple(sizes.values()))
    return GroupMesh(sizes, new_groups(sizes, grid, timeout_of(group), group))


@contextlib.contextmanager
def bind(mesh: Mesh) -> Iterator[None]:
    """Bind the axes of a mesh within a with block, in this thread and its backward passes: for training loops of your
    own.

    Args:
        mesh: A mesh made by `fjoin.mesh`.

    Raises:
        TypeError: `mesh` is no Mesh.
        PeerLost, CollectiveTimeout: a collective in the block fails. At the end of the block the mesh is taken down.
        DesyncError, TransportError: likewise, so that other ranks do not wait for this one.

    >>> from fjoin import transforms as tx
    >>> with fjoin.bind(fjoin.mesh({"data": -1})):
    ...     tx.psum(torch.tensor(2.0), "data")
    tensor(2.)
    """
    ranks = check_mesh("bind", mesh)
    try:
        with bind_axes(ranks.axes, in_backward=True):
            yield
    except RuntimeError as error:
        failures = (PeerLost, CollectiveTimeout, DesyncError, TransportError)
        if isinstance(error, failures) or is_backend_error(error):
            ranks.raise_root_cause(error, None)
        raise
