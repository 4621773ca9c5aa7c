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
from ..transforms.axes import Axis, One, bind_axes, bound
from ..transforms.base import devices, flag, is_number
from ._connect import chosen_transport, limited, meet_and_connect
from ._group_mesh import ENDED, MESHES, TIMEOUT_S, GroupMesh, mesh_from_group, timeout_of
from ._launch import Launch, read_launch
from ._mesh import Communicator, Mesh, SimulatedMesh, check_mesh

_SHORTEST, _LONGEST = 1e-3, 1e8  # seconds, the range of the backends' clocks


def mesh(
    axes: Mapping[str, int] | DeviceMesh,
    *,
    timeout_s: float = TIMEOUT_S,
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
        ordered: Sum in rank order, bit for bit as the simulator does. Slower over gloo, for tests.
        transport: How ranks exchange tensors on the CPU. With "auto" those on one host use shared memory (on Linux), and
            others gloo; "gloo" and "shared" are gloo for all, and shared memory for all. The environment variable
            FJOIN_TRANSPORT has the value for "auto".

    Returns:
        A `Mesh`. It owns its process groups: `close()`, the end of a `with` block, or the end of its last reference
        frees them. Groups over a DeviceMesh stay until the program ends.

    Raises:
        ValueError: the sizes do not fit the number of ranks; `timeout_s` is not from 0.001 to 1e8; an unknown `transport`,
            or "shared" where ranks are on several hosts; the variables of a launcher that are incomplete.
        TransportError: on all ranks: with "shared", the system refuses a rank shared memory. "auto" then uses gloo.
        TypeError: `axes` is neither a mapping by name nor a DeviceMesh; `ordered` is no bool.
        DesyncError: on all ranks: some rank makes another mesh, or is at another place in the program.
        CollectiveTimeout: not all ranks arrive within `timeout_s`.

    >>> fjoin.mesh({"data": -1})
    mesh({'data': 1}, rank=0)
    """
    if not is_number(timeout_s) or not _SHORTEST <= timeout_s <= _LONGEST:
        raise ValueError(f"timeout_s must be a number of seconds from {_SHORTEST:g} to {_LONGEST:g}, got {timeout_s!r}")
    flag("ordered", ordered)
    transport = chosen_transport(transport)
    if isinstance(axes, DeviceMesh):
        return _from_device_mesh(axes, timeout_s, ordered, transport)
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f"axes must be a mapping from axis names to sizes, for example {{'data': -1}}, got {axes!r}")
    if not axes:
        raise ValueError("a mesh needs at least one axis, for example {'data': -1}")
    simulated: dict[str, Any] = {name: axis for name, axis in bound().items() if axis.simulated}
    if simulated:
        sizes = _sizes(axes, math.prod(axis.size for axis in simulated.values()))
        if sizes != {name: axis.size for name, axis in simulated.items()}:
            raise ValueError(
                f"inside simulate the mesh must be { ({n: a.size for n, a in simulated.items()}) }, got {sizes}"
            )
        return SimulatedMesh(sizes, dict(simulated), next(iter(simulated.values())).world_rank)
    if not dist.is_initialized():
        launch = read_launch(os.environ)
        if launch is None:
            sizes = _sizes(axes, 1)
            return Communicator(sizes, {name: One() for name in sizes}, 0)
        # With fewer GPUs than ranks on this host all ranks use the CPU; with enough GPUs, both devices work.
        count, here, kind = devices.count(), launch.local_size, devices.kind()
        gpus = kind is not None and count >= here
        if gpus:
            devices.use(launch.local_rank)
        elif count:
            warnings.warn(
                f"this host has {here} ranks, and they see fewer GPUs, {count}: they use the CPU, with gloo. Start as many ranks as GPUs; "
                f"or, where each rank sees GPUs of its own, call torch.distributed.init_process_group('nccl') before fjoin.mesh",
                stacklevel=2,
            )
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}" if gpus else "gloo"  # type: ignore[arg-type]
        _connect(backend, timeout_s, launch)
    sizes = _sizes(axes, dist.get_world_size())
    grid = torch.arange(dist.get_world_size()).reshape(tuple(sizes.values()))
    timeout = datetime.timedelta(seconds=timeout_s)

    def connect() -> dict[str, Any]:
        groups, me = {}, dist.get_rank()
        lines = {name: grid.movedim(dim, -1).reshape(-1, sizes[name]).tolist() for dim, name in enumerate(sizes)}
        if len(sizes) > 1:
            lines[""] = [grid.flatten().tolist()]
        for name, all_of in lines.items():
            for line in all_of:
                group = dist.new_group(line, timeout=timeout)
                if me in line:
                    groups[name] = group
        return groups

    return meet_and_connect(sizes, grid, connect, timeout_s, ordered, transport)


# Without these a thread of torch's ends the process about a minute after a rank has failed, whatever the program does.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


def _connect(backend: str, timeout_s: float, launch: Launch) -> None:
    """Initialise torch.distributed."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if "nccl" in backend:
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
    limited(
        timeout_s,
        lambda: dist.init_process_group(backend, timeout=timeout, rank=launch.rank, world_size=launch.size),
    )
    # Threads of groups that still exist when the interpreter ends can abort the process.
    atexit.register(_close, os.getpid())


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
        raise ValueError(
            f"a mesh of shape {dict(shape)} does not fit {ranks} ranks: sizes must be whole numbers whose product is {ranks}, "
            f"one of them may be -1"
        )
    return {name: ranks // known if size == -1 else size for name, size in shape.items()}


def _from_device_mesh(device_mesh: DeviceMesh, timeout_s: float, ordered: bool, transport: str) -> Communicator:
    names = device_mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "the DeviceMesh has no mesh_dim_names; make it with init_device_mesh(..., mesh_dim_names=('data',))"
        )
    sizes = dict(zip(names, device_mesh.mesh.shape, strict=True))
    timeout = datetime.timedelta(seconds=timeout_s)

    def connect() -> dict[str, Any]:
        # Groups of our own with the same members: taking them down must leave the user's groups intact.
        groups = {name: _group_of(dist.get_process_group_ranks(device_mesh.get_group(name)), timeout) for name in names}
        if len(groups) > 1:
            groups[""] = _group_of(sorted(device_mesh.mesh.flatten().tolist()), timeout)
        return groups

    # These groups stay until the program ends. torch names such groups by their ranks and by the current number of
    # groups, so a later group could get the name of a destroyed one, and with it the addresses of that group.
    return meet_and_connect(sizes, device_mesh.mesh, connect, timeout_s, ordered, transport, owned=False)


def _group_of(ranks: list[int], timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A new group. One of all ranks gets a name of its own, since a name made from the ranks can be used only once."""
    world_mesh = len(ranks) == dist.get_world_size()
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=not world_mesh)  # type: ignore[return-value]


def world_mesh() -> Communicator:
    """A mesh of all ranks with the axis "data": over the default group where there is one, without own groups."""
    simulated = any(axis.simulated for axis in bound().values())
    if dist.is_initialized() and not simulated:
        ENDED.clear()
        return mesh_from_group(dist.group.WORLD)
    if ENDED and not simulated:
        raise JoinError(
            f"the default process group was taken down after a failure: {ENDED[-1]}; to train on in this process, all ranks "
            f"must call fjoin.mesh(...) or torch.distributed.init_process_group(...) again"
        )
    return check_mesh("mesh", mesh({"data": -1}))


def mesh_or_world(where: str, mesh: Mesh | None) -> Communicator:
    """The mesh that a user has passed, or one of all ranks.

    Raises:
        TypeError: it is no Mesh.
    """
    return world_mesh() if mesh is None else check_mesh(where, mesh)


def _simulated() -> list[Axis]:
    return [axis for axis in bound().values() if axis.simulated]


def world_size() -> int:
    """The number of all ranks: processes, simulated ranks, or one. Under torchrun it initialises torch.distributed."""
    return math.prod(axis.size for axis in axes) if (axes := _simulated()) else world_mesh().size


def nested_mesh(shape: dict[str, int], group: Any = None) -> Communicator:
    """A mesh of several axes over a process group; consecutive ranks form the groups of the last axes.

    All ranks of `group` must call it. Where `group` has not all ranks, they must have made the same number of groups
    before, since torch names new groups by that number. The new groups stay until the program ends.

    Args:
        shape: Axis name -> size, the slowest varying first; the product is the size of the group.
        group: The process group; by default all ranks.
    """
    if group is None and (_simulated() or not dist.is_initialized()):
        return check_mesh("mesh", mesh(shape))
    whole = dist.group.WORLD if group is None else group
    ranks, here = dist.get_process_group_ranks(whole), dist.get_rank()
    grid = torch.tensor(ranks).reshape(tuple(shape.values()))
    timeout = datetime.timedelta(seconds=timeout_of(whole))
    groups = {}
    for dim, name in enumerate(shape):
        for line in grid.movedim(dim, -1).reshape(-1, shape[name]).tolist():
            if len(line) == len(ranks):
                groups[name] = whole
            elif len(ranks) == dist.get_world_size():
                one = dist.new_group(line, timeout=timeout)  # called on all ranks
                groups = {**groups, name: one} if here in line else groups
            elif here in line:
                groups[name] = dist.new_group(line, timeout=timeout, use_local_synchronization=True)
    return GroupMesh(shape, groups, whole, timeout.total_seconds(), False, owned=False)


@contextlib.contextmanager
def bind(mesh: Mesh) -> Iterator[None]:
    """Bind the axes of a mesh within a with block, in this thread and its backward passes: for training loops of your own.

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
        if isinstance(error, failures) or ranks.is_backend_error(error):
            ranks.raise_root_cause(error, None)
        raise
