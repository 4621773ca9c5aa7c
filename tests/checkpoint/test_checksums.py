"""The numbers by which ranks compare tensors on devices."""

from __future__ import annotations

import pytest
import torch

from fjoin.records._compare import on_devices


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
    monkeypatch.setattr("fjoin.records._compare._CHUNK", 16)  # also in different chunks
    x = torch.randn(50)
    numbers = set[int]()
    for i in range(50):
        for j in range(i + 1, 50):
            y = x.clone()
            y[i], y[j] = -y[i], -y[j]
            numbers.add(on_devices([y])[0])
    assert len(numbers) == 50 * 49 // 2 and on_devices([x])[0] not in numbers
