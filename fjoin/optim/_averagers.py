"""torch's model averagers."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement import same_average
from ..groups import Communicator, bind, mesh_from_group, nested_mesh, world_mesh, world_size
from ..transforms.averaging import average_parameters
from ..transforms.base import AxisName, Transform, whole_number
from ..transforms.sync import average_buffers

Buffers = Iterable[Tensor] | Callable[[], Iterable[Tensor]]
# torch's stand-in for a group, on ranks outside of it.
_OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
ALONE = Communicator({"data": 1}, {}, 0)


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
        self._mesh: Communicator | None = self._mesh_of(process_group)
        self._compared = False  # with the other ranks

    def _mesh_over(self, group: Any) -> Communicator:
        """The ranks of a process group, None for all ranks, as a mesh."""
        raise NotImplementedError

    def _axes(self) -> AxisName | None:
        """The axes over which this step averages; None where it averages nothing."""
        raise NotImplementedError

    def _mesh_of(self, group: Any) -> Communicator:
        if group is not None and group is not _OUTSIDE and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group of torch.distributed, or None for all ranks, got {group!r}"
            )
        return ALONE if group is _OUTSIDE else self._mesh_over(group)

    @property
    def mesh(self) -> Communicator:
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


class PeriodicModelAverager(ModelAverager):
    """Averages parameters over all ranks in every `period`-th step, from step `warmup_steps` on.

    Args:
        period: Steps from one average to the next.
        warmup_steps: Steps before the first average; the first is at the end of step `warmup_steps`, counted from 0.
        process_group: The ranks; by default all.
        buffers: Buffers to average in the same steps: tensors, or a function that gives them, such as `model.buffers`.
            Integer buffers become the maximum of all ranks.

    Raises:
        ValueError: `period` is no whole number from 1, or `warmup_steps` none from 0.
        TypeError: `process_group` is no process group; `buffers` holds other things than tensors.

    Warns:
        UserWarning: `period` is 1.

    Same as: torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager.

    >>> model = torch.nn.Linear(2, 1)
    >>> averager = fjoin.PeriodicModelAverager(period=4, warmup_steps=100)
    >>> for step in range(3):
    ...     averager.average_parameters(model.parameters())  # after optimizer.step()
    >>> averager, averager.step
    (PeriodicModelAverager(period=4, warmup_steps=100), 3)
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: Any = None, *, buffers: Buffers | None = None
    ) -> None:
        self.period: int = whole_number("period", period, 1)
        super().__init__(warmup_steps, process_group, buffers)
        if period == 1:
            _warn("period")

    def __repr__(self) -> str:
        return f"PeriodicModelAverager(period={self.period}, warmup_steps={self.warmup_steps})"

    def _mesh_over(self, group: Any) -> Communicator:
        return world_mesh() if group is None else mesh_from_group(group)

    def _axes(self) -> AxisName | None:
        return None if (self.step - self.warmup_steps) % self.period else tuple(self.mesh.axes)


class HierarchicalModelAverager(ModelAverager):
    """Averages parameters over small groups of ranks often, and over larger groups rarely.

    After step s, counted from 0 and at least `warmup_steps`, it averages over the groups of the largest period that
    divides s. Consecutive ranks of `process_group` form the groups, for example {4: 8, 16: 16}: groups of 8 every 4
    steps, all 16 ranks every 16 steps. All ranks must make it, in the same order relative to other process groups.

    Args:
        period_group_size_dict: Period in steps -> ranks in a group. Each period is a multiple of the one before, each
            size too; the last size is that of `process_group`.
        warmup_steps: Steps before the first average.
        process_group, buffers: As `PeriodicModelAverager`.

    Raises:
        ValueError: no period, a period or a size that is no multiple of the one before, or a last size that is not the
            number of ranks; `warmup_steps` is no whole number from 0.
        TypeError: `period_group_size_dict` is no mapping; as `PeriodicModelAverager`.

    Warns:
        UserWarning: the largest period is 1.

    Same as: torch.distributed.algorithms.model_averaging.hierarchical_model_averager.HierarchicalModelAverager.

    >>> fjoin.HierarchicalModelAverager({4: 1}, warmup_steps=100)
    HierarchicalModelAverager({4: 1}, warmup_steps=100)
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        buffers: Buffers | None = None,
    ) -> None:
        self.period_group_size_dict: dict[int, int] = _check_levels(period_group_size_dict)
        super().__init__(warmup_steps, process_group, buffers)
        if max(self.period_group_size_dict) == 1:
            _warn("the largest period")

    def __repr__(self) -> str:
        return f"HierarchicalModelAverager({self.period_group_size_dict}, warmup_steps={self.warmup_steps})"

    def _levels(self) -> list[tuple[int, int]]:
        """(period, size of the groups), without those of one rank or of the size before, whose averages change nothing."""
        before, found = 1, []
        for period, size in self.period_group_size_dict.items():
            if size > before:
                found.append((period, size))
            before = size
        return found

    def _mesh_over(self, group: Any) -> Communicator:
        ranks, last = world_size() if group is None else group.size(), list(self.period_group_size_dict.values())[-1]
        if last != ranks:
            raise ValueError(
                f"period_group_size_dict: the last size must be the number of ranks of process_group, {ranks}, got {last} in "
                f"{self.period_group_size_dict}"
            )
        sizes = [1, *(size for _, size in self._levels())]
        pairs = list(enumerate(zip(sizes, sizes[1:], strict=False)))
        shape = {f"level{i}": large // small for i, (small, large) in reversed(pairs)}
        return nested_mesh(shape, group) if shape else ALONE

    def _axes(self) -> AxisName | None:
        due = [i for i, (period, _) in enumerate(self._levels()) if self.step % period == 0]
        return tuple(self.mesh.axes)[-1 - due[-1] :] if due else None  # "level0" is the last


def _check_levels(given: Any) -> dict[int, int]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"period_group_size_dict must be a mapping from periods to sizes of groups, for example {{4: 8, 16: 16}}, got {given!r}"
        )
    if not given:
        raise ValueError(
            f"period_group_size_dict must have at least one period, for example {{4: 8, 16: 16}}, got {given!r}"
        )
    levels = dict(given)
    for period, size in levels.items():
        whole_number("period_group_size_dict: a period", period, 1)
        whole_number(f"period_group_size_dict: the size of the groups of period {period}", size, 1)
    for (inner, small), (outer, large) in itertools.pairwise(levels.items()):
        if outer % inner:
            raise ValueError(
                f"period_group_size_dict: each period must be a multiple of the one before, got {outer} after {inner} in "
                f"{levels}; sort the periods, and choose multiples"
            )
        if large % small:
            raise ValueError(
                f"period_group_size_dict: each size must be a multiple of the one before, got {large} after {small} in "
                f"{levels}; the smaller groups must fit into the larger ones"
            )
    return levels


def _warn(name: str) -> None:
    warnings.warn(
        f"{name} is 1: averaging the parameters in every step sends as much as averaging the gradients; use "
        f"DistributedDataParallel alone, or a longer period",
        UserWarning,
        stacklevel=3,
    )
