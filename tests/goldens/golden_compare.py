"""The differences between a run and what was recorded, as text: which case, which step, which name, old and new."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from tests.goldens.golden_problem import SHAPES, STEPS
from tests.goldens.golden_records import load, machine, of_ranks, recorded as recorded_now
from tests.goldens.golden_rows import ROWS

TOLERANCE = 1e-5  # relative to the largest value of the parameter
IN_16_BITS = 2e-2

stored, recorded = functools.cache(load), functools.cache(recorded_now)


def differences(name: str, path: str, records: Any) -> list[str]:
    """A line for each difference of a row on a path."""
    fields, bits = of_ranks(records)
    old = recorded(path)[name]
    hashes = stored("bits").get(f"{machine()}, {path}", {}).get(name, {})
    found = []
    for case in sorted({*old, *fields}):
        if case not in fields or case not in old:
            found.append(
                f"{case}: {'ran' if case in old else 'did not run'} when it was recorded, but not the same now"
            )
            continue
        lines = compared(old[case], fields[case], ROWS[name].dtype)
        differ = _bits(hashes.get(case, bits[case]), bits[case], [n for rank in records[case] for n in rank["state"]])
        lines += [line + ("" if lines else "; all rounded values agree") for line in differ]
        found += [f"{case}: {line}" for line in lines]
    return found


def compared(old: dict[str, Any], new: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """The differences of one case, hashes left out."""
    ranks = range(max(len(x[key]) for x in (old, new) for key in ("error", "messages", "values", "losses")))
    found = []
    if old["names"] != new["names"]:
        lost, added = (
            [n for n in a if n not in b] for a, b in ((old["names"], new["names"]), (new["names"], old["names"]))
        )
        found.append(f"names of the state: {lost} are gone, {added} are new")
    for rank in ranks:
        was, now = ({key: x[key][rank % len(x[key])] for key in x if key != "names"} for x in (old, new))
        lines = [] if was["error"] == now["error"] else [f"the error was {was['error']!r}, is {now['error']!r}"]
        lines += _messages(was["messages"], now["messages"])
        lines += _values(was["values"], now["values"], IN_16_BITS if dtype.itemsize == 2 else TOLERANCE)
        for step, (a, b) in enumerate(zip(was["losses"], now["losses"], strict=False)):
            if _apart(a, b, IN_16_BITS if dtype.itemsize == 2 else TOLERANCE):
                lines.append(f"step {step}: loss, weight and sums were {a}, are {b}")
        found += [f"rank {rank}: {line}" for line in lines]
    return found


def _messages(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    was: list[str] = []
    now: list[str] = []
    for step in map(str, range(STEPS)):
        was, now = old.get(step, was), new.get(step, now)
        if was != now:
            return [f"step {step}: {len(was)} messages were\n    {was}\n  and {len(now)} are\n    {now}"]
    return []


def _values(old: dict[str, list[float]], new: dict[str, list[float]], tolerance: float) -> list[str]:
    if old.keys() != new.keys():
        return [f"parameters were {sorted(old)}, are {sorted(new)}"]
    return [f"{path!r} was {old[path]}, is {new[path]}" for path in old if _apart(old[path], new[path], tolerance)]


def _apart(a: list[float], b: list[float], tolerance: float) -> bool:
    largest = max((abs(x) for x in a if math.isfinite(x)), default=0.0)
    return len(a) != len(b) or any(
        not (x == y or abs(x - y) <= tolerance * largest or (math.isnan(x) and math.isnan(y)))
        for x, y in zip(a, b, strict=True)
    )


def _bits(old: str, new: str, names: list[str]) -> list[str]:
    """Where the hashes differ: 4 digits for the parameters of each step, 3 for each name of the last state.

    The names may have been recorded again since, on another kind of machine. Then those hashes are of other names, and are not
    compared.
    """
    (was, of_names), (now, others) = (text.split(" ") for text in (old, new))
    steps = [i for i in range(STEPS) if was[4 * i : 4 * i + 4] != now[4 * i : 4 * i + 4]]
    names = sorted(set(names))
    state = [n for i, n in enumerate(names) if of_names[3 * i : 3 * i + 3] != others[3 * i : 3 * i + 3]]
    state = state if len(of_names) == len(others) else []
    if not steps and not state:
        return []
    where = f"in step {steps[0]} first" if steps else f"in no step of {list(SHAPES)}"
    return [f"bits of parameters differ {where}; of the state in {state}"]
