"""Meshes over the user's own process groups."""

from __future__ import annotations

import contextlib
from typing import Any

from ._group_mesh import GroupMesh
from ._mesh import Mesh
from .failures._connections import Connections

TIMEOUT_S = 600.0


def mesh_from_group(group: Any) -> Mesh:
    """A mesh of one axis, "data", over the user's process group, which it takes down when a rank fails."""
    return GroupMesh(
        {"data": group.size()}, {"data": group}, group, timeout_of(group), False, Connections(()), owned=False
    )


def timeout_of(group: Any) -> float:
    with contextlib.suppress(RuntimeError, AttributeError):  # not every backend has the option
        for device in group._device_types:
            return float(group._get_backend(device).options._timeout.total_seconds())
    return TIMEOUT_S
