"""What must be the same on all ranks, and errors that all raise together."""

from __future__ import annotations

import os
import reprlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import CheckpointError, DesyncError, described
from ..groups import Communicator

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

    def apart(self, mesh: Communicator, occasion: str, values: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Name -> (rank, another rank), for each value in which the two differ, or that only the other one has.

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
    elsewhere = on_devices([flat for flat in flats if flat.device.type != "cpu"])
    number = zlib.crc32(repr([others, elsewhere]).encode(), number)
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


NOTHING_SENT = "Nothing has been sent; run the same program with the same settings on all ranks"


def compare(
    mesh: Communicator,
    occasion: str,
    parts: Mapping[str, Any],
    remedy: str = NOTHING_SENT,
    *,
    shown: Mapping[str, Any] = {},
    axes: tuple[str, ...] = (),
    step: int | None = None,
) -> None:
    """Raise on all ranks of some axes, before any payload, unless they have the same parts.

    Args:
        occasion: The place in the program, in words.
        parts: Name -> JSON.
        remedy: What to do, for the error.
        shown: What the error shows in the place of some parts.
        axes: All by default.
        step: The number of this rank's step, for the error.

    Raises:
        DesyncError: naming the ranks that differ from the majority, and the part that differs.
    """
    if problem := mesh.exchange(occasion, [dict(parts), {**parts, **shown}], _compare, axes):
        raise DesyncError(f"{problem[1]}. {remedy}", rank=problem[0], step=step)


def described_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Paths, dtypes and shapes."""
    return [f"{path}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for path, t in tensors.items()]


def _compare(values: list[Any]) -> Any:
    for part in values[0][0]:
        texts = [str(mine[part]) for mine, _ in values]
        usual = Counter(texts).most_common(1)[0][0]
        odd = [rank for rank, text in enumerate(texts) if text != usual]
        if odd:
            like = texts.index(usual)
            there, here = values[odd[0]][1][part], values[like][1][part]
            if isinstance(there, list):
                there, here = _first_difference(there, here)
            ranks = ", ".join(map(str, odd))
            where = f"rank {ranks} differs from rank {like} in its {part}"
            return [odd[0], f"{where}: {there} there, {here} on rank {like}"]
    return None


def _first_difference(a: list[str], b: list[str]) -> tuple[str, str]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return x, y
    return (f"{len(a)} of them", f"{len(b)}")


def parameters_fit(mesh: Communicator, fit: bool, step: int) -> None:
    """Raise on all ranks unless each of them has the parameters that go with the state that it has loaded.

    Raises:
        DesyncError: naming the first rank that has others.
    """
    odd = mesh.exchange("the first pass after load_state_dict", fit, lambda fits: [*fits, False].index(False))
    if odd < mesh.size:
        raise DesyncError(
            f"rank {odd} goes on from step {step} with other parameters than those that go with the state_dict() it has loaded. "
            f"Load each rank's own weights after DistributedDataParallel(...), which sends rank 0's to all ranks",
            rank=odd,
            step=step,
        )


def common_names(mesh: Communicator, axes: tuple[str, ...], mine: list[str] | None) -> tuple[str, ...] | None:
    """The names in aux["sum"], the same on the ranks of some axes; None if no rank knows them.

    Only ranks with a batch know the names.

    Raises:
        DesyncError: two ranks with a batch have different names.
    """
    found = mesh.exchange("the first step", mine, _common_names, axes)
    if len(found) > 1:
        (first, usual), (odd, names) = found
        raise DesyncError(
            f"aux['sum'] has the names {names} on rank {odd}, but {usual} on rank {first}; they must be the same on "
            f"all ranks",
            rank=odd,
        )
    return tuple(found[0][1]) if found else None


def _common_names(values: list[list[str] | None]) -> list[Any]:
    """The first rank that knows names, with its names, and the first that knows others."""
    known = [(rank, sorted(names)) for rank, names in enumerate(values) if names is not None]
    return known[:1] + [one for one in known if one[1] != known[0][1]][:1]


def compare_values(mesh: Communicator, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None) -> None:
    """Raise on all ranks unless parameters and buffers are equal to the bit.

    Raises:
        DesyncError: naming a rank and the first tensor that differs.
    """
    values = {**params, **(buffers or {})}
    replicas = Replicas(dict.fromkeys(values, "all"), {path: form(value) for path, value in values.items()})
    for path, (rank, other) in replicas.apart(mesh, "step.init", values).items():
        raise DesyncError(
            f"{path!r} has other values on rank {rank} than on rank {other}; use init(params, sync='broadcast'), or the same seed on all "
            f"ranks",
            rank=rank,
        )


def on_first(mesh: Communicator, occasion: str, make: Callable[[], Any]) -> Any:
    """The JSON value that rank 0 makes; its error is raised on all ranks."""
    return _together(mesh, occasion, make if mesh.rank == 0 else lambda: None)[0]


def on_each(
    mesh: Communicator,
    occasion: str,
    make: Callable[[], Any],
    same: Callable[[Any], dict[str, Any]] | None = None,
    remedy: str = "it must be the same on all ranks",
) -> Any:
    """The value that this rank makes, once all ranks have made theirs.

    Args:
        same: From the value to what must be the same on all ranks: name -> JSON.
        remedy: What to do where that differs, for the error.

    Raises:
        CheckpointError: another rank has failed, or has something else where `same` says.
        Exception: the error of this rank.
    """
    made: list[Any] = []

    def shown() -> Any:
        made.append(make())
        return None if same is None else same(made[0])

    found = _together(mesh, occasion, shown)
    for name in found[0] or ():
        texts = [str(facts[name]) for facts in found]
        if odd := [rank for rank, text in enumerate(texts) if text != texts[0]]:
            # Of long texts the part where they begin to differ.
            cut = max(0, len(os.path.commonprefix([texts[0], texts[odd[0]]])) - 40)
            parts = (texts[odd[0]][cut:], texts[0][cut:])
            there, here = ("..." * bool(cut) + part[:80] + "..." * (len(part) > 80) for part in parts)
            ranks = f"the ranks {reprlib.repr(odd)}: {there} on rank {odd[0]}, and {here} on rank 0"
            raise CheckpointError(f"{occasion}: {name} differs from that of rank 0 on {ranks}; {remedy}", rank=odd[0])
    return made[0]


def wait_until_all_see(mesh: Communicator, path: Path, wait_s: float = 5.0) -> None:
    """Wait until all ranks see a path, which a network's file system may show late to some.

    Raises:
        CheckpointError: on all ranks: some do not see it.
    """
    end = time.monotonic() + wait_s
    while True:
        found = mesh.exchange(f"a look for {path.name}", [path.exists(), time.monotonic() > end], list)
        blind = [rank for rank, (sees, _) in enumerate(found) if not sees]
        if not blind:
            return
        if any(late for _, late in found):
            raise CheckpointError(f"{path} is not there on the ranks {blind}; all ranks need one folder", rank=blind[0])
        time.sleep(0.1)


def _together(mesh: Communicator, occasion: str, make: Callable[[], Any]) -> list[Any]:
    own: Exception | None = None
    try:
        shown = {"value": make()}
    except Exception as error:  # the other ranks wait for this one
        own, shown = error, {"error": described(error)}
    found = mesh.exchange(occasion, shown, list)
    if own is not None:
        raise own
    for rank, one in enumerate(found):
        if "error" in one:
            raise CheckpointError(f"rank {rank} failed in {occasion}: {one['error']}", rank=rank)
    return [one["value"] for one in found]
