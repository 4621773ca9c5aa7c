"""What a load reads, and how ranks compare their values."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.agreement._same import on_devices
from fjoin.checkpoint._files import BLOCK

START = {"w": torch.linspace(-1, 1, BLOCK + 77), "b": torch.ones(5)}


def make_step() -> fjoin.TrainStep:
    hook = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
    return fjoin.train_step(lambda p, x: sum((v * x).square().sum() for v in p.values()), tx.fuse(hook, tx.adamw(0.1)))


def values_of(state: fjoin.TrainState) -> dict[str, torch.Tensor]:
    """Name -> value."""
    found = tx.to_state_dict((state.params, state.pipeline))
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def saved(folder: Path) -> dict[str, torch.Tensor]:
    step = make_step()
    state, _ = step(step.init(START), torch.ones(()))
    fjoin.save(folder, step, state)
    return values_of(state)


def test_each_byte_is_checked_once_and_goes_where_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = saved(tmp_path)
    (file,) = tmp_path.glob("*/*.safetensors")
    checked, read, places = [0], [0], set[int]()
    crc32, preadv = zlib.crc32, os.preadv

    def counting_crc32(data: Any, *rest: Any) -> int:
        checked[0] += memoryview(data).nbytes
        return crc32(data, *rest)

    def counting_preadv(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        read[0] += count
        places.update(torch.frombuffer(one, dtype=torch.uint8).data_ptr() for one in buffers if len(one))
        return count

    monkeypatch.setattr(zlib, "crc32", counting_crc32)
    monkeypatch.setattr(os, "preadv", counting_preadv)
    step = make_step()
    state = fjoin.load(tmp_path, step, START)
    monkeypatch.undo()
    size = file.stat().st_size
    assert size <= checked[0] < size + 10_000  # and the names of what is compared
    assert 2 * size - 2 * BLOCK < read[0] < 2 * size + 10_000  # to be checked, and into its place
    begin, end = state.params["w"].data_ptr(), state.params["w"].data_ptr() + START["w"].nbytes
    assert sum(begin <= place < end for place in places) >= START["w"].nbytes // BLOCK - 1
    found = values_of(state)
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 64, 1001])
def test_numbers_of_tensors_on_devices(dtype: torch.dtype, numel: int) -> None:
    x = torch.arange(numel).fmod(2).bool() if dtype is torch.bool else torch.randn(numel).to(dtype)
    ((own,), (again,)) = on_devices([x]), on_devices([x.clone()])
    assert own == again
    for i in range(0, numel, 97):  # any change of one element
        other = x.clone()
        other[i] = ~other[i] if dtype is torch.bool else other[i] + 1
        assert on_devices([x, other])[0] == own and on_devices([other]) != [own]
    assert numel < 2 or on_devices([x.flip(0)]) != [own] or torch.equal(x.flip(0), x)  # and any change of places


def test_numbers_of_tensors_on_devices_do_not_depend_on_where_memory_begins() -> None:
    data = torch.randint(0, 255, (4099,), dtype=torch.uint8)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert shifted.data_ptr() % 4 and on_devices([data]) == on_devices([shifted])


def test_two_equal_changes_do_not_cancel_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fjoin.agreement._same._CHUNK", 16)  # also in different chunks
    x = torch.randn(50)
    numbers = set[int]()
    for i in range(50):
        for j in range(i + 1, 50):
            y = x.clone()
            y[i], y[j] = -y[i], -y[j]
            numbers.add(on_devices([y])[0])
    assert len(numbers) == 50 * 49 // 2 and on_devices([x])[0] not in numbers
