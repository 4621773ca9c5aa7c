"""Meshes: which ranks form which axis, on processes, in the simulator, or alone."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._axis import Done, GroupAxis, Work
from ._errors import CollectiveTimeout, FjoinError, PeerLost
from .transforms._errors import NotVmappable
from .transforms.axes._env import One, bind_axes, bound, under_vmap
from .transforms.axes._lockstep import SimulatedAxis

TIMEOUT_S = 600.0
# How long a rank whose connection broke waits for the failed rank's own account of it.
_ACCOUNT_S = 1.0


class Mesh:
    """The ranks of a run, arranged in named axes; made by `mesh`.

    Attributes:
        shape: Axis name -> size.
        axes: Axis name -> what runs collectives over it.
        rank: This rank among all of the mesh, the last axis varying fastest.
        size: The number of ranks.
    """

    def __init__(self, shape: dict[str, int], axes: dict[str, Any], rank: int) -> None:
        self.shape, self.axes, self.rank = shape, axes, rank
        self.size = math.prod(shape.values())

    def __repr__(self) -> str:
        return f"mesh({self.shape}, rank={self.rank})"

    def over(self, names: tuple[str, ...]) -> list[Any]:
        """The axes to reduce over, in turn; one that covers them all where there is one."""
        for name in names:
            if name not in self.axes:
                raise NameError(
                    f"unbound axis name {name!r}; this mesh has {list(self.axes)}; name it in fjoin.mesh(...)"
                )
        if len(names) > 1:
            joint = self.axes[names[0]].joint(names) if hasattr(self.axes[names[0]], "joint") else None
            if joint is not None:
                return [joint]
        return [self.axes[name] for name in names]

    def reduce_(self, buffer: Tensor, names: tuple[str, ...]) -> Work:
        """Start summing a buffer over some axes, in place."""
        *first, last = self.over(names)
        for axis in first:
            _reduce_(axis, buffer).wait()
        return _reduce_(last, buffer)

    def exchange(self, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...] = ()) -> Any:
        """`combine` of every rank's JSON value, in rank order; computed once, the same on all ranks.

        Args:
            axes: The axes whose ranks meet; all by default.
        """
        return combine([value])

    def _members(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks that differ from this one along some axes only."""
        grid = torch.arange(self.size).reshape(tuple(self.shape.values()))
        here = (grid == self.rank).nonzero()[0].tolist()
        where = [slice(None) if name in axes or not axes else at for name, at in zip(self.shape, here, strict=True)]
        return grid[tuple(where)].flatten().tolist()

    def failed(self, error: BaseException, step: int | None) -> None:
        """Tell the other ranks that this one has failed, and let go of what they wait in."""

    def account(self, error: BaseException, step: int | None) -> BaseException:
        """What really happened, given an error that came out of a collective."""
        return error


def _reduce_(axis: Any, buffer: Tensor) -> Work:
    if isinstance(axis, GroupAxis):
        return axis.reduce_(buffer)
    if axis.size > 1:
        buffer.copy_(axis.run("psum", buffer, None))
    return Done()


class _SimulatedMesh(Mesh):
    def exchange(self, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...] = ()) -> Any:
        over = self.over(axes if len(axes) == 1 else tuple(self.shape))
        if len(over) > 1:
            raise ValueError(f"a mesh must name all simulated axes in their order, got {list(self.shape)}")
        return combine(over[0].exchange(value))


class _GroupMesh(Mesh):
    """A mesh over process groups that belong to it alone, so that it can take them down."""

    def __init__(
        self, shape: dict[str, int], groups: dict[str, Any], everyone: Any, timeout_s: float, ordered: bool
    ) -> None:
        self._everyone = GroupAxis(everyone, ordered)
        names = tuple(shape)

        def joint(axes: tuple[str, ...]) -> GroupAxis | None:
            return self._everyone if axes == names else None

        axes = {name: GroupAxis(group, ordered, joint) for name, group in groups.items()}
        super().__init__(shape, axes, self._everyone.rank)
        # The group is this mesh's own, and its name the same on all ranks: no two meshes share keys.
        self._store: Any = dist.distributed_c10d.PrefixStore(
            f"fjoin/{everyone.group_name}", dist.distributed_c10d._get_default_store()
        )
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._meetings: Counter[str] = Counter()
        self._down = False

    def exchange(self, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...] = ()) -> Any:
        members = self._members(axes)
        who = ",".join(map(str, members))
        self._meetings[who] += 1
        place = f"meeting/{who}/{self._meetings[who]}"
        self._store.set(f"{place}/{self.rank}", json.dumps(value))
        if self.rank == members[0]:
            values = []
            for rank in members:
                self._await(f"{place}/{rank}", rank)
                values.append(json.loads(self._store.get(f"{place}/{rank}")))
            self._store.set(f"{place}/result", json.dumps(combine(values)))
        self._await(f"{place}/result", members[0])
        return json.loads(self._store.get(f"{place}/result"))

    def _await(self, key: str, rank: int) -> None:
        """Wait for a key, looking up now and then whether a rank has failed meanwhile."""
        end = time.monotonic() + self._timeout.total_seconds()
        while True:
            left = end - time.monotonic()
            try:
                self._store.wait([key], datetime.timedelta(seconds=max(0.01, min(left, 0.5))))
                return
            except RuntimeError as error:  # stores differ in what they raise when time is up
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise
                self._raise_account()
                if left <= 0.5:
                    raise CollectiveTimeout(
                        f"rank {rank} did not come to the check before the first message within "
                        f"{self._timeout.total_seconds():g} s; is it running the same program?",
                        rank=rank,
                    ) from None

    def failed(self, error: BaseException, step: int | None) -> None:
        if self._down:
            return
        if not isinstance(error, (PeerLost, CollectiveTimeout)):
            with contextlib.suppress(RuntimeError):  # the store's own host may be gone
                account = {"rank": self.rank, "step": step, "error": f"{type(error).__name__}: {error}"}
                if self._store.add("failures", 1) == 1:
                    self._store.set("failure", json.dumps(account))
        self.take_down()

    def take_down(self) -> None:
        """Destroy the groups of this mesh; peers that wait in them get an error at once."""
        self._down = True
        groups = {id(axis.group): axis for axis in [*self.axes.values(), self._everyone] if axis.group is not None}
        for axis in groups.values():
            group, axis.group = axis.group, None
            for other in [*self.axes.values(), self._everyone]:
                if other.group is group:
                    other.group = None
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                if group.name() == "nccl":
                    group.abort()
                if group is dist.group.WORLD:
                    del group
                    dist.destroy_process_group()
                else:
                    dist.destroy_process_group(group)

    def account(self, error: BaseException, step: int | None) -> BaseException:
        if isinstance(error, FjoinError) or not isinstance(error, RuntimeError) or not _from_backend(error):
            return error
        if "imed out" in str(error):
            lost: FjoinError = CollectiveTimeout(
                f"step {step}: a collective of rank {self.rank} timed out: a peer is stopped, or not in this step. {error}",
                step=step,
            )
        else:
            lost = PeerLost(f"step {step}: rank {self.rank} lost the connection to a peer. {error}", step=step)
        return self._look_up(_ACCOUNT_S) or lost

    def _look_up(self, patience_s: float) -> PeerLost | None:
        """The failed rank's account of itself, if there is one within some time."""
        with contextlib.suppress(RuntimeError):
            self._store.wait(["failure"], datetime.timedelta(seconds=patience_s))
            told = json.loads(self._store.get("failure"))
            if told["rank"] != self.rank:
                where = "" if told["step"] is None else f" in step {told['step']}"
                return PeerLost(
                    f"rank {told['rank']} failed{where}: {told['error']}", rank=told["rank"], step=told["step"]
                )
        return None

    def _raise_account(self) -> None:
        if self._store.check(["failure"]) and (lost := self._look_up(0.05)):
            raise lost


def _from_backend(error: RuntimeError) -> bool:
    """Whether a RuntimeError comes from the transport, not from somebody's tensor code."""
    text = str(error)
    known = ("gloo", "NCCL", "Connection closed", "Connection reset", "imed out", "Broken pipe", "Socket", "connection")
    return isinstance(error, dist.DistError) or any(word in text for word in known)


def mesh(shape: Mapping[str, int] | DeviceMesh, *, timeout_s: float = TIMEOUT_S, ordered: bool = False) -> Mesh:
    """Arrange the ranks of this run in named axes.

    Under torchrun (or an initialised torch.distributed) the ranks are processes, NCCL on GPUs and
    gloo on CPUs; inside `simulate` they are the simulated ranks; otherwise there is one rank, so that
    every script also runs with plain `python`. All ranks must make the same meshes in the same order.

    Args:
        shape: Axis name -> size, the slowest varying first; one size may be -1, for what is left. Or
            a torch DeviceMesh, whose dim names become the axes.
        timeout_s: Seconds after which a collective of this mesh that not all ranks have come to fails.
        ordered: Sum in rank order, bit for bit as the simulator: slower, for tests.

    Returns:
        A `Mesh`. Its process groups are its own.

    Raises:
        ValueError: the sizes do not fit the number of ranks.

    >>> fjoin.mesh({"data": -1})
    mesh({'data': 1}, rank=0)
    """
    if isinstance(shape, DeviceMesh):
        return _from_device_mesh(shape, timeout_s, ordered)
    if not shape:
        raise ValueError("a mesh needs at least one axis, for example {'data': -1}")
    if under_vmap():
        raise NotVmappable("fjoin.mesh and train_step need simulate(..., engine='lockstep')")
    simulated = {name: axis for name, axis in bound().items() if isinstance(axis, SimulatedAxis)}
    if simulated:
        sizes = _sizes(shape, math.prod(axis.size for axis in simulated.values()))
        if sizes != {name: axis.size for name, axis in simulated.items()}:
            raise ValueError(
                f"inside simulate the mesh must be { ({n: a.size for n, a in simulated.items()}) }, got {sizes}"
            )
        return _SimulatedMesh(sizes, dict(simulated), next(iter(simulated.values())).world_rank)
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            sizes = _sizes(shape, 1)
            return Mesh(sizes, {name: One() for name in sizes}, 0)
        # With fewer GPUs than ranks on this host all of them use the CPU; with enough, both work.
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    sizes = _sizes(shape, dist.get_world_size())
    grid = torch.arange(dist.get_world_size()).reshape(tuple(sizes.values()))
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = {}
    for dim, name in enumerate(sizes):
        for line in grid.movedim(dim, -1).reshape(-1, sizes[name]).tolist():
            group = dist.new_group(line, timeout=timeout)
            if dist.get_rank() in line:
                groups[name] = group
    everyone = next(iter(groups.values())) if len(groups) == 1 else dist.new_group(timeout=timeout)
    return _GroupMesh(sizes, groups, everyone, timeout_s, ordered)


def _sizes(shape: Mapping[str, int], ranks: int) -> dict[str, int]:
    free = [name for name, size in shape.items() if size == -1]
    known = math.prod(size for size in shape.values() if size != -1)
    bad = [
        size for size in shape.values() if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1
    ]
    if bad or len(free) > 1 or known == 0 or ranks % known or (not free and known != ranks):
        raise ValueError(
            f"a mesh of shape {dict(shape)} does not fit {ranks} ranks: sizes must be whole numbers whose product is {ranks}, "
            f"one of them may be -1"
        )
    return {name: ranks // known if size == -1 else size for name, size in shape.items()}


def _from_device_mesh(device_mesh: DeviceMesh, timeout_s: float, ordered: bool) -> Mesh:
    names = device_mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "the DeviceMesh has no mesh_dim_names; make it with init_device_mesh(..., mesh_dim_names=('data',))"
        )
    sizes = dict(zip(names, device_mesh.mesh.shape, strict=True))
    timeout = datetime.timedelta(seconds=timeout_s)
    # Groups of our own with the same members: taking them down must not take the user's.
    groups = {
        name: dist.new_group(
            dist.get_process_group_ranks(device_mesh.get_group(name)), timeout=timeout, use_local_synchronization=True
        )
        for name in names
    }
    if len(groups) == 1:
        everyone = next(iter(groups.values()))
    else:
        everyone = dist.new_group(
            sorted(device_mesh.mesh.flatten().tolist()), timeout=timeout, use_local_synchronization=True
        )
    return _GroupMesh(sizes, groups, everyone, timeout_s, ordered)


@contextlib.contextmanager
def bind(mesh: Mesh) -> Iterator[None]:
    """Bind the axes of a mesh for the length of a with block: for loops of one's own.

    >>> from fjoin import transforms as tx
    >>> with fjoin.bind(fjoin.mesh({"data": -1})):
    ...     tx.psum(torch.tensor(2.0), "data")
    tensor(2.)
    """
    with bind_axes(mesh.axes):
        yield
