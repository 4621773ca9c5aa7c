"""Gathers an optimizer's whole state from the ranks that own its parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...agreement._device_reads import read_now
from ...groups._mesh import Mesh
from ...groups.axes._axis import GroupAxis
from ...groups.axes._messages import plain
from ...shared_memory._channel import flat_view


class NoState(dict[Any, Any]):
    """The state of parameters that no rank has as a whole."""

    def __missing__(self, key: Any) -> NoReturn:
        raise RuntimeError(
            "a ZeroRedundancyOptimizer has no whole state of a parameter, only slices of it on each rank; call "
            "consolidate_state_dict(to=...) on all ranks, then state_dict() on that rank"
        )


class Owned(NamedTuple):
    """One rank's part of the state of a parameter."""

    number: int  # of the parameter
    start: int  # its slice of the flat parameter
    stop: int
    state: dict[str, Any]  # name -> value; tensors are of the slice, of the whole leaf, or 0-d
    sliced: bool = True  # whether tensors of the slice are flat


def numbers_of(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter; of one without dims, whose slice is a vector of one element, with values without dims."""
    if p.dim():
        return state
    return {name: v.reshape(()) if isinstance(v, Tensor) and v.numel() == 1 else v for name, v in state.items()}


def gather_states(
    mesh: Mesh, to: int, owned: Iterable[Owned], shapes: Sequence[torch.Size], device: torch.device
) -> dict[int, dict[str, Any]] | None:
    """The states of all parameters by their number, on rank `to`; None on the other ranks.

    Args:
        owned: This rank's parts.
        shapes: The shapes of the parameters.

    Raises:
        TypeError: on all ranks: some rank has a state that does not consist of tensors, numbers, strings, None, and lists,
            tuples and dicts of these.
    """
    rows: list[Any] = []
    parts: list[Tensor] = []
    bad = ""
    for number, start, stop, own, sliced in owned:
        try:
            rows.append([number, start, stop, _described(own, device, parts), sliced])
        except Exception as error:  # the other ranks wait for this one's part
            bad = str(error)
    head = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8).to(device)
    body = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *parts])
    axis: GroupAxis = mesh.axes["data"]
    sizes = read_now(mesh, axis.run("all_gather", torch.tensor([len(head), len(body), bool(bad)], device=device), None))
    if refusing := [rank for rank, (*_, refuses) in enumerate(sizes) if refuses]:
        raise TypeError(
            "consolidate_state_dict: the state of an optimizer must consist of tensors, numbers and strings, in lists, tuples and "
            f"dicts; it does not on ranks "
            f"{refusing}{f', here {bad}' if bad else ''}"
        )
    here = axis.rank == to
    sent, all_sizes = torch.cat([head, body]), [head + body for head, body, _ in sizes]
    give = [len(sent) if r == to else 0 for r in range(axis.size)]
    take = all_sizes if here else [0] * axis.size
    received = axis.run("all_to_all_single", sent, (tuple(give), tuple(take)))
    if not here:
        return None
    found: dict[int, list[Owned]] = {}
    for (n, *_), data in zip(sizes, received.split(all_sizes), strict=True):
        at = n
        for number, start, stop, named, sliced in json.loads(bytes(read_now(mesh, data[:n]))):
            state, at = _rebuilt(named, data, at)
            found.setdefault(number, []).append(Owned(number, start, stop, state, sliced))
    return {number: _joined(some, shapes[number]) for number, some in sorted(found.items())}


def _described(value: Any, device: torch.device, parts: list[Tensor], where: str = "state") -> Any:
    """A value for JSON, as one kind and its content; the bytes of its tensors are appended to `parts`."""
    if isinstance(value, Tensor):
        raw = plain(value.detach().to(device))
        parts.append(flat_view(raw).view(torch.uint8))
        return [str(raw.dtype).removeprefix("torch."), list(raw.shape)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_described(one, device, parts, f"{where}[{i}]") for i, one in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, (int, str)) for key in value):
        return ["dict", [[key, _described(one, device, parts, f"{where}[{key!r}]")] for key, one in value.items()]]
    raise TypeError(f"{where} is a {type(value).__name__}")


def _rebuilt(described: Any, data: Tensor, at: int) -> tuple[Any, int]:
    """What `_described` described, and the place in `data` behind its bytes."""
    kind, content = described
    if kind in ("list", "tuple", "dict"):
        found = []
        for one in content:
            key, one = one if kind == "dict" else (None, one)
            value, at = _rebuilt(one, data, at)
            found.append((key, value) if kind == "dict" else value)
        return {"list": list, "tuple": tuple, "dict": dict}[kind](found), at
    if not kind:
        return content, at
    dtype = getattr(torch, kind)
    end = at + math.prod(content) * dtype.itemsize
    return data[at:end].clone().view(dtype).reshape(content), end


def _joined(parts: list[Owned], shape: torch.Size) -> dict[str, Any]:
    """The state of a whole parameter, from those of its slices."""
    parts = sorted(parts, key=lambda part: part.start)
    first = parts[0].state
    if not parts[0].sliced:
        return first
    return {
        name: torch.cat([part.state[name] for part in parts]).reshape(shape)
        if isinstance(value, Tensor) and value.dim()
        else value
        for name, value in first.items()
    }
