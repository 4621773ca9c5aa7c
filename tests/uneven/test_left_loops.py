"""How a loop was left is no guess: closed or dropped between two steps, in any form, it ends where all ranks leave it.

One rank alone is an error on all. What leaves loops is in left_loops.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.pool import Pool
from tests.uneven.left_loops import CASES, FORMS, KINDS, N, at_once, on_ranks, outcome, within_a_window

ROOT = Path(__file__).parents[2]


def check(kind: str, case: str, found: list[tuple[Any, ...]]) -> None:
    """Look at the outcomes of two ranks, of which rank 1 leaves the loop first where one of them does."""
    if case == "stop":
        assert found[0] == found[1] and N <= found[0][0] - 2 <= N + 2 and found[0][1] is True
    elif case in ("together", "exceptions"):
        assert found == [(N + 2, False)] * 2
    else:
        error, text = found[0]
        name = "fjoin.join" if "fjoin" in kind and "steps" not in kind else "step.join"
        assert error == "PeerLost" and f"rank 1 left the loop over {name} in iteration" in text and "stop()" in text
        assert found[1][0] in (["ValueError"] if case == "exception" else ["JoinError", "PeerLost"])


@pytest.mark.sample(8)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_left(pool: Pool, kind: str, form: str, case: str, transport: str) -> None:
    results = pool.run(2, on_ranks, kind, form, case, transport)
    check(kind, case, [found for found, _ in results])
    assert [errors for _, errors in results] == ["", ""]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_ranks(kind: str, form: str) -> None:
    def rank(case: str) -> Any:
        return outcome(kind, form, case, fjoin.mesh({"data": -1}))

    check(kind, "together", tx.simulate(rank, {"data": 2}, ["together"] * 2))
    check(kind, "stop", tx.simulate(rank, {"data": 2}, ["stop"] * 2))
    with pytest.raises(tx.CollectiveMismatch):
        tx.simulate(rank, {"data": 2}, ["alone"] * 2)


def test_within_a_window(pool: Pool) -> None:
    assert pool.run(2, within_a_window) == [(3, 7, 2), (3, 4, 2)]


@pytest.mark.parametrize("early", [0, 1])
def test_one_rank_leaves_before_its_first_step(pool: Pool, early: int) -> None:
    kind, text = pool.run(2, at_once, early)[1 - early]
    assert kind == "PeerLost" and f"rank {early} left the loop over" in text and "stop()" in text


@pytest.mark.parametrize("case", [None, "together", "alone", "exception", "stop"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_iterator_that_lives_until_the_interpreter_ends(kind: str, case: str | None) -> None:
    """Nothing is printed, and no rank waits; `None` is one rank alone. Another rank that goes on gets an error."""
    environment, ranks = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}, [dict[str, str]()]
    if case is not None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meet = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks = [{**meet, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    command = [sys.executable, "-m", "tests.uneven.left_loops", kind, case or "together"]
    started = [
        subprocess.Popen(command, env=environment | one, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for one in ranks
    ]
    found = []
    try:
        for process in started:
            found.append(process.communicate(timeout=60))
    finally:
        for process in started:
            process.kill()
    outs = [out for out, _ in found]
    if case == "stop":
        assert outs[0] == outs[1] and "True" in outs[0]
    elif case in ("alone", "exception"):
        assert outs[0].startswith("PeerLost") and outs[1] == (f"{N} False\n" if case == "alone" else "")
    else:
        assert set(outs) == {f"{N} False\n"}
    failed = [errors for _, errors in found if errors]
    if case == "exception":  # Python's own report of it, and nothing behind that
        (report,) = failed
        assert report.endswith("ValueError: bad batch\n") and report.count("Traceback") == 1
    else:
        assert not failed
