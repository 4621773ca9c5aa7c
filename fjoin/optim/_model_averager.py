"""The base of torch's model averagers: averages of tensors in place, by our transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement._program_check import same_average
from ..groups._bind import bind
from ..groups._mesh import Mesh
from ..transforms._check import AxisName, whole_number
from ..transforms.local_sgd._average import average_parameters
from ..transforms.sync._buffers import average_buffers
from ..transforms.transform._transform import Transform

Buffers = Iterable[Tensor] | Callable[[], Iterable[Tensor]]
# torch's stand-in for a group, on ranks outside of it.
_OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
ALONE = Mesh({"data": 1}, {}, 0)


class ModelAverager:
    """Base of the averagers; it averages in place, so that every parameter keeps its memory.

    A copy by copy.deepcopy has the same process group. A pickled one has none, since process groups cannot be pickled:
    an unpickled averager uses the default process group, until `process_group` is set.

    Attributes:
        step: The number of calls of `average_parameters`; it decides which calls average.
        warmup_steps: The number of calls before the first average.
        process_group: The process group; None in a world of one rank, where nothing is averaged.
    """

    def __init__(self, warmup_steps: int, process_group: Any, buffers: Buffers | None) -> None:
        self.warmup_steps: int = whole_number("warmup_steps", warmup_steps, 0)
        self.step: int = 0
        self._buffers = buffers if buffers is None or callable(buffers) else _tensors("buffers", buffers)
        self._mesh: Mesh | None = self._mesh_of(process_group)
        self._compared = False  # with the other ranks

    def _mesh_over(self, group: Any) -> Mesh:
        """The ranks of a process group, None for all ranks, as a mesh."""
        raise NotImplementedError

    def _axes(self) -> AxisName | None:
        """The axes over which this step averages; None where it averages nothing."""
        raise NotImplementedError

    def _mesh_of(self, group: Any) -> Mesh:
        if group is not None and group is not _OUTSIDE and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group of torch.distributed, or None for all ranks, got {group!r}"
            )
        return ALONE if group is _OUTSIDE else self._mesh_over(group)

    @property
    def mesh(self) -> Mesh:
        """The ranks, as a mesh."""
        if self._mesh is None:
            self._mesh = self._mesh_of(None)
        return self._mesh

    @property
    def process_group(self) -> Any:
        group = self.mesh.group
        return group if isinstance(group, dist.ProcessGroup) else None

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._mesh, self._compared = self._mesh_of(group), False

    @torch.no_grad()
    def average_parameters(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> None:
        """Average parameters in place, in the calls that the schedule says, and count the call.

        All ranks must call it equally often, with parameters of the same shapes in the same order. It sends one message
        for each dtype and device; parameters in 16 bits travel as float32. Integer parameters, and integer buffers,
        become the maximum of all ranks.

        Args:
            params: Parameters, or param_groups of an optimizer. Parameters without a gradient are averaged as well.

        Raises:
            TypeError: `params` holds neither parameters nor groups of them.
            DesyncError: in the first call, on all ranks: they average other tensors or in other steps.
            PeerLost, CollectiveTimeout: another rank has failed, or has not arrived.
        """
        found = _parameters(params)
        axes = self._axes() if self.step >= self.warmup_steps else None
        if self.mesh.size > 1 and (axes is not None or not self._compared):
            self._average(found, axes)
        self.step += 1

    def _average(self, params: list[Tensor], axes: AxisName | None) -> None:
        given = self._buffers() if callable(self._buffers) else self._buffers
        buffers = [] if given is None else _tensors("buffers", given)
        if not self._compared:
            same_average(self.mesh, f"{self!r} at step {self.step}", _numbered(params), _numbered(buffers))
            self._compared = True
        if axes is None:
            return
        means = [p for p in params if p.is_floating_point() or p.is_complex()]
        known = set(map(id, means))
        with bind(self.mesh):
            _apply(average_parameters(axes, over="world"), means)
            _apply(average_buffers(axes), [t for t in _distinct([*params, *buffers]) if id(t) not in known])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mesh": None, "_compared": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = self.__class__.__new__(self.__class__)
        vars(new).update(copy.deepcopy(self.__getstate__(), memo), _mesh=self._mesh)
        return new


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _tensors(name: str, given: Any) -> list[Tensor]:
    found = None if isinstance(given, Tensor) or not isinstance(given, Iterable) else list(given)
    if found is None or not all(isinstance(t, Tensor) for t in found):
        kind = given if found is None else next(t for t in found if not isinstance(t, Tensor))
        raise TypeError(f"{name} must be tensors, for example model.{name}(), got {type(kind).__name__}")
    return _distinct(found)


def _parameters(params: Any) -> list[Tensor]:
    """The parameters, each once, of an iterable of parameters or of param_groups."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"average_parameters takes model.parameters() or optimizer.param_groups, got {type(params).__name__}"
        )
    found: list[Tensor] = []
    for one in params:
        of_group = one.get("params") if isinstance(one, dict) else one
        found += [of_group] if isinstance(of_group, Tensor) else _tensors("parameters", of_group)
    return _distinct(found)


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"tensor {i}": t for i, t in enumerate(tensors)}


def _apply(transform: Transform, tensors: list[Tensor]) -> None:
    """Run a transform in place, on the tensors of each device by themselves."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for t in tensors:
        by_device.setdefault(t.device, []).append(t.detach())
    for given in by_device.values():
        torch._foreach_copy_(given, transform.update(given, transform.init(given))[0])
