"""Whether values are equal on the ranks that should have the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh

_SMALL = 1 << 16  # elements


def apart(
    mesh: Mesh, occasion: str, values: Mapping[str, Any], groups: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """Name -> (rank, another rank), for each value that a rank has otherwise than the rank before it, or not at all.

    The ranks exchange a number for each group, and one for each value where some differ.

    Args:
        occasion: The place in the program, in words.
        values: Name -> tensor or host number.
        groups: Name -> a text that those ranks have in common which should have equal values, and no others.
    """
    if mesh.size == 1:
        return {}
    named: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        named.setdefault(groups[name], {})[name] = value
    mine = {group: checksum(held) for group, held in named.items()}
    mine[""] = zlib.crc32(repr(sorted(groups.items())).encode())  # the names
    if not mesh.exchange(occasion, mine, _differ):
        return {}
    sums = {name: (groups[name], checksum({name: value})) for name, value in values.items()}
    found = mesh.exchange(f"{occasion}: the values that differ", sums, _pairs)
    return {name: (rank, other) for name, (rank, other) in found.items()}


def checksum(values: Mapping[str, Any]) -> int:
    """A number of the bytes and forms of values. Small ones are read together."""
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    large, forms = list[Tensor](), list[Any]()
    for name, value in values.items():
        if not isinstance(value, Tensor):
            forms.append((name, value))
            continue
        forms.append((name, value.dtype, *value.shape))
        (large if value.numel() > _SMALL else small.setdefault((value.dtype, value.device), [])).append(
            value.detach().resolve_conj().resolve_neg()
        )
    number = zlib.crc32(repr(forms).encode())
    for flat in (*(torch.cat([value.reshape(-1) for value in some]) for some in small.values()), *large):
        data: Any = flat.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if flat.numel() else b""
        number = zlib.crc32(data, number)
    return number


def _differ(values: list[dict[str, int]]) -> bool:
    known: dict[str, int] = {}
    return any(known.setdefault(key, number) != number for mine in values for key, number in mine.items())


def _pairs(values: list[dict[str, tuple[str, int]]]) -> dict[str, list[int]]:
    known: dict[tuple[str, str], tuple[int, int]] = {}
    found: dict[str, list[int]] = {}
    for rank, mine in enumerate(values):
        for name, (group, number) in mine.items():
            first, of_first = known.setdefault((name, group), (rank, number))
            if number != of_first:
                found.setdefault(name, [rank, first])
        for name in {name for other in values for name in other} - mine.keys():
            found.setdefault(name, [rank, next(other for other, of in enumerate(values) if name in of)])
    return found
