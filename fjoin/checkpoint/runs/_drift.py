"""Replicas that should be equal, and are not."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from ...groups._mesh import Mesh
from ._snapshot import Snapshot, is_host
from ._writers import Writers


def drifted(mesh: Mesh, found: Snapshot) -> dict[str, str]:
    """Name -> a line, for each value that is not equal where its placement says so.

    The ranks exchange one number each, and one of each value where some differ.
    """
    if mesh.size == 1:
        return {}
    writers = Writers(mesh.shape, mesh.rank)
    whole = [name for name, place in found.places.items() if place.equal and name in found.values]
    groups = {name: writers.group(found.places[name].equal) for name in whole}
    sums = {name: _checksum(found.values[name]) for name in whole}
    mine = {"names": zlib.crc32(repr(sorted(whole)).encode())}
    for name in whole:  # for each set of ranks that should agree, one number
        key = str(groups[name]) + ",".join(found.places[name].equal)
        mine[key] = zlib.crc32(f"{name} {sums[name]}".encode(), mine.get(key, 0))
    if not mesh.exchange("a comparison of replicas", mine, _differ):
        return {}
    return dict(mesh.exchange("the replicas that differ", {n: [groups[n], s] for n, s in sums.items()}, _lines))


def _checksum(value: Any) -> int:
    """A number of a value's bytes and form."""
    if is_host(value):
        return zlib.crc32(repr(value).encode())
    flat: Tensor = value.detach().contiguous().reshape(-1)
    data: Any = flat.cpu().view(torch.uint8).numpy() if flat.numel() else b""
    return zlib.crc32(data, zlib.crc32(f"{value.dtype} {list(value.shape)}".encode()))


def _differ(values: list[dict[str, int]]) -> bool:
    known: dict[str, int] = {}
    return any(known.setdefault(key, number) != number for mine in values for key, number in mine.items())


def _lines(values: list[dict[str, list[int]]]) -> dict[str, str]:
    found, known = dict[str, str](), dict[tuple[str, int], int]()
    for rank, mine in enumerate(values):
        for name, (group, number) in mine.items():
            if known.setdefault((name, group), number) != number and name not in found:
                found[name] = f"{name} of rank {rank} differs from that of rank {group}, which has been saved"
        for name in {name for other in values for name in other} - mine.keys():
            found.setdefault(name, f"rank {rank} has no {name}")
    return found
