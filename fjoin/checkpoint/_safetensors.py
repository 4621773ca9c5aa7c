"""Tensor files, and the parts of leaves in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CheckpointError
from ._files import (
    LARGEST,
    BlockReader,
    BlockWriter,
    FileEntry,
    Refused,
    array,
    mapping,
    parse,
    plain,
    record,
    refuse,
    text,
    whole,
)

CODES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODE_OF = {dtype: code for code, dtype in CODES.items()} | {torch.complex128: "F64"}
_METADATA = "__metadata__"
_ENTRY = frozenset({"dtype", "shape", "data_offsets"})
_LONGEST_HEADER = 100_000_000  # bytes, as in the package safetensors


class _Span(NamedTuple):
    code: str
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


def write_file(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write tensors to a new file; it is on the disk when this returns.

    complex128, which the format does not have, is written as float64 with a further dim of 2. Tensors on a device are
    copied to the CPU one at a time.

    Args:
        path: The file, which must not exist.
        tensors: Dense tensors by name, of any shape and strides.
        metadata: Strings for the header's `__metadata__`.

    Returns:
        The name, size and checksums of the file.

    Raises:
        TypeError: A tensor, or a name, that the format does not have. Nothing is written.
        CheckpointError: The system could not write the file.
    """
    spans, position = dict[str, _Span](), 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):  # hence all are aligned
        code, shape = check_form(name, tensors[name])
        end = position + math.prod(shape) * CODES[code].itemsize
        spans[name] = _Span(code, shape, position, end)
        position = end
    header = _header(spans, dict(metadata or {}))
    with BlockWriter(Path(path)) as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for name in spans:
            out.write(_bytes(tensors[name]))
        return out.finish()


def check_form(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """The code of the dtype, and the shape, in the file.

    Raises:
        TypeError: the format has no such tensor, or no such name.
    """
    if type(name) is not str or name == _METADATA:
        raise TypeError(
            f"a tensor is called {name!r}, expected a string other than {_METADATA!r}; give it another name"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.dtype not in _CODE_OF:
        form = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"{name!r} is a tensor of {form}, expected a dense tensor of {sorted(CODES)} or complex128")
    return _CODE_OF[tensor.dtype], (*tensor.shape, *((2,) if tensor.dtype == torch.complex128 else ()))


def _header(spans: dict[str, _Span], metadata: dict[str, str]) -> bytes:
    """The header, padded; written entry by entry, so that other threads run in between."""
    entries = [json.dumps(_METADATA) + ":" + json.dumps(metadata, ensure_ascii=False)] if metadata else []
    if any(type(value) is not str for item in metadata.items() for value in item):
        raise TypeError(f"metadata is {metadata!r}, expected strings by strings")
    for name, (code, shape, begin, end) in spans.items():
        form = json.dumps({"dtype": code, "shape": shape, "data_offsets": (begin, end)}, separators=(",", ":"))
        entries.append(f"{json.dumps(name, ensure_ascii=False)}:{form}")
    header = ("{" + ",".join(entries) + "}").encode()
    return header + b" " * (-len(header) % 8)


def _bytes(tensor: Tensor) -> memoryview:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A file of tensors. Each block is checked before the first values from it are returned.

    Args:
        path: The file; a link is refused.
        entry: The size and the checksums that it must have.

    Attributes:
        names: The tensors' names, in the order of the file.

    Raises:
        CheckpointError: The file is missing, has another size or another checksum, or its header is not valid.
    """

    def __init__(self, path: Path | str, entry: FileEntry) -> None:
        self.path: Path = Path(path)
        self._file = BlockReader(self.path, entry)
        try:
            self._spans = _parse(self._file, entry.size)
        except Refused as error:
            self.close()
            raise CheckpointError(f"{self.path}: {error}; the file is damaged: use another step") from error
        except BaseException:
            self.close()
            raise
        self.names: list[str] = list(self._spans)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it can be closed twice."""
        self._file.close()

    def release(self) -> None:
        """Free the memory of the block that was read last, 4 MiB."""
        self._file.release()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file."""
        return self._span(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the file: float64 for what was complex128."""
        return CODES[self._span(name).code]

    def read(self, name: str, memory: Tensor | None = None) -> Tensor:
        """A tensor, on the CPU.

        Args:
            memory: A tensor that is filled and returned, where it is dense and on the CPU, and has the shape and dtype of the file.

        Raises:
            CheckpointError: There is no such tensor, or its bytes are not those that were written.
        """
        code, shape, begin, _ = self._span(name)
        if memory is not None and (memory.device.type, memory.dtype, memory.shape) == ("cpu", CODES[code], shape):
            values = memory if memory.is_contiguous() else torch.empty_like(memory)
        else:
            values = torch.empty(shape, dtype=CODES[code], device="cpu")
        self._file.read(values.detach().view(-1).view(torch.uint8).numpy().data, begin, repr(name))
        return values

    def verify(self) -> None:
        """Check all blocks.

        Raises:
            CheckpointError: A block's bytes are not those that were written.
        """
        self._file.verify()

    def _span(self, name: str) -> _Span:
        if name not in self._spans:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}; the file is not of this checkpoint: use another step"
            )
        return self._spans[name]


def _parse(file: BlockReader, size: int) -> dict[str, _Span]:
    """The header's entries, in the order of the data."""
    count = bytearray(8)
    whole(size, "the size of the file", 8)
    file.read(memoryview(count), 0, "the header")
    length = whole(int.from_bytes(count, "little"), "the length of the header", 2, min(size - 8, _LONGEST_HEADER))
    header = bytearray(length)
    file.read(memoryview(header), 8, "the header")
    if header[:1] != b"{":
        refuse("the header", bytes(header[:8]), "an object of JSON")
    entries = mapping(parse(bytes(header), "the header"), "the header")
    for key, value in mapping(entries.pop(_METADATA, {}), _METADATA).items():
        text(value, f"{_METADATA}[{key!r}]")
    spans = {name: _span(name, entry, 8 + length, size) for name, entry in entries.items()}
    spans = dict(sorted(spans.items(), key=lambda item: item[1][2:]))
    end = 8 + length
    for name, span in spans.items():
        if span.begin != end:
            refuse(f"the first byte of {name!r}", span.begin, f"{end}: no hole, and no two tensors in one place")
        end = span.end
    if end != size:
        refuse("the end of the last tensor", end, f"{size}, the end of the file")
    return spans


def _span(name: str, entry: Any, base: int, size: int) -> _Span:
    fields = record(entry, repr(name), _ENTRY)
    if (code := text(fields["dtype"], f"the dtype of {name!r}")) not in CODES:
        refuse(f"the dtype of {name!r}", code, f"one of {sorted(CODES)}")
    shape = tuple(whole(dim, f"a dim of {name!r}") for dim in array(fields["shape"], f"the shape of {name!r}"))
    if len(shape) > 64 or math.prod(max(dim, 1) for dim in shape) > LARGEST:
        refuse(f"the shape of {name!r}", shape, f"at most 64 dims and {LARGEST} elements")
    where = f"data_offsets of {name!r}"
    offsets = [base + whole(offset, where, 0, size - base) for offset in array(fields["data_offsets"], where)]
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * CODES[code].itemsize:
        refuse(where, fields["data_offsets"], f"two numbers, apart by the bytes of {code} {list(shape)}")
    return _Span(code, shape, offsets[0], offsets[1])


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
