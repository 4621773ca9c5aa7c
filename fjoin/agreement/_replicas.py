"""Whether values are equal on the ranks that should have the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh

_SMALL = 1 << 16  # elements
_CHUNK = 1 << 22  # words of 32 bits that are read at a time on a device
_MIX = 0x2545F4914F6CDD1D  # an odd number whose bits look random


class Replicas:
    """Values of which ranks should have the same ones; what follows from their names and forms is computed once.

    Args:
        groups: Name -> a text that those ranks have in common which should have equal values, and no others.
        forms: Name -> dtype and shape, of the tensors.
    """

    def __init__(self, groups: Mapping[str, str], forms: Mapping[str, str]) -> None:
        self._groups, self._names = groups, dict[str, list[str]]()
        for name, group in groups.items():
            self._names.setdefault(group, []).append(name)
        self._seeds = {name: zlib.crc32(f"{name} {forms.get(name)}".encode()) for name in groups}
        self._of_groups = {
            group: zlib.crc32(repr([*map(self._seeds.__getitem__, names)]).encode())
            for group, names in self._names.items()
        }
        self._of_names = zlib.crc32(repr(sorted(groups.items())).encode())

    def apart(self, mesh: Mesh, occasion: str, values: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Name -> (rank, another rank), for each value that a rank has otherwise than the rank before it, or not at all.

        The ranks exchange a number for each group, and one for each value where some differ.

        Args:
            occasion: The place in the program, in words.
            values: Name -> tensor or host number, of all names.
        """
        if mesh.size == 1:
            return {}
        mine = {
            group: checksum([values[name] for name in names], self._of_groups[group])
            for group, names in self._names.items()
        }
        if not mesh.exchange(occasion, mine | {"": self._of_names}, _differ):
            return {}
        sums = {name: (group, checksum([values[name]], self._seeds[name])) for name, group in self._groups.items()}
        found = mesh.exchange(f"{occasion}: the values that differ", sums, _pairs)
        return {name: (rank, other) for name, (rank, other) in found.items()}


def form(value: Tensor) -> str:
    """The dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}"


def checksum(values: Iterable[Any], number: int = 0) -> int:
    """A number of the bytes of tensors and of other values. Small tensors are read together.

    Args:
        number: One to start from.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    large, others = list[Tensor](), list[Any]()
    for value in values:
        if isinstance(value, Tensor):
            plain = value.detach().resolve_conj().resolve_neg()
            (large if value.numel() > _SMALL else small.setdefault((value.dtype, value.device), [])).append(plain)
        else:
            others.append(value)
    flats = [*(torch.cat([value.reshape(-1) for value in some]) for some in small.values()), *large]
    number = zlib.crc32(
        repr([others, on_devices([flat for flat in flats if flat.device.type != "cpu"])]).encode(), number
    )
    for flat in flats:
        if flat.device.type == "cpu" and flat.numel():
            data: Any = _bytes(flat).numpy()
            number = zlib.crc32(data, number)
    return number


@torch.no_grad()
def on_devices(tensors: Sequence[Tensor]) -> list[int]:
    """A number of the bytes of each tensor, computed where it lies; the host waits once for each device.

    It is the sum, modulo 2**64, of the words of 32 bits, each by an odd factor that depends on its place.
    """
    sums = [_sum(_bytes(tensor)) for tensor in tensors]
    found: dict[int, int] = {}
    for device in {one.device for one in sums}:
        at = [i for i, one in enumerate(sums) if one.device == device]
        found.update(zip(at, torch.stack([sums[i] for i in at]).tolist(), strict=True))
    return [found[i] for i in range(len(sums))]


def _sum(data: Tensor) -> Tensor:
    """Of bytes; 0-d int64."""
    whole, total = len(data) // 4 * 4, torch.zeros((), dtype=torch.int64, device=data.device)
    places = (data[:whole].clone() if data.data_ptr() % 4 else data[:whole]).view(torch.int32).split(_CHUNK)
    for k, words in enumerate((*places, data[whole:])):
        factors = torch.arange(k * _CHUNK, k * _CHUNK + len(words), device=data.device) * _MIX
        total += (words.long() * ((factors ^ (factors >> 29)) | 1)).sum()
    return total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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
