"""A mesh: ranks arranged in named axes, alone or simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from ._axis import Done, GroupAxis, Work
from ._use import Use


class Mesh:
    """The ranks of a run, arranged in named axes; made by `mesh`.

    Attributes:
        shape: Axis name -> size.
        axes: Axis name -> what runs collectives over it.
        rank: This rank among all of the mesh, the last axis varying fastest.
        size: The number of ranks.

    >>> mesh = fjoin.mesh({"node": 1, "local": -1})
    >>> mesh.shape, mesh.rank, mesh.size
    ({'node': 1, 'local': 1}, 0, 1)
    """

    def __init__(self, shape: dict[str, int], axes: dict[str, Any], rank: int) -> None:
        self.shape, self.axes, self.rank = shape, axes, rank
        self.size = math.prod(shape.values())
        self.use = Use()

    def __repr__(self) -> str:
        return f"mesh({self.shape}, rank={self.rank})"

    @property
    def group(self) -> Any:
        """What stands for the ranks of this mesh: equal for two meshes over the same ranks."""
        return "one rank"

    @property
    def device(self) -> torch.device:
        """Where small messages lie."""
        return torch.device("cpu")

    def over(self, names: tuple[str, ...]) -> list[Any]:
        """The axes to reduce over, in turn; one that covers them all where there is one."""
        for name in names:
            if name not in self.axes:
                raise NameError(
                    f"unbound axis name {name!r}; this mesh has {list(self.axes)}; name it in fjoin.mesh(...)"
                )
        if len(names) > 1 and (joint := self.axes[names[0]].joint(names)) is not None:
            return [joint]
        return [self.axes[name] for name in names]

    def reduce_(self, buffer: Tensor, names: tuple[str, ...]) -> Work:
        """Start summing a buffer over some axes, in place."""
        if not names:
            return Done()
        *first, last = self.over(names)
        for axis in first:
            _reduce_(axis, buffer).wait()
        return _reduce_(last, buffer)

    def exchange(
        self, occasion: str, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...] = ()
    ) -> Any:
        """`combine` of every rank's JSON value, in rank order; computed once, the same on all ranks.

        Args:
            occasion: The place in the program, in words; it must be the same on all ranks.
            axes: The axes whose ranks meet; all by default.

        Raises:
            DesyncError: a rank is at another place in the program.
            CollectiveTimeout, PeerLost: a rank does not come, or has failed.
        """
        return combine([value])

    def _members(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks that differ from this one along some axes only."""
        grid = torch.arange(self.size).reshape(tuple(self.shape.values()))
        here = (grid == self.rank).nonzero()[0].tolist()
        where = [slice(None) if name in axes or not axes else at for name, at in zip(self.shape, here, strict=True)]
        return grid[tuple(where)].flatten().tolist()

    def lost(self) -> BaseException | None:
        """The failure of another rank, as far as it has been reported or shows; None where there is none."""
        return None

    def sent(self) -> int:
        """How many collectives have been called over the group of this mesh, where that is known."""
        return 0

    def await_event(self, event: Any) -> None:
        """Wait for a device, whose kernels may wait for a rank that has failed: a CUDA event."""
        event.synchronize()

    def close(self) -> None:
        """Give back the process groups of this mesh, with their threads and connections; it cannot be used afterwards.

        Groups that were given to fjoin, and those over a DeviceMesh, stay. A mesh that is no longer referenced is closed by
        itself, and so are all at the end of a program.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.report_failure(error, None)
        self.close()

    def report(self, error: BaseException, step: int | None) -> BaseException:
        """Let the other ranks know of an error in this one, without taking anything down; the error to raise."""
        return error

    def report_failure(self, error: BaseException, step: int | None) -> None:
        """Let the other ranks know that this one has failed, and let go of the messages that they wait in."""

    def raise_root_cause(self, error: BaseException, step: int | None) -> NoReturn:
        """Let the other ranks know of an error, and raise what really happened, where it is only its echo."""
        told = self.root_cause(error, step)
        self.report_failure(told, step)
        try:
            if told is error:
                raise error
            raise told from error
        finally:  # a frame that knows its exception lives until Python looks for cycles, and connections in it
            del told, error

    def is_backend_error(self, error: BaseException) -> bool:
        """Whether an error is what the backend raises where a peer is gone."""
        return False

    def root_cause(self, error: BaseException, step: int | None) -> BaseException:
        """What really happened, given an error that came out of a collective."""
        return error


def check_mesh(where: str, mesh: Any) -> None:
    """Raise TypeError unless `mesh` is one."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{where}: mesh must be a Mesh, made by fjoin.mesh({{'data': -1}}), got {mesh!r}")


def _reduce_(axis: Any, buffer: Tensor) -> Work:
    if isinstance(axis, GroupAxis):
        return axis.reduce_(buffer)
    if axis.size > 1:
        buffer.copy_(axis.run("psum", buffer, None))
    return Done()


class SimulatedMesh(Mesh):
    @property
    def group(self) -> Any:
        return self.over(tuple(self.shape))[0].group

    def exchange(
        self, occasion: str, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...] = ()
    ) -> Any:
        over = self.over(axes if len(axes) == 1 else tuple(self.shape))
        if len(over) > 1:
            raise ValueError(f"a mesh must name all simulated axes in their order, got {list(self.shape)}")
        return combine(over[0].exchange(value, occasion))
