"""Every row of the table in docs/from-jax.md gives the same in jax, on 8 devices, and here, on 8 simulated ranks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.from_jax import ours, rows
from tests.from_jax.rows import CASES, Row, table


def difference(kind: str, row: Row, want: list[Any], got: list[Any]) -> str:
    """Where what jax gives and what we give differ; empty: nowhere."""
    if kind == "policy" and not row.residuals:  # the gradients of two parameters, then the residuals
        want, got = want[:2], got[:2]
    if len(want) != len(got):
        return f"{len(want)} values and {len(got)}"
    for a, b in zip(want, got, strict=True):
        if isinstance(a, str):
            same = a == b
        elif a.shape != b.shape or not np.isfinite(a).all():
            return f"shapes {a.shape} and {b.shape}, or not finite"
        elif row.exact and a.dtype.kind == "u":
            same = a.tobytes() == b.tobytes()
        elif row.exact or a.dtype.kind != "f":
            same = bool((a == b).all())
        else:
            same = bool(np.abs(a - b).max() <= row.room * max(1.0, np.abs(a).max()))
        if not same:
            return f"{a} and {b}"
    return ""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_both_sides_of_each_row_give_the_same(every: int, tmp_path: Path) -> None:
    """One process of jax for all rows, hence one test; of every fourth row in the short run."""
    env = os.environ | {"PYTHONPATH": str(rows.PAGE.parents[1])}
    command = [sys.executable, "-m", "tests.from_jax.theirs", tmp_path / "found", str(every)]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    theirs = pickle.loads((tmp_path / "found").read_bytes())
    cases = dict([*CASES.items()][::every])
    assert theirs.keys() == cases.keys()
    failed = {}
    for name, (kind, row) in cases.items():
        want = theirs[name]
        found = want if isinstance(want, str) else difference(kind, row, want, ours.leaves(kind, row.ours))
        if found:
            failed[name] = found
    assert not failed


def test_differences_are_noticed() -> None:
    row, x = Row("", ""), np.ones(3, np.float32)
    assert not difference("values", row, [x], [x + np.float32(2e-7)])
    assert difference("values", row._replace(exact=True), [x], [x + np.float32(2e-7)])
    assert difference("values", row, [x], [x + np.float32(1e-5)]) and difference("values", row, [x], [x[:2]])
    assert difference("values", row, [x, x], [x]) and difference("values", row, ["a.0"], ["a.1"])
    assert difference("values", row, [np.arange(3)], [np.arange(3) + 1])


def test_the_page_has_the_rows() -> None:
    """`python -m tests.from_jax.rows` writes them."""
    assert len(CASES) == sum(len(section.rows) for section in rows.SECTIONS)
    assert rows.BEGIN + table(rows.SECTIONS) + rows.END in rows.PAGE.read_text()
