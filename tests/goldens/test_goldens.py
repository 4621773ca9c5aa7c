"""This tree behaves as it was recorded: values, bits, states, messages, errors and explanations.

After an intended change, `python tests/goldens/record.py` writes the files again.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.goldens.golden_compare import compared, differences, recorded, stored
from tests.goldens.golden_paths import loss_is_linear, on_ranks
from tests.goldens.golden_plans import explained, plan, worlds_of
from tests.goldens.golden_records import machine
from tests.goldens.golden_rows import PATHS, ROWS


def _same(name: str, path: str, found: list[str]) -> None:
    text = "\n".join([f"{name!r} on the path {path!r} is not as it was recorded:", *found])
    assert not found, f"{text}\nif this is intended: python tests/goldens/record.py --rows {name!r}"


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "pure" in row.paths])
def test_pure(name: str) -> None:
    _same(name, "pure", differences(name, "pure", on_ranks(None, [name], "pure")[name]))


@pytest.mark.sample(30)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=pytest.mark.gloo)
        for path in PATHS[1:]
        for name, row in ROWS.items()
        if path in row.paths
    ],
)
def test_on_real_ranks(pool: Any, name: str, path: str) -> None:
    _same(name, path, differences(name, path, on_ranks(pool, [name], path)[name]))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name for name in ROWS if worlds_of(name)])
def test_explained(name: str) -> None:
    old, new = stored("explained")[name], explained(name)
    _same(name, "explain", [f"{w}: was\n{old.get(w)}\nis\n{new[w]}" for w in new if new[w] != old.get(w)])


@pytest.mark.parametrize("name", ROWS)
def test_spec_and_fingerprint(name: str) -> None:
    old, new = stored("plans")[name], plan(name)
    _same(name, "plan", [f"{key}: was\n{old[key]}\nis\n{new[key]}" for key in new if new[key] != old[key]])


def test_the_files_hold_the_rows() -> None:
    for path in PATHS:
        assert stored(path).keys() == {name for name, row in ROWS.items() if path in row.paths}, path
    assert stored("plans").keys() == stored("explained").keys() == ROWS.keys()
    assert loss_is_linear()


def test_bits_are_compared_on_this_machine() -> None:
    if not any(key.startswith(machine()) for key in stored("bits")):
        pytest.skip(f"no hashes were recorded on {machine()!r}: only rounded values are compared")


def _changed(name: str, change: Any) -> list[str]:
    old = recorded("gloo")[name]["powers"]
    new = copy.deepcopy(old)
    change(new)
    return compared(old, new, torch.float32)


def test_a_difference_is_told() -> None:
    def set_value(new: Any) -> None:
        new["values"][0]["w"][1] += 0.001

    def add_message(new: Any) -> None:
        new["messages"][0]["3"] = [*new["messages"][0]["0"], "all_reduce 6 float64 48"]

    def lose_message(new: Any) -> None:
        new["messages"][0] = {"0": new["messages"][0]["0"][1:]}

    def lose_name(new: Any) -> None:
        new["names"].remove("window")

    assert _changed("mean 0", lambda new: None) == []
    (value,) = _changed("mean 0", set_value)
    assert value.startswith("rank 0: 'w' was [") and ", is [" in value
    (message,) = _changed("mean 0", add_message)
    assert message.startswith("rank 0: step 3: ") and "all_reduce 6 float64 48" in message
    assert _changed("mean 0", lose_name) == ["names of the state: ['window'] are gone, [] are new"]
    assert len(_changed("mean 0", lose_message)) == 1
