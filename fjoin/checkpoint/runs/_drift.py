"""Replicas that should be equal, and are not."""

from __future__ import annotations

from ...agreement._replicas import apart
from ...groups._mesh import Mesh
from ._snapshot import Snapshot
from ._writers import Writers


def drifted(mesh: Mesh, found: Snapshot) -> dict[str, str]:
    """Name -> a line, for each value that is not equal where its placement says so."""
    writers = Writers(mesh.shape, mesh.rank)
    equal = {name: place.equal for name, place in found.places.items() if place.equal and name in found.values}
    groups = {name: f"{writers.group(axes)} {axes}" for name, axes in equal.items()}
    pairs = apart(mesh, "a comparison of replicas", {name: found.values[name] for name in groups}, groups)
    return {name: f"{name} of rank {rank} differs from that of rank {other}" for name, (rank, other) in pairs.items()}
