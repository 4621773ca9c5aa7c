"""This tree behaves as it was recorded: values, bits, states and explanations. What differs is told: which case, step and name.

After an intended change, `python tests/goldens/record.py` writes the files again. That a pipeline comes to the same in all other
places is held by tests/test_places.py, and that a step sends what is explained by tests/reducer/test_traffic.py.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest

from tests.goldens.golden_records import STEPS, WEIGHTS, explained, load, machine, plan, recorded_now, worlds_of
from tests.goldens.golden_rows import ROWS

stored = functools.cache(load)


def _same(name: str, found: list[str]) -> None:
    text = "\n".join([f"{name!r} is not as it was recorded:", *found])
    assert not found, f"{text}\nif this is intended: python tests/goldens/record.py --rows {name!r}"


def compared(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> list[str]:
    """The differences of names and values, these relative to the largest one of a parameter."""
    found = []
    if old["names"] != new["names"]:
        lost, added = ([n for n in a["names"] if n not in b["names"]] for a, b in ((old, new), (new, old)))
        found.append(f"names of the state: {lost} are gone, {added} are new")
    for case, ranks in new["values"].items():
        for rank in range(max(len(ranks), len(old["values"][case]))):
            was, now = (values[rank % len(values)] for values in (old["values"][case], ranks))
            found += [
                f"{case}: rank {rank}: {path!r} was {was.get(path)}, is {now.get(path)}"
                for path in sorted({*was, *now})
                if _apart(was.get(path, []), now.get(path, []), tolerance)
            ]
    return found


def _apart(a: list[float], b: list[float], tolerance: float) -> bool:
    largest = max((abs(x) for x in a if math.isfinite(x)), default=0.0)
    return len(a) != len(b) or any(
        not (x == y or abs(x - y) <= tolerance * largest or (math.isnan(x) and math.isnan(y)))
        for x, y in zip(a, b, strict=True)
    )


def changed_bits(old: str, new: str, names: list[str]) -> list[str]:
    """Where the hashes of a case differ. The names may have been recorded again since, on another kind of machine."""
    (was, of_names), (now, others) = (text.split(" ") for text in (old, new))
    steps = [i for i in range(STEPS) if was[4 * i : 4 * i + 4] != now[4 * i : 4 * i + 4]]
    state = [n for i, n in enumerate(names) if of_names[3 * i : 3 * i + 3] != others[3 * i : 3 * i + 3]]
    state = state if len(of_names) == len(others) else []
    return [f"bits of parameters differ in the steps {steps}, of the state in {state}"] * bool(steps or state)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", ROWS)
def test_pure(name: str) -> None:
    fields, bits = recorded_now(name)
    found = compared(stored("pure")[name], fields, 2e-2 if ROWS[name].dtype.itemsize == 2 else 1e-5)
    for case, hashes in stored("bits").get(machine(), {}).get(name, {}).items():
        found += [f"{case}: {line}" for line in changed_bits(hashes, bits[case], fields["names"])]
    _same(name, found)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name for name in ROWS if worlds_of(name)])
def test_explained(name: str) -> None:
    old, new = stored("explained")[name], explained(name)
    _same(name, [f"{world}: was\n{old.get(world)}\nis\n{new[world]}" for world in new if new[world] != old.get(world)])


@pytest.mark.parametrize("name", ROWS)
def test_spec_and_fingerprint(name: str) -> None:
    old, new = stored("plans")[name], plan(name)
    _same(name, [f"{key}: was\n{old[key]}\nis\n{new[key]}" for key in new if new[key] != old[key]])


def test_the_files_hold_the_rows() -> None:
    assert stored("pure").keys() == stored("plans").keys() == stored("explained").keys() == ROWS.keys()
    assert all(row["values"].keys() == WEIGHTS.keys() for row in stored("pure").values())


def test_bits_are_compared_on_this_machine() -> None:
    if machine() not in stored("bits"):
        pytest.skip(f"no hashes were recorded on {machine()!r}: only rounded values are compared")


def test_a_difference_is_told() -> None:
    old = stored("pure")["mean 0"]
    new = copy.deepcopy(old)
    assert compared(old, new, 1e-5) == []
    new["values"]["powers"][0]["w"][1] += 0.001
    new["names"].remove("window")
    name, value = compared(old, new, 1e-5)
    assert name == "names of the state: ['window'] are gone, [] are new"
    assert value.startswith("powers: rank 0: 'w' was [") and ", is [" in value
    assert changed_bits("aaaabbbb ccc", "aaaabbbb ccc", ["n"]) == []
    (line,) = changed_bits("aaaabbbb cccddd", "aaaaxbbb cccxdd", ["m", "n"])
    assert line == "bits of parameters differ in the steps [1], of the state in ['n']"
