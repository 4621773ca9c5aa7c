"""The library's structure stays within these limits. Those of lines go up with what the library can do, the others only down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.code_counts import axis_kinds, counts, foreign_privates, name_comparisons, sources, torchs_privates

ROOT = Path(__file__).parents[1]
LIMITS = {
    "executors of a step": 1,
    "classes of messages of a few scalars": 2,
    "keywords of update that are handed on": 2,
    "tests for the class of an axis": 0,
    "comparisons with a spec's name": 6,
    "accesses to another object's privates": 25,
    "accesses to privates of torch's objects": 66,
    "lines of reducer, training, ddp": 9151,
    "code lines": 25_230,
    "lines": 48_721,
    "files over 250 lines": 0,
    "fmt: skip": 0,
}


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return counts(ROOT)


def test_every_count_has_a_limit(found: dict[str, int]) -> None:
    assert found.keys() == LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_the_structure_stays_within_its_limits(name: str, found: dict[str, int]) -> None:
    """`python tests/code_counts.py` prints all counts."""
    assert found[name] <= LIMITS[name]


def test_counts_of_a_small_example(tmp_path: Path) -> None:
    (tmp_path / "transforms").mkdir()
    (tmp_path / "fjoin").mkdir()
    (tmp_path / "fjoin" / "_x.py").write_text(
        '"""A docstring."""\nimport os\n\n# A comment.\n'
        "def f(axis, part, other):\n    if isinstance(axis, GroupAxis) and part.spec.name == 'mean':\n        return other._hidden\n"
        "    return TABLE[part.spec.name], other._replace(a=1), part.spec.name in NAMES, other._torchs\n"
    )
    (tmp_path / "fjoin" / "_y.py").write_text("class Y:\n    def __init__(self):\n        self._hidden = 1\n")
    files = sources(tmp_path)
    assert len(list(axis_kinds(files))) == 1 and len(list(name_comparisons(files))) == 3
    assert [one.split()[-1] for one in foreign_privates(files)] == ["_hidden"]
    assert [one.split()[-1] for one in torchs_privates(files)] == ["_torchs"]
    assert counts(tmp_path)["code lines"] == 7 and counts(tmp_path)["lines"] == 11
