"""On real ranks a run that is saved and restored, with all objects made anew, goes on as the uncut run, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.resumed_kinds import KINDS
from tests.checkpoint.resumed_runs import CUT, Seen, train


def on_ranks(pool: Any, name: str, *args: Any) -> list[Seen]:
    ranks = 4 if len(KINDS[name].axes) > 1 else 2
    return [Seen(*one) for one in pool.run(ranks, train, name, *args)]


def cases() -> list[Any]:
    """Each kind with one transport; with the other one in the long run."""
    return [
        pytest.param(name, transport, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, name in enumerate(KINDS)
        for j, transport in enumerate(("gloo", "shared"))
    ]


@pytest.mark.parametrize(("name", "transport"), cases())
def test_a_resumed_run_goes_on_to_the_bit(pool: Any, name: str, transport: str, tmp_path: Path) -> None:
    parts = [on_ranks(pool, name, transport, str(tmp_path), part) for part in ("whole", "before", "after")]
    for whole, before, after in zip(*parts, strict=True):
        assert before.moved and after.moved
        assert after.counts == whole.counts and before.counts < whole.counts
        assert before.batches[:CUT] + after.batches == whole.batches
        assert after.values.keys() == whole.values.keys()
        assert not [path for path in whole.values if after.values[path] != whole.values[path]]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", KINDS)
def test_the_law_fails_where_a_part_is_lost(pool: Any, name: str, tmp_path: Path) -> None:
    """Each kind misses the part that is named in its row, so the law has seen it."""
    on_ranks(pool, name, "shared", str(tmp_path), "before")
    whole = on_ranks(pool, name, "shared", str(tmp_path), "after")
    lacking = on_ranks(pool, name, "shared", str(tmp_path), "after", (KINDS[name].lost,))
    assert any(one.values != other.values for one, other in zip(lacking, whole, strict=True))
