"""Within `fjoin.bind` a failure is a typed error as soon as a collective raises it, over both transports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.groups import Traffic
from fjoin.groups._failures import Failures
from fjoin.shared_memory import PeerGone
from tests.ranks import Ranks

Report = Callable[[Any], None]
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "psum": lambda x: tx.psum(x, "data"),
    "all_gather": lambda x: tx.all_gather(x, "data"),
    "psum_scatter": lambda x: tx.psum_scatter(x, "data", tiled=True),
    "pmax": lambda x: tx.pmax(x, "data"),
    "pbroadcast": lambda x: tx.pbroadcast(x, "data", 1),
    "grad": lambda x: torch.func.grad(lambda y: tx.psum(y, "data").sum())(x),
    "donate": lambda x: tx.fuse(tx.mean("data"), tx.sgd(0.1)).step(
        {"w": x}, {"w": x.clone()}, tx.fuse(tx.mean("data"), tx.sgd(0.1)).init({"w": x}), donate=True
    ),
}


def fails(rank: int, report: Report, call: str, transport: str, how: str, n: int) -> None:
    mesh = fjoin.mesh({"data": -1}, timeout_s=2.0 if how == "stop" else 60.0, transport=transport)
    x = torch.ones(n)
    with fjoin.bind(mesh):
        tx.psum(x, "data")
    if rank == 1:
        report("now")
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    inside = None
    try:
        with fjoin.bind(mesh):
            try:
                for _ in range(2):
                    CALLS[call](x)
            except Exception as error:
                inside = type(error).__name__, getattr(error, "rank", None)
                raise
    except Exception as error:
        report((inside, type(error).__name__, str(error)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("n", [6, 60_000])
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_is_typed_inside_the_block(call: str, transport: str, how: str, n: int) -> None:
    with Ranks(2, fails, call, transport, how, n) as run:
        ((_, _, (inside, outside, text)),) = run.after("now", 1)
    kind = "CollectiveTimeout" if how == "stop" else "PeerLost"
    assert (inside, outside) == ((kind, 1), kind), text


def test_error_does_not_name_a_rank_that_lost_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of two axes rank 2 sees rank 0 close its connections, since rank 0 has lost rank 1."""

    class Nothing:
        def set(self, *args: Any) -> None: ...

        def get(self, *args: Any) -> None:
            return None

    failures = Failures(Nothing(), "mesh", 2, [10, 11, 12, 13], Traffic())  # type: ignore[arg-type]
    for gone, blamed in (({1}, 1), ({0, 1}, None), (set(), 0), ({0}, 0)):
        monkeypatch.setattr(failures, "gone", lambda gone=gone: gone)
        cause = failures.root_cause(PeerGone(10), 3)
        assert isinstance(cause, fjoin.PeerLost) and (cause.rank, cause.step) == (blamed, 3), str(cause)


PROGRAM = """
import sys
import fjoin
try:
    fjoin.mesh({"data": -1}, timeout_s=1.0)
except fjoin.CollectiveTimeout:
    sys.exit(3)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_may_end_after_a_time_out_of_mesh(tmp_path: Path, rank: int) -> None:
    """The thread that still connects would abort the process: "terminate called without an active exception"."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, str(file)], env={**os.environ, **own}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
