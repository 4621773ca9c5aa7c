"""The writer and reader of safetensors: against a reader of the test's own, torch's parser, and damaged or hostile files."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin.checkpoint._files import FileEntry, TensorFile, write_file
from tests.checkpoint.saved_steps import CODES, entry_of, read_safetensors
from tests.helpers import raises_text

BLOCK = 4 << 20
NEEDS_PACKAGE = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="the package safetensors is not installed"
)


def bits(value: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()


def of_every_dtype() -> dict[str, Tensor]:
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8)
    found = {f"one.{code}": raw.view(dtype)[:3].clone() for code, dtype in CODES.items()}
    found |= {f"0-d.{code}": value[0] for code, value in found.items()}
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


def test_every_dtype_and_form_is_read_by_a_reader_of_another_hand_and_by_our_own(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    entry = write_file(tmp_path / "a", tensors)
    assert entry == entry_of(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    theirs = read_safetensors(data)
    with contextlib.closing(TensorFile(tmp_path / "a", entry)) as ours:
        assert set(theirs) == set(ours.names) == set(tensors)
        for name, value in tensors.items():
            want = bits(value.detach().resolve_conj().resolve_neg())
            assert bits(theirs[name]) == bits(ours.read(name)) == want, name
            assert ours.span(name)[:2] == want[:2]


def test_complex128_is_float64_with_two_columns(tmp_path: Path) -> None:
    value = torch.randn(3, 2, dtype=torch.complex128)
    entry = write_file(tmp_path / "a", {"v": value})
    with contextlib.closing(TensorFile(tmp_path / "a", entry)) as file:
        assert file.span("v")[:2] == (torch.float64, (3, 2, 2))
        assert torch.equal(torch.view_as_complex(file.read("v")), value)


def test_torchs_own_parser_reads_the_header(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata

    write_file(tmp_path / "a", {"w": torch.ones(2, 3), "n": torch.tensor(4)})
    with (tmp_path / "a").open("rb") as file:
        header, first = _get_safetensors_file_metadata(file)
    assert first % 8 == 0 and header["__metadata__"] == {"format": "pt"}
    assert header["w"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}
    assert header["n"] == {"dtype": "I64", "shape": [], "data_offsets": [0, 8]}


@NEEDS_PACKAGE
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_package_and_torchs_storage_reader_read_the_file(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    tensors = {name: value for name, value in of_every_dtype().items() if not name.startswith("0-d")}
    write_file(tmp_path / "a.safetensors", tensors)
    for name, value in load_file(tmp_path / "a.safetensors").items():
        assert bits(value) == bits(tensors[name].detach().resolve_conj().resolve_neg()), name
    into = {"one.F32": torch.zeros(3), "one.BF16": torch.zeros(3, dtype=torch.bfloat16)}
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


def test_each_block_is_checked_once_and_only_those_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {str(k): torch.full((BLOCK // 2,), k, dtype=torch.uint8) for k in range(8)}
    entry = write_file(tmp_path / "a", tensors)
    calls: list[int] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: calls.append(len(data)) or crc32(data))
    with contextlib.closing(TensorFile(tmp_path / "a", entry)) as file:
        assert len(calls) == 1
        assert torch.equal(file.read("7"), tensors["7"]) and len(calls) == 3
        for name in (*tensors, *tensors):
            assert torch.equal(file.read(name), tensors[name])
        file.verify()
    assert len(calls) == len(entry.blocks) == 5


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


def test_links_pipes_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    entry = write_file(tmp_path / "a", {"w": torch.ones(1)})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    raises_text(fjoin.CheckpointError, lambda: TensorFile(tmp_path / "link", entry), "link", "symbolic links")
    raises_text(fjoin.CheckpointError, lambda: TensorFile(tmp_path / "pipe", entry), "no regular file")
    raises_text(fjoin.CheckpointError, lambda: TensorFile(tmp_path, entry), "no regular file")
    raises_text(fjoin.CheckpointError, lambda: TensorFile(tmp_path / "b", entry), "No such file")
    other = FileEntry("a", entry.size, [*entry.blocks, 0])
    raises_text(fjoin.CheckpointError, lambda: TensorFile(tmp_path / "a", other), "2 blocks")


def test_tensors_and_names_that_the_format_has_not_are_refused_before_the_first_byte(tmp_path: Path) -> None:
    path, w = tmp_path / "a", torch.ones(1)
    cases: list[tuple[Any, str]] = [
        ({"w": torch.ones(2, device="meta")}, "meta"),
        ({"w": torch.ones(2).to_sparse()}, "sparse"),
        ({"w": torch.zeros(2, dtype=torch.float8_e4m3fnuz)}, "float8_e4m3fnuz"),
        ({"__metadata__": w}, "__metadata__"),
        ({3: w}, "3"),
    ]
    for tensors, part in cases:
        raises_text(TypeError, lambda tensors=tensors: write_file(path, tensors), part)  # type: ignore[misc]
    assert not path.exists()
    path.write_bytes(b"mine")
    raises_text(fjoin.CheckpointError, lambda: write_file(path, {"w": w}), "exists")
    assert path.read_bytes() == b"mine"


def test_short_writes_are_continued_and_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, write = {"w": torch.randn(3_000_000)}, os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1_000_003]))
    assert write_file(tmp_path / "a", tensors) == entry_of(tmp_path / "a")

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    raises_text(
        fjoin.CheckpointError, lambda: write_file(tmp_path / "b", tensors), "b", "No space left", "free some space"
    )


@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_device(tmp_path: Path) -> None:
    value = torch.randn(5, 3).cuda()
    with contextlib.closing(TensorFile(tmp_path / "a", write_file(tmp_path / "a", {"w": value.t()}))) as file:
        assert torch.equal(file.read("w"), value.t().cpu())
