"""`Mesh`: named axes over ranks."""

from __future__ import annotations

import math
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from ..transforms.axes import Done, Work
from ._failures import raise_from
from ._meetings import Combine
from ._message import Unfinished
from ._traffic import Traffic


class Mesh:
    """The ranks of a run, arranged in named axes; made by `mesh`.

    Attributes:
        shape: Axis name -> size.
        axes: Axis name -> the object that runs collectives over it.
        rank: This rank among all ranks of the mesh, the last axis varying fastest.
        size: The number of ranks.

    >>> mesh = fjoin.mesh({"node": 1, "local": -1})
    >>> mesh.shape, mesh.rank, mesh.size
    ({'node': 1, 'local': 1}, 0, 1)
    """

    def __init__(self, shape: dict[str, int], axes: dict[str, Any], rank: int) -> None:
        self.shape: dict[str, int] = shape
        self.axes: dict[str, Any] = axes
        self.rank: int = rank
        self.size: int = math.prod(shape.values())

    def __repr__(self) -> str:
        return f"mesh({self.shape}, rank={self.rank})"

    @property
    def device(self) -> torch.device:
        """The device of small messages."""
        return torch.device("cpu")

    def close(self) -> None:
        """Free the process groups of this mesh, with their threads and connections; it cannot be used afterwards.

        Groups passed to fjoin, and those of a DeviceMesh, stay. A mesh is closed automatically when it is no longer
        referenced, and all meshes are closed at the end of the program.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()


class Communicator(Mesh):
    """A mesh as the parts of the shell use it; here that of one rank, which sends nothing.

    Attributes:
        steps: The number of steps initialised on the mesh, in the same order on all ranks.
        unfinished: The steps that the device may not have ended.
        traffic: Counts the messages of this rank.
        generation: Of a mesh whose ranks come and go, how many such meshes there have been; else 0.
    """

    generation = 0

    def __init__(self, shape: dict[str, int], axes: dict[str, Any], rank: int) -> None:
        super().__init__(shape, axes, rank)
        self.steps: int = 0
        self.unfinished: Unfinished = Unfinished()
        self.traffic: Traffic = Traffic()

    @property
    def group(self) -> Any:
        """An identifier of the ranks of this mesh: equal for two meshes over the same ranks."""
        return "one rank"

    def over(self, names: tuple[str, ...]) -> list[Any]:
        """The axes to reduce over, in turn; a single joint axis where one covers them all."""
        for name in names:
            if name not in self.axes:
                raise NameError(f"unbound axis name {name!r}; this mesh has {list(self.axes)}; add it in fjoin.mesh")
        if len(names) == 1:
            return [self.axes[names[0]]]
        joint = self.axes[names[0]].joint(names) if names else None
        return [self.axes[name] for name in names] if joint is None else [joint]

    def reduce_(self, buffer: Tensor, names: tuple[str, ...]) -> Work:
        """Start summing a buffer over some axes, in place."""
        if not names:
            return Done()
        *first, last = self.over(names)
        for axis in first:
            axis.begin_reduce(buffer).wait()
        work: Work = last.begin_reduce(buffer)
        return work

    def zeros(
        self, numel: int, dtype: torch.dtype, device: torch.device | None, names: tuple[str, ...]
    ) -> Tensor | None:
        """A buffer whose messages over some axes need no copy; None if any memory is as good."""
        over = self.over(names) if names and (device is None or device.type == "cpu") else []
        return over[0].zeros(numel, dtype) if len(over) == 1 and numel else None

    def exchange(self, occasion: str, value: Any, combine: Combine, axes: tuple[str, ...] = ()) -> Any:
        """`combine` of every rank's JSON value, in rank order; computed once, with the same result on all ranks.

        Args:
            occasion: The place in the program, in words; it must be the same on all ranks.
            axes: The axes whose ranks meet; all by default.

        Raises:
            DesyncError: a rank is at another place in the program.
            CollectiveTimeout, PeerLost: a rank does not arrive, or has failed.
        """
        return combine([value])

    def lost(self) -> BaseException | None:
        """The failure of another rank that has been reported or detected; None if there is none."""
        return None

    def await_event(self, event: Any) -> None:
        """Wait for a CUDA event. The kernels before it may wait for a rank that has failed."""
        event.synchronize()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.report_failure(error, None)
        self.close()

    def report(self, error: BaseException, step: int | None) -> None:
        """Reports an error to the other ranks, without taking anything down."""

    def report_silent(self, rank: int, text: str) -> None:
        """Reports, in words, the failure of a rank that cannot do so itself."""

    def report_failure(self, error: BaseException, step: int | None) -> None:
        """Reports a failure of this rank to the other ranks, and ends the messages that they wait for."""

    def leave(self, text: str, step: int | None, limit_s: float = math.inf) -> BaseException | None:
        """Leave a loop before its end. Waits for the other ranks to leave it here too, and reports a failure if they do
        not.

        It never raises, since it may run while an iterator is dropped.

        Args:
            text: The error of ranks that go on.
            limit_s: The longest time to wait, where that is shorter than the mesh's time-out.

        Returns:
            The failure; None if all ranks have left.
        """
        return None

    def raise_root_cause(self, error: BaseException, step: int | None) -> NoReturn:
        """Reports an error to the other ranks, and raises its root cause."""
        cause = self.root_cause(error, step)
        self.report_failure(cause, step)
        try:
            raise_from(cause, error)
        finally:  # see there
            del cause, error

    def root_cause(self, error: BaseException, step: int | None) -> BaseException:
        """The root cause of an error that a collective raised."""
        return error


def check_mesh(where: str, mesh: Any) -> Communicator:
    """Raise TypeError unless `mesh` is a Mesh; returns it."""
    if not isinstance(mesh, Communicator):
        raise TypeError(f"{where}: mesh must be a Mesh, made by fjoin.mesh({{'data': -1}}), got {mesh!r}")
    return mesh


class SimulatedMesh(Communicator):
    @property
    def group(self) -> Any:
        return self.over(tuple(self.shape))[0].group

    def exchange(self, occasion: str, value: Any, combine: Combine, axes: tuple[str, ...] = ()) -> Any:
        over = self.over(axes if len(axes) == 1 else tuple(self.shape))
        if len(over) > 1:
            raise ValueError(f"a mesh must name all simulated axes in their order, got {list(self.shape)}")
        return combine(over[0].exchange(value, occasion))
