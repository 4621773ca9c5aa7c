"""Pipelines give the same bits where messages arrive only at their wait; none is forgotten or overwritten."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any
from unittest import mock

import pytest

from fjoin.buckets import GradBuffer
from fjoin.step._reducer import SumReducer
from fjoin.training._flat_step import FlatStep
from tests.devices.fake_device import poisoned
from tests.goldens.golden_paths import registered, trained
from tests.goldens.golden_problem import WEIGHTS
from tests.goldens.golden_rows import ROWS

PATHS = ("gloo", "registered")
# The record of a run's last step may be read in the next step, which does not come.
LAST = re.compile("never waited for: psum of [0-9]+ torch.float64")
SOME = [
    "other: mean", "other: zero", "other: zero, int8 gather", "other: scatter, clip",
    "other: accumulate in the step, zero", "other: loss scale",
    "other: power_sgd", "other: first whole, then int8", "other: partition by kinds", "other: mean of means",
    "other: masters, average of states", "other: sums, int8", "average_every 0", "outer_step 0", "average_buffers 0",
    "hierarchical_average 0",
]  # fmt: skip


def _launches_and_writes(hook: Any, index: int, out: Any, launch: Any = SumReducer.launch) -> Any:
    work = launch(hook, index, out)
    out.buffer[-1:] = 1.0
    return work


# A part of fjoin that is replaced, the row that shows it, and what is found.
FAULTS: dict[str, tuple[Any, str, Any, str, str]] = {
    "wait": (GradBuffer, "wait", lambda self: None, "other: mean", "has other results"),
    "gathers": (
        FlatStep, "_gather", lambda self, sharding, effect: None, "other: zero", "never waited for: gather",
    ),
    "written": (SumReducer, "launch", _launches_and_writes, "other: mean", "written to while under way: psum"),
}  # fmt: skip


def both(names: list[str], path: str, fault: str | None = None) -> list[Any]:
    """Each row's records without and with late messages, with what was seen of the messages."""
    run = registered if path == "registered" else lambda names: trained(names, path)
    out = []
    for name in names:
        plain = run([name])
        with poisoned() as seen, mock.patch.object(*FAULTS[fault][:3]) if fault else contextlib.nullcontext():
            late = run([name])
        out.append((json.dumps(plain), json.dumps(late), seen.faults, seen.begun))
    return out


def wrong(pool: Any, path: str, names: list[str], fault: str | None = None) -> list[str]:
    found = []
    size = math.prod(ROWS[names[0]].axes.values())
    for rank, results in enumerate(pool.run(size, both, names, path, fault)):
        for name, (plain, late, faults, messages) in zip(names, results, strict=True):
            if name in SOME and not messages and not fault:
                found.append(f"{name}: rank {rank} has sent nothing")
            if plain != late:
                found.append(f"{name}: rank {rank} has other results")
            if all(LAST.fullmatch(text) for text in faults) and len(faults) <= len(WEIGHTS):
                continue
            found += [f"{name}: {text}" for text in faults]
    return found


def cases(path: str) -> list[Any]:
    rows = [name for name, row in ROWS.items() if path in row.paths]
    short = {"gloo": SOME, "registered": SOME[::3]}[path]
    return [pytest.param(path, name, marks=() if name in short else pytest.mark.long) for name in rows]


@pytest.mark.gloo
@pytest.mark.parametrize(("path", "name"), [case for path in PATHS for case in cases(path)])
def test_late_messages_give_the_same_bits(pool: Any, path: str, name: str) -> None:
    assert "\n".join(wrong(pool, path, [name])) == ""


@pytest.mark.gloo
@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_with_messages_are_found(pool: Any, fault: str) -> None:
    *_, name, says = FAULTS[fault]
    found = wrong(pool, "gloo", [name], fault)
    assert any(says in line for line in found), found
