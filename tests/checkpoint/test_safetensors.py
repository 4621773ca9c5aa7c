"""The writer and reader of safetensors: against the package's reader and torch's, and damaged files."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fjoin
from fjoin.checkpoint._files import FileEntry, TensorFile, write_file
from tests.helpers import raises_text

BLOCK = 4 << 20
WRITTEN = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def entry_of(path: Path) -> FileEntry:
    """The entry of a file as it is, whatever it holds."""
    data = path.read_bytes()
    blocks = [zlib.crc32(data[first : first + BLOCK]) for first in range(0, len(data), BLOCK)]
    return FileEntry(path.name, len(data), blocks)


def bits(value: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()


def of_every_dtype() -> dict[str, Tensor]:
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8)
    found = {f"one.{dtype}".replace("torch.", ""): raw.view(dtype)[:3].clone() for dtype in WRITTEN}
    found |= {f"0-d {name}": value[0] for name, value in found.items()}
    w = torch.randn(4, 5, dtype=torch.complex64)
    return found | {
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 4).t(),
        "strided": torch.arange(20)[::3],
        "expanded": torch.ones(1).expand(6),
        "conjugate": w.conj(),
        "negative": w.conj().imag,
        "a parameter": torch.nn.Parameter(torch.randn(2)),
        "ü \"'\\": torch.ones(1),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_dtype_and_form_is_read_by_others_and_by_our_own(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    tensors, path = of_every_dtype(), tmp_path / "a.safetensors"
    entry = write_file(path, tensors)
    assert entry == entry_of(path) and int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    theirs = load_file(path)
    with contextlib.closing(TensorFile(path, entry)) as ours:
        assert set(theirs) == set(ours.names) == set(tensors)
        for name, value in tensors.items():
            want = bits(value.detach().resolve_conj().resolve_neg())
            assert bits(theirs[name]) == bits(ours.read(name)) == want, name
            assert ours.span(name)[:2] == want[:2]
        raises_text(fjoin.CheckpointError, lambda: ours.read("v"), "no tensor 'v'")
    into = {"one.float32": torch.zeros(3), "one.bfloat16": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(bits(into[name]) == bits(tensors[name]) for name in into)


@pytest.mark.parametrize("more", [-9, -1, 0, 1, 9, BLOCK])
def test_files_around_the_ends_of_blocks(tmp_path: Path, more: int) -> None:
    big = torch.arange(BLOCK - 168 + more, dtype=torch.int32).to(torch.uint8)  # 168: the header
    tensors = {"a": big, "b": torch.ones(7, dtype=torch.uint8)}
    entry = write_file(tmp_path / "a", tensors)
    assert entry == entry_of(tmp_path / "a") and len(entry.blocks) == -(-entry.size // BLOCK)
    with contextlib.closing(TensorFile(tmp_path / "a", entry)) as file:
        for name in ("b", "a", "b"):
            assert torch.equal(file.read(name), tensors[name])


def test_damage_names_the_leaf_and_values_of_other_blocks_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tensors = {str(k): torch.full((2 * BLOCK,), k, dtype=torch.uint8) for k in range(2)}
    entry = write_file(path, tensors)
    with path.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        out.write(b"\7")
    with contextlib.closing(TensorFile(path, entry)) as file:
        assert torch.equal(file.read("0"), tensors["0"])
        raises_text(fjoin.CheckpointError, lambda: file.read("1"), str(path), "'1'", "checksum", "use another step")
        raises_text(fjoin.CheckpointError, file.verify, str(path), "checksum")


def test_other_files_than_were_written_are_refused(tmp_path: Path) -> None:
    entry = write_file(tmp_path / "a", {"w": torch.ones(1)})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for name, words in {
        "link": "symbolic links",
        "pipe": "no regular file",
        ".": "no regular file",
        "b": "No such file",
    }.items():
        raises_text(fjoin.CheckpointError, lambda name=name: TensorFile(tmp_path / name, entry), words)  # type: ignore[misc]
    other = FileEntry("a", entry.size, [*entry.blocks, 0])
    raises_text(fjoin.CheckpointError, lambda: TensorFile(tmp_path / "a", other), "2 blocks")


@pytest.mark.parametrize("name, dtype", [("w", torch.float8_e4m3fnuz), ("__metadata__", torch.int8), (3, torch.int8)])
def test_what_the_format_has_not_is_refused_before_the_first_byte(
    name: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    raises_text(TypeError, lambda: write_file(path, {name: torch.zeros(2, dtype=dtype)}), str(name))
    assert not path.exists()
    path.write_bytes(b"mine")
    raises_text(fjoin.CheckpointError, lambda: write_file(path, {"w": torch.ones(1)}), "exists")
    assert path.read_bytes() == b"mine"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, write = {"w": torch.randn(3_000_000)}, os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1_000_003]))
    assert write_file(tmp_path / "a", tensors) == entry_of(tmp_path / "a")


@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_device(tmp_path: Path) -> None:
    value = torch.randn(5, 3).cuda()
    with contextlib.closing(TensorFile(tmp_path / "a", write_file(tmp_path / "a", {"w": value.t()}))) as file:
        assert torch.equal(file.read("w"), value.t().cpu())
