"""Meshes of nested groups: consecutive ranks of a process group form the smaller groups."""

from __future__ import annotations

import datetime
import math
from typing import Any

import torch
import torch.distributed as dist

from ..transforms._axis_env import Axis, bound
from ._from_group import timeout_of
from ._group_mesh import GroupMesh
from ._make_mesh import mesh, world_mesh
from ._mesh import Mesh
from .failures._connections import Connections


def _simulated() -> list[Axis]:
    return [axis for axis in bound().values() if axis.simulated]


def world_size() -> int:
    """The number of all ranks: processes, simulated ranks, or one. Under torchrun it initialises torch.distributed."""
    return math.prod(axis.size for axis in axes) if (axes := _simulated()) else world_mesh().size


def nested_mesh(shape: dict[str, int], group: Any = None) -> Mesh:
    """A mesh of several axes over a process group; consecutive ranks form the groups of the last axes.

    All ranks of `group` must call it. Where `group` has not all ranks, they must have made the same number of groups
    before, since torch names new groups by that number. The new groups stay until the program ends.

    Args:
        shape: Axis name -> size, the slowest varying first; the product is the size of the group.
        group: The process group; by default all ranks.
    """
    if group is None and (_simulated() or not dist.is_initialized()):
        return mesh(shape)
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
    return GroupMesh(shape, groups, whole, timeout.total_seconds(), False, Connections(()), owned=False)
