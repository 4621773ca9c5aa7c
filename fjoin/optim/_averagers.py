"""torch's model averagers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import Communicator, bind, mesh_over, world_size
from ..records import compare, described_tensors
from ..transforms.base import AxisName, Transform, checks
from ..transforms.reductions import mean
from ..transforms.sync import average_buffers

# torch's stand-in for a group, on ranks outside of it.
_OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
ALONE = Communicator({"data": 1}, {}, 0)


class ModelAverager:
    """Averages over levels of groups of ranks, in place, so that every parameter keeps its memory.

    Attributes:
        step: The number of calls of `average_parameters`; it decides which calls average.
        warmup_steps: The number of calls before the first average.
        mesh: The ranks.
        process_group: The process group; None in a world of one rank, where nothing is averaged.
    """

    def __init__(self, warmup_steps: int, process_group: Any) -> None:
        self.warmup_steps: int = checks.whole_number("warmup_steps", warmup_steps, 0)
        self.step: int = 0
        self.mesh: Communicator = self._mesh_of(process_group)
        self._compared = False  # with the other ranks
        if max(self._levels()) == 1:
            warnings.warn(
                "the largest period is 1: averaging the parameters in every step sends as much as averaging the gradients; use "
                "DistributedDataParallel alone, or a longer period",
                UserWarning,
                stacklevel=3,
            )

    def _levels(self) -> dict[int, int]:
        """Period -> ranks in a group, from small groups to large ones; 0 for all ranks."""
        raise NotImplementedError

    def _count(self) -> int:
        """The number that a period must divide in a call that averages."""
        return self.step

    def _sizes(self) -> list[tuple[int, int]]:
        """(period, ranks in a group), without levels of one rank or of the ranks before, whose averages change nothing."""
        pairs = [(1, 1), *self._levels().items()]
        return [(period, size) for (_, before), (period, size) in itertools.pairwise(pairs) if size != before]

    def _axes(self) -> AxisName | None:
        """The axes over which this step averages; None if it averages nothing."""
        due = [i for i, (period, _) in enumerate(self._sizes()) if self._count() % period == 0]
        return tuple(self.mesh.axes)[-1 - due[-1] :] if due and self.step >= self.warmup_steps else None

    def _mesh_of(self, group: Any) -> Communicator:
        """The ranks of a process group, None for all ranks, as a mesh; the axis of the smallest groups is the last."""
        if group is _OUTSIDE:
            return ALONE
        sizes = [1, *(size for _, size in self._sizes())]
        if sizes == [1, 0]:
            return mesh_over(group)
        ranks, last = world_size() if group is None else group.size(), [*self._levels().values()][-1]
        if last != ranks:
            raise ValueError(
                f"period_group_size_dict: the last size must be the ranks of process_group, {ranks}, got {last} in {self._levels()}"
            )
        factors = [large // small for small, large in itertools.pairwise(sizes)]
        shape = {f"level{i}": factor for i, factor in reversed(list(enumerate(factors)))}
        return mesh_over(group, shape) if shape else ALONE

    @property
    def process_group(self) -> Any:
        group = self.mesh.group
        return group if isinstance(group, dist.ProcessGroup) else None

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self.mesh, self._compared = self._mesh_of(group), False

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
        found, axes = _tensors(params), self._axes()
        if self.mesh.size > 1 and (axes is not None or not self._compared):
            self._average(found, axes)
        self.step += 1

    def _average(self, params: list[Tensor], axes: AxisName | None) -> None:
        if not self._compared:
            tensors = described_tensors({f"tensor {i}": t for i, t in enumerate(params)})
            parts = {"averager": f"{self!r} at step {self.step}", "parameters": tensors}
            compare(self.mesh, "the first average of parameters", parts)
            self._compared = True
        if axes is None:
            return
        means = [p for p in params if p.is_floating_point() or p.is_complex()]
        rest = [p for p in params if not (p.is_floating_point() or p.is_complex())]
        with bind(self.mesh):
            _apply(mean(axes, over="world"), means, [torch.promote_types(p.dtype, torch.float32) for p in means])
            _apply(average_buffers(axes), rest, [t.dtype for t in rest])


_PARAMETERS = "average_parameters takes model.parameters() or optimizer.param_groups"


def _tensors(given: Any) -> list[Tensor]:
    """The tensors, each once, of an iterable of tensors or of param_groups."""
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"{_PARAMETERS}; got {type(given).__name__}")
    found = [t for one in given for t in (one["params"] if isinstance(one, dict) else [one])]
    if others := [one for one in found if not isinstance(one, Tensor)]:
        raise TypeError(f"{_PARAMETERS}; got {type(others[0]).__name__}")
    return list({id(t): t for t in found}.values())


def _apply(transform: Transform, tensors: list[Tensor], dtypes: list[torch.dtype]) -> None:
    """Run a transform in place, on values of these dtypes."""
    if given := [t.detach() for t in tensors]:
        values = [t.to(dtype) for t, dtype in zip(given, dtypes, strict=True)]
        torch._foreach_copy_(given, transform.update(values, transform.init(values))[0])


class PeriodicModelAverager(ModelAverager):
    """Averages parameters over all ranks in every `period`-th step, from step `warmup_steps` on.

    Args:
        period: Steps from one average to the next.
        warmup_steps: Steps before the first average; the first is at the end of step `warmup_steps`, counted from 0.
        process_group: The ranks; by default all.

    Raises:
        ValueError: `period` is no whole number from 1, or `warmup_steps` none from 0.

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

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None) -> None:
        self.period: int = checks.whole_number("period", period, 1)
        super().__init__(warmup_steps, process_group)

    def __repr__(self) -> str:
        return f"PeriodicModelAverager(period={self.period}, warmup_steps={self.warmup_steps})"

    def _levels(self) -> dict[int, int]:
        return {self.period: 0}

    def _count(self) -> int:
        return self.step - self.warmup_steps


class HierarchicalModelAverager(ModelAverager):
    """Averages parameters over small groups of ranks often, and over larger groups rarely.

    After step s, counted from 0 and at least `warmup_steps`, it averages over the groups of the largest period that
    divides s. Consecutive ranks of `process_group` form the groups, for example {4: 8, 16: 16}: groups of 8 every 4
    steps, all 16 ranks every 16 steps. All ranks must make it, in the same order relative to other process groups.

    Args:
        period_group_size_dict: Period in steps -> ranks in a group. Each period is a multiple of the one before, each
            size too; the last size is that of `process_group`.
        warmup_steps: Steps before the first average.
        process_group: As `PeriodicModelAverager`.

    Raises:
        ValueError: no period, a period or a size that is no multiple of the one before, or a last size that is not the
            number of ranks; `warmup_steps` is no whole number from 0.

    Warns:
        UserWarning: the largest period is 1.

    Same as: torch.distributed.algorithms.model_averaging.hierarchical_model_averager.HierarchicalModelAverager.

    >>> fjoin.HierarchicalModelAverager({4: 1}, warmup_steps=100)
    HierarchicalModelAverager({4: 1}, warmup_steps=100)
    """

    def __init__(
        self, period_group_size_dict: Mapping[int, int] | None = None, warmup_steps: int = 0, process_group: Any = None
    ) -> None:
        self.period_group_size_dict: dict[int, int] = _check_levels(period_group_size_dict)
        super().__init__(warmup_steps, process_group)

    def __repr__(self) -> str:
        return f"HierarchicalModelAverager({self.period_group_size_dict}, warmup_steps={self.warmup_steps})"

    def _levels(self) -> dict[int, int]:
        return self.period_group_size_dict


def _check_levels(given: Mapping[int, int] | None) -> dict[int, int]:
    if not given:
        raise ValueError(
            f"period_group_size_dict must have at least one period, for example {{4: 8, 16: 16}}, got {given!r}"
        )
    for name, numbers in (("period", given.keys()), ("size", given.values())):
        for number in numbers:
            checks.whole_number(f"period_group_size_dict: a {name}", number, 1)
        for small, large in itertools.pairwise(numbers):
            if large % small:
                raise ValueError(
                    f"period_group_size_dict: each {name} must be a multiple of the one before, got {large} after {small} in {given}"
                )
    return dict(given)
