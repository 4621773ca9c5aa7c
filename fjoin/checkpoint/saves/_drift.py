"""Replicas that should be equal, and are not."""

from __future__ import annotations

from ...groups._mesh import Mesh
from ..values._snapshot import Snapshot
from ._plan import Plan


def drifted(mesh: Mesh, plan: Plan, found: Snapshot) -> dict[str, str]:
    """Name -> a line, for each value that is not equal where its placement says so."""
    if mesh.size == 1:
        return {}
    pairs = plan.replicas.apart(mesh, "a comparison of replicas", found.values)
    return {name: f"{name} of rank {rank} differs from that of rank {other}" for name, (rank, other) in pairs.items()}
