"""The leaves of a state, and the parts of files that hold them, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ._json import array, mapping, plain, record, refuse, text, whole
from ._safetensors import CODES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES.values(), torch.complex128)}
_LEAF = frozenset({"shape", "dtype", "placement", "parts"})
_PART = frozenset({"file", "name", "rank", "start"})


@dataclass(frozen=True)
class Part:
    """A tensor of a file that is a leaf, or a piece of one.

    Attributes:
        file: The index in `Manifest.files`.
        name: The tensor's name in the file.
        rank: The rank whose value it is; None where all ranks have it.
        start: Of a piece, its first element in the flattened leaf; None for a whole leaf.
    """

    file: int
    name: str
    rank: int | None = None
    start: int | None = None


@dataclass(frozen=True)
class Leaf:
    """A tensor of the state.

    Attributes:
        shape: Of the whole leaf.
        dtype: The name in torch, such as "float32".
        placement: Where the ranks have it; any JSON.
        parts: Either one whole part, or one of each rank, or pieces.
    """

    shape: list[int]
    dtype: str
    placement: dict[str, Any]
    parts: list[Part]


def read_leaf(value: Any, where: str) -> Leaf:
    """A leaf from JSON."""
    given = record(value, where, _LEAF)
    shape = [whole(dim, f"a dim of {where}") for dim in array(given["shape"], f"the shape of {where}")]
    if given["dtype"] not in DTYPES:
        refuse(f"the dtype of {where}", given["dtype"], f"one of {sorted(DTYPES)}")
    parts = [_part(part, f"a part of {where}") for part in array(given["parts"], f"the parts of {where}")]
    whole_ones = [part.rank for part in parts if part.start is None]
    if not parts or len(whole_ones) not in (0, len(parts)) or (None in whole_ones and len(parts) > 1):
        refuse(f"the parts of {where}", parts, "one whole part, or one of each rank, or pieces")
    if len({(part.rank, part.start) for part in parts}) != len(parts):
        refuse(f"the parts of {where}", parts, "no two parts of one rank and one start")
    numel = math.prod(shape)
    for part in parts:
        whole(part.start or 0, f"start of a part of {where}", 0, numel)
    return Leaf(shape, given["dtype"], mapping(plain(given["placement"], at := f"the placement of {where}"), at), parts)


def _part(value: Any, where: str) -> Part:
    given = record(value, where, _PART)
    for key in ("file", "rank", "start"):
        if key == "file" or given[key] is not None:
            whole(given[key], f"{key} of {where}")
    return Part(given["file"], text(given["name"], f"name of {where}"), given["rank"], given["start"])
