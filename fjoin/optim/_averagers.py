"""torch's model averagers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

from ..groups._from_group import mesh_from_group
from ..groups._make_mesh import world_mesh
from ..groups._mesh import Mesh
from ..groups._nested_mesh import nested_mesh, world_size
from ..transforms._check import AxisName, whole_number
from ._model_averager import ALONE, Buffers, ModelAverager


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

    def _mesh_over(self, group: Any) -> Mesh:
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

    def _mesh_over(self, group: Any) -> Mesh:
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
